"""A hundred thousand steps: memory, file handles, threads and journal files stay as they are."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import torch

import ddpprobe
from benchmarks import command_line, tables
from benchmarks.memory import anonymous
from benchmarks.workloads import MLP
from ddpprobe.rundir.paths import RunDir, node_name

STEPS, QUICK_STEPS, EVERY, LOOKS = 100_000, 2_000, 10, 10
FLAT = {
    "memory of the training process (anonymous), MiB": 1.0,
    "its file handles": 0.0,
    "its threads": 0.0,
    "memory of the daemon (anonymous), MiB": 8.0,
    "its file handles ": 0.0,
    "its threads ": 0.0,
    "journal files of the rank": 1.0,
}
"""What is looked at, in this order, and how far the last look may be above the one at a fifth."""


def look(run: RunDir, daemon: psutil.Process) -> list[float]:
    """Return what `FLAT` names, now."""
    gc.collect()
    found = []
    for process in (psutil.Process(), daemon):
        found += [anonymous(process.pid), process.num_fds(), process.num_threads()]
    journal = run.rank_journal(0, node_name(0), 0)
    return [*found, len(list(journal.glob("*.wal")))]


def settled(run: RunDir) -> None:
    """Wait until the daemon has read what the rank wrote: a queue is no leak."""
    journal = run.rank_journal(0, node_name(0), 0)
    deadline = time.monotonic() + 60.0
    while len(list(journal.glob("*.wal"))) > 2 and time.monotonic() < deadline:
        time.sleep(0.1)


def soak(directory: Path, steps: int) -> list[list[float]]:
    """Train a model of three small layers under the eyes of a daemon; return what was seen."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, run = MLP(16), RunDir(directory / "run")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = torch.randn(8, 16), torch.randint(10, (8,))
    probe = ddpprobe.install(model, run_dir=run.path, every=EVERY)
    said, seen = run.daemon_file(node_name(0), "json"), list[list[float]]()
    while not said.exists():
        time.sleep(0.05)
    daemon = psutil.Process(json.loads(said.read_bytes())["pid"])
    for step in range(1, steps + 1):
        model(*batch)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % (steps // LOOKS) == 0:
            settled(run)
            seen.append([float(step), *look(run, daemon)])
    probe.close()
    daemon.terminate()
    daemon.wait(60.0)
    return seen


def main(argv: Sequence[str] | None = None) -> str:
    arguments = command_line.parent("soak", __doc__).parse_args(argv)
    if arguments.child:
        directory, steps = arguments.child
        text = json.dumps(soak(Path(directory), steps))
        print(text)
        return text
    steps = QUICK_STEPS if arguments.quick else STEPS
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        seen = command_line.ask_child("soak", directory, steps)
    took = time.monotonic() - start
    number, *columns = np.array(seen).T
    rows = []
    for (what, room), values in zip(FLAT.items(), columns, strict=True):
        late = values[1:]  # the first look is at a process that has just begun
        slope = np.polyfit(number[1:] / 10_000, late, 1)[0]
        shown = " ".join(f"{value:.1f}".removesuffix(".0") for value in values)
        holds = tables.verdict(late[-1] - late[0], room)
        rows.append((what.strip(), shown, f"{slope:+.3f}", f"<= {room:g}", holds))
    table = tables.table(
        (
            f"looked at every {steps // LOOKS:,} steps", "seen", "per 10,000 steps",
            "last less second", "holds",
        ),
        rows,
    )  # fmt: skip
    text = (
        f"{steps:,} steps of an MLP of 4 layers of 16, one rank, every={EVERY}, a real daemon that "
        f"merges, judges, stores and serves; {took:.0f} s. The rows are first of the training "
        "process, then of the daemon."
    )
    result = tables.section("Soak", "soak", text, table)
    print(result)
    return result


if __name__ == "__main__":
    main()
