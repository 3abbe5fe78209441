"""What `ddpprobe run` costs a process of the job that trains nothing: at its start, in pairs."""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence

from benchmarks import command_line, tables
from ddpprobe.cli.commands.run import SHIM
from ddpprobe.rundir.paths import RUN_OPTIONS_VARIABLE

GOAL_MS = 1.0
# The second looks for dozens of modules, and the job's finder is asked for each.
PROCESSES = {
    "`python -c pass`": "pass",
    "`python -c 'import argparse, json, logging, subprocess'`": (
        "import argparse, json, logging, subprocess"
    ),
}


def seconds(code: str, environment: Mapping[str, str]) -> tuple[float, float]:
    """Run a process; return its CPU seconds, and those from its start to its end."""
    begun = time.perf_counter()
    command = [sys.executable, "-c", code]
    pid = os.posix_spawn(sys.executable, command, environment)
    _, status, usage = os.wait4(pid, 0)
    assert status == 0
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - begun


def pairs(code: str, count: int) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Return what a process takes without and with `ddpprobe run`, neighbours in time."""
    bare = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", RUN_OPTIONS_VARIABLE}}
    job = {**bare, "PYTHONPATH": str(SHIM), RUN_OPTIONS_VARIABLE: "{}"}
    found = []
    for _ in range(count):
        first_bare = random.random() < 0.5
        order = (bare, job) if first_bare else (job, bare)
        one, other = (seconds(code, each) for each in order)
        found.append((one, other) if first_bare else (other, one))
    return found


def main(argv: Sequence[str] | None = None) -> str:
    arguments = command_line.parser("unmodified", __doc__).parse_args(argv)
    count = 5 if arguments.quick else 300
    rows = []
    for name, code in PROCESSES.items():
        measured = pairs(code, count)
        for what, at in (("CPU", 0), ("elapsed", 1)):
            more = [1000 * (job[at] - bare[at]) for bare, job in measured]
            ratios = [job[at] / bare[at] for bare, job in measured]
            low, mid, high = statistics.quantiles(more, n=4)
            ratio = statistics.quantiles(ratios, n=4)
            base = 1000 * statistics.median(bare[at] for bare, _ in measured)
            row = (
                f"{name}, {what}", f"{base:.1f}", f"{low:.2f} / **{mid:.2f}** / {high:.2f}",
                f"{ratio[0]:.3f} / **{ratio[1]:.3f}** / {ratio[2]:.3f}",
            )  # fmt: skip
            goal = (
                (f"< {GOAL_MS:g} ms", tables.verdict(mid, GOAL_MS)) if what == "CPU" else ("", "")
            )
            rows.append((*row, *goal))
    header = ("process", "without, ms", "added, ms", "ratio", "goal", "holds")
    text = (
        f"{count} pairs of processes each, without and with `ddpprobe run`, in random order. Added "
        "and ratio are those of a pair: quartile / **median** / quartile. The goal is for CPU "
        "time: what else the machine does is in the elapsed time, and is more than what is added."
    )
    told = tables.section(
        "A process that trains nothing, under `ddpprobe run`", "unmodified", text,
        tables.table(header, rows),
    )  # fmt: skip
    print(told)
    return told


if __name__ == "__main__":
    main()
