"""Training whose probe, or whose own code, is broken in one chosen way.

torchrun ... sabotage.py sweep WRAP OUT        every method of the probe raises, one at a time
torchrun ... sabotage.py HOW[@STEP] [arguments of job.py]    the small job; HOW is one of `PROBE`,
                                                or, at STEP, one of `USER`
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import inspect
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpprobe
from ddpprobe.daemon import launch
from ddpprobe.testing import state_hash

spec = importlib.util.spec_from_file_location("job", Path(__file__).with_name("job.py"))
job = importlib.util.module_from_spec(spec)
spec.loader.exec_module(job)

# Where the training process can be inside ddpprobe after install() has returned.
ROOMS = (
    "rank.backward", "rank.hooks.eager", "rank.hooks.execution_order", "rank.hooks.full",
    "rank.hooks.loss_scale", "rank.hooks.parts", "rank.hooks.peaks", "rank.hooks.root",
    "rank.hooks.row_buffer", "rank.hooks.step_rows",
    "rank.hooks.watch", "rank.join", "rank.journal_writer", "rank.observers",
    "rank.order_handler", "rank.phase_times", "rank.recorder", "rank.run_delay",
    "rank.step_clock", "rank.topology.describe", "rundir.heartbeat", "rundir.journal",
    "rundir.orders", "rundir.slot_file",
)  # fmt: skip
# One line each, that enters the fuse: the outside of the containment.
DOORS = (
    "ddpprobe.rank.hooks.eager._Gradient.__call__", "ddpprobe.rank.hooks.watch._Watched.__call__",
    "ddpprobe.rank.hooks.watch._Watched._tell", "ddpprobe.rank.hooks.watch._Arriving.__call__",
    "ddpprobe.rank.hooks.root._Before.__call__", "ddpprobe.rank.hooks.root._After.__call__",
    "ddpprobe.rank.hooks.root._Arrived.__call__",
    "ddpprobe.rank.hooks.root.RootHooks.begin", "ddpprobe.rank.hooks.root.RootHooks.begin_root",
    "ddpprobe.rank.step_clock.StepClock._behind_step",
    "ddpprobe.rank.order_handler.OrderHandler.act",
)  # fmt: skip
STEPS, PAUSED, EVALUATED = 4, 1, (1, 2)  # sampled: 0 and 2
# A sweep trains hundreds of times. With one block, and an optimizer that takes all parameters at
# once, it passes through the same methods as with three, as often as it takes for a middle call.
BLOCKS = 1


class Sabotage(Exception):
    """What every broken method raises."""


class Breaker:
    """Makes methods raise: `target` at its `at`-th call (0: at every one), once it is armed."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.raised = 0
        self.target: str | None = None
        self.at = 0
        self.armed = False
        for room in ROOMS:
            module = importlib.import_module(f"ddpprobe.{room}")
            for owner in vars(module).values():
                if inspect.isclass(owner) and owner.__module__ == module.__name__:
                    self._break(owner)

    def _break(self, owner: type) -> None:
        for name, method in list(vars(owner).items()):
            if inspect.isfunction(method) and (name == "__call__" or not name.startswith("__")):
                place = f"{owner.__module__}.{owner.__qualname__}.{name}"
                if place in DOORS:
                    continue
                setattr(owner, name, self._wrap(place, method))

    def _wrap(self, place: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def broken(*args: Any, **kwargs: Any) -> Any:
            if self.armed and self.target in {None, place, "all"}:
                self.calls[place] += 1
                if self.target and self.calls[place] >= self.at:
                    self.raised += 1
                    raise Sabotage(place)
            return method(*args, **kwargs)

        broken.__name__ = method.__name__
        return broken


def train(wrap: str, options: dict[str, Any] | None, breaker: Breaker) -> str:
    """Train for a few steps; return the hash of the state. Without options there is no probe."""
    rank, model = dist.get_rank(), job.build()
    model.blocks = model.blocks[:BLOCKS]
    wrapped: nn.Module = model
    if wrap == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard  # half a second, for nothing under DDP

        for part in (model.blocks[0], model):
            fully_shard(part)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01, foreach=True)
    probe = ddpprobe.install(wrapped, daemon="none", **options) if options else None
    breaker.armed = probe is not None
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 + rank)
    for step in range(STEPS):
        wrapped(job.batch(step, 0, rank))[1].backward()
        if probe is not None:
            probe.log(number=1.0)
            with probe.pause() if step == PAUSED else contextlib.nullcontext():
                pass
        optimizer.step()
        optimizer.zero_grad()
        if step in EVALUATED:
            with torch.no_grad():
                wrapped(job.batch(step, 9, rank))
    if probe is not None:
        probe.close()
    breaker.armed = False
    return state_hash(wrapped, optimizer)


