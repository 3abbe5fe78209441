"""Ranks in words: of thousands, runs of them are ranges, and of many runs the first are named."""

from __future__ import annotations

from collections.abc import Iterable

MOST_RUNS = 8
_FEW = 4  # so many are named one by one


def ranks_text(ranks: Iterable[int]) -> str:
    """Name ranks in ascending order, runs of them as ranges: `ranks 0-3, 6`."""
    numbers = sorted(ranks)
    return f"rank{'' if len(numbers) == 1 else 's'} {_listed(_runs(numbers))}"


def numbers_text(numbers: Iterable[int]) -> str:
    """Name ranks without the word, up to four one by one: `0, 1`, `0-6, 8`; "" of none."""
    known = sorted(numbers)
    return _listed([*map(str, known)] if len(known) <= _FEW else _runs(known))


def ranks_joined(ranks: Iterable[int], word: str = "or") -> str:
    """Name ranks in a sentence: `rank 3`, `rank 1 or 3`, `ranks 0, 1 and 2`, `ranks 0-6, 8`.

    More than four that `or` joins are `one of ranks 0-6, 8`.
    """
    numbers = sorted(ranks)
    if len(numbers) > _FEW:
        return f"{'one of ' if word == 'or' else ''}{ranks_text(numbers)}"
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    many = "s" if word == "and" else ""
    return f"rank{many} {', '.join(map(str, numbers[:-1]))} {word} {numbers[-1]}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:MOST_RUNS]) + (", ..." if len(names) > MOST_RUNS else "")


def _runs(numbers: list[int]) -> list[str]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(a) if a == b else f"{a}-{b}" for a, b in runs]
