"""Recorded steps of a run that nobody trained: what its ranks would have written, of any size."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import numpy as np
import psutil

from ddpprobe.records.step import Site, StepRecord
from ddpprobe.rundir.paths import node_name

MODULES = 300
PER_NODE = 8
_SCALARS = (
    "loss", "grad_norm_local", "grad_norm", "micro_batches", "sites_expected", "sites_observed",
    "data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds", "probe_seconds",
)  # fmt: skip


class Model:
    """A data-parallel model of so many modules, three of four with a weight and a bias.

    With 300 modules: 300 outputs, 300 output gradients, 450 parameters with a local and a reduced
    gradient each, so 1,500 sites, and 450 checksums.
    """

    def __init__(self, modules: int = MODULES) -> None:
        names = [f"transformer.blocks.{i // 10}.part_{i % 10}" for i in range(modules)]
        self.parameters = [
            f"{n}.{p}" for i, n in enumerate(names) if i % 4 for p in ("weight", "bias")
        ]
        self.tables = {primary: self._sites(names, primary=primary) for primary in (True, False)}
        self.checksums = range(10**18, 10**18 + len(self.parameters))
        shape = np.random.default_rng(0).standard_normal((len(self.tables[True]), 4))
        self.values = np.sort(shape, axis=1)
        self.counts = np.tile(np.array([4096, 0, 0, 0, 17, 1, 1], np.int64), (len(shape), 1))
        self.more = np.array([1, 0, 0, 0, 0, 0, 0], np.int64)

    def _sites(self, names: list[str], *, primary: bool) -> tuple[Site, ...]:
        kinds = (
            (names, "output", "local", True),
            (names[::-1], "grad_output", "local", True),
            (self.parameters[::-1], "grad_local", "local", True),
            (self.parameters, "grad", "replicated", primary),
        )
        return tuple(
            Site(name, kind, "", placement, first, "float32")
            for these, kind, placement, first in kinds
            for name in these
        )

    def record(self, rank: int, step: int) -> StepRecord:
        """Return what `rank` writes of a sampled step; its numbers differ by rank and step."""
        keys = ((parameter, "") for parameter in self.parameters)
        return StepRecord(
            attempt=0, step=step, ranks=(rank,), wall_time_ns=time.time_ns(),
            sites=self.tables[rank == 0], counts=self.counts + step * self.more,
            values=self.values * (1.0 + 1e-3 * rank + 1e-6 * step),
            scalars={rank: dict.fromkeys(_SCALARS, 0.123456789 * (rank + 1))},
            digests={
                k: {c + step: 1 << rank} for k, c in zip(keys, self.checksums, strict=True)
            },
        )  # fmt: skip


def meta(rank: int, world_size: int) -> dict[str, Any]:
    """Return what a rank's journal begins with; its process is this one."""
    node = rank // PER_NODE
    return {
        "rank": rank, "local_rank": rank % PER_NODE, "world_size": world_size,
        "local_world_size": min(PER_NODE, world_size), "node": node_name(node), "node_index": node,
        "attempt": 0, "pid": os.getpid(), "pid_start": psutil.Process().create_time(),
        "hostname": socket.gethostname(), "device": "cpu", "wrapper": "ddp", "backend": "gloo",
        "torch": "2.13.0", "run_id": "simulated", "name": "simulated", "every": 10,
        "started_ns": time.time_ns(), "head": node == 0, "resume_step": 0, "head_url": None,
    }  # fmt: skip
