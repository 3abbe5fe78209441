"""Options of the optimizers that no schedule changes, and that have other values than before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

from ddpprobe.records.rank_names import ranks_text
from ddpprobe.records.step import OPTION, OPTIONS, StepRecord

FEWEST_LOOKS = 3  # in a row that the value before must have lasted
REPEATS = 2  # looks in a row that show the new value
MOST_VALUES = 4  # an option that has had more is changed again and again by the script
_NAMES = tuple((option, f"{OPTION}{option}") for option in OPTIONS)
_NUMBERS = ("eps", "dampening", "rho")  # the others are either true or false


class ChangedOption(NamedTuple):
    """An option that has another value on some ranks.

    Attributes:
        option: its key in `param_groups`.
        before: the value that lasted.
        now: the value after it.
        since: the sampled step that showed it first.
        ranks: on which it changed, ascending.
    """

    option: str
    before: float
    now: float
    since: int
    ranks: tuple[int, ...]

    @property
    def values(self) -> dict[str, float]:
        """The numbers behind what is told of it."""
        numbers = {"since": self.since, "before": self.before, "now": self.now}
        return {**numbers, "ranks": len(self.ranks)}

    def message(self, record: StepRecord) -> str:
        """Return what is told of it at a record."""
        where = "" if self.ranks == record.ranks else f" on {ranks_text(self.ranks)}"
        before, now = (self._text(value) for value in (self.before, self.now))
        return (
            f"the optimizer's option {self.option} is {now}{where} since step {self.since}, and "
            f"was {before} before: no schedule changes this option. Look at which configuration "
            "was read then, and at what writes into param_groups; announce a change that is meant "
            "with probe.note(...)"
        )

    def _text(self, value: float) -> str:
        return f"{value:.9g}" if self.option in _NUMBERS else str(bool(value))


@dataclass(slots=True)
class _Held:
    """The value that an option has on a rank, and what it was before."""

    now: float
    since: int
    seen: tuple[float, ...]
    looks: int = 0  # in a row, with this value
    before: float | None = None  # the value that lasted, if `now` is new after it

    def update(self, value: float, step: int) -> float | None:
        """Take the value of the next look; return the one before when it is time to tell."""
        if value != self.now:
            is_new = value not in self.seen and len(self.seen) < MOST_VALUES
            self.before = self.now if is_new and self.looks >= FEWEST_LOOKS else None
            self.seen = (*self.seen, value) if is_new else self.seen
            self.now, self.since, self.looks = value, step, 0
        self.looks += 1
        return self.before if self.looks == REPEATS else None


@final
class ChangedOptions:
    """Follows each option on each rank.

    Only a value that was never seen before is told: optimizers that step in turn, each with its own
    options, come back to theirs.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, str], _Held] = {}

    def update(self, record: StepRecord) -> list[ChangedOption]:
        """Take the next sampled step; return what has changed, each change once for its ranks."""
        changed: dict[tuple[str, float, float], list[tuple[int, int]]] = {}
        for rank, option, value in _options(record):
            held = self._held.get((rank, option))
            if held is None:
                held = self._held[rank, option] = _Held(value, record.step, (value,))
            before = held.update(value, record.step)
            if before is not None:
                changed.setdefault((option, before, value), []).append((held.since, rank))
        return [
            ChangedOption(*change, min(where)[0], tuple(sorted(rank for _, rank in where)))
            for change, where in changed.items()
        ]


def _options(record: StepRecord) -> Iterator[tuple[int, str, float]]:
    """Yield (rank, option, value)."""
    for rank, said in record.scalars.items():
        for option, name in _NAMES:
            value = said.get(name)
            if value is not None and math.isfinite(value):
                yield rank, option, float(value)
