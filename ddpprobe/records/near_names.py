"""Names that come close to one that there is not, for the text of an error."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterable

MOST_COMPARED = 2000  # letter by letter, which takes 0.1 ms each


def nearest(word: str, known: Iterable[str], most: int = 5) -> str:
    """Name what comes closest to a word, the closest first; of many unlike names the first ones.

    Args:
        word: as it was typed.
        known: what there is; any number.
        most: names that are told.

    Returns:
        `a, b, c`; with `...` after them if there are more. "" if nothing is known.
    """
    names = sorted(set(known))
    near = names
    if len(names) > MOST_COMPARED:
        wanted = _pieces(word)
        near = heapq.nlargest(MOST_COMPARED, names, key=lambda name: len(wanted & _pieces(name)))
    close = difflib.get_close_matches(word, near, most, cutoff=0.3) or names[:most]
    return ", ".join(close) + (", ..." if len(names) > len(close) else "")


def by_nearness(word: str, known: Iterable[str]) -> list[str]:
    """Return the names of a short list, the closest to a word first."""
    likeness = difflib.SequenceMatcher(b=word)

    def unlike(name: str) -> float:
        likeness.set_seq1(name)
        return -likeness.ratio()

    return sorted(known, key=unlike)


def _pieces(name: str) -> set[str]:
    return {name[i : i + 3] for i in range(len(name) - 2)}
