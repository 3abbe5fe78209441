"""Ray Train: functions of its workers, which Ray ends without Python's own exit."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddpprobe
from ddpprobe.records.events import ClosedEvent

from ..conftest import torchrun_in
from ..waiting import deadline
from .trained import (
    FULL,
    Trained,
    assert_losses,
    assert_named,
    assert_resumed,
    assert_right,
    need,
)

pytestmark = FULL
JOB = Path(__file__).with_name("ray_job.py")
STEPS, MICROS, SAVED, FAULT = 4, 2, 2, 2
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0"}
# Part of the job: what its last worker dies of once.
DEATHS = {"raised_once": "OSError: the disk is gone", "killed_once": "SIGKILL"}


@pytest.fixture(scope="module", params=[1, 2])
def trained(request, tmp_path_factory) -> Iterator[Trained]:
    need("ray")
    out, world = tmp_path_factory.mktemp("ray"), request.param
    with torchrun_in(out) as run:
        done = run([JOB, out, str(world)], nproc=0, timeout=300, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        told = [json.loads((out / f"ray.{rank}.json").read_text()) for rank in range(world)]
        wait_until_sealed(out)
        yield Trained(done, told, out)


def wait_until_sealed(out: Path) -> None:
    """Wait until the daemons have written down how each attempt of each run ended."""
    late = deadline(60)
    for path in out.rglob("run.json"):
        while not all(one["sealed"] for one in ddpprobe.open(path.parent).info()["attempts"]):
            assert time.monotonic() < late, f"the daemon of {path.parent} does not end"
            time.sleep(0.1)


def test_training_is_the_same_and_everything_is_observed(trained) -> None:
    assert_right(trained, STEPS, {"up", "down"}, "ddp" if len(trained.told) > 1 else "none")


def test_the_run_lies_with_the_experiment_and_not_where_ray_runs_the_worker(trained) -> None:
    run = Path(trained.told[0]["run"])
    assert run.parent == trained.out / "storage" / "experiment" / "ddpprobe"
    assert not any(run.is_relative_to(one["directory"]) for one in trained.told)


def test_the_loss_is_the_models_own(trained) -> None:
    assert_losses(trained, MICROS)


def test_a_resumed_training_is_a_further_attempt_at_the_users_step(trained) -> None:
    assert_resumed(trained, SAVED, STEPS)


def test_each_fit_has_a_run_and_no_worker_leaves_another_one(trained) -> None:
    runs = {one[part] for one in trained.told for part in ("run", *DEATHS)}
    assert len(runs) == 1 + len(DEATHS)
    found = {str(path.parent) for path in trained.out.rglob("run.json")}
    assert found == runs | {str(trained.out / name) for name in ("faulty", "raised", "stopped")}


@pytest.mark.parametrize(("part", "how"), DEATHS.items(), ids=DEATHS)
def test_workers_that_ray_starts_again_go_on_in_the_run_that_they_had(
    trained, call, part: str, how: str
) -> None:
    last, first_step = len(trained.told) - 1, {"raised_once": 0, "killed_once": SAVED}[part]
    run = ddpprobe.open(trained.told[0][part])
    records = [(r.attempt, r.step, r.ranks) for r in run.records() if r.attempt]
    assert records == [(1, step, tuple(range(last + 1))) for step in range(first_step, STEPS)]
    assert {r.attempt for r in run.records()} == {0, 1}
    assert run.info()["state"] == "ended"  # is how the last attempt ended
    (page,) = [a for a in run.anomalies() if a.level == "page"]
    assert (page.attempt, page.detector, page.rank) == (0, "rank_lost", last)
    code, out, _ = call("anomalies", run.path)
    assert code == 1
    assert out.startswith("attempt 0: crashed, see below\n")
    assert f"rank_lost: rank {last} died ({how}" in out
    assert "attempt 1" not in out
    code, out, _ = call("verify", run.path)
    assert code in {0, 4}  # 4: a step of the rank that died was under way
    assert out.startswith("all intact")


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


def test_for_an_anomaly_all_workers_raise_behind_one_step_and_fit_says_why(trained, call) -> None:
    world = len(trained.told)
    (step,) = {one["stopped"]["step"] for one in trained.told}
    assert step > FAULT
    assert [one["stopped"]["for"] for one in trained.told] == [[FAULT, world - 1]] * world
    assert "fit() raised: " in trained.done.stdout
    assert "ddpprobe stopped training after step" in trained.done.stdout
    run = ddpprobe.open(trained.out / "stopped")
    assert run.info()["state"] == "stopped"  # a stop that was asked for is no crash
    assert {a.detector for a in run.anomalies() if a.level == "page"} == {"nonfinite"}
    assert "ended as on_anomaly='stop' asks for" in call("anomalies", run.path)[1]


def test_outside_of_a_worker_it_says_where_it_belongs(torchrun) -> None:
    need("ray")
    code = (
        "import torch\nfrom ddpprobe.integrations.ray import install\n"
        "install(torch.nn.Linear(1, 1))\n"
    )
    done = torchrun(code, nproc=0, env=ENVIRONMENT)
    assert done.returncode == 1
    assert "Call it in the function that TorchTrainer is given" in done.stderr
