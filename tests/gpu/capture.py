"""Part `capture`: full tensors are kept bit by bit, and what a step pays for them."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

import ddpprobe
from benchmarks import blocks, workloads
from benchmarks.variants import Sampled
from benchmarks.workloads import Training
from ddpprobe.rundir.paths import RunDir, node_name
from ddpprobe.rundir.tensor_pack import Pack
from tests.gpu.parts import Case, Context
from tests.gpu.training import SETTINGS, group_for, one_rank
from tests.gpu.training import Training as Small

MODULE = "blocks.1"
STEPS, EVERY = 8, 4  # of a block; its second half pays for what the step before it has captured
_MIB = 1 << 20


def cases() -> dict[str, Case]:
    return {"right": right, "right, fsdp2": right_fsdp2, "cost": cost}


def packs_below(run: Path) -> Iterator[Pack]:
    return map(Pack.open, sorted(run.rglob("*.pack")))


def right(context: Context, name: str = "plain") -> None:
    """Compare what is kept of a module's output with what a plain hook has seen."""
    seen: list[torch.Tensor] = []
    with group_for(SETTINGS[name], context.device):
        run = context.scratch / "run"
        training = Small(SETTINGS[name], context.device, run, every=2, capture=MODULE)
        module = training.model.get_submodule(MODULE)
        module.register_forward_hook(lambda m, a, output: seen.append(output.detach().clone()))
        training.steps(4)
        training.close()
    for step in (0, 2):
        pack = Pack.open(RunDir(run).pack(0, node_name(0), 0, step))
        places = [i for i, t in enumerate(pack.tensors) if (t.fqn, t.kind) == (MODULE, "output")]
        kept = [bytes(pack.raw(i)) for i in places]
        wanted = [seen[step].cpu().numpy().tobytes()]
        kinds = sorted({t.kind for t in pack.tensors})
        context.findings.check(
            f"output of {MODULE}, step {step}", holds=kept == wanted,
            text=f"{len(pack.tensors)} tensors: {', '.join(kinds)}",
        )  # fmt: skip


def right_fsdp2(context: Context) -> None:
    right(context, "fsdp2")


class SampledOnly(Sampled):
    """Every fourth step is sampled, and nothing is kept."""

    EVERY = EVERY


class Capturing(SampledOnly):
    """Of every fourth step whole blocks are kept. What was written is counted, then removed."""

    MODULES = ("blocks.0", "blocks.1")

    def on(self) -> None:
        self._run = self._scratch / f"run{next(self._installs)}"
        self._probe = ddpprobe.install(
            self._model, run_dir=self._run, every=EVERY, daemon="none", capture=self.MODULES
        )
        self._training.step()

    def off(self) -> None:
        super().off()
        packs = list(packs_below(self._run))
        self.bytes = [pack.bytes for pack in packs]
        self.dropped = sum(int(pack.header["dropped"]) for pack in packs)
        shutil.rmtree(self._run)


def cost(context: Context) -> None:
    """Measure blocks of steps with captures, and those of a probe that only samples."""
    workload = workloads.ON_GPU["gpt-125m"]
    workload = context.size(workload, replace(workloads.WORKLOADS["small-gpt"], steps=STEPS))
    say, pairs = context.findings, context.size(6, 2)
    with one_rank(context.device):
        training = Training(workload, 0, context.device)
        training.step()
        extra = []
        for make in (SampledOnly, Capturing):
            variant = make(training, context.scratch)
            if context.cuda:
                torch.cuda.reset_peak_memory_stats()
            times = blocks.times_of(training, variant, STEPS, pairs)
            both = list(zip(times["on"], times["off"], strict=True))
            ratios = [on[0] / off[0] for on, off in both]
            name = "with captures" if make is Capturing else "only sampled"
            what = f"{STEPS} steps, every {EVERY}th {name}"
            say.figure(what, ratios, "of the steps without", digits=4)
            extra.append([(on[0] - off[0]) * EVERY for on, off in both])
            if context.cuda:
                peak = torch.cuda.max_memory_allocated() / _MIB
                say.figure(f"device memory at the peak, {name}", [peak], "MiB", digits=0)
    size = statistics.median(variant.bytes)
    say.figure("kept of a step", [size / _MIB], "MiB", digits=1)
    say.figure("left out, beyond the bound", [variant.dropped / _MIB], "MiB", digits=1, most=0)
    paid = [seconds - statistics.median(extra[0]) for seconds in extra[1]]
    say.figure("a captured step pays", [seconds * 1e3 for seconds in paid], "ms", digits=2)
    middle = statistics.median(paid)
    if middle > 0:
        say.figure("kept, by what the training pays", [size / middle / 1e9], "GB/s", digits=2)
