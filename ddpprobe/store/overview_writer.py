"""`python -m ddpprobe.store.overview_writer PATH`: the table on stdin (JSON) as a Parquet file.

The daemon starts it where it has pyarrow, which it does not import itself. It starts one at the end
of every run: hence nothing is imported here that the file does not need.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, BinaryIO

from ddpprobe.rundir import paths
from ddpprobe.store.format import escape
from ddpprobe.store.overview import TYPES


class _WithoutPandas(MetaPathFinder):
    """Lets pyarrow do without pandas, as where it is not installed.

    pyarrow would import it to ask whether a list is one of its columns: half of all the time that
    this process takes.
    """

    def find_spec(self, name: str, *_: object) -> None:
        """Raise ModuleNotFoundError for pandas; leave the rest to others."""
        if name == "pandas":
            raise ModuleNotFoundError("pandas is not needed here", name=name)


def main() -> None:
    """Write the file, all of it or nothing."""
    sys.meta_path.insert(0, _WithoutPandas())
    rows = json.load(sys.stdin)
    with paths.replacing(Path(sys.argv[1])) as fd, open(fd, "wb", closefd=False) as out:
        write_overview(rows, out)


def write_overview(rows: Mapping[str, Sequence[Any]], out: BinaryIO) -> int:
    """Write a table as Parquet to a binary file; return the number of rows.

    Args:
        rows: a list for each of `overview.TYPES`.
        out: where to.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
    """
    import pyarrow as pa  # noqa: PLC0415  (an extra)
    import pyarrow.parquet as pq  # noqa: PLC0415

    types = {
        "int": pa.int64(), "float": pa.float64(), "text": pa.string(),
        "time": pa.timestamp("ns", tz="UTC"),
    }  # fmt: skip
    arrays = {
        name: pa.array(_escaped(rows[name]) if kind == "text" else rows[name], types[kind])
        for name, kind in TYPES.items()
    }
    pq.write_table(pa.table(arrays), out, compression="zstd")
    return len(rows["kind"])


def _escaped(texts: Sequence[str | None]) -> list[str | None]:
    return [None if text is None else escape(text) for text in texts]


if __name__ == "__main__":
    main()
