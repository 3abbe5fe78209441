"""From memory into the run directory: what a daemon does for the ranks of its machine."""

from __future__ import annotations

import contextlib
from typing import final

from ddpprobe import heartbeat, spool
from ddpprobe.layout import RunDir

BEAT_SECONDS = 1.0  # between two copies of a rank's heartbeat: what a lost machine can hide


@final
class Porter:
    """Copies heartbeats of living ranks, and brings in what dead ones left. May wait for a disk."""

    def __init__(self, run: RunDir, attempt: int, node: str) -> None:
        self._run, self._attempt, self._node = run, attempt, node
        self._due: dict[int, float] = {}
        self._settled: set[int] = set()

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

    def lags(self, rank: int) -> bool:
        """Whether a part of a rank's journal has not arrived here, as it may be any moment."""
        if rank in self._settled:
            return False
        return spool.is_waiting(self._run, self._attempt, self._node, rank)

    def _settle(self, rank: int) -> None:
        if spool.settle(self._run, self._attempt, self._node, rank):
            self._settled.add(rank)
