"""What rank 0 makes of the nodes that the ranks tell it of, and which run a restart goes on in."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import psutil
import pytest

from ddpprobe.daemon import variables
from ddpprobe.rank import attempts, head, join

FACTS = {"format_version": 1, "hostname": "here"}


@pytest.mark.parametrize(
    ("told", "node"),
    [({}, 0), ({"SLURM_NODEID": "2"}, 2), ({"SLURM_NODEID": "2", "GROUP_RANK": "1"}, 1)],
)
def test_a_node_is_numbered_by_torchrun_or_else_by_slurm(
    monkeypatch, told: dict[str, str], node: int
) -> None:
    for name in ("GROUP_RANK", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert join._Place.here(3).node_index == node


def test_ranks_of_a_node_that_do_not_follow_each_other_are_refused() -> None:
    assert head._members([{"node_index": n} for n in (0, 0, 2)], {0: 0, 2: 2}) == {0: 2, 2: 1}
    with pytest.raises(ValueError, match="ranks of node 0 do not follow each other: 2 is one"):
        head._members([{"node_index": n} for n in (0, 1, 0, 1)], {0: 0, 1: 1})


@pytest.fixture
def restarted(monkeypatch, tmp_path: Path) -> None:
    """A directory of runs, in a process that torchrun has started for the second time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")


def claim(name: str | None = None, call: str = "ddpprobe/1/1") -> attempts.Claimed:
    claimed = attempts.claim(None, name, {**FACTS, **attempts.launch_of(call)})
    claimed.lock.release()
    claimed.run.attempt_dir(claimed.attempt).mkdir(exist_ok=True)
    return claimed


def test_a_rank_that_torchrun_starts_again_goes_on_in_the_run_of_the_same_call(
    restarted: None, monkeypatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    first, of_another_model = claim(), claim(call="ddpprobe/0/2")
    assert first.run.path != of_another_model.run.path
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again, there = claim(), claim(call="ddpprobe/1/2")
    assert (again.run.path, again.attempt) == (first.run.path, 1)
    assert (there.run.path, there.attempt) == (of_another_model.run.path, 1)
    assert claim(name="mine").run.path.name == "mine"


@pytest.mark.parametrize(
    "change",
    [
        {"pid": os.getpid()}, {"pid_start": psutil.Process().parent().create_time() - 60},
        {"call": "2"}, {"pid_start": "x"},
    ],
    ids=["another process", "another start", "another call", "no start"],
)  # fmt: skip
def test_a_run_that_another_torchrun_has_started_is_not_gone_on_in(
    restarted: None, change: dict[str, object]
) -> None:
    other = claim()
    said = json.loads(other.run.run_json.read_bytes())
    said[attempts.LAUNCH] |= change
    other.run.run_json.write_text(json.dumps(said))
    assert claim().run.path != other.run.path


def test_without_torchrun_each_job_has_a_run_of_its_own(restarted: None, monkeypatch) -> None:
    first = claim()
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert attempts.launch_of("ddpprobe/0/1") == {}
    assert claim().run.path != first.run.path


def test_a_variable_that_is_nearly_one_of_ours_is_told(monkeypatch) -> None:
    monkeypatch.setenv("DDPPROBE_EVREY", "5")
    monkeypatch.setenv("DDPPROBE_LISTENS", "x")
    monkeypatch.setenv("DDPPROBE_OF_MY_SCRIPT", "y")
    monkeypatch.setenv("DDPPROBE_EVERY", "5")
    found = variables.misspelt()
    assert found == {"DDPPROBE_EVREY": "DDPPROBE_EVERY", "DDPPROBE_LISTENS": "DDPPROBE_LISTEN"}


def test_every_variable_that_is_read_is_known() -> None:
    package = Path(variables.__file__).parent.parent
    read = {
        name
        for file in package.rglob("*.py")
        for name in re.findall(r"\bDDPPROBE_[A-Z_]+\b", file.read_text())
    }
    assert read - {variables.PREFIX} <= set(variables.KNOWN)
