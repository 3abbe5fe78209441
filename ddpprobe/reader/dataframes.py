"""The long table of a run as a data frame of pandas or polars, in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddpprobe.reader.long_table import TYPES, Block, Cells
from ddpprobe.reader.needs import needs

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

_EMPTY = {"int": np.int64, "time": np.int64, "float": np.float64, "text": object}


def pandas_frame(blocks: Iterable[Block]) -> pd.DataFrame:
    """Return the table with int64, or Int64 where cells may be absent, float64, str, datetime64.

    Args:
        blocks: see `long_table.blocks`.

    Raises:
        ImportError: pandas is not installed.
    """
    with needs("Run.to_pandas()", "pandas"):
        import pandas as pd  # noqa: PLC0415  (an extra)

    def column(name: str, cells: Cells) -> Any:  # noqa: ANN401  (an array of any dtype)
        if TYPES[name] == "time":
            return pd.DatetimeIndex(cells.data.astype("datetime64[ns]"), tz="UTC")
        if cells.there is None:
            return cells.data
        if TYPES[name] == "int":
            return pd.arrays.IntegerArray(cells.data.astype(np.int64), ~cells.there)
        return np.where(cells.there, cells.data, np.nan)

    return pd.DataFrame({name: column(name, cells) for name, cells in _joined(blocks)})


def polars_frame(blocks: Iterable[Block]) -> pl.DataFrame:
    """Return the table with Int64, Float64, String and Datetime columns; absent cells are null.

    Args:
        blocks: see `long_table.blocks`.

    Raises:
        ImportError: polars is not installed.
    """
    with needs("Run.to_polars()", "polars"):
        import polars as pl  # noqa: PLC0415  (an extra)

    kinds: dict[str, Any] = {"int": pl.Int64, "float": pl.Float64, "text": pl.String}

    def column(name: str, cells: Cells) -> pl.Series:
        if TYPES[name] == "time":
            times = pl.Series(name, cells.data.astype("datetime64[ns]"))
            return times.dt.replace_time_zone("UTC")
        kind = kinds[TYPES[name]]
        data = cells.data.tolist() if TYPES[name] == "text" else cells.data
        return pl.Series(name, data, dtype=kind)

    columns = list(_joined(blocks))
    absent = {name: pl.Series(~cells.there) for name, cells in columns if cells.there is not None}
    return pl.DataFrame([column(name, cells) for name, cells in columns]).with_columns(
        pl.when(where).then(None).otherwise(pl.col(name)).alias(name)
        for name, where in absent.items()
    )


def _joined(blocks: Iterable[Block]) -> Iterable[tuple[str, Cells]]:
    """Yield each column as a whole; one of which any block lacks a cell says which are there."""
    whole = list(blocks)
    for name, kind in TYPES.items():
        cells = [block[name] for block in whole]
        data = np.concatenate([np.empty(0, _EMPTY[kind]), *(c.data for c in cells)])
        gaps = any(c.there is not None for c in cells)
        yield name, Cells(data, np.concatenate([_there(c) for c in cells]) if gaps else None)


def _there(cells: Cells) -> NDArray[np.bool_]:
    return np.ones(len(cells.data), bool) if cells.there is None else cells.there
