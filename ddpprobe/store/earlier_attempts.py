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
from ddpprobe.store.manifest import Consumed
from ddpprobe.store.reader import StoredGroup, attempts_of, groups_of

START, BEFORE, BEHIND = 16, 64, 16  # sampled steps that are kept: of 1,000 ranks 48 MB
_NAMES = ("loss", "micro_batches", DIGEST, LEARNING_RATE, NOTED, OPTIMIZER_STEPS, TRAINABLE)
_MOST_ATTEMPTS = 16  # the newest ones, and the first

Scalars = dict[int, dict[int, dict[str, float]]]  # step -> rank -> name -> number


def earlier(run: RunDir, first: StepRecord) -> Iterator[StepRecord]:
    """Yield records of the attempts before that of `first`, ascending by attempt, then by step."""
    attempt, step = first.attempt, first.step
    held = set(run.attempts()) | set(attempts_of(run) if run.has_store else ())
    numbers = sorted(n for n in held if n < attempt)
    for number in [*numbers[:1], *numbers[1:][-_MOST_ATTEMPTS:]]:
        start = START if number == numbers[0] else 0
        for at, said in sorted(_scalars(run, number, step, start).items()):
            yield StepRecord(number, at, tuple(sorted(said)), 0, scalars=said)


def _scalars(run: RunDir, attempt: int, step: int, start: int) -> Scalars:
    """Return the scalars of an attempt: as its head merged them, else as its ranks wrote them."""
    merged = _of_groups(run, attempt, ["merged"], step, start)
    _add_journals(run, attempt, merged, of_ranks=False)
    if not merged:
        ranks = [name for name in _groups(run, attempt) if name.startswith("rank_")]
        merged = _of_groups(run, attempt, ranks, step, start)
        _add_journals(run, attempt, merged, of_ranks=True)
    return {int(n): merged[int(n)] for n in _around(np.array(sorted(merged)), step, start)}


def _around(steps: NDArray[np.int64], step: int, start: int) -> NDArray[np.int64]:
    """Return of ascending steps the first ones, and those around a step."""
    here = int(np.searchsorted(steps, step, "right"))
    near = steps[max(0, here - BEFORE) : here + BEHIND]
    return np.union1d(steps[:start], near)


def _groups(run: RunDir, attempt: int) -> list[str]:
    keys = groups_of(run, attempt) if run.has_store else []
    return [key.rpartition("/")[2] for key in keys]


def _of_groups(run: RunDir, attempt: int, groups: list[str], step: int, start: int) -> Scalars:
    found: Scalars = {}
    for name in set(groups).intersection(_groups(run, attempt)):
        try:
            group = StoredGroup(run, f"{attempt_key(attempt)}/{name}")
        except StoreDamaged:
            continue  # of a newer version, or damaged: then less is known
        steps, sampled = group.step_numbers()
        wanted = set(_around(np.unique(steps[sampled]), step, start).tolist())
        for scalar in _NAMES:
            for at, given in group.scalar(scalar, wanted):
                for rank, value in given.items():
                    found.setdefault(at, {}).setdefault(rank, {})[scalar] = value
    return found


def _add_journals(run: RunDir, attempt: int, into: Scalars, *, of_ranks: bool) -> None:
    """Add what is not folded yet; of a step that is there twice, what came last."""
    for source in segments.sources_of(run, attempt):
        if (source.rank is not None) != of_ranks:
            continue
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
