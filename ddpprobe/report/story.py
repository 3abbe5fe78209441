"""Everything that the page is made of, gathered in one pass over the merged records."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, final

from ddpprobe.detectors.suite import Episode, episodes
from ddpprobe.reader.completeness import Completeness
from ddpprobe.reader.readings import NodeReading
from ddpprobe.reader.run import Run
from ddpprobe.reader.tensors import Captured
from ddpprobe.records.derived import DerivedNumbers
from ddpprobe.records.every_loss import losses_of
from ddpprobe.records.step import Anomaly, Site, StepRecord
from ddpprobe.report.bins import SiteBins
from ddpprobe.report.captured_cause import CapturedCause, look
from ddpprobe.report.columns import StepColumn, StepColumns, with_gaps
from ddpprobe.report.history import History, histories_of
from ddpprobe.report.numbers import Labels, Numbers, ScalarTable, table_of
from ddpprobe.report.rows import RunSites, SiteRows

Advance = Callable[[int], None]
MAP_COLUMNS, LINE_COLUMNS = 80, 250  # of a heat map, of a curve; see `StepColumns`
BIN_COLUMNS = 60  # of a site's histogram
MAP_CELLS, FEWEST_COLUMNS = 240_000, 10  # 88 bytes each
MOST_CAUSES = 3  # first causes with a close look
SINGLE_RANKS = 8  # ranks whose own rows of the guilty site are read


@final
@dataclass(slots=True)
class Story:
    """What one run has to tell.

    Attributes:
        info: what `Run.info` says.
        anomalies: in order of cause.
        table, maps: the sites, and their rows over the steps.
        labels, lines: ranks and names of numbers, and their values over the steps.
        histograms: the first sites that have any, and theirs over the steps.
        derived: the same of numbers that follow from merged records, as if rank 0 had said them.
        histories: of the guilty sites.
        readings: of the nodes and the ranks' processes.
        captures: steps of which full tensors are kept.
        captured: what is kept of the module of each of the first `MOST_CAUSES` causes, if anything.
        expired, lost: what retention took away; what is damaged or missing; one line each.
        held: how much of the run all this is about.
        records, skipped: how many steps were read, and in how many the optimizer did not step.
        loss_lost: attempt, step and ranks of the first loss that was not finite.
    """

    info: dict[str, Any]
    anomalies: list[Anomaly]
    table: RunSites
    maps: list[StepColumn[SiteRows]]
    labels: Labels
    lines: list[StepColumn[Numbers]]
    histories: list[History]
    readings: list[NodeReading]
    captures: list[Captured] = field(default_factory=list)
    captured: list[CapturedCause | None] = field(default_factory=list)
    expired: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    held: Completeness = field(default_factory=lambda: Completeness((), {}, live=False))
    records: int = 0
    skipped: int = 0
    loss_lost: tuple[int, int, list[int]] | None = None
    derived: tuple[Labels, list[StepColumn[Numbers]]] = field(
        default_factory=lambda: (Labels(), [])
    )

    histograms: tuple[list[Site], list[StepColumn[SiteBins]]] = field(
        default_factory=lambda: ([], [])
    )

    @property
    def episodes(self) -> list[Episode]:
        """The anomalies by first cause."""
        return episodes(self.anomalies)

    @property
    def causes(self) -> list[Anomaly]:
        """The first causes, the first one first."""
        return [group.cause for group in self.episodes if group.cause]

    def numbers(self, name: str) -> ScalarTable:
        """Return what each rank said under one name, over the steps."""
        return table_of([column.content for column in self.lines], self.labels, name)

    def whole(self, name: str) -> ScalarTable:
        """Return a number that follows from the merged records, over the steps: one column."""
        labels, columns = self.derived
        return table_of([column.content for column in columns], labels, name)


def gather(run: Run, advance: Advance | None = None) -> Story:
    """Read a run once, in bounded memory.

    Args:
        run: live, sealed, crashed or damaged.
        advance: told 1 for each record.
    """
    anomalies = run.anomalies()
    causes = [group.cause for group in episodes(anomalies) if group.cause][:MOST_CAUSES]
    moments = [(cause.attempt, cause.step) for cause in causes]
    table, labels = RunSites(), Labels()
    maps: StepColumns[SiteRows] | None = None
    lines: StepColumns[Numbers] = StepColumns(LINE_COLUMNS, moments)
    whole: StepColumns[Numbers] = StepColumns(LINE_COLUMNS, moments)
    derived, fold = Labels(), DerivedNumbers()
    bins: StepColumns[SiteBins] = StepColumns(BIN_COLUMNS, moments)
    binned: dict[Site, int] = {}
    histories = histories_of(causes, MOST_CAUSES)
    story = Story({}, anomalies, table, [], labels, [], histories, [])
    for record in run.records():
        if record.sites:
            maps = maps or StepColumns(_columns_for(len(record.sites)), moments)
            maps.add(record.attempt, record.step, SiteRows.of(record, table))
        if len(record.binned):
            bins.add(record.attempt, record.step, SiteBins.of(record, binned))
        if record.scalars or record.sites:
            lines.add(record.attempt, record.step, Numbers.of(record, labels))
            numbers = fold.update(record) if record.sampled else {}
            one = replace(record, ranks=(0,), missing=(), scalars={0: numbers})
            whole.add(record.attempt, record.step, Numbers.of(one, derived))
        for history in histories:
            history.take(record)
        _count(story, record)
        if advance:
            advance(1)
    for history in histories:
        _read_ranks(run, history)
    holes = _holes(run)
    story.maps = with_gaps(
        maps or (), [StepColumn(*hole, SiteRows.none(), steps=0) for hole in holes]
    )
    story.lines = with_gaps(lines, [StepColumn(*hole, Numbers.none(), steps=0) for hole in holes])
    story.derived = (
        derived,
        with_gaps(whole, [StepColumn(*hole, Numbers.none(), steps=0) for hole in holes]),
    )
    story.histograms = list(binned), with_gaps(bins, [])
    story.readings = list(run.readings())
    story.captures = run.captures()
    story.captured = [look(run, cause, story.captures) for cause in causes]
    story.expired = [str(gone) for gone in run.expired()]
    story.info = run.info()
    story.held = run.completeness()
    story.lost = [str(lost) for lost in run.lost]
    return story


def _columns_for(sites: int) -> int:
    """Return how many columns a map of so many sites may have for its memory's sake."""
    return max(FEWEST_COLUMNS, min(MAP_COLUMNS, MAP_CELLS // sites))


def _holes(run: Run) -> list[tuple[int, int, int]]:
    """Return attempt, first and last step of the merged records that turned out to be lost."""
    found = set()
    for lost in run.lost:
        where = re.match(r"run\.zarr/attempt_(\d+)/merged/", lost.where)
        if where and lost.steps:
            found.add((int(where[1]), *lost.steps))
    return sorted(found)


def _count(story: Story, record: StepRecord) -> None:
    story.records += 1
    story.skipped += record.skipped
    for step, losses in losses_of(record) if story.loss_lost is None else ():
        bad = [rank for rank, loss in losses.items() if not math.isfinite(loss)]
        if bad:
            story.loss_lost = record.attempt, step, sorted(bad)
            return


def _read_ranks(run: Run, history: History) -> None:
    """Read the single ranks' rows: of the guilty one, and of others to compare it with."""
    cause = history.cause
    ranks = sorted(run.ranks(cause.attempt), key=lambda r: (r != cause.rank, r))[:SINGLE_RANKS]
    after = history.steps[0] - 1 if history.steps else -1
    for rank in sorted(ranks):
        history.take_rank(rank, run.records(rank, cause.attempt, after=after))
