"""Whatever breaks in ddpprobe, training ends as it would alone: same exit, same bits, same time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddpprobe
from ddpprobe.replay.verify import verify

SABOTAGE = Path(__file__).with_name("sabotage.py")
STEPS = 60
TINY = ("--steps", STEPS, "--every", 2, "--micros", 1, "--sleep", 0.02)
DISK_KIB, SPARE_KIB = 600, 250


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_an_exception_anywhere_in_the_probe_reaches_nobody(wrap: str, torchrun, tmp_path) -> None:
    """At every place that training passes through, from the first or the middle call on."""
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


def both(launch, how: str, *arguments: object, **options: object) -> tuple[object, object]:
    """Run the broken job and, at the same time, the one without a probe; compare how they end."""
    broken = launch("broken", *TINY, *arguments, script=(SABOTAGE, how), **options)
    bare = launch("bare", *TINY, run_dir=None)
    assert bare.wait() == 0, bare.log
    assert broken.wait() == 0, broken.log
    assert broken.hashes() == bare.hashes()
    assert broken.finished(0) == broken.finished(1) == list(range(STEPS))
    assert broken.seconds <= 1.5 * bare.seconds + 2.0
    print(how, f"{broken.seconds:.1f} s, bare {bare.seconds:.1f} s")
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
    assert run.anomalies() == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 600 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_KIB}k", "ddpprobe-test", str(disk)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs needs root: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_costs_records_and_nothing_else(launch, small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(SPARE_KIB * 1024))
    broken, _ = both(launch, "nothing", "--daemon", "auto", run_dir=small_disk / "run")
    broken.wait_for_the_daemon_to_end()
    run = ddpprobe.open(broken.path)
    kept = [r.step for r in run.records()]
    print(kept, broken.log)
    print(run.info())
    print(list((r, [x.step for x in run.records(r)]) for r in (0,1)))
    print(verify(run))
    assert 0 < len(kept) < STEPS // 2
    assert kept == list(range(0, 2 * len(kept), 2))
    assert verify(run).ok
