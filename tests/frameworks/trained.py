"""What a job of one framework left behind, and what it must be: the same for all of them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ddpprobe
from ddpprobe.records.events import PausedEvent
from ddpprobe.records.step import StepRecord

# Two ranks and a daemon take their time: `make test` has one framework in one process only.
FULL = pytest.mark.skipif("TEST_FRAMEWORKS" not in os.environ, reason="make test-frameworks")


def need(package: str) -> None:
    """Skip a test where a framework is not installed; none is imported here, which takes long."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-frameworks")


@dataclass(frozen=True)
class Trained:
    """Of a job: how it ended, and what each rank told in `NAME.RANK.json`."""

    done: subprocess.CompletedProcess[str]
    told: list[dict[str, Any]]
    out: Path

    @property
    def run(self) -> ddpprobe.Run:
        assert {one["run"] for one in self.told} == {self.told[0]["run"]}
        return ddpprobe.open(self.told[0]["run"])

    def records(self, attempt: int = 0) -> list[StepRecord]:
        return [r for r in self.run.records() if r.attempt == attempt]

    def pauses(self) -> set[str]:
        events = self.run._merged_reader.events(0)
        return {e.what.reason for e in events if isinstance(e.what, PausedEvent)}


def train(run: Callable[..., Any], job: Path, out: Path, name: str, world: int) -> Trained:
    """Run a job, in one process without a launcher or in ranks of torchrun."""
    done = run([job, out, name], nproc=world if world > 1 else 0, timeout=240)
    assert done.returncode == 0, done.stderr
    told = [json.loads((out / f"{name}.{rank}.json").read_text()) for rank in range(world)]
    return Trained(done, told, out)


def steps_of(losses: list[float], micros: int) -> list[float]:
    """Return the mean loss of each step of so many micro-batches."""
    return [float(np.mean(losses[i : i + micros])) for i in range(0, len(losses), micros)]


def assert_right(trained: Trained, steps: int, sites: set[str], wrapper: str) -> None:
    """Claim: the same bits, every step, every site, an end, and nothing found."""
    assert all(one["same"] for one in trained.told)
    info = trained.run.info()
    assert (info["state"], info["complete"], info["wrapper"]) == ("ended", True, wrapper)
    assert [a for a in trained.run.anomalies() if a.attempt == 0] == []
    records = trained.records()
    assert [r.step for r in records] == list(range(steps))
    for record in records:
        assert record.ranks == tuple(range(len(trained.told)))
        outputs = {s.fqn for s in record.sites if s.kind == "output"}
        assert sites <= outputs
        assert sites <= {s.fqn for s in record.sites if s.kind == "grad_output"}


def assert_losses(trained: Trained, micros: int) -> None:
    """Claim: the loss of each rank in each step is the mean of what its micro-batches had."""
    for rank, one in enumerate(trained.told):
        seen = [r.scalars[rank]["loss"] for r in trained.records()]
        assert seen == pytest.approx(steps_of(one["losses"], micros), rel=1e-5)


def assert_resumed(trained: Trained, first: int, steps: int, told: Sequence[str] = ()) -> None:
    """Claim: the resumed training is a further attempt, at the framework's own step number.

    `told` are the detectors that find something in it.
    """
    assert [a.detector for a in trained.run.anomalies() if a.attempt == 1] == [*told]
    assert {one["resumed_run"] for one in trained.told} == {trained.told[0]["run"]}
    assert [r.step for r in trained.records(attempt=1)] == list(range(first, steps))


def assert_named(trained: Trained, step: int, module: str) -> None:
    """Claim: the fault of the last rank is the first cause, with step, rank and module."""
    first = ddpprobe.open(trained.out / "faulty").anomalies()[0]
    assert (first.detector, first.level, first.first_cause) == ("nonfinite", "page", True)
    assert (first.step, first.rank, first.module) == (step, len(trained.told) - 1, module)


def assert_stopped(run: Callable[..., Any], out: Path, job: Path, words: str, name: str) -> None:
    """Claim: for the fault of step 2 a job in one process stops some steps later, and ends well."""
    done = run([job, out, *words.split()], nproc=0, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads((out / f"{name}.0.json").read_text())
    assert found["for"] == [2, 0]
    assert found["step"] > 2
    assert ddpprobe.open(out / "stopped").info()["state"] == "ended"
