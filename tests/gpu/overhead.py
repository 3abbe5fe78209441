"""Part `overhead`: what a step costs with the probe and with its peers, and on the host alone.

The blocks, pairs and variants are those of `benchmarks.overhead`, in one process of one rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

import ddpprobe
from benchmarks import blocks, workloads
from benchmarks.variants import VARIANTS, Sampled, Unsampled, Variant, missing
from benchmarks.workloads import Training, Workload
from tests.gpu.findings import FAILED, SKIPPED
from tests.gpu.parts import Case, Context
from tests.gpu.training import one_rank

MEASURED = ("none", "sampled", "unsampled", "default", "read", "callbacks", "wandb", "transformers")
PEERS = ("wandb", "transformers")
SLOWNESS = 4.0  # of a step with a peer, for a guess at how long it takes
HOST_GOAL_MS = 10.0
LAYERS = 31  # of a GPT that has about 1,500 sites
# What the driver is asked to do, by the names that CUPTI gives to calls that start something.
LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")


def cases() -> dict[str, Case]:
    ratios = {
        name.removeprefix("gpt-").upper(): partial(ratios_of, workload)
        for name, workload in workloads.ON_GPU.items()
    }
    return {"host": host_time, "launches": launches, **ratios}


def small(steps: int) -> Workload:
    return replace(workloads.WORKLOADS["small-gpt"], steps=steps)


def ratios_of(workload: Workload, context: Context) -> None:
    """Measure each variant against the step without, in pairs of neighbouring blocks."""
    goals = dict(zip(("sampled", "unsampled"), workload.goals, strict=True))
    workload = context.size(workload, small(10))
    with one_rank(context.device):
        training = Training(workload, 0, context.device)
        for _ in range(3):
            training.step()
        context.sync()
        start = time.perf_counter()
        training.step()
        context.sync()
        bare = time.perf_counter() - start
        for name in MEASURED:
            pairs = context.size(3 if name in PEERS else 6, 2)
            steps = max(workload.steps, 10) if name == "default" else workload.steps
            likely = (pairs + 2) * 2 * steps * bare * (SLOWNESS if name in PEERS else 1.2)
            package = missing(name)
            if package or context.seconds_left() < likely + 10:
                why = f"{package} is not installed" if package else "out of time"
                context.findings.add(VARIANTS[name][0], SKIPPED, why)
                continue
            one(context, training, name, goals.get(name), steps=steps, pairs=pairs)


def one(
    context: Context, training: Training, name: str, goal: float | None, *, steps: int, pairs: int
) -> None:
    """Measure one variant; a peer that does not work here is no failure of ours."""
    title, make, _ = VARIANTS[name]
    title = title.replace("*", "")
    scratch = context.scratch / name
    scratch.mkdir()
    try:
        times = blocks.times_of(training, make(training, scratch), steps, pairs)
    except Exception as error:  # of a stranger's package
        if name not in PEERS:
            raise
        context.findings.add(title, SKIPPED, f"does not work here: {error}")
        return
    ratios = [on[0] / off[0] for on, off in zip(times["on"], times["off"], strict=True)]
    more = {"step_ms": [round(off[0] * 1e3, 3) for off in times["off"]]}
    if name in ("sampled", "unsampled", "default"):
        more["own"] = [mine / on[0] for mine, on in zip(times["own"], times["on"], strict=True)]
    context.findings.figure(title, ratios, "of the step without", most=goal, digits=4, **more)
    if name == "none":
        context.findings.figure("the step without", more["step_ms"], "ms", digits=2)


def deep(layers: int) -> Workload:
    """Return a model of many sites and little work: what counts is the host."""
    return replace(small(4), build=partial(workloads.GPT, layers, 64, 2, 16))


def host_time(context: Context) -> None:
    """Measure what a sampled step takes from the host, on a model of 1,500 sites."""
    with one_rank(context.device):
        training = Training(deep(context.size(LAYERS, 2)), 0, context.device)
        run = context.scratch / "sites"
        probe = ddpprobe.install(training.model, run_dir=run, every=1, daemon="none")
        for _ in range(3):
            training.step()
        probe.close()
        sites = max(len(record.sites) for record in ddpprobe.open(run).records())
        for name, goal in (("sampled", HOST_GOAL_MS), ("unsampled", None)):
            variant = VARIANTS[name][1](training, context.scratch)
            times = blocks.times_of(training, variant, 4, context.size(12, 2))
            both = zip(times["on"], times["off"], strict=True)
            added = [(on[0] - off[0]) * 1e3 for on, off in both]
            title = f"added to a step of {sites} sites, {name}"
            context.findings.figure(title, added, "ms", most=goal, digits=2)
            own = [seconds * 1e3 for seconds in times["own"]]
            context.findings.figure(f"of it by our own stopwatch, {name}", own, "ms", digits=2)
        bare = [off[0] * 1e3 for off in times["off"]]
        context.findings.figure("the step without", bare, "ms", digits=2)


def launches(context: Context) -> None:
    """Count what a step starts on the device; in a dry run, which operators it calls."""
    with one_rank(context.device):
        training = Training(deep(context.size(LAYERS, 2)), 0, context.device)
        training.step()
        kinds: dict[str, Callable[[Training, Path], Variant]]
        kinds = {"without": Variant, "sampled": Sampled, "unsampled": Unsampled}
        for name, make in kinds.items():
            variant = make(training, context.scratch)
            variant.on()
            training.step()
            count = launched(training, context)
            variant.off()
            if count:
                unit = context.size("launches and copies", "operators")
                context.findings.figure(f"a step, {name}", [count], unit, digits=0)
            else:
                context.findings.add(f"a step, {name}", FAILED, "the profiler saw nothing")


def launched(training: Training, context: Context) -> int:
    on_gpu = [ProfilerActivity.CUDA] if context.cuda else []
    context.sync()
    with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as seen:
        training.step()
        context.sync()
    names = [event.name for event in seen.events()]
    if context.cuda:
        return sum(any(kind in name for kind in LAUNCHES) for name in names)
    return sum(name.startswith(("aten::", "ddpprobe::")) for name in names)
