"""One rank, told again record by record: what its daemon knew of it at each step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddpprobe.records.events import Event
from ddpprobe.records.node_view import RankView
from ddpprobe.records.step import STEP_PHASES, StepRecord
from ddpprobe.rundir import paths
from ddpprobe.rundir.journal_tail import JournalFacts

FUSES = ("hooks", "steps")  # of a rank; each says so in the journal when it blows


class ReplayedRank:
    """One rank of one attempt; its counters start at its first record.

    Args:
        number: of the rank.
        meta: META of its journal.
        said: the events of its journal.
        records: its own, ascending.
    """

    def __init__(
        self,
        number: int,
        meta: Mapping[str, Any],
        said: Sequence[Event],
        records: Iterator[StepRecord],
    ) -> None:
        self.number, self.meta = number, meta
        self.node = str(meta.get("node") or paths.node_name(0))
        self._facts, last_words = JournalFacts(), JournalFacts()
        for event in said:
            last_words.take_life(event)
        self.closed = last_words.closed and not last_words.raised
        self.dropped = last_words.dropped
        self._blown = last_words.components
        self._records = records
        self._next = next(records, None)
        self._first = self._sampled = self._step = -1
        self._at = self._skipped = 0
        self._phases = dict.fromkeys(STEP_PHASES, 0.0)
        self._probe_seconds = 0.0
        self._interval: int | None = None
        self._ratio: float | None = None

    def advance(self, step: int) -> int:
        """Take its records up to a step; return how many they were."""
        taken = 0
        while self._next is not None and self._next.step <= step:
            self._take(self._next)
            self._next, taken = next(self._records, None), taken + 1
        return taken

    def view(self, step: int, *, died: bool, over: bool) -> RankView:
        """Return what is known of it; `step` is the one that the view is of, -1 if of none."""
        facts, meta, fresh = self._facts, self.meta, self._step == step >= 0
        left = over and self.closed and not died
        unknown = over and not self.closed and not died
        return RankView(
            rank=self.number,
            local_rank=whole(meta.get("local_rank"), -1),
            pid=whole(meta.get("pid"), 0),
            device=str(meta.get("device", "")),
            up=None if left or unknown else not died,
            last_heartbeat_ns=0 if left else self._at,
            step=self._step,
            steps=self._step - self._first + 1 if self._first >= 0 else 0,
            skipped_steps=self._skipped,
            phase_seconds=dict(self._phases),
            probe_seconds=self._probe_seconds,
            overhead_ratio=self._ratio,
            sample_interval=self._interval,
            loss=facts.loss if fresh else None,
            grad_norm=facts.grad_norm if fresh else None,
            loss_scale=facts.loss_scale if fresh else None,
            nonfinite=dict(facts.nonfinite),
            sites_expected=facts.sites_expected if fresh else 0,
            sites_observed=facts.sites_observed if fresh else 0,
            components={
                name: self._next is not None or name not in self._blown
                for name in (*FUSES, *sorted(set(self._blown) - set(FUSES)))
            },
        )

    def _take(self, record: StepRecord) -> None:
        facts = self._facts
        facts.loss = facts.grad_norm = facts.loss_scale = None
        facts.take_record(record)
        self._step, self._at = record.step, record.wall_time_ns
        self._first = record.step if self._first < 0 else self._first
        self._skipped += record.skipped
        if record.sampled:
            gap = record.step - self._sampled if self._sampled >= 0 else 1
            self._interval = gap if self._sampled >= 0 else None
            self._sampled = record.step
            self._spend(record.scalars.get(self.number, {}), gap)

    def _spend(self, scalars: Mapping[str, float], gap: int) -> None:
        """Account for the seconds of a sampled step, which stands for `gap` steps."""
        spent = {phase: scalars.get(f"{phase}_seconds", 0.0) for phase in STEP_PHASES}
        own = scalars.get("probe_seconds", 0.0)
        if not all(0 <= s < math.inf for s in (*spent.values(), own)):
            return  # no clock says that
        for phase, seconds in spent.items():
            self._phases[phase] += seconds * gap
        self._probe_seconds += own
        bare = sum(spent.values()) - own
        self._ratio = own / gap / bare if bare > 0 else None


def whole(value: object, default: int) -> int:
    """Return an integer out of a store's JSON, or the default for anything else."""
    return value if isinstance(value, int) else default
