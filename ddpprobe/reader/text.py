"""Names and numbers of a run as text: what a store says is not trusted to be printable."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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


def lacking(absent: NDArray[np.int64]) -> str:
    """Say at how many of the steps ranks are not in the numbers; "" if none lacks any.

    Args:
        absent: int64 [steps]; how many ranks each step lacks.
    """
    steps, most = int((absent > 0).sum()), int(absent.max(initial=0))
    ranks = f"{'up to ' if most > 1 else ''}{most} rank{'' if most == 1 else 's'}"
    return f"{steps} of {len(absent)} steps without {ranks}" if steps else ""


def without(ranks: int) -> str:
    """Say how many ranks a step lacks; "" if it lacks none."""
    return f"{ranks} rank{'' if ranks == 1 else 's'}" if ranks else ""


def per_cent(ratio: float | None) -> str:
    """Format a share of 1 as per cent, rounded down: what lacks anything is never 100 %."""
    return UNOBSERVED if ratio is None else f"{math.floor(1000 * ratio) / 10:g} %"


def size(n_bytes: float) -> str:
    """Format a number of bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n_bytes) < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"


def span(first: int | None, last: int | None) -> str:
    """Say from which step to which; None: there is none."""
    return UNOBSERVED if first is None else f"{first} to {last}"


def over_steps(steps: NDArray[np.int64]) -> str:
    """Say at how many steps something is known, and which they reach: `40 steps, 0 to 390`."""
    if len(steps) == 1:
        return f"1 step, {steps[0]}"
    return f"{len(steps)} steps, {steps.min()} to {steps.max()}" if len(steps) else "0 steps"


def sites_in_words(sites: Sequence[object], most: int = 3) -> str:
    """Say how many sites there are, and name the first: `2 sites (0:output, 1:output)`."""
    named = [*map(plain, sites[:most]), *["..."] * (len(sites) > most)]
    listed = f" ({', '.join(named)})" if named else ""
    return f"{len(sites)} site{'' if len(sites) == 1 else 's'}{listed}"


def steps_in_words(info: Mapping[str, Any]) -> str:
    """Say which steps a run, or an attempt, has trained, and which are recorded if others are.

    Neither the first one nor the last one is always a sampled one.
    """
    first, last = info["steps"]["first"], info["steps"]["last"]
    known = [n for n in (first, info["began"]) if n is not None]
    if not known:
        reached = info["reached"]
        return UNOBSERVED if reached is None else f"up to {reached}, none recorded"
    began = min(known)
    reached = max(n for n in (began, last, info["reached"]) if n is not None)
    trained = span(began, reached)
    if first is None:
        return f"{trained}, none recorded"
    if (began, reached) == (first, last):
        return trained
    return f"{trained}, recorded {'up to' if began == first else f'{first} to'} {last}"


def wrapping(info: Mapping[str, Any]) -> list[str]:
    """Return the wrapper and the backend of a run, as far as they are known."""
    known = [str(info[name]) for name in ("wrapper", "backend") if info[name]]
    return ["no wrapper" if name == "none" else name for name in known]


def commit(command: Mapping[str, Any]) -> str:
    """Write the commit of a `CommandEvent`, and whether files differed; "" if it is not known."""
    if command["commit"] is None:
        return ""
    return f"{command['commit']}{', with changes' if command['changed'] else ''}"
