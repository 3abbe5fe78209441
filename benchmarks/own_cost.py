"""What ddpprobe says of its own cost, against the CPU time that a training takes with it.

One process on one thread. The probe is installed for a block of steps and closed after it, block
by block, in alternating order, and a difference is that of two neighbours, so that whatever drifts
on the machine hits both. All of it takes 15 minutes.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import ddpprobe
from benchmarks import command_line, tables

_LAYERS = 8
_WITHIN = 0.15
_NEVER = 1 << 40
_TEXT = """
Eight `Linear` layers and SGD in one process on one thread, without a daemon; the CPU time is the
process's, with its disk thread. Measured is what a step with ddpprobe takes more than one without
in the neighbouring block: first quartile / **median** / third over the pairs. "No difference" is
that of two blocks without it, the same way. Told is what ddpprobe says at the end of the block:
`ddpprobe_overhead_ratio`, and `probe_seconds` as a part of the block's seconds. Both go by the
host's clock, which on a machine that others use goes on while they do; so that part of the block's
CPU time is compared. Told by measured is that of the ratio, or, where it cannot be known (no step
is sampled, or all are), that of `probe_seconds`. It holds within 15 %, or where told and measured
are no further apart than the quartiles of no difference. Where all steps are sampled it is a floor.

`probe_seconds` is what passed in ddpprobe, and what torch takes to call it. What it does not have
is that the code after it finds the processor's caches full; the ratio has it.
"""
_BUDGET_TEXT = """
`budget=0.01` from `every=10` on, measured when the interval has settled. What an unsampled step
takes by itself is a floor that no interval can change: where it is above the budget, one warning
says so.
"""
_HEADER = (
    "step, ms", "sampled", "measured, us", "no difference, us", "share measured",
    "share by `probe_seconds`", "ratio told", "told / measured", "goal", "holds",
)  # fmt: skip
_BUDGET_HEADER = (
    "step, ms",
    "interval",
    "ratio measured",
    "no difference",
    "ratio told",
    "kept",
    "said",
)


@dataclass(frozen=True, slots=True)
class Size:
    """A step of about `milliseconds`, and how many of them make a block.

    Attributes:
        width, batch: of the layers and of their input.
        block, pairs: steps of a block, and pairs of blocks.
    """

    milliseconds: float
    width: int
    batch: int
    block: int
    pairs: int


SIZES = (
    Size(0.5, 16, 8, 400, 20),
    Size(5, 256, 80, 100, 12),
    Size(50, 512, 200, 40, 8),
    Size(500, 1024, 500, 20, 4),
)
MODES = {"every 10th": 10, "none": _NEVER, "all": 1}


class Training:
    """A training of one size, whose steps all do the same work on the same numbers."""

    def __init__(self, size: Size, scratch: Path) -> None:
        torch.manual_seed(0)
        self.size = size
        self._model = nn.Sequential(*[nn.Linear(size.width, size.width) for _ in range(_LAYERS)])
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.0)
        self._inputs = torch.randn(size.batch, size.width)
        self._scratch, self._runs = scratch, 0

    def take(self, steps: int) -> tuple[float, float]:
        """Take some steps; return the seconds of one: of this process's CPU, and of the clock."""
        begun, wall = time.process_time(), time.perf_counter()
        for _ in range(steps):
            self._optimizer.zero_grad()
            self._model(self._inputs).square().mean().backward()
            self._optimizer.step()
        cpu, wall = time.process_time() - begun, time.perf_counter() - wall
        return cpu / steps, wall / steps

    def probed(self, steps: int, warm: int, every: int, budget: float | None) -> Probed:
        """Take some steps under the probe, after `warm` others."""
        self._runs += 1
        run = self._scratch / f"run{self.size.width}-{self._runs}"
        with ddpprobe.install(
            self._model, run_dir=run, every=every, budget=budget, daemon="none"
        ) as probe:
            recorder = probe._recorder  # noqa: SLF001  (an experiment on the inside)
            self.take(warm)
            before = recorder._clock.probe_seconds  # noqa: SLF001
            cpu, wall = self.take(steps)
            own = (recorder._clock.probe_seconds - before) / steps  # noqa: SLF001
            beat = recorder._heartbeat  # noqa: SLF001
            return Probed(cpu, cpu * own / wall, beat.overhead_ratio, beat.every)


@dataclass(frozen=True, slots=True)
class Probed:
    """CPU seconds of a step; those that `probe_seconds` tells; the ratio told; the interval."""

    cpu: float
    own: float
    ratio: float
    every: int


