"""What earlier attempts of a run said of themselves, for who judges whether a later one goes on.

Records of sampled steps with the scalars of their ranks: those of the first steps of the run, and
those around the step at which the later attempt begins. Of these also the rows of the parameters
that had their turn, and no other rows; nor those of shards that nobody has merged. A step that did
not come to its end is left out: it had a part of its micro-batches, and maybe of its ranks.
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
    OBSERVED,
    OPTIMIZER_STEPS,
    TRAINABLE,
    Counts,
    Site,
    StepRecord,
    Values,
    empty_rows,
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
Weights = dict[int, tuple[tuple[Site, ...], Counts, Values]]  # step -> rows of parameters
_NO_ROWS: tuple[tuple[Site, ...], Counts, Values] = ((), *empty_rows(0))


def earlier(run: RunDir, first: StepRecord) -> Iterator[StepRecord]:
    """Yield records of the attempts before that of `first`, ascending by attempt, then by step."""
    numbers = sorted(n for n in {*run.attempts(), *attempts_of(run)} if n < first.attempt)
    for number in [*numbers[:1], *numbers[1:][-_MOST_ATTEMPTS:]]:
        start = START if number == numbers[0] else 0
        scalars, weights = _said(run, number, first.step, start)
        for step, said in sorted(scalars.items()):
            sites, counts, values = weights.pop(step, _NO_ROWS)
            yield StepRecord(
                number, step, tuple(sorted(said)), 0, sites=sites, counts=counts, values=values,
                scalars=said,
            )  # fmt: skip


def _said(run: RunDir, attempt: int, step: int, start: int) -> tuple[Scalars, Weights]:
    """Return what an attempt said: as its head merged it, else scalars as its ranks wrote them."""
    found: Scalars = {}
    weights: Weights = {}
    for of_ranks in (False, True):
        # The journals first: what is folded and deleted meanwhile is in the store afterwards.
        journaled: Scalars = {}
        for source in segments.sources_of(run, attempt):
            if (source.rank is not None) == of_ranks:
                _add_journal(journaled, weights, source)
        group = f"{attempt_key(attempt)}/{'rank_' if of_ranks else 'merged'}"
        for key in groups_of(run, attempt):
            if key.startswith(group):
                _add_group(found, weights, run, attempt, key, step, start)
        for at, said in journaled.items():  # of a step that is there twice, what came last
            found.setdefault(at, {}).update(said)
        if found:
            break
    wanted = _around(np.array(sorted(found)), step, start).tolist()
    return {n: found[n] for n in wanted}, weights


def _around(steps: NDArray[np.int64], step: int, start: int) -> NDArray[np.int64]:
    """Return of ascending steps the first ones, and those around a step."""
    here = int(np.searchsorted(steps, step, "right"))
    near = steps[max(0, here - BEFORE) : here + BEHIND]
    return np.union1d(steps[:start], near)


def _add_journal(into: Scalars, weights: Weights, source: JournalSource) -> None:
    """Add what is not folded yet."""
    tables, own = framing.NameTables(), _Rows(whole=source.rank is None)
    for number in segments.segments_of(source):
        try:
            segment = segments.read_segment(source.directory, number)
        except OSError:
            continue  # folded meanwhile, or not to be read
        for _, record in segments.records_of(segment, tables, Consumed()):
            whole = record.sampled and not record.partial
            if whole and segments.belongs(record, source):
                here = into.setdefault(record.step, {})
                for rank, said in record.scalars.items():
                    here[rank] = {n: float(said[n]) for n in _NAMES if n in said}
                own.take(record)
    _add_rows(weights, own.found)


class _Rows:
    """Takes from records the rows of the parameters that had their turn, but shards of a tensor.

    `whole`: of those, too, as they are merged.
    """

    def __init__(self, *, whole: bool) -> None:
        self.found = Weights()
        self._whole = whole
        self._table: tuple[Site, ...] = ()
        self._places = np.zeros(0, np.intp)

    def take(self, record: StepRecord) -> None:
        """Take a record; of one that is not whole a sum would be too small."""
        if record.partial or record.missing:
            return
        if record.sites is not self._table:
            self._table = record.sites
            self._places = np.array(
                [
                    place for place, site in enumerate(record.sites)
                    if site.kind == "param" and (self._whole or site.placement != "sharded")
                ], np.intp,
            )  # fmt: skip
        rows = self._places[record.counts[self._places, OBSERVED] > 0]
        sites = tuple(record.sites[i] for i in rows)
        self.found[record.step] = sites, record.counts[rows], record.values[rows]


def _add_rows(into: Weights, more: Weights) -> None:
    """Add the rows of parameters that are not there yet: what ranks share is the same on all."""
    for step, (sites, counts, values) in more.items():
        known, some, numbers = into.get(step, _NO_ROWS)
        have = set(known)
        new = [i for i, site in enumerate(sites) if site not in have]
        into[step] = (
            (*known, *(sites[i] for i in new)),
            np.concatenate((some, counts[new])),
            np.concatenate((numbers, values[new])),
        )


def _add_group(
    into: Scalars, weights: Weights, run: RunDir, attempt: int, key: str, step: int, start: int
) -> None:
    """Add what a stored group holds of the steps that are wanted."""
    from ddpprobe.store.reader import StoredGroup  # noqa: PLC0415  (what decodes loads slowly)

    try:
        group = StoredGroup(run, key)
    except StoreDamaged:
        return  # of a newer version, or damaged: then less is known
    steps, sampled = group.step_numbers(whole=True)
    wanted = set(_around(np.unique(steps[sampled]), step, start).tolist())
    for name in _NAMES:
        for at, given in group.scalar(name, wanted):
            for rank, value in given.items():
                into.setdefault(at, {}).setdefault(rank, {})[name] = value
    near = set(_around(np.unique(steps[sampled]), step, 0).tolist())
    own = _Rows(whole="/rank_" not in key)
    for record in group.records(attempt, min(near, default=0) - 1):
        if record.step in near:
            own.take(record)
        elif record.step > max(near, default=-1):
            break
    _add_rows(weights, own.found)
