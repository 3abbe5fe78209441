"""Whatever breaks in ddpprobe, training ends as it would alone: same exit, same bits, same time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import ddpprobe
from ddpprobe.reader.verify.verify import verify
from ddpprobe.rundir.journal import BACK_OFF_SECONDS
from ddpprobe.rundir.paths import RunDir, node_name
from ddpprobe.rundir.spool import settle_all

from ..timed import untimed

SABOTAGE = Path(__file__).with_name("sabotage.py")
STEPS = 60
TINY = ("--steps", STEPS, "--every", 2, "--micros", 1, "--sleep", 0.02)
DISK_KIB, SPARE_KIB = 900, 350
OURS = "ddpprobe-test-"


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_an_exception_anywhere_in_the_probe_reaches_nobody(wrap: str, torchrun, tmp_path) -> None:
    """At every place that training passes through, from the first (DDP: or the middle) call on."""
    done = torchrun(
        [SABOTAGE, "sweep", wrap, tmp_path / "o"], env={"DDPPROBE_STRICT": "0"}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        found = json.loads((tmp_path / "o" / f"found.{rank}").read_text())
        reached = [f"{place} from call {at} on: {text}" for place, at, _, _, text in found if text]
        assert reached == []
        changed = [(place, at) for place, at, _, same, _ in found if not same]
        assert changed == []
        raised = {place for place, _, times, _, _ in found if times}
        assert raised == {place for place, *_ in found}
        assert len(raised) > 70  # all of hooks, steps, rows, watch, journal, heartbeat


def both(
    launch,
    how: str,
    *arguments: object,
    look: Callable[[Any], None] = lambda _: None,
    **options: object,
) -> tuple[Any, Any]:
    """Run the broken job and, at the same time, the one without a probe; compare how they end.

    `look` is given the broken one while it runs.
    """
    broken = launch("broken", *TINY, *arguments, script=(SABOTAGE, how), fresh=False, **options)
    bare = launch("bare", *TINY, run_dir=None, fresh=False)
    began = time.monotonic()
    look(broken)
    looked = time.monotonic() - began  # while which it may wait
    assert bare.wait() == 0, bare.log
    assert broken.wait() == 0, broken.log
    assert broken.hashes() == bare.hashes()
    assert broken.finished(0) == broken.finished(1) == list(range(STEPS))
    assert broken.seconds <= 3 * bare.seconds + looked  # some 3 s each; a busy machine slows both
    return broken, bare


def test_a_probe_in_which_every_call_raises(launch) -> None:
    broken, _ = both(launch, "every-call", "--daemon", "auto")
    assert "training goes on" in broken.log
    broken.wait_for_the_daemon_to_end()
    run = ddpprobe.open(broken.path)
    assert list(run.records()) == []
    assert run.ranks() == [0, 1]
    assert verify(run).ok


@pytest.mark.parametrize("how", ["no-python", "no-shell"])
def test_without_any_daemon_the_journals_hold_it_all(how: str, launch) -> None:
    broken, _ = both(launch, how, "--daemon", "auto")
    assert broken.daemon() is None
    run = ddpprobe.open(broken.path)
    assert [r.step for r in run.records()] == list(range(0, STEPS, 2))
    assert all(r.ranks == (0, 1) for r in run.records())
    assert untimed(run.anomalies()) == []


def unmount_what_was_left() -> None:
    """Unmount the disks of tests that were killed: each is named by the process that made it."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        name, disk, *_ = line.split()
        if name.startswith(OURS) and not psutil.pid_exists(int(name.removeprefix(OURS))):
            subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 900 KiB, which the ranks fill after the daemon has come up."""
    disk = tmp_path / "disk"
    disk.mkdir()
    unmount_what_was_left()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_KIB}k", f"{OURS}{os.getpid()}", str(disk)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs needs root: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_costs_records_and_nothing_else(launch, small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(SPARE_KIB * 1024))
    seen: list[dict[int, int]] = []
    held = STEPS - 10

    def look(broken: Any) -> None:
        """Read the metrics while the ranks wait in the middle of it."""
        broken.until(lambda: broken.finished(0)[-1:] == broken.finished(1)[-1:] == [held - 1])
        # The beat of the next step counts the last one.
        ranks = ddpprobe.open(broken.path).info()["attempts"][0]["ranks"]
        lost = {rank["rank"]: held // 2 - rank["sampled"] for rank in ranks}
        seen.append(broken.until(lambda: unrecorded(broken) == lost and lost))
        (broken.directory / "steps.go").touch()

    broken, _ = both(
        launch, "small-room", "--daemon", "auto", "--behind-daemon", "--hold", held, look=look,
        run_dir=small_disk / "run",
    )  # fmt: skip
    broken.wait_for_the_daemon_to_end()
    run = ddpprobe.open(broken.path)
    kept = [record.step for record in run.records()]
    assert 0 < len(kept) < STEPS // 2
    assert kept == list(range(0, 2 * len(kept), 2))
    assert verify(run).ok
    assert (small_disk / "other").stat().st_size == SPARE_KIB * 1024
    for rank in run.info()["attempts"][0]["ranks"]:
        assert f"rank {rank['rank']} cannot write" in broken.log
        assert (rank["status"], rank["expected"]) == ("closed", STEPS // 2)
        assert rank["sampled"] in {len(kept), len(kept) - 1}
        lost = held // 2 - rank["sampled"]
        assert seen[0][rank["rank"]] == lost > 0


def test_a_disk_with_room_again_is_written_again(launch, small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(DISK_KIB // 2 * 1024))
    arguments = (*TINY, "--every", 1, "--daemon", "auto", "--behind-daemon", "--hold", 40)
    launched = launch(
        "r", *arguments, script=(SABOTAGE, "no-memory"), run_dir=small_disk / "run", fresh=False
    )
    launched.until(lambda: launched.log.count("cannot write") == 2)
    text = launched.until(lambda: (t := scrape(launched)) and "records_dropped_total{" in t and t)
    assert 'reason="ENOSPC"' in text
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    time.sleep(BACK_OFF_SECONDS)  # in which nothing is tried
    (launched.directory / "steps.go").touch()
    assert launched.wait() == 0, launched.log
    launched.wait_for_the_daemon_to_end()
    run = ddpprobe.open(launched.path)
    assert verify(run).ok
    for rank in (0, 1):
        steps = [record.step for record in run.records(rank)]
        assert steps == sorted(set(steps))
        assert steps[:8] == list(range(8))
        assert steps[-1] == STEPS - 1
        assert len(steps) < STEPS
    (attempt,) = run.info()["attempts"]
    assert attempt["sealed"]
    assert [rank["expected"] for rank in attempt["ranks"]] == [STEPS, STEPS]


def unrecorded(launched) -> dict[int, int]:
    """Return the sampled steps that never arrived, by rank, as /metrics has them."""
    found = re.findall(r'unrecorded_steps\{rank="(\d)"\} (\d+)', scrape(launched))
    return {int(rank): int(count) for rank, count in found}


def scrape(launched) -> str:
    """Return the daemon's /metrics, "" if it does not answer."""
    try:
        said = json.loads(launched.run.daemon_file("node_0000", "json").read_bytes())
        with urllib.request.urlopen(f"http://{said['listen']}/metrics", timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


# How the user's own code may end, and what exit code a shell sees then (a signal: its negative).
ENDS = {"exit-7": 7, "raise": 1, "_exit-3": 3, "abort": -signal.SIGABRT}
AT_ONCE = {"_exit-3", "abort"}  # no interpreter is taken down: a forked one is as good


@pytest.mark.parametrize("how", ENDS)
def test_the_users_own_exit_code_stays(how: str, torchrun, tmp_path: Path) -> None:
    """Without torchrun, whose own exit code is 1 whatever its ranks' are."""
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    env |= {"DDPPROBE_STRICT": "0"}
    job = [SABOTAGE, how, "--wrap", "none", "--steps", "20", "--every", "2"]
    job += ["--out", tmp_path / "run"]
    if how in AT_ONCE:
        done = torchrun(job, nproc=0, env=env)
    else:
        done = subprocess.run(
            [sys.executable, *job], env={**os.environ, **env}, check=False, capture_output=True,
            text=True,
        )  # fmt: skip
    assert done.returncode == ENDS[how], done.stderr
    assert ("a bug of the user's" in done.stderr) == (how == "raise")
    assert "ddpprobe:" not in done.stderr
    settle_all(RunDir(tmp_path / "run"), node_name(0))  # what has not reached the disk by then
    steps = [record.step for record in ddpprobe.open(tmp_path / "run").records() if record.sampled]
    assert steps[:3] == [0, 2, 4]


def test_torchrun_sees_the_ranks_own_exit_code_and_so_does_the_run(launch) -> None:
    script = (SABOTAGE, "_exit-3@30")
    launched = launch("r", *TINY, "--daemon", "auto", script=script, fresh=False)
    assert launched.wait() == 1
    assert re.search(r"exitcode *: 3 ", launched.log), launched.log
    launched.wait_for_the_daemon_to_end()
    deaths = ddpprobe.open(launched.path).deaths()
    assert [(d.rank, d.signal) for d in deaths if d.first] == [(0, "exit:3")]
