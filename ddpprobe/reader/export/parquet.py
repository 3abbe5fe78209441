"""The long table as Parquet: typed columns, a row group a block; an absent cell is null."""

from __future__ import annotations

from collections.abc import Iterable
from typing import BinaryIO

from ddpprobe.errors import RunError
from ddpprobe.reader.long_table import TYPES, Block

NO_PYARROW = (
    "Parquet is written by pyarrow, which is not installed: pip install 'ddpprobe[parquet]'"
)


def write_parquet(blocks: Iterable[Block], out: BinaryIO) -> int:
    """Write blocks of the table to a binary file; return the number of rows.

    Raises:
        RunError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise RunError(NO_PYARROW) from error
    types = {
        "int": pa.int64(), "float": pa.float64(), "text": pa.string(),
        "time": pa.timestamp("ns", tz="UTC"),
    }  # fmt: skip
    schema = pa.schema([pa.field(name, types[type_]) for name, type_ in TYPES.items()])
    rows = 0
    with pq.ParquetWriter(out, schema, compression="zstd") as writer:
        for block in blocks:
            arrays = [
                pa.array(c.data, field.type, mask=None if c.there is None else ~c.there)
                for c, field in zip(block.values(), schema, strict=True)
            ]
            table = pa.Table.from_arrays(arrays, schema=schema)
            writer.write_table(table)
            rows += table.num_rows
    return rows
