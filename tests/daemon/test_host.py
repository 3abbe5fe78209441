"""Readings of the ranks' processes: what is not known is left out."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

from ddpprobe.daemon.host import read_ranks

from ..distributed.daemon_harness import wait


def test_a_process_that_has_ended_and_was_not_waited_for_has_no_reading() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as ended:
        wait(lambda: psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE)
        found = read_ranks({0: os.getpid(), 1: ended.pid})
    assert found[0]["resident_bytes"] > 0
    assert list(found) == [0]
