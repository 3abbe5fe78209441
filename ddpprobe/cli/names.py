"""Names that are longer than a table can bear, shortened so that each still tells which it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

MOST = 72  # characters of a name in a table
_CUT = "…"


def shortened(names: Iterable[str], most: int = MOST) -> list[str]:
    """Shorten what is longer than `most` characters, in front, where the names say least.

    Names that differ only there keep their beginning too, or all of it: no two become equal.
    """
    given = list(names)
    out = {name: name if len(name) <= most else _end(name, most) for name in given}
    for form in (_both_ends, _whole):
        often = Counter(out.values())
        out |= {n: form(n, most) for n, s in out.items() if s != n and often[s] > 1}
    return [out[name] for name in given]


def _end(name: str, most: int) -> str:
    end = name[len(name) - max(most - 1, 1) :]
    dot = end.find(".", 0, most // 3)  # a name that begins with half a word is harder to read
    return _CUT + end[max(dot, 0) :]


def _both_ends(name: str, most: int) -> str:
    first = most // 3
    return name[:first] + _CUT + name[len(name) - max(most - first - 1, 1) :]


def _whole(name: str, _: int) -> str:
    return name
