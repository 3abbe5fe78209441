"""Ray Train: functions of its workers, which Ray ends without Python's own exit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddpprobe
from ddpprobe.records.events import ClosedEvent

from ..conftest import torchrun_in
from .trained import FULL, Trained, assert_named, assert_resumed, assert_right, need, steps_of

pytestmark = FULL
JOB = Path(__file__).with_name("ray_job.py")
STEPS, MICROS, SAVED = 4, 2, 2
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module", params=[1, 2])
def trained(request, tmp_path_factory) -> Iterator[Trained]:
    need("ray")
    out, world = tmp_path_factory.mktemp("ray"), request.param
    with torchrun_in(out) as run:
        done = run([JOB, out, str(world)], nproc=0, timeout=300, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        told = [json.loads((out / f"ray.{rank}.json").read_text()) for rank in range(world)]
        yield Trained(done, told, out)


def test_training_is_the_same_and_everything_is_observed(trained) -> None:
    assert_right(trained, STEPS, {"up", "down"}, "ddp" if len(trained.told) > 1 else "none")


def test_the_run_lies_with_the_experiment_and_not_where_ray_runs_the_worker(trained) -> None:
    run = Path(trained.told[0]["run"])
    assert run.parent == trained.out / "storage" / "experiment" / "ddpprobe"
    assert not any(run.is_relative_to(one["directory"]) for one in trained.told)


def test_the_loss_is_the_models_own(trained) -> None:
    for rank, one in enumerate(trained.told):
        seen = [r.scalars[rank]["loss"] for r in trained.records()]
        assert seen == pytest.approx(steps_of(one["losses"], MICROS), rel=1e-5)


def test_a_resumed_training_is_a_further_attempt_at_the_users_step(trained) -> None:
    assert_resumed(trained, SAVED, STEPS)


def test_workers_that_ray_starts_again_go_on_in_the_run_that_they_had(trained) -> None:
    runs = {one["started_again_run"] for one in trained.told}
    assert len(runs) == 1
    assert runs != {one["run"] for one in trained.told}  # each fit() has its own
    run = ddpprobe.open(runs.pop())
    assert [(r.attempt, r.step) for r in run.records()] == [
        *((0, s) for s in range(2)), *((1, s) for s in range(STEPS))
    ]  # fmt: skip


def test_a_nan_is_named_by_step_rank_and_module(trained) -> None:
    assert_named(trained, 2, "down")


def test_a_function_that_raises_has_closed_its_run_with_its_last_step(trained) -> None:
    assert "the training function raised" in trained.done.stdout
    run = ddpprobe.open(trained.out / "raised")
    assert [r.step for r in run.records()] == [0, 1]
    events = [e.what for e in run._merged_reader.events(0)]
    closed = [what for what in events if isinstance(what, ClosedEvent)]
    told = [(what.error and what.error.message, what.at_exit) for what in closed]
    assert told == [("the data are bad", False)] * len(trained.told)


def test_outside_of_a_worker_it_says_where_it_belongs(torchrun) -> None:
    need("ray")
    code = (
        "import torch\nfrom ddpprobe.integrations.ray import install\n"
        "install(torch.nn.Linear(1, 1))\n"
    )
    done = torchrun(code, nproc=0, env=ENVIRONMENT)
    assert done.returncode == 1
    assert "Call it in the function that TorchTrainer is given" in done.stderr
