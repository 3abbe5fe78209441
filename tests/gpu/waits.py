"""Part `waits`: the host never waits for the device because of the probe, and no memory grows."""

from __future__ import annotations

import gc
from functools import partial

import torch

from benchmarks.memory import anonymous
from tests.gpu.findings import VOID
from tests.gpu.parts import Case, Context
from tests.gpu.training import SETTINGS, Setting, Training, group_for, start_anew

# A GradScaler waits by itself, in every step.
QUIET = ("plain", "plain fp64", "autocast bf16", "checkpointing", "ddp", "fsdp2", "several streams",
         "compile")  # fmt: skip
STEPS, EVERY = 12, 3
_MIB = 1 << 20


def cases() -> dict[str, Case]:
    waiting = {f"no wait: {name}": partial(no_wait, SETTINGS[name]) for name in QUIET}
    growing = {f"growth: {name}": partial(growth, SETTINGS[name]) for name in ("plain", "ddp")}
    return {**waiting, "memory added": memory_added, **growing}


def no_wait(setting: Setting, context: Context) -> None:
    """Whatever makes the host wait raises, from the first step after `install` on.

    Where torch itself waits in the first steps (buckets, compilation) it is the third.
    """
    if context.needs_cuda("on the CPU there is nobody to wait for"):
        return
    start_anew(setting)
    with group_for(setting, context.device):
        alone = quiet_steps(Training(setting, context.device))
        if alone:
            context.findings.add("steps without the probe", VOID, f"wait by themselves: {alone}")
            return
        training = Training(setting, context.device, context.scratch / "run", EVERY)
        said = quiet_steps(training)
        training.close()
    text = said or f"{STEPS} steps, every third sampled"
    context.findings.check("sampled and unsampled steps", holds=not said, text=text)


def quiet_steps(training: Training) -> str:
    """Train where waiting raises; return what was said, "" if nobody waited."""
    batches = [training.batch(step) for step in range(STEPS)]
    if training.setting.wrap or training.setting.mode:
        for batch in batches[:2]:  # a sampled step and another build buckets, graphs, communicators
            training.step(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            training.step(batch)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def memory_added(context: Context) -> None:
    """What stands there more with the probe, and what a sampled step takes on top."""
    held, peaks = [], []
    for run in (None, context.scratch / "run"):
        training = Training(SETTINGS["plain"], context.device, run, every=2)
        training.steps(10)
        held.append(taken(context))
        if context.cuda:
            torch.cuda.reset_peak_memory_stats()
        training.steps(4)
        context.sync()
        peaks.append(torch.cuda.max_memory_allocated() / _MIB if context.cuda else anonymous())
        training.close()
        del training
        context.sync()
    where = "device" if context.cuda else "host"
    context.findings.figure(f"{where} memory held", [held[1] - held[0]], "MiB")
    context.findings.figure(f"{where} memory at the peak of a step", [peaks[1] - peaks[0]], "MiB")


def taken(context: Context) -> float:
    """Return the memory that is in use, in MiB: of the device, or of this process."""
    gc.collect()
    context.sync()
    return torch.cuda.memory_allocated() / _MIB if context.cuda else anonymous()


def growth(setting: Setting, context: Context) -> None:
    """Nothing grows from the 200th step to the 2,000th; the allocator never starts anew."""
    first, last = context.size((200, 2000), (20, 120))
    with group_for(setting, context.device):
        training = Training(setting, context.device, context.scratch / "run", every=10)
        run(training, first)
        before, host = allocator(context), anonymous()
        run(training, last - first)
        after, host_after = allocator(context), anonymous()
        training.close()
    for name, value in before.items():
        more = after[name] - value
        text = f"{value:.0f}, then {after[name]:.0f}"
        context.findings.check(f"{name}, steps {first} to {last}", holds=more <= 0, text=text)
    context.findings.figure(f"host memory, steps {first} to {last}", [host_after - host], "MiB")


def run(training: Training, steps: int) -> None:
    for step in range(steps):
        training.step(training.batch(step % 16))


def allocator(context: Context) -> dict[str, float]:
    """Return what the allocator of the device says; nothing on the CPU."""
    if not context.cuda:
        return {}
    gc.collect()
    context.sync()
    told = torch.cuda.memory_stats()
    names = {"bytes allocated": "allocated_bytes.all.current",
             "blocks allocated": "allocation.all.current",
             "bytes reserved": "reserved_bytes.all.current",
             "allocations tried again": "num_alloc_retries"}  # fmt: skip
    return {name: float(told[key]) for name, key in names.items()}
