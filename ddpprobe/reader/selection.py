"""Which part of a run is asked for, and whether the run has it."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ddpprobe.errors import Error, UnknownSeries
from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.series import is_within
from ddpprobe.records.rank_names import numbers_text
from ddpprobe.records.step import StepRecord

EVERY_RANK = -1


@contextlib.contextmanager
def told_as(kind: type[Error], told: type[Exception]) -> Iterator[None]:
    """Let who asks hear of all that is wrong by one error: of `kind`, in place of `told`."""
    try:
        yield
    except told as error:
        raise kind(str(error)) from None


@dataclass(frozen=True, slots=True)
class Selection:
    """Attempts, ranks and steps to take.

    Attributes:
        rank: one rank's own; None: all ranks merged; `EVERY_RANK`: each rank's own.
        steps: slice over step numbers.
        attempt: one of them; None: all.
    """

    rank: int | None = None
    steps: slice = field(default_factory=lambda: slice(None))
    attempt: int | None = None

    @property
    def after(self) -> int:
        """The step after which it begins."""
        return (self.steps.start or 0) - 1

    @property
    def open_ended(self) -> bool:
        """Whether it reaches to the end of the run."""
        return self.steps.stop is None

    def attempts(self, merged_reader: MergedReader) -> list[int]:
        """Return the numbers of its attempts, ascending."""
        found = merged_reader.attempts()
        return found if self.attempt is None else [n for n in found if n == self.attempt]

    def ranks(self, merged_reader: MergedReader, attempt: int) -> list[int]:
        """Return the ranks whose own records it needs, ascending."""
        if self.rank is None or self.rank == EVERY_RANK:
            return merged_reader.ranks(attempt)
        return [self.rank] if merged_reader.has_rank(attempt, self.rank) else []

    def merged(self, merged_reader: MergedReader, attempt: int) -> Iterator[StepRecord]:
        """Yield the merged records in it, ascending."""
        return self._within(merged_reader.merged_records(attempt, self.after))

    def of_rank(self, merged_reader: MergedReader, attempt: int, rank: int) -> Iterator[StepRecord]:
        """Yield one rank's own records in it, ascending."""
        return self._within(merged_reader.rank_records(attempt, rank, self.after))

    def _within(self, records: Iterator[StepRecord]) -> Iterator[StepRecord]:
        for record in records:
            if self.steps.stop is not None and record.step >= self.steps.stop:
                return
            if is_within(record.step, self.steps):
                yield record


def check_attempt(attempt: int | None, known: Sequence[int]) -> None:
    """Raise UnknownSeries if a run has attempts, and not this one; None is all of them."""
    _check("attempt", attempt, known)


def check_rank(rank: int | None, known: Sequence[int], attempt: int | None = None) -> None:
    """Raise UnknownSeries if a run, or an attempt of it, has ranks, and not this one."""
    _check("rank", rank, known, "this run" if attempt is None else f"attempt {attempt}")


def check_text(what: str, given: object, example: str) -> None:
    """Raise UnknownSeries if the name of something, or a glob over names, is no text."""
    if not isinstance(given, str):
        raise UnknownSeries(f"{what} is a text such as {example!r}, got {given!r:.80}")


def globs_of(what: str, given: object, example: str) -> tuple[str, ...]:
    """Return one glob or several as several.

    Raises:
        UnknownSeries: they are no texts, or there is none.
    """
    if isinstance(given, list | tuple) and given:
        for each in given:
            check_text(f"each of {what}", each, example)
        return tuple(given)
    check_text(what, given, example)
    return (str(given),)


def check_step(what: str, step: object) -> None:
    """Raise UnknownSeries for what is no number of a step."""
    if not is_whole(step):
        raise UnknownSeries(f"{what} is the number of a step, such as {what}=412, got {step!r:.80}")


def check_steps(steps: slice) -> None:
    """Raise UnknownSeries for what is no slice over step numbers.

    A negative bound is refused: it would count from the end, which a live run does not have yet.
    """
    example = "give step numbers, such as steps=slice(100, 200)"
    if not isinstance(steps, slice):
        raise UnknownSeries(f"steps={steps!r:.60} is no slice: {example}")
    for name, least in (("start", 0), ("stop", 0), ("step", 1)):
        bound = getattr(steps, name)
        if bound is not None and not (is_whole(bound) and bound >= least):
            raise UnknownSeries(
                f"{name} of steps={steps!r:.60} is no whole number of at least {least}: {example}"
            )


def _check(what: str, asked: int | None, known: Sequence[int], where: str = "this run") -> None:
    """Of a run that holds nothing yet all may be asked for: it may have it the next time."""
    if asked is None or (is_whole(asked) and (asked in known or not known)):
        return
    there = f"it has {numbers_text(known)}" if known else "give its number: 0, 1, ..."
    raise UnknownSeries(f"no {what} {asked!r:.40} in {where}; {there}")


def is_whole(number: object) -> bool:
    """Return whether it can be an index, as NumPy's whole numbers can; True and False are none."""
    try:
        operator.index(number)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        return False
    return not isinstance(number, bool)
