"""What a slow disk does to a step: every write into the run directory takes 20 ms, and none.

One process, one thread, a step of about 0.75 ms; the two settings take turns, block by block, with
one probe. Calls of the `os` module that write below the run directory are delayed, on whichever
thread they are made.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

import ddpprobe
from benchmarks import command_line, tables

SECONDS = 0.02  # of a write
WRITES = ("open", "pwrite", "write", "writev", "ftruncate", "fsync", "replace", "rename", "unlink")
STEPS = 60  # of a block
GOAL = 1.1
_TEXT = """
Medians over the steps of each block, minimum / **median** / maximum over pairs of blocks. Every
tenth step is sampled.
"""


class SlowDisk:
    """Within a `with`: delays what is written below a directory, while `slow`."""

    def __init__(self, root: Path) -> None:
        self.slow = False
        self._root = str(root)
        self._calls = {name: getattr(os, name) for name in WRITES}

    def __enter__(self) -> Self:
        for name, call in self._calls.items():
            setattr(os, name, self._delayed(call))
        return self

    def __exit__(self, *_: object) -> None:
        for name, call in self._calls.items():
            setattr(os, name, call)

    def _delayed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def delayed(*args: Any, **kwargs: Any) -> Any:
            if self.slow:
                where = args[0]
                if isinstance(where, int):
                    where = str(Path(f"/proc/self/fd/{where}").readlink())
                if str(where).startswith(self._root):
                    time.sleep(SECONDS)
            return call(*args, **kwargs)

        return delayed


def measure(pairs: int) -> dict[str, list[float]]:
    """Return the median seconds of a step, `fast` and `slow`, one of each for a pair of blocks."""
    layers = [module for _ in range(6) for module in (nn.Linear(64, 64), nn.ReLU())]
    model, batch = nn.Sequential(*layers), torch.randn(32, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    found: dict[str, list[float]] = {"fast": [], "slow": []}
    with tempfile.TemporaryDirectory() as scratch, SlowDisk(Path(scratch)) as disk:
        probe = ddpprobe.install(model, run_dir=Path(scratch) / "run", every=10, daemon="none")
        for pair in range(pairs + 1):
            for kind in ("fast", "slow") if pair % 2 else ("slow", "fast"):
                disk.slow = kind == "slow"
                times = []
                for _ in range(STEPS):
                    started = time.perf_counter()
                    model(batch).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    times.append(time.perf_counter() - started)
                if pair:  # the first one warms up
                    found[kind].append(statistics.median(times))
        disk.slow = False
        probe.close()
    return found


def main(argv: Sequence[str] | None = None) -> str:
    parser = command_line.parser("slow_disk", __doc__)
    parser.add_argument("--pairs", type=int, default=20, help="pairs of blocks")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = measure(2 if arguments.quick else arguments.pairs)
    ratios = [slow / fast for slow, fast in zip(found["slow"], found["fast"], strict=True)]
    rows = [
        [
            "a small MLP, each write 20 ms", f"{1e3 * statistics.median(found['fast']):.3g}",
            f"{1e3 * statistics.median(found['slow']):.3g}", tables.spread(ratios), f"<= {GOAL}",
            tables.verdict(statistics.median(ratios), GOAL),
        ]
    ]  # fmt: skip
    header = ("what", "step, ms", "with slow writes, ms", "slow / fast", "goal", "holds")
    result = tables.section("A slow disk", "slow_disk", _TEXT, tables.table(header, rows))
    print(result)
    return result


if __name__ == "__main__":
    main()
