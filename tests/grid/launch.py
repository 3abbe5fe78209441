"""Starts the worker on as many ranks as cells need, and again after a cell that broke it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.grid.axes import Cell
from tests.launcher import Launcher

WORKER = Path(__file__).with_name("worker.py")
PATIENCE = 240.0  # seconds for one cell: many times what the slowest takes

Results = dict[str, dict[str, Any]]


def run_cells(
    cells: Iterable[Cell], directory: Path, said: Callable[[str], object] = lambda _: None, *,
    far: bool = False,
) -> Results:  # fmt: skip
    """Run all cells, one launch per world size; the outcome of each, by its name.

    `far`: as where the host cannot look into tensors.
    """
    results: Results = {}
    by_world: dict[int, list[str]] = {}
    for cell in cells:
        by_world.setdefault(cell.ranks, []).append(cell.name)
    for world, asked in sorted(by_world.items()):
        names = asked
        while names:
            found = _launch(world, names, directory, said, far=far)
            if names[0] not in found:
                text = (directory / "log").read_text()[-3000:]
                found[names[0]] = {"cell": names[0], "result": "failed", "problems": [text]}
            results |= found
            names = [name for name in names if name not in found]
    return results


def _launch(
    world: int, names: list[str], directory: Path, said: Callable[[str], object], *, far: bool
) -> Results:
    lines, wanted = directory / "results.jsonl", directory / "cells"
    lines.write_text("")
    wanted.write_text("\n".join(names))
    options = ["--nproc-per-node", world]
    env = {**os.environ, "GRID_SCRATCH": str(directory), "DDPPROBE_STRICT": "1",
           "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1",
           "GRID_FAR": "1" if far else ""}  # fmt: skip
    log = directory / "log"
    where = {"cwd": Path.cwd(), "env": env, "out": log, "err": log}
    process = Launcher(options, [WORKER, lines, wanted], **where, fresh=False)
    try:
        _follow(process, lines, said)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)  # torchrun ends its ranks
            process.wait(60)
    found: Results = {}
    for line in lines.read_text().splitlines():
        outcome = json.loads(line)
        found.setdefault(outcome["cell"], outcome)  # of the ranks that failed, the first
    return found


def _follow(process: Launcher, lines: Path, said: Callable[[str], object]) -> None:
    seen, quiet = 0, time.monotonic()
    while process.poll() is None and time.monotonic() - quiet < PATIENCE:
        text = lines.read_text().splitlines()
        for line in text[seen:]:
            said(line)
            quiet = time.monotonic()
        seen = len(text)
        time.sleep(0.1)
    for line in lines.read_text().splitlines()[seen:]:
        said(line)
