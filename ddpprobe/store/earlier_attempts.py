"""What earlier attempts of a run said of themselves, for who judges whether a later one goes on.

Records of sampled steps with the scalars of their ranks, and no rows: those of the first steps of
the run, and those around the step at which the later attempt begins.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ddpprobe.errors import StoreDamaged
from ddpprobe.records.step import (
    DIGEST,
    LEARNING_RATE,
    NOTED,
    OPTIMIZER_STEPS,
    TRAINABLE,
    StepRecord,
)
from ddpprobe.rundir import framing
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store import segments
from ddpprobe.store.format import attempt_key
from ddpprobe.store.group_names import attempts_of, groups_of
from ddpprobe.store.manifest import Consumed
from ddpprobe.store.segments import JournalSource

START, BEFORE, BEHIND = 16, 64, 16  # sampled steps that are kept: of 1,000 ranks 48 MB
_NAMES = ("loss", "micro_batches", DIGEST, LEARNING_RATE, NOTED, OPTIMIZER_STEPS, TRAINABLE)
_MOST_ATTEMPTS = 16  # the newest ones, and the first

Scalars = dict[int, dict[int, dict[str, float]]]  # step -> rank -> name -> number


def earlier(run: RunDir, first: StepRecord) -> Iterator[StepRecord]:
    """Yield records of the attempts before that of `first`, ascending by attempt, then by step."""
    numbers = sorted(n for n in {*run.attempts(), *attempts_of(run)} if n < first.attempt)
    for number in [*numbers[:1], *numbers[1:][-_MOST_ATTEMPTS:]]:
        start = START if number == numbers[0] else 0
        for step, said in sorted(_scalars(run, number, first.step, start).items()):
            yield StepRecord(number, step, tuple(sorted(said)), 0, scalars=said)


def _scalars(run: RunDir, attempt: int, step: int, start: int) -> Scalars:
    """Return the scalars of an attempt: as its head merged them, else as its ranks wrote them."""
    found: Scalars = {}
    for of_ranks in (False, True):
        # The journals first: what is folded and deleted meanwhile is in the store afterwards.
        journaled: Scalars = {}
        for source in segments.sources_of(run, attempt):
            if (source.rank is not None) == of_ranks:
                _add_journal(journaled, source)
        group = f"{attempt_key(attempt)}/{'rank_' if of_ranks else 'merged'}"
        for key in groups_of(run, attempt):
            if key.startswith(group):
                _add_group(found, run, key, step, start)
        for at, said in journaled.items():  # of a step that is there twice, what came last
            found.setdefault(at, {}).update(said)
        if found:
            break
    return {int(n): found[int(n)] for n in _around(np.array(sorted(found)), step, start)}


def _around(steps: NDArray[np.int64], step: int, start: int) -> NDArray[np.int64]:
    """Return of ascending steps the first ones, and those around a step."""
    here = int(np.searchsorted(steps, step, "right"))
    near = steps[max(0, here - BEFORE) : here + BEHIND]
    return np.union1d(steps[:start], near)


def _add_journal(into: Scalars, source: JournalSource) -> None:
    """Add what is not folded yet."""
    tables = framing.NameTables()
    for number in segments.segments_of(source):
        try:
            segment = segments.read_segment(source.directory, number)
        except OSError:
            continue  # folded meanwhile, or not to be read
        for _, record in segments.records_of(segment, tables, Consumed()):
            if record.sampled and segments.belongs(record, source):
                here = into.setdefault(record.step, {})
                for rank, said in record.scalars.items():
                    here[rank] = {n: float(said[n]) for n in _NAMES if n in said}


def _add_group(into: Scalars, run: RunDir, key: str, step: int, start: int) -> None:
    """Add what a stored group holds of the steps that are wanted."""
    from ddpprobe.store.reader import StoredGroup  # noqa: PLC0415  (what decodes loads slowly)

    try:
        group = StoredGroup(run, key)
    except StoreDamaged:
        return  # of a newer version, or damaged: then less is known
    steps, sampled = group.step_numbers()
    wanted = set(_around(np.unique(steps[sampled]), step, start).tolist())
    for name in _NAMES:
        for at, given in group.scalar(name, wanted):
            for rank, value in given.items():
                into.setdefault(at, {}).setdefault(rank, {})[name] = value
