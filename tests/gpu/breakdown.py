"""Part `breakdown`: where a step spends its time, on the host by phase, on the device by kernel.

What `overhead` measures says that a step takes longer; this says where, on the same models.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from types import FrameType

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import workloads
from benchmarks.variants import VARIANTS, Variant
from benchmarks.workloads import Training, Workload
from ddpprobe.rank.frames import stack
from tests.gpu.overhead import small
from tests.gpu.parts import Case, Context
from tests.gpu.training import one_rank

KINDS = ("none", "unsampled", "sampled")
STEPS, LOOKED_AT = 8, 30
PARTS = ("forward", "backward", "optimizer")
KERNELS, PLACES = 6, 40  # told of
OURS = "ddpprobe"


def cases() -> dict[str, Case]:
    return {
        name.removeprefix("gpt-").upper(): partial(break_down, workload)
        for name, workload in workloads.ON_GPU.items()
        if name != "gpt-10m"
    }


def break_down(workload: Workload, context: Context) -> None:
    """Tell of a step without the probe, an unsampled and a sampled one."""
    kernels: dict[str, Counter[str]] = {}
    with one_rank(context.device):
        training = Training(context.size(workload, small(10)), 0, context.device)
        for _ in range(3):
            training.step()
        for kind in KINDS:
            variant: Variant = VARIANTS[kind][1](training, context.scratch)
            variant.on()
            for _ in range(2):  # as in `benchmarks.blocks`
                training.step()
            of_host(training, kind, context)
            if context.cuda:
                kernels[kind] = of_device(training)
            if kind == "sampled":
                print(*places(training), sep="\n", flush=True)
            variant.off()
    for kind in KINDS if context.cuda else ():
        total = sum(kernels[kind].values()) / 1e3
        context.findings.figure(f"device, {kind}", [total], "ms", digits=2)
    added = kernels.get("sampled", Counter()) - kernels.get("none", Counter())
    for name, microseconds in added.most_common(KERNELS):
        context.findings.figure(f"device, added by {name[:60]}", [microseconds / 1e3], "ms")


def of_host(training: Training, kind: str, context: Context) -> None:
    """Tell what the host takes for each phase; it waits for the device before each step only."""
    steps = []
    for _ in range(STEPS):
        training.wait()
        began = [time.perf_counter()]
        loss = training.forward()
        began.append(time.perf_counter())
        loss.backward()
        began.append(time.perf_counter())
        training.update()
        began.append(time.perf_counter())
        steps.append([(end - start) * 1e3 for start, end in itertools.pairwise(began)])
    for part, milliseconds in zip(PARTS, zip(*steps, strict=True), strict=True):
        context.findings.figure(f"host, {part}, {kind}", milliseconds, "ms", digits=2)


def of_device(training: Training) -> Counter[str]:
    """Return the microseconds of each kernel of a step."""
    training.wait()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        training.step()
        training.wait()
    found: Counter[str] = Counter()
    for event in seen.events():
        if event.device_type == DeviceType.CUDA:
            found[event.name] += event.self_device_time_total
    return found


def places(training: Training) -> Iterator[str]:
    """Yield where the host is, of all threads: a backward has one of its own on a device."""
    stop, found, looks = threading.Event(), Counter[str](), 0

    def look() -> None:
        nonlocal looks
        while not stop.wait(0.001):
            looks += 1
            for thread, frame in sys._current_frames().items():
                if thread != threading.get_ident():
                    found.update(set(functions(frame)))

    watching = threading.Thread(target=look)
    watching.start()
    start = time.perf_counter()
    for _ in range(LOOKED_AT):
        training.step()
    training.wait()
    step = (time.perf_counter() - start) * 1e3 / LOOKED_AT
    stop.set()
    watching.join()
    yield f"a sampled step of {step:.1f} ms with {looks} looks at it, milliseconds in:"
    for name, count in found.most_common(PLACES):
        yield f"{step * count / max(looks, 1):8.2f}  {name}"


def functions(frame: FrameType) -> Iterator[str]:
    """Yield the functions of ours that a thread is in."""
    for code in (one.f_code for one in stack(frame)):
        if OURS in code.co_filename:
            yield f"{code.co_filename.rpartition(f'/{OURS}/')[2]}:{code.co_qualname}"
