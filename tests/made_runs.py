"""Run directories made without training: journals of ranks and a daemon, as they write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ddpprobe.records.merge import disagreements, merge_all
from ddpprobe.records.step import Anomaly, FirstBad, Site, StepRecord
from ddpprobe.rundir import framing, paths
from ddpprobe.rundir.journal import JournalWriter
from ddpprobe.rundir.paths import RunDir

NODE = "node_0000"
DEAD_PID = 2**22 + 7  # above the largest pid a Linux kernel hands out by default
ANOMALY = Anomaly(
    "nonfinite", "page", 3, 1, 0, "blocks.1.mlp", "output", "forward", first_cause=True,
    message="3 NaN in blocks.1.mlp", values={"nan": 3.0, "ratio": float("nan")}, sampled=True,
    wall_time_ns=10**18 + 3,
)  # fmt: skip


def sites(n: int) -> tuple[Site, ...]:
    return tuple(Site(f"blocks.{i}.mlp", "output", dtype="float32") for i in range(n))


def record(rank: int, step: int, n: int = 3, attempt: int = 0, **changes: Any) -> StepRecord:
    """Return a record whose numbers are a function of (rank, step)."""
    rng = np.random.default_rng([attempt, rank, step])
    counts = rng.integers(1, 1 << 40, (n, 7))
    counts[:, 1:4] = 0
    values = rng.standard_normal((n, 4))
    values[:, 3] = np.abs(values[:, 3]) * counts[:, 0]
    made = StepRecord(
        attempt=attempt,
        step=step,
        ranks=(rank,),
        wall_time_ns=10**18 + step,
        sites=sites(n),
        counts=counts,
        values=values,
        scalars={rank: {"loss": 1.0 / (step + 1), "grad_norm_local": 1.0 + rank}},
        digests={(f"{name}.weight", ""): {hash_of(name, step): 1 << rank} for name in ("a", "b")},
    )
    return replace(made, **changes)


def hash_of(name: str, step: int) -> int:
    """Return what a parameter's checksum might be: any 64 bits, the same on every rank."""
    return int(np.random.default_rng([*name.encode(), step]).integers(-(2**63), 2**63 - 1))


def bad(rank: int, step: int) -> FirstBad:
    return FirstBad(step, 1, "forward", 4, rank, "blocks.1.mlp", "output", nan=3, numel=8)


def key(made: StepRecord) -> bytes:
    """Return bytes that are equal for equal records, NaN included."""
    cells = {r: dict(sorted(s.items())) for r, s in sorted(made.scalars.items()) if s}
    digests = dict(sorted(made.digests.items()))
    return framing.encode_record(replace(made, scalars=cells, digests=digests))


def head_merge(parts: Sequence[StepRecord]) -> StepRecord:
    """Merge the ranks' records of a step as the head does: of the checksums the disputed ones."""
    merged = merge_all(parts)
    return replace(merged, digests=disagreements(merged.digests))


@dataclass
class Made:
    """A run being written."""

    path: Path
    ranks: int = 2
    attempt: int = 0
    segment_frames: int = 8
    pid: int = DEAD_PID
    node: str = NODE
    hostname: str = "here"
    process: str = ""  # what it has in common with other models' runs
    options: Mapping[str, Any] = field(default_factory=dict)  # of `install()`
    daemon: JournalWriter | None = None
    writers: dict[int, JournalWriter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        paths.make_dir(self.path)
        self.run = RunDir(self.path)
        if not self.run.run_json.exists():
            paths.write_json(self.run.run_json, self._identity())

    def write(self, records: Iterable[StepRecord]) -> None:
        for made in records:
            rank = made.ranks[0]
            assert self.writer(rank).append_record(made)

    def writer(self, rank: int) -> JournalWriter:
        if rank not in self.writers:
            directory = self.run.rank_journal(self.attempt, self.node, rank)
            self.writers[rank] = JournalWriter(directory, self._meta(rank), self.segment_frames)
        return self.writers[rank]

    def tell(self, type_: int, value: Mapping[str, Any] | StepRecord | Anomaly) -> None:
        """Write a frame as the daemon does."""
        if self.daemon is None:
            directory = self.run.daemon_journal(self.attempt, self.node)
            meta = {**self._identity(), "node": self.node, "pid": self.pid, "role": "daemon"}
            self.daemon = JournalWriter(directory, meta, self.segment_frames)
        if isinstance(value, StepRecord):
            self.daemon.append_record(value)
        elif isinstance(value, Anomaly):
            self.daemon.append(type_, framing.encode_anomaly(value))
        else:
            self.daemon.append_json(type_, value)

    def whole(self, steps: int, *, told: bool = True, grow_at: int | None = None) -> Made:
        """Write `steps` steps of every rank and, if `told`, what the head's daemon says."""
        for step in range(steps):
            n = 3 + (grow_at is not None and step >= grow_at)
            parts = [record(r, step, n, self.attempt) for r in range(self.ranks)]
            self.write(parts)
            if told:
                self.tell(framing.RECORD, head_merge(parts))
            if told and step == 3:
                self.tell(framing.ANOMALY, ANOMALY)
                readings = {"time_ns": step, "host": {"cpu": 0.5}, "ranks": {}}
                self.tell(framing.SAMPLE, readings)
        return self

    def close(self, *, cleanly: bool = True) -> RunDir:
        """End all writers; `cleanly` with their last words."""
        for writer in self.writers.values():
            if cleanly:
                writer.append_json(framing.LIFE, {"event": "closed", "status": "ok"})
            writer.close()
        if self.daemon is not None:
            if cleanly:
                self.daemon.append_json(framing.LIFE, {"event": "finished"})
            self.daemon.close()
        self.writers, self.daemon = {}, None
        return self.run

    def _identity(self) -> dict[str, Any]:
        return {
            "format_version": 1, "run_id": "id", "name": "made", "world_size": self.ranks,
            "nodes": 1, "created_ns": 1, "every": 1, "wrapper": "ddp", "torch": "2",
            "backend": "gloo", "hostname": self.hostname,
        }  # fmt: skip

    def _meta(self, rank: int) -> dict[str, Any]:
        began = 0.0 if self.pid == DEAD_PID else psutil.Process(self.pid).create_time()
        return {
            **self._identity(), "rank": rank, "local_rank": rank, "node": self.node,
            "node_index": int(self.node[5:]),
            "pid": self.pid, "pid_start": began,
            "local_world_size": self.ranks, "attempt": self.attempt, "device": "cpu",
            "head": self.node == NODE, **({"process": self.process} if self.process else {}),
            **self.options,
        }  # fmt: skip


def tree(path: Path) -> dict[str, bytes]:
    """Return the files below a directory."""
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}
