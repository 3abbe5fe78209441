"""What ddpprobe adds to a training process beside time in the step: import, install(), memory."""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from torch import nn

import ddpprobe
from benchmarks import command_line, tables
from benchmarks.memory import anonymous, peak
from benchmarks.workloads import MLP, WORKLOADS, Workload

IMPORT_GOAL_MS = 50.0
INSTALL_GOALS = {1_000: 0.5, 100_000: 10.0}
MEMORY_SHARE, MEMORY_ROOM = 0.01, 32.0  # of the training footprint; MiB beside
_BASE = "import sys, time; import torch, numpy, psutil; start = time.perf_counter()"
_EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
_ADDED = {
    "nothing (the clock)": "",
    "`import ddpprobe`": "import ddpprobe",
    "`import ddpprobe; ddpprobe.install`": "import ddpprobe; ddpprobe.install",
}


def import_times(repetitions: int) -> dict[str, list[float]]:
    """Return ms added by each of `_ADDED`, in fresh processes that take turns.

    With compiled bytecode, as pip leaves it: in a directory of its own, filled by a first round
    that does not count (it does if there is no other: a smoke run).
    """
    found: dict[str, list[float]] = {name: [] for name in _ADDED}
    with tempfile.TemporaryDirectory() as cache:
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment = {**kept, "PYTHONPYCACHEPREFIX": cache}
        for number in range(repetitions + 1):
            for name, statement in _ADDED.items():
                code = f"{_BASE}\n{statement}\nprint((time.perf_counter() - start) * 1e3)"
                took = subprocess.check_output([sys.executable, "-c", code], env=environment)
                if number or not repetitions:
                    found[name].append(float(took))
    return found


