"""Loops of one's own over Accelerate and over Fabric."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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

pytestmark = FULL
JOB = Path(__file__).with_name("loop_job.py")
STEPS, MICROS, SAVED = 4, 2, 2
NEEDS = {"accelerate": "accelerate", "fabric": "lightning"}


@pytest.fixture(scope="module", params=[(n, w) for n in NEEDS for w in (1, 2)], ids=str)
def trained(request, tmp_path_factory) -> Iterator[Trained]:
    name, world = request.param
    need(NEEDS[name])
    out = tmp_path_factory.mktemp(name)
    with torchrun_in(out) as run:
        yield train(run, JOB, out, name, world)


def test_training_is_the_same_and_everything_is_observed(trained) -> None:
    assert_right(trained, STEPS, {"up", "down"}, "ddp" if len(trained.told) > 1 else "none")


def test_the_loss_is_the_models_own(trained) -> None:
    assert_losses(trained, MICROS)


def test_a_resumed_training_is_a_further_attempt_at_the_users_step(trained) -> None:
    assert_resumed(trained, SAVED, STEPS)


def test_a_nan_is_named_by_step_rank_and_module(trained) -> None:
    assert_named(trained, 2, "down")


@pytest.mark.parametrize("where", [(name, 1) for name in NEEDS], ids=str)
def test_for_an_anomaly_the_optimizers_step_raises(torchrun, tmp_path: Path, where) -> None:
    name, _ = where
    need(NEEDS[name])
    assert_stopped(torchrun, tmp_path, JOB, f"{name} stop", "stop")


def test_the_trackers_of_accelerate_are_told_where_the_run_is(trained) -> None:
    if "accelerate" not in str(trained.out):
        pytest.skip("this loop over Fabric has no logger: see test_loggers")
    assert trained.told[0]["told"] == trained.told[0]["run"]
