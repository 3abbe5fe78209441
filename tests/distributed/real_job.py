"""Real jobs under torchrun with daemons of their own, and how a test asks them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import tempfile
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpprobe.rundir.orders import OrderReader
from ddpprobe.rundir.paths import RunDir

from ..launcher import Launcher
from ..nursery import nursery
from ..waiting import PATIENCE


def ddpprobe_says(*words: str | Path) -> tuple[int, str]:
    """Run the command; return its exit code and what it printed. A traceback fails the test.

    It is a process of its own, forked: what is about its start is tested in `cli/`.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        command = ["-m", "ddpprobe", *map(str, words)]
        code = nursery().start(command, os.environ, out.fileno(), err.fileno()).wait()
        for file in (out, err):
            file.seek(0)
        assert "Traceback" not in (said := err.read()), said
        return code, out.read()


def start(
    script: Sequence[object], folder: Path, nproc: int, env: Mapping[str, str], *more: str,
    fresh: bool, forks_daemons: bool = True,
) -> Launcher:  # fmt: skip
    """Start a job under torchrun, its output in `folder`/torchrun.out."""
    folder.mkdir(exist_ok=True)
    log = folder / "torchrun.out"
    where = {"cwd": folder, "env": {**os.environ, **env}, "out": log, "err": log}
    options = [*more, "--nproc-per-node", nproc]
    return Launcher(options, script, **where, fresh=fresh, forks_daemons=forks_daemons)


def said(run: Path) -> dict[str, Any]:
    """Return what the daemon of a run says of itself, {} before it does."""
    with contextlib.suppress(FileNotFoundError):
        return dict(json.loads((run / "daemon/node_0000.json").read_bytes()))
    return {}


def scrape(listen: str) -> str:
    """Return /metrics in OpenMetrics; "" as long as the daemon has nothing to show."""
    header = {"Accept": "application/openmetrics-text;version=1.0.0"}
    request = urllib.request.Request(f"http://{listen}/metrics", headers=header)
    try:
        with urllib.request.urlopen(request, timeout=10 * PATIENCE) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        error.close()
        return ""


def assert_sampled(run: Path, got: list[int], interval: Collection[int]) -> None:
    """The steps of the interval, each once, and none but those that the black box asked for.

    How late its order reaches the ranks of a short job, and whether at all, is the machine's.
    """
    with contextlib.closing(OrderReader(RunDir(run).orders(0, "node_0000"))) as board:
        ordered = {
            step for order in iter(board.look, None) for step in range(order.start, order.stop)
        }
    assert got == sorted(set(got))
    assert set(interval) <= set(got) <= {*interval} | ordered


def free_port() -> int:
    """Return a port that is free now, below the ones that systems hand out by themselves."""
    for candidate in random.SystemRandom().sample(range(20000, 30000), 50):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", candidate))
            except OSError:
                continue
            return candidate
    pytest.fail("no free port")
