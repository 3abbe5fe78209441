"""A frozen model that is installed with one that learns from it: it follows the other's steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.records.step import NUMEL

STEPS, MICROS, FAULT = 4, 2, 2


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


class Distilling:
    """A student that learns what its teacher returns."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.teacher, self.student = net().requires_grad_(False), net()
        self.optimizer = torch.optim.SGD(self.student.parameters(), lr=0.1)
        self.fault = -1

    def train(self, *, evaluate: bool = True) -> None:
        for step in range(STEPS):
            self.teacher[1].register_forward_hook(
                lambda _, __, output, bad=step == self.fault: output * float("nan") if bad else None
            )
            for micro in range(MICROS):
                self.learn(step * MICROS + micro)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if evaluate:
                self.student.eval()
                with torch.no_grad():
                    self.teacher(torch.ones(9, 4))
                    self.student(torch.ones(9, 4))
                self.student.train()

    def learn(self, seed: int) -> None:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            wanted = self.teacher(x)
        (self.student(x) - wanted).square().mean().backward()


@pytest.mark.parametrize("order", [("student", "teacher"), ("teacher", "student")])
@pytest.mark.parametrize("every", [1, 2])
def test_a_teachers_outputs_are_on_the_students_steps(
    order: tuple[str, str], every: int, tmp_path: Path
) -> None:
    job = Distilling()
    models = {name: getattr(job, name) for name in order}
    with ddpprobe.install(models, run_dir=tmp_path / "r", every=every, daemon="none"):
        job.train()
    for name, run in ddpprobe.open_models(tmp_path / "r").items():
        assert run.anomalies() == []
        records = list(run.records())
        assert [r.step for r in records] == list(range(0, STEPS, every))
        for record in records:
            assert not record.partial
            assert record.scalars[0]["micro_batches"] == MICROS
            rows = {s.key: record.counts[i][NUMEL] for i, s in enumerate(record.sites)}
            assert rows["0", "output", ""] == MICROS * 3 * 4
            assert rows["", "output", ""] == MICROS * 3 * 2
            if name == "teacher":
                assert {s.kind for s in record.sites} == {"output"}


def test_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    alone, job = Distilling(), Distilling()
    alone.train()
    models = {"student": job.student, "teacher": job.teacher}
    with ddpprobe.install(models, run_dir=tmp_path / "r", every=1, daemon="none"):
        job.train()
    for a, b in zip(alone.student.parameters(), job.student.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("every", [1, 4])
def test_a_nan_of_the_teacher_is_told_before_the_students(every: int, tmp_path: Path) -> None:
    job = Distilling()
    job.fault = FAULT
    models = {"student": job.student, "teacher": job.teacher}
    with ddpprobe.install(models, run_dir=tmp_path / "r", every=every, daemon="none"):
        job.train(evaluate=False)
    (first,) = ddpprobe.open_models(tmp_path / "r").first_causes()
    found = first.anomaly
    assert (first.model, found.detector, found.step) == ("teacher", "nonfinite", FAULT)
    assert found.module == ("1" if every == 1 else None)


class Other(Distilling):
    """A loop that asks the teacher after the student, and lets it follow as a moving average."""

    def learn(self, seed: int) -> None:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        guess = self.student(x)
        with torch.inference_mode():
            wanted = self.teacher.eval()(x)
        (guess - wanted.clone()).square().mean().backward()
        with torch.no_grad():
            for average, weight in zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            ):
                average.copy_(0.9 * average + 0.1 * weight)


@pytest.mark.parametrize("every", [1, 2])
def test_a_moving_average_that_is_asked_behind_the_student_is_on_its_steps(
    every: int, tmp_path: Path
) -> None:
    alone, job = Other(), Other()
    alone.train()
    models = {"student": job.student, "teacher": job.teacher}
    with ddpprobe.install(models, run_dir=tmp_path / "r", every=every, daemon="none"):
        job.train()
    assert all(map(torch.equal, alone.student.parameters(), job.student.parameters()))
    run = ddpprobe.open_models(tmp_path / "r")["teacher"]
    records = list(run.records())
    assert [(r.step, r.partial) for r in records] == [(s, False) for s in range(0, STEPS, every)]
    assert {r.scalars[0]["micro_batches"] for r in records} == {MICROS}
    assert run.anomalies() == []


def test_of_two_students_the_first_one_that_is_named_is_followed(tmp_path: Path) -> None:
    job, second = Distilling(), net()
    models = {"teacher": job.teacher, "student": job.student, "second": second}
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    with ddpprobe.install(models, run_dir=tmp_path / "r", every=1, daemon="none"):
        for step in range(STEPS):
            job.learn(step)
            for _ in range(2):  # it takes two steps to each of the first one's
                second(torch.ones(1, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            job.optimizer.step()
            job.optimizer.zero_grad()
    runs = ddpprobe.open_models(tmp_path / "r")
    steps = {name: [r.step for r in run.records()] for name, run in runs.items()}
    assert steps["teacher"] == steps["student"] == list(range(STEPS))
    assert steps["second"] == list(range(2 * STEPS))


def test_what_requires_gradients_and_is_never_stepped_follows_nobody(tmp_path: Path) -> None:
    job = Distilling()
    models = {"student": job.student, "teacher": job.teacher.requires_grad_(True)}
    with ddpprobe.install(models, run_dir=tmp_path / "r", every=1, daemon="none"):
        job.train()
    runs = ddpprobe.open_models(tmp_path / "r")
    assert [r.step for r in runs["student"].records()] == list(range(STEPS))
    assert list(runs["teacher"].records()) == []


def test_a_teacher_outlives_its_student_and_is_asked_in_an_evaluation(tmp_path: Path) -> None:
    job = Distilling()
    models = {"student": job.student, "teacher": job.teacher}
    with ddpprobe.install(models, run_dir=tmp_path / "r", every=1, daemon="none") as probes:
        job.train()
        probes["student"].close()
        job.teacher(torch.ones(1, 4))  # nobody's step: the run ends in it
    records = list(ddpprobe.open_models(tmp_path / "r")["teacher"].records())
    assert [r.step for r in records if not r.partial] == list(range(STEPS))
