"""Readings of the node and of the ranks' processes: what is not known is left out."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import psutil
import pytest

from ddpprobe.daemon import host
from ddpprobe.daemon.attempt import Attempt
from ddpprobe.daemon.host import read_ranks
from ddpprobe.daemon.node import DaemonOptions, NodeDaemon
from ddpprobe.records.node_view import NodeView
from ddpprobe.rundir import paths

from ..distributed.daemon_harness import wait
from ..made_runs import NODE, Made


def test_a_process_that_has_ended_and_was_not_waited_for_has_no_reading() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as ended:
        wait(lambda: psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE)
        found = read_ranks({0: os.getpid(), 1: ended.pid})
    assert found[0]["resident_bytes"] > 0
    assert list(found) == [0]


def test_the_disk_is_looked_at_while_a_daemon_lingers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that a full disk has refused wait for room, which somebody makes after the end."""
    run = Made(tmp_path / "run", ranks=1).whole(6).close()
    paths.make_dir(run.daemon_file(NODE, "lock").parent)
    daemon = NodeDaemon(DaemonOptions(run, NODE, "127.0.0.1:0", linger=1e6, wait=1e6))
    daemon._seen_alive = True  # there is somebody to linger for
    free = itertools.count(1000.0)
    shown: list[float] = []

    def read(*_: object) -> dict[str, float]:
        return {"disk_free_bytes": next(free)}

    def look(
        real: Callable[..., NodeView], attempt: Attempt, dropped: Mapping[str, int]
    ) -> NodeView:
        view = real(attempt, dropped)
        if view.finished and view.host["disk_free_bytes"] not in shown:
            shown.append(view.host["disk_free_bytes"])
            if len(shown) == 3:
                daemon.stop()
        return view

    monkeypatch.setattr(host, "read_host", read)
    monkeypatch.setattr(host, "INTERVAL_SECONDS", 0.01)
    daemon._view = partial(look, daemon._view)  # type: ignore[method-assign]
    daemon.serve()
    assert shown == sorted(set(shown))
    assert len(shown) == 3
