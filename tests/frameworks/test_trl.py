"""The trainers of TRL with the callback for Hugging Face's Trainer, from which they descend."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..conftest import torchrun_in
from .trained import (
    FULL,
    Trained,
    assert_named,
    assert_resumed,
    assert_right,
    assert_stopped,
    need,
    train,
)

pytestmark = FULL
JOB = Path(__file__).with_name("trl_job.py")
STEPS, SAVED = 4, 2


@pytest.fixture(scope="module", params=[(n, w) for n in ("sft", "dpo") for w in (1, 2)], ids=str)
def trained(request, tmp_path_factory) -> Iterator[Trained]:
    need("trl")
    name, world = request.param
    out = tmp_path_factory.mktemp(name)
    with torchrun_in(out) as run:
        yield train(run, JOB, out, name, world)


def test_training_is_the_same_and_everything_is_observed(trained) -> None:
    layers = {f"transformer.h.{i}.{part}" for i in (0, 1) for part in ("attn", "mlp", "ln_1")}
    # TRL computes the loss from the weight of `lm_head`, and never calls that module.
    sites = {*layers, "transformer.wte", "transformer.ln_f"}
    assert_right(trained, STEPS, sites, "ddp" if len(trained.told) > 1 else "none")
    assert all(one["closed"] for one in trained.told)


def test_steps_are_those_of_the_trainer(trained) -> None:
    assert [step - 1 for step in trained.told[0]["steps"]] == list(range(STEPS))
    assert [r.scalars[0]["micro_batches"] for r in trained.records()] == [2] * STEPS


def test_the_loss_is_the_one_that_the_trainer_trains_on(trained) -> None:
    seen = [sum(r.scalars[k]["loss"] for k in r.ranks) / len(r.ranks) for r in trained.records()]
    assert seen == pytest.approx(trained.told[0]["losses"], abs=1e-3)  # as it rounds them
    if trained.out.name.startswith("dpo"):  # at first the policy is the reference
        assert seen[0] == pytest.approx(math.log(2), rel=1e-5)


def test_a_resumed_training_is_a_further_attempt_at_the_trainers_step(trained) -> None:
    assert_resumed(trained, SAVED, STEPS)


def test_a_nan_is_named_by_step_rank_and_module(trained) -> None:
    assert_named(trained, 2, "transformer.h.1.mlp.c_proj")


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_for_an_anomaly_the_trainer_stops_by_itself(torchrun, tmp_path: Path, name: str) -> None:
    need("trl")
    assert_stopped(torchrun, tmp_path, JOB, f"{name} stop", name)
