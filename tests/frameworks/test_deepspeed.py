"""A loop over DeepSpeed's engine, with ZeRO of stage 1 and 2."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ddpprobe.records.step import StepRecord, derive

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
JOB = Path(__file__).with_name("deepspeed_job.py")
STEPS, MICROS, SAVED = 4, 2, 2
STAGES = ("zero1", "zero2", "zero2-bf16")
PARAMETERS = {"up.weight", "up.bias", "down.weight", "down.bias"}


@pytest.fixture(scope="module", params=[(n, w) for n in STAGES for w in (1, 2)], ids=str)
def trained(request, tmp_path_factory) -> Iterator[Trained]:
    need("deepspeed")
    name, world = request.param
    out = tmp_path_factory.mktemp(name)
    with torchrun_in(out) as run:
        yield train(run, JOB, out, name, world)


def norms(record: StepRecord, kind: str) -> dict[str, float]:
    """Return the norm over all ranks of what is of one kind, by FQN."""
    found = derive("norm", record.counts, record.values)
    return {site.fqn: float(found[i]) for i, site in enumerate(record.sites) if site.kind == kind}


def test_training_is_the_same_and_everything_is_observed(trained) -> None:
    assert_right(trained, STEPS, {"up", "down"}, trained.out.name[: len("zero1")])


def test_the_loss_is_the_models_own(trained) -> None:
    assert_losses(trained, MICROS)


def test_reduced_gradients_are_those_that_deepspeed_tells_before_it_clips_them(trained) -> None:
    for record, told in zip(trained.records(), trained.told[0]["grad"], strict=True):
        seen = norms(record, "grad")
        assert seen.keys() == PARAMETERS
        assert seen == pytest.approx(told, rel=1e-5)
        assert {s.placement for s in record.sites if s.kind == "grad"} == {"sharded"}


@pytest.mark.parametrize("kind", ["output", "grad_output", "grad_local"])
def test_what_is_local_is_what_hooks_see_in_all_micro_batches_of_all_ranks(
    trained, kind: str
) -> None:
    for record in trained.records():
        first = record.step * MICROS
        seen = norms(record, kind)
        for name in trained.told[0][kind]:
            parts = [one[kind][name][first : first + MICROS] for one in trained.told]
            assert seen[name] == pytest.approx(float(np.linalg.norm(parts)), rel=1e-5)


def test_a_resumed_training_is_a_further_attempt_at_the_engines_step(trained) -> None:
    assert_resumed(trained, SAVED, STEPS)
    assert trained.pauses() == {"checkpoint"}


def test_a_nan_is_named_by_step_rank_and_module(trained) -> None:
    assert_named(trained, 2, "down")


@pytest.mark.parametrize("where", [(name, 1) for name in STAGES], ids=str)
def test_for_an_anomaly_the_engines_step_raises(torchrun, tmp_path: Path, where) -> None:
    need("deepspeed")
    assert_stopped(torchrun, tmp_path, JOB, f"{where[0]} stop", "stop")


def test_what_would_be_wrong_is_refused_with_its_reason(torchrun, tmp_path: Path) -> None:
    need("deepspeed")
    done = torchrun([JOB, tmp_path, "refused"], nproc=0, timeout=240)
    assert done.returncode == 0, done.stderr
    said = json.loads((tmp_path / "refused.0.json").read_text())
    for name, reason in {
        "zero0": "ZeRO of stage 0 partitions nothing",
        "zero3": "ZeRO-3 puts an empty tensor in the place of each parameter",
        "zero2-offload": "with offload_optimizer it keeps the reduced gradients in buffers",
        "the engine": "write from ddpprobe.integrations.deepspeed import install",
        "the model": "parameter 'up.weight' is trained by an engine of DeepSpeed",
    }.items():
        assert reason in said[name]
