"""Part `bandwidth`: the kernel of a row beside a copy on the device, by size and dtype."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks import gpu
from tests.gpu.findings import SKIPPED
from tests.gpu.parts import Case, Context

SIZES = (1, 4, 16, 64, 256, 1024)  # MiB
PAIRS = 30
GOAL_AT = (torch.bfloat16, 64)


def cases() -> dict[str, Case]:
    dtypes = torch.bfloat16, torch.float32, torch.float64
    return {str(dtype).removeprefix("torch."): partial(shares, dtype) for dtype in dtypes}


def shares(dtype: torch.dtype, context: Context) -> None:
    """Measure `benchmarks.gpu`'s pairs: each a replay of the copies, then of the reductions."""
    if context.needs_cuda("a device with memory of its own"):
        return
    for size in SIZES:
        what = f"share of a copy's speed, {size} MiB"
        if context.seconds_left() < 20:
            context.findings.add(what, SKIPPED, "out of time")
            continue
        tensors = gpu.make("normal", dtype, size << 20)
        copied, reduced, host = gpu.measure(tensors, PAIRS)
        goal = gpu.GOAL if (dtype, size) == GOAL_AT else None
        ratios = [mine / limit for mine, limit in zip(reduced, copied, strict=True)]
        context.findings.figure(what, ratios, least=goal)
        context.findings.figure(f"read, {size} MiB", [x / 1e9 for x in reduced], "GB/s", digits=0)
        context.findings.figure(f"copy, {size} MiB", [x / 1e9 for x in copied], "GB/s", digits=0)
        context.findings.figure(f"host, a call, {size} MiB", [host * 1e6], "us", digits=1)
        del tensors
        torch.cuda.empty_cache()
