"""The statistics of a tensor on a GPU, against the speed at which that GPU copies memory."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks import command_line, tables
from ddpprobe.rank.stats import rows
from ddpprobe.rank.stats.device import reduce_by_operators

GOAL = 0.85
_TITLE = "The statistics kernel on a GPU"
_APART = 1 << 29  # bytes that are gone over before a tensor comes again: no cache holds them
_TEXT = """
GB/s of `rows.reduce_far_into` (every statistic of a row) and of `y.copy_(x)` (what it reads and
writes, both counted), on tensors of which {apart} MiB go by before one comes again. Both are
replayed from CUDA graphs, timed by events, in turns; a share is of two neighbours.
`set_sync_debug_mode("error")` was on. *Host* is what one call takes there, which a graph does not
show; *operators* is the same row by torch's own operators, which serve where Triton is missing.
"""


def make(kind: str, dtype: torch.dtype, size: int) -> list[Tensor]:
    """Return tensors of `size` bytes on the GPU, together at least `_APART`."""
    made = []
    for _ in range(max(2, _APART // size)):
        tensor = torch.randn(size // dtype.itemsize, device="cuda").to(dtype)
        if kind == "1 % NaN":
            tensor[::100] = torch.nan
        made.append(tensor)
    return made


def graph_of(work: Callable[[int], object], count: int) -> torch.cuda.CUDAGraph:
    """Capture work(0) ... work(count - 1)."""
    work(0)  # compiles, and takes what memory it needs
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(count):
            work(number)
    return graph


def seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Return the time of one replay."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    graph.replay()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def measure(tensors: list[Tensor], pairs: int) -> tuple[list[float], list[float], float]:
    """Return bytes/s of the copy and of the reduction, pair by pair, and host seconds of a call."""
    count, size = len(tensors), tensors[0].nbytes
    target = torch.empty_like(tensors[0])
    out = torch.empty((1, rows.WIDTH), dtype=torch.float64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):  # the first compiles
            start = time.perf_counter()
            for tensor in tensors:
                rows.reduce_far_into(tensor, out, 0)
            host = (time.perf_counter() - start) / count
    finally:
        torch.cuda.set_sync_debug_mode("default")
    copies = graph_of(lambda number: target.copy_(tensors[number]), count)
    reductions = graph_of(lambda number: rows.reduce_far_into(tensors[number], out, 0), count)
    copied, reduced = [], []
    for pair in range(pairs + 1):
        times = seconds(copies), seconds(reductions)
        if pair:  # the first warms up
            copied.append(2 * size * count / times[0])
            reduced.append(size * count / times[1])
    return copied, reduced, host


def by_operators(tensors: list[Tensor]) -> float:
    """Return bytes/s of the reduction by torch's operators."""
    out = torch.empty(rows.WIDTH, dtype=torch.float64, device="cuda")
    graph = graph_of(lambda number: reduce_by_operators(tensors[number], 1, out), len(tensors))
    size = tensors[0].nbytes * len(tensors)
    return statistics.median(size / seconds(graph) for _ in range(5))


def main(argv: Sequence[str] | None = None) -> str:
    quick = command_line.parser("gpu", __doc__).parse_args(argv).quick
    if not torch.cuda.is_available():
        text = tables.section(_TITLE, "gpu", "no GPU here: not measured")
        print(text)
        return text
    lines = []
    for megabytes, dtype, kind in (
        (64, torch.bfloat16, "normal"),
        (64, torch.bfloat16, "1 % NaN"),
        (64, torch.float32, "normal"),
        (4, torch.bfloat16, "normal"),
    ):
        tensors = make(kind, dtype, megabytes << 20)
        operators = by_operators(tensors)
        name = f"{megabytes} MiB {str(dtype).removeprefix('torch.')}, {kind}"
        for _ in range(1 if quick else 2):
            copied, reduced, host = measure(tensors, 3 if quick else 50)
            shares = [mine / limit for mine, limit in zip(reduced, copied, strict=True)]
            wanted = not lines or lines[0][0] == name
            lines.append(
                [
                    name, tables.spread(shares), f"{statistics.median(reduced) / 1e9:.0f}",
                    f"{statistics.median(copied) / 1e9:.0f}", f"{operators / 1e9:.0f}",
                    f"{host * 1e6:.0f}", f">= {GOAL}" if wanted else "",
                    tables.verdict(GOAL, statistics.median(shares)) if wanted else "",
                ]
            )  # fmt: skip
    header = (
        "tensor", "share of the copy's speed", "GB/s", "copy", "operators", "host, us", "goal",
        "holds",
    )  # fmt: skip
    text = tables.section(
        _TITLE, "gpu", _TEXT.format(apart=_APART >> 20), tables.table(header, lines)
    )
    print(text)
    return text


if __name__ == "__main__":
    main(sys.argv[1:])