@dataclass(frozen=True, slots=True)
class Found:
    """Pairs of blocks: CPU seconds of a step without, and what was found with."""

    without: list[float]
    probed: list[Probed]

    @property
    def added(self) -> list[float]:
        """CPU seconds that a step with takes more than its neighbour without."""
        return [p.cpu - bare for p, bare in zip(self.probed, self.without, strict=True)]

    @property
    def nothing(self) -> list[float]:
        """The same of two neighbours without."""
        return [b - a for a, b in zip(self.without, self.without[1:], strict=False)]


def measure(
    training: Training, every: int, pairs: int, *,
    warm: int, steps: int, budget: float | None = None,
) -> Found:  # fmt: skip
    """Alternate blocks without the probe and with it."""
    found = Found([], [])
    for pair in range(-1, pairs):
        for probed in (True, False) if pair % 2 else (False, True):
            if probed:
                told = training.probed(steps, warm, every, budget)
            else:
                training.take(min(warm, 10))
                bare, _ = training.take(steps)
        if pair >= 0:
            found.without.append(bare)
            found.probed.append(told)
    return found


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, mid, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, mid, high


def _spread(values: Sequence[float], unit: float, digits: int) -> str:
    low, mid, high = (unit * value for value in _quartiles(values))
    return f"{low:.{digits}f} / **{mid:.{digits}f}** / {high:.{digits}f}"


def _row(mode: str, found: Found) -> list[str]:
    bare = statistics.median(found.without)
    added = statistics.median(found.added)
    low, _, high = _quartiles(found.nothing)
    own = statistics.median(p.own for p in found.probed)
    ratio = statistics.median(p.ratio for p in found.probed)
    known = mode == "every 10th"
    told = bare * ratio if known else own
    apart = told - added if mode == "all" else abs(told - added)
    holds = apart <= max(_WITHIN * abs(added), (high - low) / 2)
    return [
        f"{1e3 * bare:.3g}", mode, _spread(found.added, 1e6, 0), _spread(found.nothing, 1e6, 0),
        f"{added / bare:.4f}", f"{own / bare:.4f}", f"{ratio:.4f}" if known else "",
        f"{told / added:.2f}", "at most 1.15" if mode == "all" else "0.85 to 1.15",
        "yes" if holds else "no",
    ]  # fmt: skip


def _budget_row(training: Training, *, warm: int, steps: int, pairs: int) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ddpprobe")
    logger.addHandler(handler)
    try:
        found = measure(training, 10, pairs, warm=warm, steps=steps, budget=0.01)
    finally:
        logger.removeHandler(handler)
    bare = statistics.median(found.without)
    share = statistics.median(found.added) / bare
    low, _, high = _quartiles(found.nothing)
    warned = sum("cannot be kept" in line for line in said)
    return [
        f"{1e3 * bare:.3g}", ", ".join(str(p.every) for p in found.probed),
        _spread([added / bare for added in found.added], 1, 4),
        _spread([one / bare for one in found.nothing], 1, 4),
        f"{statistics.median(p.ratio for p in found.probed):.4f}",
        "yes" if share <= 0.01 + (high - low) / 2 / bare else "no",
        f"`cannot be kept`, in {warned} of {pairs + 1} runs" if warned else "nothing",
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> str:
    parser = command_line.parser("own_cost", __doc__)
    arguments = parser.parse_args(argv)
    sizes, modes = (SIZES[:1], ("none",)) if arguments.quick else (SIZES, tuple(MODES))
    torch.set_num_threads(1)
    rows, kept = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for size in sizes:
            training = Training(size, Path(scratch))
            for mode in modes:
                steps, pairs = (20, 3) if arguments.quick else (size.block, size.pairs)
                steps = steps if MODES[mode] == 10 else max(steps // 2, 5)
                # The ratio is known after the second sampled step that is no step's first.
                warm = 21 if MODES[mode] == 10 else 3
                found = measure(training, MODES[mode], pairs, warm=warm, steps=steps)
                rows.append(_row(mode, found))
                print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
            if size.milliseconds <= 50 and not arguments.quick:
                long = 16 * size.block if size.milliseconds < 5 else 4 * size.block
                pairs = max(size.pairs // 3, 3)
                kept.append(_budget_row(training, warm=long, steps=long, pairs=pairs))
                print(" | ".join(kept[-1]), file=sys.stderr, flush=True)
    parts = [_TEXT, tables.table(_HEADER, rows)]
    if kept:
        parts += [_BUDGET_TEXT, tables.table(_BUDGET_HEADER, kept)]
    result = tables.section("What ddpprobe says of its own cost", "own_cost", *parts)
    print(result)
    return result


if __name__ == "__main__":
    main()
