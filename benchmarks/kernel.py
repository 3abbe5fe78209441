"""The statistics kernels of the CPU beside `y.copy_(x)` of the same tensor, on one core."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import command_line, tables
from ddpprobe.rank.stats import histogram, native, rows

BINS = 64
MIB = 1 << 20
ROW, FULL = "row", f"row + {BINS}-bin histogram"
# Speed beside the copy that is asked for, by (engine, dtype, what is computed).
GOALS = {
    ("compiled", torch.float32, ROW): 1.0,
    ("compiled", torch.bfloat16, FULL): 0.3,
    ("NumPy", torch.float32, ROW): 0.3,
    ("NumPy", torch.bfloat16, FULL): 0.1,
}
TEXT = """\
Single thread. Each call is paired with a `y.copy_(x)` of the same tensor right before it; speed is
bytes of input by time, ratio is the copy's time by ours (minimum / **median** / maximum over the
pairs, two repetitions); a goal holds if both medians reach it. "compiled" is
`rank/stats/native.cpp`, "NumPy" what runs where no C++ compiler is.

{limit}"""
LIMIT = """\
At 4 MiB both tensors lie in the third-level cache and the copy runs several times as fast as from
memory. What counts single numbers cannot follow: one addition to one counter per element, which a
core does about once a cycle. Here the kernel counts
{rate:.1f} elements a nanosecond ({speed:.1f} GB/s of bfloat16), {share:.2f} of that copy; 0.3 of it
would be {wanted:.1f} elements a nanosecond. NumPy needs five passes for a row (minimum, maximum,
zeros, sum, squares), each at most as fast as the second-level cache."""


@dataclass(frozen=True)
class Pairs:
    """Seconds of paired calls: of the copy, and of ours right after it."""

    copies: list[float]
    ours: list[float]

    @property
    def ratios(self) -> list[float]:
        return [c / o for c, o in zip(self.copies, self.ours, strict=True)]


def main(argv: list[str]) -> str:
    quick = command_line.parser("kernel", __doc__).parse_args(argv).quick
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        body, limit = bandwidth(quick=quick)
        parts = [body, fixed_costs(quick=quick)]
    finally:
        torch.set_num_threads(threads)
    text = TEXT.format(limit=limit)
    section = tables.section("Statistics kernel on one core", "kernel", text, *parts)
    print(section)
    return section


def engines() -> Iterator[str]:
    """Yield the ways to reduce a tensor on the CPU, each while it is in use."""
    if native.prepare():
        yield "compiled"
    kept = [(kernels, dict(kernels)) for kernels in (native.row_kernels, native.wide_kernels)]
    for kernels, _ in kept:
        kernels.clear()
    with contextlib.ExitStack() as stack:
        for kernels, content in kept:
            stack.callback(kernels.update, content)
        yield "NumPy"


def bandwidth(*, quick: bool) -> tuple[str, str]:
    lines, limit = [], ""
    for engine in engines():
        for dtype in (torch.float32, torch.bfloat16):
            for mib in (4,) if quick else (4, 64):
                x = torch.randn(mib * MIB // dtype.itemsize).to(dtype)
                out = torch.empty(rows.WIDTH, dtype=torch.float64)
                calls: dict[str, Callable[[], object]] = {
                    ROW: lambda x=x, out=out: rows.reduce(x, out),
                    FULL: lambda x=x: histogram.measure(x, BINS, None, 1e-8),
                }
                for what, call in calls.items():
                    budget = 0.02 if quick else 1.0
                    twice = [pairs(x, call, budget) for _ in range(2)]
                    goal = GOALS.get((engine, dtype, what))
                    lines.append([engine, *describe(dtype, mib, what, twice, goal)])
                    if (engine, dtype, mib, what) == ("compiled", torch.bfloat16, 4, FULL):
                        limit = explain(x.numel(), twice)
    head = ["engine", "dtype", "MiB", "computed", "copy GB/s", "ours GB/s", "ratio", "again"]
    return tables.table([*head, "goal", "holds"], lines), limit


def pairs(x: Tensor, call: Callable[[], object], budget: float) -> Pairs:
    """Time `call` beside a copy of `x` until `budget` seconds are spent, three times at least."""
    y = torch.zeros_like(x)
    y.copy_(x)
    call()
    copies, ours = [], []
    end = time.perf_counter() + budget
    while len(ours) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        y.copy_(x)
        between = time.perf_counter()
        call()
        copies.append(between - start)
        ours.append(time.perf_counter() - between)
    return Pairs(copies, ours)


def describe(
    dtype: torch.dtype, mib: int, what: str, twice: list[Pairs], goal: float | None
) -> list[object]:
    copy, ours = (
        mib * MIB / statistics.median([t for pair in twice for t in getattr(pair, times)]) / 1e9
        for times in ("copies", "ours")
    )
    ratios = [pair.ratios for pair in twice]
    worst = min(statistics.median(r) for r in ratios)
    return [
        str(dtype).removeprefix("torch."), mib, what, f"{copy:.1f}", f"{ours:.1f}",
        *(tables.spread(r, 2) for r in ratios),
        "" if goal is None else f">= {goal}",
        "" if goal is None else tables.verdict(goal, worst),
    ]  # fmt: skip


def explain(numel: int, twice: list[Pairs]) -> str:
    """Say what counting costs, from the pairs of the compiled histogram of `numel` bfloat16."""
    ours = statistics.median([t for pair in twice for t in pair.ours])
    copy = statistics.median([t for pair in twice for t in pair.copies])
    rate = numel / ours / 1e9
    return LIMIT.format(
        rate=rate, speed=2 * rate, share=copy / ours, wanted=0.3 * numel / copy / 1e9
    )


def fixed_costs(*, quick: bool) -> str:
    """Return what one call costs when there is hardly anything to read."""
    buffer = torch.empty(8, rows.WIDTH, dtype=torch.float64)
    repeats, number = (2, 100) if quick else (9, 5000)
    lines = []
    for engine in engines():
        goal = {"compiled": 5.0, "NumPy": 15.0}[engine]
        for dtype in (torch.float32, torch.bfloat16):
            for numel in (64, 4096):
                x = torch.randn(numel).to(dtype)
                spent = []
                for _ in range(repeats):
                    start = time.perf_counter()
                    for _ in range(number):
                        rows.reduce_into(x, buffer, 3)
                    spent.append((time.perf_counter() - start) / number * 1e6)
                name = str(dtype).removeprefix("torch.")
                holds = tables.verdict(statistics.median(spent), goal)
                lines.append([engine, name, numel, tables.spread(spent, 2), f"<= {goal:g}", holds])
    head = ["engine", "dtype", "elements", "microseconds a call", "goal", "holds"]
    return tables.table(head, lines)


if __name__ == "__main__":
    main(sys.argv[1:])
