"""From memory into the run directory: what a daemon does for the ranks of its machine."""

from __future__ import annotations

import contextlib
from typing import final

from ddpprobe.rundir import heartbeat, spool
from ddpprobe.rundir.paths import RunDir

BEAT_SECONDS = 1.0  # between two copies of a rank's heartbeat: what a lost machine can hide
STUCK_SECONDS = 5.0  # without progress, after which a disk is said to hold too little


@final
class SpoolCarrier:
    """Copies heartbeats of living ranks, and brings in what dead ones left. May wait for a disk."""

    def __init__(self, run: RunDir, attempt: int, node: str) -> None:
        self._run, self._attempt, self._node = run, attempt, node
        self._due: dict[int, float] = {}
        self._settled: set[int] = set()
        self._waiting: dict[int, tuple[tuple[int, int], float]] = {}  # from where on, since when

    def carry(self, rank: int, now: float, *, over: bool) -> None:
        """Do what is due for a rank; `over`: its process has ended."""
        due = self._due.get(rank, 0.0)
        if rank in self._settled or (now < due and not over):
            return
        self._due[rank] = now + BEAT_SECONDS
        if over:
            self._settle(rank)
            return
        with contextlib.suppress(OSError):  # a full disk; the next one comes in a second
            heartbeat.carry(self._run.heartbeat(self._attempt, self._node, rank))

    def lags(self, rank: int, now: float) -> bool:
        """Whether a part of a rank's journal is on its way here, and not stuck before a disk."""
        at = None
        if rank not in self._settled:
            at = spool.waiting_at(self._run, self._attempt, self._node, rank)
        if at is None:
            self._waiting.pop(rank, None)
            return False
        before, since = self._waiting.get(rank, (None, now))
        if before != at:
            self._waiting[rank] = at, now
            return True
        return now - since < STUCK_SECONDS

    def _settle(self, rank: int) -> None:
        if spool.settle(self._run, self._attempt, self._node, rank):
            self._settled.add(rank)
