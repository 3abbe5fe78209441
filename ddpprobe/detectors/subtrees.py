"""Names for a part of a model: the largest modules that lie in it as a whole."""

from __future__ import annotations

from collections.abc import Iterable

MOST_NAMED = 4  # modules in a message


def subtrees(part: Iterable[str], rest: Iterable[str]) -> list[str]:
    """Return the largest modules that hold names of `part` and none of `rest`, in their order.

    A name of `part` that is also in `rest`, or around a name of it, stands for itself.
    """
    taken = {prefix for name in rest for prefix in _prefixes(name)}
    found: dict[str, None] = {}
    for name in part:
        found[next((p for p in _prefixes(name) if p not in taken), name)] = None
    return list(found)


def named(modules: list[str]) -> str:
    """Return modules as prose names them."""
    names = ", ".join(name or "the whole model" for name in modules[:MOST_NAMED])
    more = len(modules) - MOST_NAMED
    return f"{names} and {more} more" if more > 0 else names


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts) + 1)]
