"""Lightning's Trainer with the callback, and with `install()` in front of `fit()`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddpprobe

from ..conftest import torchrun_in
from .trained import (
    FULL,
    Trained,
    assert_losses,
    assert_named,
    assert_resumed,
    assert_right,
    assert_stopped,
    need,
    train,
)

JOB = Path(__file__).with_name("lightning_job.py")
STEPS, MICROS, SAVED = 6, 2, 4


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=FULL)])
def trained(request, tmp_path_factory) -> Iterator[Trained]:
    need("lightning")
    out = tmp_path_factory.mktemp("lightning")
    with torchrun_in(out) as run:
        yield train(run, JOB, out, "fit", request.param)


def test_training_is_the_same_and_everything_is_observed(trained) -> None:
    wrapper = "ddp" if len(trained.told) > 1 else "none"
    assert_right(trained, STEPS, {"net.0", "net.1", "net.2", "net.3"}, wrapper)
    assert all(one["closed"] for one in trained.told)


def test_the_probe_pauses_for_validation_and_checkpoints(trained) -> None:
    assert trained.pauses() == {"validation", "checkpoint"}


def test_the_loss_is_the_one_that_training_step_returned(trained) -> None:
    assert_losses(trained, MICROS)


def test_the_gradient_norm_is_the_one_of_the_whole_step(trained) -> None:
    for rank, one in enumerate(trained.told):
        seen = [r.scalars[rank]["grad_norm"] for r in trained.records()]
        assert seen == pytest.approx(one["norms"], rel=1e-5)


def test_a_resumed_training_is_a_further_attempt_at_lightnings_step(trained) -> None:
    # A plain loader begins anew amid an epoch. Only DDP's forward is given the batch.
    assert_resumed(trained, SAVED, STEPS, ["resume"] if len(trained.told) > 1 else [])


def test_a_nan_is_named_by_step_rank_and_module(trained) -> None:
    assert_named(trained, 2, "net.1")


@FULL
def test_for_an_anomaly_the_trainer_stops_by_itself(torchrun, tmp_path: Path) -> None:
    need("lightning")
    assert_stopped(torchrun, tmp_path, JOB, "stop", "stop")


@FULL
def test_ctrl_c_stops_the_run_and_is_no_crash_though_lightning_exits_with_1(
    torchrun, poll, tmp_path: Path
) -> None:
    need("lightning")
    assert torchrun([JOB, tmp_path, "interrupted"], nproc=0, timeout=240).returncode == 1
    run = ddpprobe.open(tmp_path / "interrupted")
    poll(lambda: run.info()["attempts"][0]["sealed"], 60)
    assert run.info()["state"] == "stopped"
    assert "SIGINT" in run.info()["end"]["message"]


@FULL
def test_the_callback_is_one_of_pytorch_lightnings_where_that_is_in_use(
    torchrun, tmp_path: Path
) -> None:
    need("pytorch_lightning")
    env = {"LIGHTNING": "pytorch_lightning"}
    done = torchrun([JOB, tmp_path, "fit"], nproc=0, timeout=240, env=env)
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / "fit.0.json").read_text())]
    assert_right(Trained(done, told, tmp_path), STEPS, {"net.0", "net.3"}, "none")


@FULL
def test_install_in_front_of_fit_joins_the_ranks_that_lightning_starts(
    torchrun, tmp_path: Path
) -> None:
    need("lightning")
    done = torchrun([JOB, tmp_path, "before", "2"], nproc=0, timeout=240, fresh=True)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(tmp_path / "before-run" / "journal")) == ["000", "001"]
    run = ddpprobe.open(tmp_path / "before-run")
    assert {r.ranks for r in run.records()} == {(0, 1)}
    assert [r.step for r in run.records()] == list(range(STEPS))
    assert (run.info()["world_size"], run.info()["wrapper"]) == (2, "ddp")