class Many(nn.Module):
    """A tree of about so many modules, in blocks of ten: what a large model looks like."""

    def __init__(self, modules: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.Linear(1, 1) if i % 3 == 0 else nn.Identity() for i in range(9)),
            )
            for _ in range(max(1, (modules - 2) // 10))
        )


def install_times(modules: int, repetitions: int) -> list[float]:
    """Return seconds of `install()` with the daemon and all defaults, on the same model."""
    model, found = Many(modules), []
    for _ in range(repetitions):
        with tempfile.TemporaryDirectory() as directory:
            start = time.perf_counter()
            probe = ddpprobe.install(model, run_dir=Path(directory) / "run")
            found.append(time.perf_counter() - start)
            probe.close()
            end_daemon(Path(directory) / "run")
    return found


def end_daemon(run: Path) -> None:
    """Stop the run's daemon: nobody wants its store."""
    said = run / "daemon" / "node_0000.json"
    deadline = time.monotonic() + 30.0
    while not said.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    if said.exists():
        process = psutil.Process(json.loads(said.read_bytes())["pid"])
        process.terminate()
        process.wait(30.0)


def train(workload: Workload, steps: int, run: str | None, looks: Sequence[int]) -> list[float]:
    """Train; return this process's anonymous memory (MiB) after the steps in `looks`, and its peak.

    The peak is of the resident memory, shared pages included.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = workload.build()
    batch = workload.batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    probe = ddpprobe.install(model, run_dir=run, daemon="none") if run else None
    found = []
    for step in range(1, steps + 1):
        model(*batch)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in looks:
            gc.collect()
            found.append(anonymous())
    if probe is not None:
        probe.close()
    return [*found, peak()]


def child(name: str, steps: int, looks: Sequence[int], *, probed: bool) -> list[float]:
    """Do `train` in a fresh process, whose freed memory goes back to the system at once.

    Else what malloc happens to keep would be ten times what is looked for.
    """
    with tempfile.TemporaryDirectory() as directory:
        run = f"{directory}/run" if probed else None
        return list(command_line.ask_child("footprint", name, steps, run, list(looks), **_EXACT))


def memory_rows(*, quick: bool) -> list[Sequence[object]]:
    """Measure what is added to a GPT's training, and whether it grows with the steps."""
    name, steps, repetitions = ("tiny", 40, 1) if quick else ("gpt-ddp", 12, 2)
    off, on = [], []
    for _ in range(repetitions):
        off.append(child(name, steps, [steps], probed=False))
        on.append(child(name, steps, [steps], probed=True))
    training = statistics.median(before for before, _ in off) - idle_memory()
    goal = MEMORY_SHARE * training + MEMORY_ROOM
    rows: list[Sequence[object]] = []
    for place, what in enumerate(("anonymous memory after", "peak resident memory in")):
        added = [b[place] - a[place] for a, b in zip(off, on, strict=True)]
        title = f"{what} {steps} steps of {TITLES[name]}: added by ddpprobe, every=10"
        holds = tables.verdict(statistics.median(added), goal)
        rows.append((title, tables.spread(added, 1), f"<= {goal:.1f}", holds))
    total = 400 if quick else 10_000
    looks = [total * part // 5 for part in (1, 2, 3, 4, 5)]
    for probed in (False, True):
        seen = child("tiny", total, looks, probed=probed)
        where = "with ddpprobe" if probed else "without"
        span = f"after {looks[0]:,} ... {looks[-1]:,} steps"
        rows.append((
            f"that of {TITLES['tiny']}, {where}: {span}, less that of the first look",
            " ".join(f"{value - seen[0]:+.2f}" for value in seen[:-1]),
            "flat (< 1)" if probed else "",
            tables.verdict(seen[-2] - seen[0], 1.0) if probed else "",
        ))  # fmt: skip
    return rows


def idle_memory() -> float:
    """Return the memory (MiB) of a process that has only imported what a training imports."""
    code = (
        "import numpy, psutil, torch; from benchmarks.memory import anonymous; print(anonymous())"
    )
    return float(subprocess.check_output([sys.executable, "-c", code]))


TINY = Workload(
    "an MLP of 4 layers of 16", lambda: MLP(16),
    lambda: (torch.randn(8, 16), torch.randint(10, (8,))), "none", 1, (None, None),
)  # fmt: skip
TITLES = {"tiny": TINY.title, "gpt-ddp": "a GPT of 10.9 M parameters, batch 4 x 256, AdamW"}


def main(argv: Sequence[str] | None = None) -> str:
    arguments = command_line.parent("footprint", __doc__).parse_args(argv)
    if arguments.child:
        name, steps, run, looks = arguments.child
        found = json.dumps(train({**WORKLOADS, "tiny": TINY}[name], steps, run, looks))
        print(found)
        return found
    times = import_times(0 if arguments.quick else 4)
    last = list(_ADDED)[-1]
    imports = tables.table(
        ("after `import torch, numpy, psutil`", "ms, min / **median** / max", "goal", "holds"),
        [
            (
                name, tables.spread(took, 1), f"<= {IMPORT_GOAL_MS:.0f}" if name == last else "",
                tables.verdict(statistics.median(took), IMPORT_GOAL_MS) if name == last else "",
            )
            for name, took in times.items()
        ],
    )  # fmt: skip
    sizes = {1_000: 0.5} if arguments.quick else INSTALL_GOALS
    rows = []
    for size, goal in sizes.items():
        took = install_times(size, 1 if arguments.quick else 3)
        holds = tables.verdict(statistics.median(took), goal)
        rows.append((f"{size:,}", tables.spread(took), f"<= {goal:g}", holds))
    installs = tables.table(("modules", "s, min / **median** / max", "goal", "holds"), rows)
    memory = tables.table(
        ("memory", "MiB", "goal", "holds"),
        memory_rows(quick=arguments.quick),
    )
    text = (
        "Imports: fresh processes that take turns, bytecode compiled. `install()`: a model of "
        "blocks of ten modules, one process, defaults, the daemon's start included. Memory: pairs "
        "of fresh processes that train alike, one with ddpprobe, on one thread; the goal is 1 % of "
        "what the training holds beyond the imports, and 32 MiB."
    )
    parts = (imports, installs, memory)
    result = tables.section("What is added to the training process", "footprint", text, *parts)
    print(result)
    return result


if __name__ == "__main__":
    main()
