"""What a guilty module's sites looked like around the step, every sampled step by itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from ddpprobe.records.identity_cache import IdentityCache
from ddpprobe.records.step import OBSERVED, Anomaly, Counts, Site, StepRecord, Values, derive
from ddpprobe.report.rows import Floats

BEFORE, AFTER = 40, 20  # sampled steps that are kept on either side of the first cause
_TABLES = 64
Line = tuple[Counts, Values]
Key = tuple[str, str, str]


@final
@dataclass
class History:
    """The sites of one module around one anomaly.

    Attributes:
        cause: the anomaly.
        sites: those of its module, in the order in which they ran; grows as steps come.
        steps: sampled steps, ascending.
        lines: per step, the rows of the sites that it observed.
        absent: of the steps that lack ranks, how many.
        ranks: the same of single ranks: rank -> step -> rows.
    """

    cause: Anomaly
    sites: dict[Key, Site] = field(default_factory=dict)
    steps: deque[int] = field(default_factory=deque)
    lines: dict[int, dict[Key, Line]] = field(default_factory=dict)
    ranks: dict[int, dict[int, dict[Key, Line]]] = field(default_factory=dict)
    absent: dict[int, int] = field(default_factory=dict)
    _after: int = 0

    def __post_init__(self) -> None:
        self._places = IdentityCache(self._find, _TABLES)

    def take(self, record: StepRecord) -> None:
        """Take the next merged step, in ascending order; most of them are forgotten again."""
        if record.attempt != self.cause.attempt or not record.sampled or self._after >= AFTER:
            return
        self._after += record.step > self.cause.step
        self.lines[record.step] = self._rows(record, remember=True)
        self.steps.append(record.step)
        if record.missing:
            self.absent[record.step] = len(record.missing)
        if record.step < self.cause.step and len(self.steps) > BEFORE:
            oldest = self.steps.popleft()
            del self.lines[oldest]
            self.absent.pop(oldest, None)

    def take_rank(self, rank: int, records: Iterator[StepRecord]) -> None:
        """Take one rank's records of the steps that are kept; reads no further than these."""
        last = self.steps[-1] if self.steps else -1
        own = self.ranks.setdefault(rank, {})
        for record in records:
            if record.step > last:
                break
            if record.step in self.lines:
                own[record.step] = self._rows(record, remember=False)

    def series(self, key: Key, stat: str, rank: int | None = None) -> Floats:
        """Return one statistic [steps] of one site; NaN where it was not observed."""
        lines: Mapping[int, Mapping[Key, Line]] = self.lines if rank is None else self.ranks[rank]
        found = [lines.get(step, {}).get(key) for step in self.steps]
        return np.array([_value(line, stat) for line in found], np.float64)

    def ordered(self) -> list[Site]:
        """Return the sites, the one that the verdict names first."""
        return sorted(self.sites.values(), key=lambda s: s.kind != self.cause.kind)

    def _find(self, sites: tuple[Site, ...]) -> list[int]:
        return [place for place, site in enumerate(sites) if site.fqn == self.cause.module]

    def _rows(self, record: StepRecord, *, remember: bool) -> dict[Key, Line]:
        rows: dict[Key, Line] = {}
        for place in self._places(record.sites):
            site = record.sites[place]
            rows[site.key] = record.counts[place].copy(), record.values[place].copy()
            if remember:
                self.sites.setdefault(site.key, site)
        return rows


def _value(line: Line | None, stat: str) -> float:
    if line is None or not line[0][OBSERVED]:
        return float("nan")
    return float(derive(stat, *line))


def histories_of(causes: Sequence[Anomaly], most: int) -> list[History]:
    """Return an empty history for each of the first causes that name a module."""
    return [History(cause) for cause in causes if cause.module is not None][:most]
