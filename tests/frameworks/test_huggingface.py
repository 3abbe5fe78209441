"""Hugging Face's Trainer with the callback."""

from __future__ import annotations

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
JOB = Path(__file__).with_name("huggingface_job.py")
STEPS, SAVED = 5, 3


@pytest.fixture(scope="module", params=[1, 2])
def trained(request, tmp_path_factory) -> Iterator[Trained]:
    need("transformers")
    out = tmp_path_factory.mktemp("huggingface")
    with torchrun_in(out) as run:
        yield train(run, JOB, out, "fit", request.param)


def test_training_is_the_same_and_everything_is_observed(trained) -> None:
    layers = {f"transformer.h.{i}.{part}" for i in (0, 1) for part in ("attn", "mlp", "ln_1")}
    sites = {*layers, "transformer.wte", "transformer.ln_f", "lm_head"}
    assert_right(trained, STEPS, sites, "ddp" if len(trained.told) > 1 else "none")
    assert all(one["closed"] for one in trained.told)


def test_the_probe_pauses_for_evaluation_and_checkpoints(trained) -> None:
    assert trained.pauses() == {"evaluation", "checkpoint"}


def test_the_loss_is_the_one_that_the_trainer_reports(trained) -> None:
    """Of steps that differ in micro-batches, whose micro-batches differ in tokens."""
    seen = [sum(r.scalars[k]["loss"] for k in r.ranks) / len(r.ranks) for r in trained.records()]
    assert seen == pytest.approx(trained.told[0]["losses"], rel=1e-5)
    assert [r.scalars[0]["micro_batches"] for r in trained.records()] == [2, 2, 2, 2, 1]


def test_a_resumed_training_is_a_further_attempt_at_the_trainers_step(trained) -> None:
    assert_resumed(trained, SAVED, STEPS)


def test_a_nan_is_named_by_step_rank_and_module(trained) -> None:
    assert_named(trained, 2, "transformer.h.1.mlp.c_proj")


def test_for_an_anomaly_the_trainer_stops_by_itself(torchrun, tmp_path: Path) -> None:
    need("transformers")
    assert_stopped(torchrun, tmp_path, JOB, "stop", "stop")
