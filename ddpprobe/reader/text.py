"""Names and numbers of a run as text: what a store says is not trusted to be printable."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from typing import Any

UNOBSERVED = "-"  # there is no value; never printed as 0


def plain(text: object) -> str:
    """Return text without control characters, so that no name can move or colour the terminal.

    Control (Cc), format (Cf: bidirectional overrides) and lone surrogates (Cs) become `?`; what is
    left of an escape sequence is then harmless text. Line and paragraph separators count as well.
    """
    said, bad = str(text), {"Cc", "Cf", "Cs", "Zl", "Zp"}
    if said.isascii() and said.isprintable():  # almost every one
        return said
    return "".join("?" if unicodedata.category(c) in bad else c for c in said)


def number(value: float) -> str:
    """Format a statistic: whole numbers in full, others with 6 digits, NaN (no data) as `-`."""
    if math.isnan(value):
        return UNOBSERVED
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.6g}"


def size(n_bytes: float) -> str:
    """Format a number of bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n_bytes) < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"


def commit(command: Mapping[str, Any]) -> str:
    """Write the commit of a `CommandEvent`, and whether files differed; "" if it is not known."""
    if command["commit"] is None:
        return ""
    return f"{command['commit']}{', with changes' if command['changed'] else ''}"
