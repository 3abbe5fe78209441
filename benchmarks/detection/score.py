"""What was said of a run, held against what was planted in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.detection.faults import Fault
from ddpprobe.records.step import Anomaly

Spoke = dict[str, list[int]]  # rival -> steps at which it says something

SAMPLES = 5  # that a verdict may take where they are far apart


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: which job, how it was sampled, and what was said.

    `found`: the right detector spoke in time; `by` which one, `late` how many steps after the
    fault; `rank` and `module` whether it named the right one, None where nobody asks. `pages` and
    `warns` are those of a healthy run, or before the fault.
    """

    job: str
    seed: int
    every: int
    found: bool | None
    by: str
    late: int | None
    rank: bool | None
    module: bool | None
    pages: tuple[str, ...]
    warns: tuple[str, ...]


def judge_healthy(job: str, seed: int, every: int, said: Sequence[Anomaly]) -> Outcome:
    """Return how often something was said of a run in which nothing is wrong."""
    pages, warns = (_told(said, level) for level in ("page", "warn"))
    return Outcome(job, seed, every, None, "", None, None, None, pages, warns)


def judge_fault(fault: Fault, seed: int, every: int, said: Sequence[Anomaly]) -> Outcome:
    """Return whether a fault was found, in time and by name.

    Args:
        fault: as any rank drew it.
        seed: it was drawn by.
        every: interval of sampled steps.
        said: anomalies of the run, in any order.
    """
    expected, start = fault.expected, fault.start - fault.early
    limit = fault.start + (expected.within if every == 1 else max(expected.within, SAMPLES * every))
    loud = sorted((a for a in said if a.level != "info"), key=lambda a: a.step)
    before = [a for a in loud if a.step < start]
    right = [a for a in loud if a.detector in expected.detectors and start <= a.step <= limit]
    job = type(fault).__name__
    pages, warns = (_told(before, level) for level in ("page", "warn"))
    rank = module = None
    if right and expected.rank:
        rank = any(a.rank == (fault.victim if fault.world > 1 else 0) for a in right)
    if right and expected.module:
        module = any(_is_in(a.module, fault.where) for a in right)
    by = right[0].detector if right else ""
    late = max(0, right[0].step - fault.start) if right else None
    return Outcome(job, seed, every, bool(right), by, late, rank, module, pages, warns)


def wilson(hits: int, of: int, z: float = 1.96) -> str:
    """Return a share with its 95 % interval, in percent."""
    if not of:
        return "-"
    p, n = hits / of, of
    middle, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = ((middle - spread) / (1 + z * z / n), (middle + spread) / (1 + z * z / n))
    return f"{hits}/{of} = {p:.0%} ({max(low, 0):.0%}-{min(high, 1):.0%})"


def _told(said: Sequence[Anomaly], level: str) -> tuple[str, ...]:
    return tuple(f"{a.detector}@{a.step}" for a in said if a.level == level)


def _is_in(module: str | None, where: str) -> bool:
    """Whether a module is one of those of the fault ("a|b"), in it or around it but the root."""
    if not module:
        return False
    inside = ((f"{module}.", f"{one}.") for one in where.split("|"))
    return any(m.startswith(w) or w.startswith(m) for m, w in inside)
