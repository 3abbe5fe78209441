"""A resumed training that does not go on where it was is told, live as afterwards."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.detectors.statistics_of import statistic_of
from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.verdicts import run_detectors
from ddpprobe.records.step import DIGEST, LEARNING_RATE, StepRecord
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store import earlier_attempts
from ddpprobe.store.earlier_attempts import earlier

from .. import conftest

FIRST, NEXT, LAST, EVERY = 0, 100, 130, 5
FORGOTTEN = {
    "optimizer": ("optimizer_reset", "counted 0 steps"),
    "weights": ("resume", "the weights of 0.weight, 0.bias, 2.weight are not those"),
    "layer": ("resume", "the weights of 2.weight are not those that the run had at step 95"),
    "loader": ("resume", "those of step 0 and on"),
    "schedule": ("resume", "the schedule has begun anew"),
}


def train(path: Path, steps: range, restored: dict[str, Any], forgotten: str, daemon: str) -> dict:
    """Train some steps as one attempt, from a checkpoint but for what is forgotten of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 60)
    parts = {"weights": model, "optimizer": optimizer, "schedule": schedule}
    for name, part in parts.items():
        if name in restored and name != forgotten:
            part.load_state_dict(restored[name])
    if restored and forgotten == "layer":
        torch.manual_seed(1)
        model[2].reset_parameters()
    for group in optimizer.param_groups:
        group["lr"] = schedule.get_last_lr()[0]
    start = steps.start if forgotten == "loader" else 0
    with ddpprobe.install(
        model, run_dir=path, every=EVERY, first_step=steps.start, daemon=daemon
    ) as probe:
        for step in steps:
            data = torch.Generator().manual_seed(step - start)
            x = torch.randn(32, 16, generator=data)
            loss = (model(x) - x.flip(1)).square().mean()
            probe.log(loss=loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})


def resumed(path: Path, forgotten: str, daemon: str = "none") -> Path:
    held = train(path, range(FIRST, NEXT), {}, "", daemon)
    train(path, range(NEXT, LAST), held, forgotten, daemon)
    return path


@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_what_a_checkpoint_lacks_is_told(forgotten: str, tmp_path: Path) -> None:
    (found,) = ddpprobe.open(resumed(tmp_path, forgotten)).anomalies()
    detector, words = FORGOTTEN[forgotten]
    assert (found.detector, found.level, found.attempt) == (detector, "warn", 1)
    assert found.step - NEXT in {0, EVERY}
    assert words in found.message


def test_a_training_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    assert ddpprobe.open(resumed(tmp_path, "")).anomalies() == []


@pytest.mark.parametrize("folded", [False, True])
def test_a_step_that_broke_off_says_nothing_of_the_batch_before_the_resume(
    tmp_path: Path, folded: bool
) -> None:
    def attempt(steps: range, breaks_at: int) -> None:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with ddpprobe.install(
            model, run_dir=tmp_path, every=EVERY, first_step=steps.start, daemon="none"
        ):
            for step in steps:
                optimizer.zero_grad()
                for micro in range(2):
                    if (step, micro) == (breaks_at, 1):
                        raise RuntimeError
                    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + micro))
                    model(x).square().mean().backward()
                optimizer.step()

    with pytest.raises(RuntimeError):
        attempt(range(21), 20)  # a sampled step, of which one of two micro-batches was trained
    if folded:
        fold(tmp_path)
    attempt(range(20, 40), -1)
    assert [r.step for r in ddpprobe.open(tmp_path).records(attempt=0) if r.partial] == [20]
    first = first_of(tmp_path, 1)
    assert [r.step for r in earlier(RunDir(tmp_path), first)] == [0, 5, 10, 15]
    assert [a for a in ddpprobe.open(tmp_path).anomalies() if a.attempt] == []


@pytest.mark.parametrize("forgotten", ["loader", "layer"])
def test_the_daemon_of_the_resumed_attempt_says_the_same(
    tmp_path: Path, poll: Callable[..., None], forgotten: str
) -> None:
    reader = MergedReader(RunDir(resumed(tmp_path / "run", forgotten, "auto")))
    poll(lambda: bool(reader.daemon_anomalies(1)), 60)
    conftest.end_daemons(tmp_path)
    assert reader.daemon_anomalies(1) == run_detectors(reader, 1)
    assert [a.detector for a in reader.daemon_anomalies(1)] == ["resume"]


@pytest.fixture(scope="module")
def journaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resumed(tmp_path_factory.mktemp("journaled") / "run", "")


def told(records: Iterable[StepRecord]) -> list[tuple[float, ...]]:
    names = (DIGEST, LEARNING_RATE, "loss", "micro_batches")
    return [(r.attempt, r.step, *(r.scalars[0][name] for name in names)) for r in records]


def weights_of(record: StepRecord) -> dict[str, tuple[float, ...]]:
    """What a record says of the weights that had their turn."""
    stats = ("numel", "sum", "norm", "min", "max")
    columns = [statistic_of(record, name) for name in stats]
    observed = statistic_of(record, "observed")
    return {
        site.fqn: tuple(float(column[i]) for column in columns)
        for i, site in enumerate(record.sites)
        if site.kind == "param" and observed[i] > 0
    }


def fold(path: Path) -> None:
    """Have a daemon carry what ranks wrote down into the store."""
    command = [sys.executable, "-m", "ddpprobe.daemon", "--dir", str(path)]
    env = {**os.environ, "DDPPROBE_LINGER": "0"}
    subprocess.run(command, check=True, capture_output=True, timeout=60, env=env)
    assert RunDir(path).has_store


def first_of(path: Path, attempt: int) -> StepRecord:
    return next(ddpprobe.open(path).records(attempt=attempt))


def test_earlier_attempts_are_read_as_they_were_written_in_journals_and_in_the_store(
    journaled: Path, tmp_path: Path
) -> None:
    whole = [r for r in ddpprobe.open(journaled).records(attempt=0) if r.sampled]
    first = first_of(journaled, 1)
    found = list(earlier(RunDir(journaled), first))
    assert told(found) == told(whole)
    assert all(r.sampled and r.ranks == (0,) for r in found)
    weights = [weights_of(r) for r in found]
    assert weights == [weights_of(r) for r in whole]
    assert {fqn for row in weights for fqn in row} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    stored = RunDir(shutil.copytree(journaled, tmp_path / "stored"))
    fold(stored.path)
    assert told(earlier(stored, first)) == told(found)
    assert [weights_of(r) for r in earlier(stored, first)] == weights
    assert list(earlier(RunDir(journaled), whole[0])) == []


def test_of_long_attempts_the_first_steps_and_those_around_the_resume_are_read(
    journaled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, number in (("START", 3), ("BEFORE", 4), ("BEHIND", 2)):
        monkeypatch.setattr(earlier_attempts, name, number)
    first = first_of(journaled, 1)
    steps = [r.step for r in earlier(RunDir(journaled), first)]
    assert steps == [0, 5, 10, 80, 85, 90, 95]
    back = StepRecord(1, 52, (0,), 0)
    assert [r.step for r in earlier(RunDir(journaled), back)] == [0, 5, 10, 35, 40, 45, 50, 55, 60]


def test_the_interval_that_is_told_is_that_of_the_newest_attempt(tmp_path: Path) -> None:
    for every, first in ((10, 0), (3, 20)):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        path = tmp_path / "run"
        with ddpprobe.install(model, run_dir=path, every=every, first_step=first, daemon="none"):
            for _ in range(10):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
    run = ddpprobe.open(path)
    assert (run.info()["every"], run.sampled_steps(1)) == (3, [21, 24, 27])
