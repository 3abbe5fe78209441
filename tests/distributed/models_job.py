"""Several models in one process, on each of two ranks under DDP: torchrun ... models_job.py OUT.

Each of `PLANS` trains once with a probe on every model and, if nothing is planted in it, once
without any; OUT/PLAN/MODEL is the run of a model, OUT/PLAN.RANK.json what was trained.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddpprobe
from ddpprobe.testing import state_hash

TURNS, CRITICS = 5, 3
Models = dict[str, nn.Module]
# Plan: (loop, every, where a NaN is planted: model, turn, place in the turn, rank)
PLANS: dict[str, tuple[str, int, tuple[str, int, str, int] | None]] = {
    "gan": ("gan", 1, None),
    "gan-10": ("gan", 10, None),
    "actor-critic": ("actor_critic", 1, None),
    "distilled": ("distilled", 1, None),
    "bad-generator": ("gan", 1, ("generator", 2, "lent", 1)),
    "bad-critic": ("gan", 1, ("critic", 3, "own", 0)),
    "bad-critic-10": ("gan", 10, ("critic", 2, "own", 1)),
    "bad-critic-lent": ("gan", 1, ("critic", 2, "lent", 0)),
    "bad-generator-10": ("gan", 10, ("generator", 2, "lent", 0)),
    "bad-loss": ("gan", 1, ("loss", 2, "lent", 0)),
    "bad-actor": ("actor_critic", 1, ("actor", 2, "own", 1)),
    "bad-teacher": ("distilled", 1, ("teacher", 3, "own", 1)),
    "bad-teacher-10": ("distilled", 10, ("teacher", 3, "own", 0)),
}


def net(*sizes: int) -> nn.Module:
    torch.manual_seed(sum(sizes))
    return nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.Tanh(), nn.Linear(sizes[1], sizes[2]))


class Job:
    """The models of a plan, wrapped, with an optimizer each; `bad` as in `PLANS`."""

    def __init__(self, models: Models, bad: tuple[str, int, str, int] | None) -> None:
        self.models = models
        self.ddp = {
            name: DistributedDataParallel(model)
            if next(model.parameters()).requires_grad
            else model
            for name, model in models.items()
        }
        self.optimizers = {
            name: torch.optim.Adam(model.parameters(), lr=1e-3) for name, model in models.items()
        }
        self.bad, self.losses = bad, list[float]()
        self.probes: Mapping[str, ddpprobe.Probe] = {}
        self.data = torch.Generator().manual_seed(dist.get_rank())

    def random(self, size: int) -> Tensor:
        return torch.randn(4, size, generator=self.data)

    @contextlib.contextmanager
    def place(self, turn: int, where: str):
        """Make the middle module of a model return NaN here, if the plan says so."""
        model, at, place, rank = self.bad or ("", -1, "", -1)
        if (turn, where, dist.get_rank()) != (at, place, rank) or model == "loss":
            yield
            return
        hook = self.models[model][1].register_forward_hook(lambda _m, _a, out: out * torch.nan)
        yield
        hook.remove()

    def probe(self, name: str) -> ddpprobe.Probe:
        return self.probes.get(name) or ddpprobe.Probe()

    def update(self, name: str, loss: Tensor) -> None:
        """Throw the old gradients away between forward and backward, as most loops do."""
        self.optimizers[name].zero_grad()
        loss.backward()
        self.optimizers[name].step()
        self.losses.append(loss.item())


def gan(job: Job, turn: int) -> None:
    generator, critic = job.ddp["generator"], job.ddp["critic"]
    for at in range(CRITICS):
        with torch.no_grad():
            fake = generator(job.random(2))
        with job.place(turn, "own") if at == 1 else contextlib.nullcontext():
            scores = critic(torch.cat([fake, job.random(4)]))
        job.update("critic", scores[:4].mean() - scores[4:].mean())
    with job.place(turn, "lent"):
        loss = -critic(generator(job.random(2))).mean()
    if job.bad == ("loss", turn, "lent", dist.get_rank()):
        loss = loss * torch.nan
    job.probe("generator").log(loss=loss)
    job.update("generator", loss)


def actor_critic(job: Job, turn: int) -> None:
    actor, critic, x = job.ddp["actor"], job.ddp["critic"], job.random(4)
    value = critic(x)
    with job.place(turn, "own"):
        action = actor(x)
    job.update("actor", -(action.mean(1, keepdim=True) * value.detach()).mean())
    job.update("critic", value.square().mean())
    job.update("actor", -critic(actor(x)).mean())  # as in DDPG, through the critic


def distilled(job: Job, turn: int) -> None:
    student, teacher, x = job.ddp["student"], job.ddp["teacher"], job.random(2)
    with torch.no_grad(), job.place(turn, "own"):
        wanted = teacher(x)
    job.update("student", (student(x) - wanted).square().mean())
    with torch.no_grad():
        for ours, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
            ours.lerp_(theirs, 0.1)


LOOPS: dict[str, tuple[Callable[[Job, int], None], Callable[[], Models]]] = {
    "gan": (gan, lambda: {"generator": net(2, 5, 4), "critic": net(4, 6, 1)}),
    "actor_critic": (actor_critic, lambda: {"actor": net(4, 5, 4), "critic": net(4, 6, 1)}),
    "distilled": (
        distilled,
        lambda: {"student": net(2, 5, 4), "teacher": net(2, 5, 4).requires_grad_(False)},
    ),
}


def train(plan: str, out: Path | None) -> dict[str, Any]:
    loop, every, bad = PLANS[plan]
    turn, models = LOOPS[loop]
    job = Job(models(), bad)
    with contextlib.ExitStack() as stack:
        if out is not None:
            how = {"every": every, "daemon": "none", "task": "gan"}
            job.probes = stack.enter_context(ddpprobe.install(job.ddp, run_dir=out / plan, **how))
        for at in range(TURNS):
            turn(job, at)
    hashes = [state_hash(m, job.optimizers[name]) for name, m in job.models.items()]
    return {"losses": job.losses, "hashes": hashes}


def main() -> None:
    dist.init_process_group("gloo")
    out = Path(sys.argv[1])
    for plan, (_, _, bad) in PLANS.items():
        said = {"probed": train(plan, out)}
        if bad is None:
            said["plain"] = train(plan, None)
        (out / f"{plan}.{dist.get_rank()}.json").write_text(json.dumps(said))
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
