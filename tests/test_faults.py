"""A small sample of `python -m tests.faults`: kills at system calls, accidents, hostile runs."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest

from ddpprobe.replay.run import open_run
from ddpprobe.replay.verify import verify

from .faults import __main__ as faults
from .faults import hostile, mutations, syscalls
from .made_runs import Made


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
@pytest.mark.parametrize(
    ("act", "call", "number"),
    [
        (syscalls.train, "pwrite64", 9),
        (syscalls.train, "openat", 4),
        (syscalls.fold, "rename", 30),
        (syscalls.fold, "unlink", 2),
    ],
)
def test_a_writer_killed_at_a_system_call_loses_nothing_it_acknowledged(
    tmp_path: Path, act: syscalls.Act, call: str, number: int
) -> None:
    made = Made(tmp_path / "run", ranks=1)
    if act is syscalls.fold:
        made.whole(syscalls.STEPS)
        made.close()
    assert syscalls.killed(act, made.path, call, number)
    said = made.path / "acknowledged"
    steps = set(map(int, said.read_text().split())) if said.exists() else set()
    steps = set(range(syscalls.STEPS)) if act is syscalls.fold else steps
    assert list(syscalls.problems(made.path, steps, whole=act is syscalls.fold)) == []


def test_no_accident_to_a_store_with_captures_is_silent(tmp_path: Path) -> None:
    done, problems = mutations.mutate(tmp_path, 10, seed=3)
    assert problems == []
    assert done.total() > 5


def test_no_group_loses_its_zarr_json_in_silence(tmp_path: Path) -> None:
    path = tmp_path / "run"
    mutations.make(path)
    whole = dict(mutations.values(open_run(path)))
    groups = [
        f for f in path.rglob("zarr.json") if json.loads(f.read_text()).get("consolidated_metadata")
    ]
    assert {"anomalies", "rank_00000", "merged"} < {f.parent.name for f in groups}
    for lost in groups:
        data = lost.read_bytes()
        lost.unlink()
        assert mutations.problem(path, whole) == "", lost.relative_to(path)
        lost.write_bytes(data)


def test_what_a_stranger_sends_is_read_without_harm_and_in_bounded_memory(tmp_path: Path) -> None:
    args = argparse.Namespace(oddities=4, seed=1, most=1)
    done, problems = faults.of_hostile(tmp_path, args)
    assert problems == []
    assert done.total() == 2 * (1 + args.most)


def test_every_hostile_case_has_a_name_of_its_own() -> None:
    names = [name for name, _ in hostile.cases(2)]
    assert len(names) == len(set(names)) > 100


def test_no_byte_of_the_list_of_captures_changes_unseen(tmp_path: Path) -> None:
    mutations.make(tmp_path / "run")
    log = tmp_path / "run/manifest/attempt_000.captures.log"
    data = log.read_bytes()
    for at in range(3, len(data), 11):
        log.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        report = verify(open_run(tmp_path / "run"))
        assert report.damage or report.notes, at
