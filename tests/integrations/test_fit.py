"""What the callbacks of all frameworks do alike: directory, pause, stop, end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.integrations.fit import Fit
from ddpprobe.integrations.run_directory import run_directory
from ddpprobe.records.step import Anomaly


def train(net: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        net(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def begun(tmp_path: Path, step: int = 0, **options: object) -> tuple[Fit, nn.Module]:
    fit, net = Fit({"every": 1, "daemon": "none", **options}), nn.Linear(4, 1)
    fit.begin(net, tmp_path, step)
    return fit, net


def test_a_new_training_gets_a_new_directory_and_a_resumed_one_goes_on_in_the_newest(
    tmp_path: Path,
) -> None:
    first = run_directory(tmp_path, 0)
    assert first.parent == tmp_path / "ddpprobe"
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{6}", first.name)
    assert run_directory(tmp_path, 0) != first
    for name in ("20260101T000000Z-bbbbbb", "20260102T000000Z-aaaaaa"):
        (tmp_path / "ddpprobe" / name).mkdir(parents=True)
        (tmp_path / "ddpprobe" / name / "run.json").touch()
    (tmp_path / "ddpprobe" / "20260103T000000Z-no-run").mkdir()
    assert run_directory(tmp_path, 7).name == "20260102T000000Z-aaaaaa"
    assert run_directory(tmp_path, 0).name not in {p.name for p in tmp_path.rglob("*")}


def test_a_job_that_is_begun_again_has_the_directory_that_it_had(tmp_path: Path) -> None:
    first = run_directory(tmp_path, 0, "ab12")
    assert first.name.endswith("Z-ab12")
    first.mkdir(parents=True)
    assert run_directory(tmp_path, 0, "ab12").parent == first.parent  # of a start that made no run
    (first / "run.json").touch()
    assert run_directory(tmp_path, 0, "ab12") == run_directory(tmp_path, 7, "ab12") == first
    assert run_directory(tmp_path, 0, "cd34") != first  # another job is a new training,
    assert run_directory(tmp_path, 7, "cd34") == first  # or goes on with this one


def test_a_resumed_training_without_an_earlier_run_begins_one(tmp_path: Path) -> None:
    assert not run_directory(tmp_path, 5).exists()


def test_the_steps_of_a_resumed_fit_go_on(tmp_path: Path) -> None:
    fit, net = begun(tmp_path)
    train(net)
    where = fit.probe.run_dir
    fit.end()
    fit, net = begun(tmp_path, step=2)
    train(net)
    assert fit.probe.run_dir == where
    fit.end()
    steps = [(r.attempt, r.step) for r in ddpprobe.open(where).records()]
    assert steps == [(0, 0), (0, 1), (1, 2), (1, 3)]


def test_a_pause_lasts_until_training_goes_on_whatever_comes_in_between(tmp_path: Path) -> None:
    fit, net = begun(tmp_path)
    fit.pause("evaluation")
    fit.pause("checkpoint")
    assert not net._forward_hooks
    train(net, 1)
    fit.go_on()
    fit.go_on()
    train(net, 1)
    where = fit.probe.run_dir
    fit.end()
    assert [r.step for r in ddpprobe.open(where).records()] == [0]


def test_a_second_training_closes_what_the_first_left_open(tmp_path: Path) -> None:
    fit, net = begun(tmp_path)
    fit.pause("it raised here")
    fit.begin(net, tmp_path / "again", 0)
    train(net)
    where = fit.probe.run_dir
    fit.end()
    assert fit.probe is None
    assert not net._forward_hooks
    assert len(list(ddpprobe.open(where).records())) == 2


def test_to_stop_is_remembered_and_told_and_raises_nothing(tmp_path: Path, caplog) -> None:
    fit, _ = begun(tmp_path, on_anomaly="stop")
    where = {"micro": 0, "rank": 0, "module": "x", "kind": "output", "phase": "forward"}
    what = {"first_cause": True, "values": {"nan": 1}, "sampled": True, "message": "NaN in x"}
    anomaly = Anomaly(detector="nonfinite", level="page", step=3, **where, **what)
    fit.probe._order_handler._on_anomaly(anomaly)  # as an order of the head's would
    assert fit.stopped_for is anomaly
    assert f"asked to stop for nonfinite at step 3: NaN in x (ddpprobe anomalies {tmp_path}" in (
        caplog.text
    )
    fit.end()


def test_the_users_own_answer_to_an_anomaly_stays(tmp_path: Path) -> None:
    heard: list[Anomaly] = []
    fit, _ = begun(tmp_path, on_anomaly=heard.append)
    assert fit.probe._order_handler._on_anomaly == heard.append
    fit.end()


def test_the_first_step_is_not_the_users_to_say() -> None:
    with pytest.raises(TypeError, match="first_step comes from the framework"):
        Fit({"first_step": 3})