def attempts_to_break(wrap: str, out: Path, breaker: Breaker) -> Iterator[tuple[str, int]]:
    """Yield every place that training passes through, with its first and (DDP) its middle call."""
    train(wrap, {"run_dir": out / "whole", "every": 2, "backward": "full"}, breaker)
    for place, calls in sorted(breaker.calls.items()):
        yield place, 1
        if calls > 3 and wrap == "ddp":
            yield place, calls // 2 + 1


def sweep(wrap: str, out: Path) -> None:
    """Break one thing after the other; rank 0 writes down what came of it."""
    dist.init_process_group("gloo")
    breaker = Breaker()
    bare = train(wrap, None, breaker)
    places, found = list(attempts_to_break(wrap, out, breaker)), []
    for i, (place, at) in enumerate(places):
        # `install` looks through the collector's objects, 300 times: through those of its own run.
        gc.collect()
        gc.freeze()
        breaker.target, breaker.at, breaker.raised = place, at, 0
        breaker.calls.clear()
        options = {"run_dir": out / str(i), "every": 2, "backward": "full"}
        try:
            same, error = train(wrap, options, breaker) == bare, ""
        except Exception as raised:  # noqa: BLE001  (the finding: it got through to the user)
            same, error = False, f"{type(raised).__name__}: {raised}"
            breaker.armed = False
        found.append([place, at, breaker.raised, same, error])
        if error:
            break  # the other rank is in another place now
    (out / f"found.{dist.get_rank()}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)


def every_call() -> None:
    """All methods of the probe raise whenever training calls them."""
    breaker = Breaker()
    breaker.target, breaker.at = "all", 1
    install = ddpprobe.install

    def installed(*args: Any, **kwargs: Any) -> Any:
        probe = install(*args, **kwargs)
        breaker.armed = True
        return probe

    ddpprobe.install = installed


def no_python() -> None:
    """The daemon's interpreter ends at once."""
    sys.executable = "/bin/false"


def no_shell() -> None:
    """The daemon dies at once, and then not even a process can be started for another one."""
    no_python()
    start, tries = launch.start_daemon, Counter[str]()

    def start_once(*args: Any, **kwargs: Any) -> None:
        tries["start"] += 1
        if tries["start"] > 1:
            raise OSError(11, "Resource temporarily unavailable")
        start(*args, **kwargs)

    launch.start_daemon = start_once
    importlib.import_module("ddpprobe.daemon.launch").CHECK_SECONDS = 0.1


def small_room() -> None:
    """Hardly any record may wait in memory for the disk."""
    importlib.import_module("ddpprobe.rundir.spool").MAX_ROOM = 40_000


def no_memory() -> None:
    """There is no file system in memory."""
    importlib.import_module("ddpprobe.rundir.tmpfs").ROOT = Path("/missing")


def misbehave(act: Callable[[], Any], bad_step: int) -> None:
    """Do it in the user's code, on rank 0."""
    batch = job.batch

    def bad(step: int, micro: int, rank: int, **options: Any) -> Any:
        if step == bad_step and rank == 0:
            act()
        return batch(step, micro, rank, **options)

    job.batch = bad


def fail() -> None:
    raise RuntimeError("a bug of the user's")


PROBE: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "every-call": every_call,
    "no-python": no_python,
    "no-shell": no_shell,
    "small-room": small_room,
    "no-memory": no_memory,
}
USER: dict[str, Callable[[], Any]] = {
    "exit-7": lambda: sys.exit(7),
    "raise": fail,
    "_exit-3": lambda: os._exit(3),
    "abort": os.abort,
}


def main() -> None:
    """Break it, then train."""
    how, _, step = sys.argv.pop(1).partition("@")
    if how == "sweep":
        sweep(sys.argv[1], Path(sys.argv[2]))
        return
    if how in USER:
        misbehave(USER[how], int(step or 5))
    else:
        PROBE[how]()
    job.main()


if __name__ == "__main__":
    main()
