"""The long table as CSV: UTF-8, a header, a line feed after each row; an absent cell is empty.

Floats are written so that they read back exactly, as `nan` and `inf` too. Names are escaped as in
the store, and besides what a spreadsheet would take for a formula or a new row, or a terminal for
a command.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from typing import Any, TextIO

import numpy as np

from ddpprobe.reader.long_table import TYPES, Block, Cells

_UNSAFE = re.compile("^[=+@-]|[\x01-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def write_csv(blocks: Iterable[Block], out: TextIO) -> int:
    """Write blocks of the table; return the number of rows; without any not even the header.

    Args:
        blocks: as `long_table.blocks` makes them.
        out: a text stream opened with `newline=""`.
    """
    writer = csv.writer(out, lineterminator="\n")
    rows = 0
    for block in blocks:
        columns = [_column(cells, TYPES[name]) for name, cells in block.items()]
        if not rows and len(columns[0]):
            writer.writerow(TYPES)
        rows += len(columns[0])
        writer.writerows(zip(*columns, strict=True))
    return rows


def _column(cells: Cells, type_: str) -> list[Any]:
    match type_:
        case "text":
            known = {text: _safe(text) for text in set(cells.data.tolist())}
            return [known[text] for text in cells.data.tolist()]
        case "time":
            moments, where = np.unique(cells.data, return_inverse=True)
            texts = np.datetime_as_string(moments.astype("datetime64[ns]"), timezone="UTC")
            found: list[Any] = texts[where].tolist()
            return found
    listed: list[Any] = cells.data.tolist()
    if cells.there is None:
        return listed
    return [x if here else None for x, here in zip(listed, cells.there.tolist(), strict=True)]


def _safe(text: str) -> str:
    r"""Escape what is no part of a name as the store does, `\uXXXX`."""
    return _UNSAFE.sub(lambda m: f"\\u{ord(m[0]):04x}", text)
