"""Runs one cell on all ranks: bare, then probed, then (rank 0) judged against the reference."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import ddpprobe
from ddpprobe.errors import InstallError
from ddpprobe.records.step import StepRecord
from ddpprobe.rundir import framing
from ddpprobe.rundir.journal import JournalTail
from ddpprobe.rundir.paths import RunDir
from ddpprobe.testing import state_hash
from tests.grid.axes import Cell
from tests.grid.loops import STEPS, Loop
from tests.grid.models import build
from tests.grid.wrapping import Wrapped, full_parameters, wrap

ALL_STEPS = STEPS + 2


@dataclass
class Run:
    """What one training run leaves behind on this rank."""

    state: str = ""
    graphs: int = 0
    breaks: set[str] = field(default_factory=set)  # their reasons
    refused: str = ""
    trained: dict[str, torch.Tensor] = field(default_factory=dict)  # only of the bare run


@dataclass
class Outcome:
    """All that is known of one cell, gathered on rank 0; `problems` non-empty: it failed."""

    cell: str
    result: str = ""  # exact | limited: ... | refused: ...
    worst: float = 0.0
    sites: int = 0  # rows compared
    limited: int = 0  # rows that are labelled instead
    same: bool = False
    faults: str = ""
    graphs: list[int] = field(default_factory=list)  # bare, probed
    breaks: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def run_cell(cell: Cell, directory: Path) -> Outcome | None:
    """Run `cell` on every rank of the process group; rank 0 gets the outcome."""
    from tests.grid.judge import judge

    try:
        bare = _train(cell, None)
    except Exception as error:
        raise RuntimeError("without a probe: torch itself refuses this cell") from error
    probed = _train(cell, directory / "run")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (bare, probed))
    outcome = judge(cell, everyone, directory / "run") if dist.get_rank() == 0 else None
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory, ignore_errors=True)
    return outcome


def _train(cell: Cell, run_dir: Path | None) -> Run:
    torch._dynamo.reset()
    counters.clear()
    gc.collect()
    torch.manual_seed(1)
    rank = dist.get_rank()
    backend = CompileCounterWithBackend("aot_eager")
    root = build(cell.model, inplace=cell.inplace)
    torch.manual_seed(2 + rank)
    run, probe = Run(), None
    with contextlib.ExitStack() as stack:
        try:
            if cell.install == "before":
                probe = _install(root, cell, run_dir)
            wrapped = wrap(cell, root, rank, backend)
            loop = Loop(wrapped)
            if cell.install == "late":
                loop.warm_up()
            if cell.install != "before":
                probe = _install(wrapped.model, cell, run_dir)
        except InstallError as error:
            run.refused = str(error)
            return run
        if probe is not None:
            stack.callback(probe.close)
            loop.end_step = probe.step
        for number in range(STEPS):
            loop.step(number)
        run.state = _state(wrapped, loop)
        run.graphs = backend.frame_count
        run.breaks = {reason.partition("\n")[0] for reason in counters["graph_break"]}
        if probe is None:
            found = full_parameters(wrapped)
            run.trained = found if rank == 0 or cell.wrapper == "pp" else {}
        for number in range(STEPS, ALL_STEPS):
            loop.step(number)
    return run


def _install(model: torch.nn.Module, cell: Cell, run_dir: Path | None) -> ddpprobe.Probe | None:
    if run_dir is None:
        return None
    return ddpprobe.install(model, run_dir=run_dir, every=cell.every, daemon="none")


def _state(wrapped: Wrapped, loop: Loop) -> str:
    """A hash of parameters, optimizer states and random states on this rank."""
    try:
        states = [state_hash(wrapped.model, optimizer) for optimizer in loop.optimizers]
    except ValueError as refused:  # the same wrappers that install() refuses
        return f"not comparable: {refused}"
    return hashlib.sha256("".join(states).encode()).hexdigest()


def journal_of(run_dir: Path, rank: int) -> tuple[list[StepRecord], set[str]]:
    """Read a rank's records, and the modules that it says were never seen being called."""
    tail = JournalTail(RunDir(run_dir).rank_journal(0, "node_0000", rank))
    frames = tail.poll()
    records = [
        framing.decode_record(f.payload, tail.tables) for f in frames if f.type == framing.RECORD
    ]
    lives = [json.loads(f.payload) for f in frames if f.type == framing.LIFE]
    tail.close()
    return records, {name for life in lives for name in life.get("silent", ())}


def scratch() -> Path:
    """Where the runs of this launch go; the same on all ranks."""
    return Path(os.environ["GRID_SCRATCH"])


def is_far() -> bool:
    """Whether the host cannot look into tensors (`tests.far`)."""
    return bool(os.environ["GRID_FAR"])
