"""A head with ranks of its own, and other nodes that push to it, all in this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpprobe.daemon.attempt import Attempt
from ddpprobe.daemon.blocks import Refusal
from ddpprobe.daemon.gather_queue import GatherQueue
from ddpprobe.daemon.liveness import ProcessWatcher
from ddpprobe.records.merge import merge_all
from ddpprobe.records.step import Anomaly, StepRecord
from ddpprobe.rundir import framing
from ddpprobe.rundir.heartbeat import STATES, HeartbeatWriter
from ddpprobe.rundir.journal import JournalTail
from ddpprobe.rundir.paths import node_name
from ddpprobe.rundir.roster import Roster

from .made_runs import NODE, Made, record

Item = StepRecord | Mapping[str, Any] | tuple[int, bytes]


def block(*items: Item) -> bytes:
    """Return what a node would push of these: records with their tables, events, raw payloads."""
    frames: list[tuple[int, bytes]] = []
    for item in items:
        if isinstance(item, StepRecord):
            frames += [(table.type, table.payload) for table in framing.tables_of(item)]
            frames.append((framing.RECORD, framing.encode_record(item)))
        elif isinstance(item, tuple):
            frames.append(item)
        else:
            frames.append((framing.LIFE, framing.encode_json(item)))
    return b"".join(framing.encode_frame(t, seq, data) for seq, (t, data) in enumerate(frames))


def wish(rank: int, number: int = 0, step: int = 0, **changes: Any) -> dict[str, Any]:
    told = {"event": "trigger", "attempt": 0, "cause": f"trigger/{rank}/{number}"}
    return {**told, "reason": "trigger: look", "step": step, **changes}


@dataclass
class Cluster(Made):
    """A head's daemon without its loop. `ranks` are those of one node; the head's come first."""

    nodes: int = 2
    pid: int = field(default_factory=os.getpid)
    rostered: bool = True
    beats: dict[int, HeartbeatWriter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.watcher = ProcessWatcher()
        self.now = 0.0
        self.start()

    def start(self) -> None:
        """Start the head's daemon, anew if there was one."""
        self.gather_queue = GatherQueue(self.path / "inbox")
        if self.rostered:
            others = {node_name(n): frozenset(self.of(n)) for n in range(1, self.nodes)}
            self.gather_queue.roster = Roster(self.attempt, others, dict.fromkeys(others, "digest"))
        self.head = Attempt(self.run, NODE, self.attempt, self.watcher, self.gather_queue, None)

    def of(self, node: int) -> range:
        """Ranks of a node."""
        return range(node * self.ranks, (node + 1) * self.ranks)

    def train(self, step: int, **changes: Any) -> None:
        """Let the head's ranks take a step."""
        for rank in self.of(0):
            self.write([record(rank, step, attempt=self.attempt, **changes)])
            self.beat(rank, step)

    def beat(self, rank: int, step: int) -> None:
        if rank not in self.beats:
            path = self.run.heartbeat(self.attempt, NODE, rank)
            self.beats[rank] = HeartbeatWriter(path)
        self.beats[rank].beat(
            step=step, micro=0, state=STATES.index("forward"), steps=step, skipped=0, sampled=step,
            phase_seconds=(0.0, 0.1, 0.1, 0.0), probe_seconds=0.0,
        )  # fmt: skip

    def said(self, node: int, step: int, **changes: Any) -> StepRecord:
        """Return what an honest node pushes of a step."""
        parts = [record(rank, step, attempt=self.attempt, **changes) for rank in self.of(node)]
        return merge_all(parts)

    def push(self, node: int, *items: Item) -> int:
        """Push as a node; return the status of the answer."""
        return self.push_block(node, block(*items))

    def push_block(self, node: int, data: bytes) -> int:
        try:
            return 200 if self.gather_queue.take(node_name(node), data) else 204
        except Refusal as refusal:
            return refusal.status

    def look(self, seconds: float = 0.0) -> None:
        """Let time pass, and the daemon look."""
        self.now += seconds
        self.head.poll(self.now)

    def merged(self) -> list[StepRecord]:
        """Return what came out, in its order."""
        tail = JournalTail(self.run.daemon_journal(self.attempt, NODE))
        frames = [f for f in tail.poll() if f.type == framing.RECORD]
        found = [framing.decode_record(f.payload, tail.tables) for f in frames]
        tail.close()
        return found

    def anomalies(self) -> list[Anomaly]:
        tail = JournalTail(self.run.daemon_journal(self.attempt, NODE))
        found = [
            framing.decode_anomaly(f.payload) for f in tail.poll() if f.type == framing.ANOMALY
        ]
        tail.close()
        return found

    def files(self) -> int:
        """Return how many files there are in the run directory."""
        return sum(path.is_file() for path in self.path.rglob("*"))

    def kill(self) -> None:
        """Let the head's daemon die: nothing is said or merged any more, files are closed."""
        self.head.closed = True
        self.head._close_orders()
        for rank in self.head.ranks.values():
            rank.tail.close()
        if self.head.daemon_journal is not None:
            self.head.daemon_journal.close()

    def stop(self) -> None:
        self.head.close(ended=False)
        if self.head.daemon_journal is not None:
            self.head.daemon_journal.close()

    def end(self) -> None:
        self.stop()
        for beat in self.beats.values():
            beat.close()
        self.close(cleanly=False)
        self.watcher.close()

    def _meta(self, rank: int) -> dict[str, Any]:
        meta = {**super()._meta(rank), "world_size": self.nodes * self.ranks}
        return {**meta, "hostname": os.uname().nodename}


@contextlib.contextmanager
def cluster(path: Path, **options: Any) -> Iterator[Cluster]:
    """Return a head that has begun: step 0 is merged."""
    made = Cluster(path / "run", **options)
    try:
        made.train(0)
        made.look()
        for node in range(1, made.nodes):
            assert made.push(node, made.said(node, 0)) == 204
        made.look()
        yield made
    finally:
        made.end()
