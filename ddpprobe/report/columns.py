"""Any number of steps in a bounded number of columns, by merging neighbours; never by dropping."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar, final

NEAR = 12  # steps on each side of a moment, and at the end, that keep a column of their own


class Mergeable(Protocol):
    """A commutative monoid's element."""

    def absorb(self, later: Self, /) -> None:
        """Take another one in."""


M = TypeVar("M", bound=Mergeable)


@final
@dataclass(slots=True)
class StepColumn(Generic[M]):
    """What is known of the `steps` records from step `first` to `last` of one attempt.

    Where `steps` is 0 the records are lost, and the content is empty.
    """

    attempt: int
    first: int
    last: int
    content: M
    steps: int = 1
    pinned: bool = False

    def absorb(self, later: StepColumn[M]) -> None:
        """Merge a column that comes after this one."""
        self.last = later.last
        self.steps += later.steps
        self.content.absorb(later.content)

    def covers(self, attempt: int, step: int) -> bool:
        """Return whether a step lies in here."""
        return self.attempt == attempt and self.first <= step <= self.last

    def meets(self, other: StepColumn[M]) -> bool:
        """Return whether the two have steps in common."""
        return self.attempt == other.attempt and (
            self.first <= other.last and other.first <= self.last
        )


def with_gaps(
    columns: Iterable[StepColumn[M]], gaps: Iterable[StepColumn[M]]
) -> list[StepColumn[M]]:
    """Return columns with those put in between that say that nothing is known of their steps.

    Where some of a gap's steps share a column with others there is no gap to be shown.
    """
    found = list(columns)
    found += [gap for gap in gaps if not any(gap.meets(column) for column in found)]
    return sorted(found, key=lambda column: (column.attempt, column.first))


@final
class StepColumns(Generic[M]):
    """Takes step after step and keeps at most about `2 * most` columns.

    Around the moments, and at the end, a step is a column; elsewhere so many steps share one, the
    same number everywhere, as the bound demands.

    Args:
        most: see above.
        moments: (attempt, step) of what deserves a close look, ascending.
    """

    def __init__(self, most: int, moments: Sequence[tuple[int, int]] = ()) -> None:
        self._most, self._width = most, 1
        self._moments = deque(sorted(moments))
        self._settled: list[StepColumn[M]] = []
        self._loose = 0  # of those that are settled and may be merged
        self._recent: deque[StepColumn[M]] = deque()
        self._pin = 0

    def add(self, attempt: int, step: int, content: M) -> None:
        """Take the next step, in ascending order of (attempt, step)."""
        column = StepColumn(attempt, step, step, content)
        self._recent.append(column)
        if self._moments and (attempt, step) >= self._moments[0]:
            while self._moments and (attempt, step) >= self._moments[0]:
                self._moments.popleft()
            self._pin = NEAR
            for near in self._recent:
                near.pinned = True
        elif self._pin:
            self._pin -= 1
            column.pinned = True
        if len(self._recent) > NEAR:
            self._settle(self._recent.popleft())

    def __iter__(self) -> Iterator[StepColumn[M]]:
        yield from self._settled
        yield from self._recent

    def _settle(self, column: StepColumn[M]) -> None:
        if self._put(column) and self._loose > 2 * self._most:
            self._widen()

    def _put(self, column: StepColumn[M]) -> bool:
        """Merge it into the last column where the two may join; return whether it is a new one."""
        last = self._settled[-1] if self._settled else None
        if last is not None and self._may_join(last, column):
            last.absorb(column)
            return False
        self._settled.append(column)
        self._loose += not column.pinned
        return True

    def _may_join(self, last: StepColumn[M], column: StepColumn[M]) -> bool:
        fits = last.steps + column.steps <= self._width
        return fits and last.attempt == column.attempt and not (last.pinned or column.pinned)

    def _widen(self) -> None:
        self._width *= 2
        columns, self._settled, self._loose = self._settled, [], 0
        for column in columns:
            self._put(column)
