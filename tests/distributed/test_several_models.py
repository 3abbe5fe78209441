"""Models that are trained against each other or beside each other: each has a run of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ddpprobe
from ddpprobe.records.step import Anomaly
from tests.conftest import torchrun_in

from ..timed import untimed
from .models_job import CRITICS, PLANS, TURNS

JOB = Path(__file__).with_name("models_job.py")
RANKS = 2
OBSERVED = [plan for plan, (_, _, bad) in PLANS.items() if bad is None]
STEPS = {
    "generator": TURNS, "critic": CRITICS * TURNS, "student": TURNS, "actor": 2 * TURNS,
    "teacher": TURNS,  # it follows the student
}  # fmt: skip

BEFORE_THE_GROUP = """
import json, os, pathlib
import torch, ddpprobe
from torch import distributed as dist, nn

models = {"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 1)}
probes = ddpprobe.install(models, every=1, daemon="none")
before = probes.run_dir
dist.init_process_group("gloo")
for _ in range(2):
    for model in models.values():
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped(torch.ones(3, 2)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
told = [before, probes.run_dir, {name: probe.run_dir for name, probe in probes.items()}]
pathlib.Path(f"{dist.get_rank()}.json").write_text(json.dumps(told))
probes.close()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All plans in one launch."""
    out = tmp_path_factory.mktemp("models")
    with torchrun_in(out) as torchrun:
        done = torchrun([JOB, out], nproc=RANKS, timeout=240)
    assert done.returncode == 0, done.stderr
    return out


def said(out: Path, plan: str) -> list[dict[str, Any]]:
    return [json.loads((out / f"{plan}.{rank}.json").read_text()) for rank in range(RANKS)]


def pages(out: Path, plan: str, model: str) -> list[Anomaly]:
    found = ddpprobe.open(out / plan / model).anomalies()
    return [a for a in found if a.level == "page"]


@pytest.mark.parametrize("plan", OBSERVED)
def test_training_of_all_models_is_the_same_to_the_bit(plan: str, trained: Path) -> None:
    for rank in said(trained, plan):
        assert rank["probed"] == rank["plain"]


@pytest.mark.parametrize("plan", OBSERVED)
def test_each_model_has_the_steps_of_its_optimizer_and_nothing_is_said_of_a_healthy_one(
    plan: str, trained: Path
) -> None:
    every = PLANS[plan][1]
    for run in sorted((trained / plan).iterdir()):
        opened = ddpprobe.open(run)
        count = TURNS if (plan, run.name) == ("actor-critic", "critic") else STEPS[run.name]
        records = [r for r in opened.records() if not r.partial]
        assert [r.step for r in records if r.sampled] == list(range(0, count, every)), run
        assert all(r.ranks == (0, 1) and not r.missing for r in records), run
        assert all(s["micro_batches"] == 1.0 for r in records for s in r.scalars.values()), run
        assert [a for a in untimed(opened.anomalies()) if a.level != "info"] == [], run


@pytest.mark.parametrize("plan", OBSERVED)
def test_no_model_of_a_healthy_job_was_first(plan: str, trained: Path) -> None:
    models = ddpprobe.open_models(trained / plan)
    assert sorted(models) == sorted(path.name for path in (trained / plan).iterdir())
    assert models.first_causes() == []


@pytest.mark.parametrize(
    ("plan", "model", "step"),
    [
        ("bad-generator", "generator", 2),
        ("bad-generator-10", "generator", 2),  # not a sampled step
        ("bad-critic", "critic", 3 * CRITICS + 1),
        ("bad-critic-10", "critic", 2 * CRITICS + 1),
        ("bad-critic-lent", "critic", 3 * CRITICS),
        ("bad-loss", "generator", 2),
        ("bad-actor", "actor", 4),
        ("bad-teacher", "teacher", 3),
        ("bad-teacher-10", "teacher", 3),
    ],
)
def test_of_all_models_the_one_is_first_in_which_the_nan_was_born(
    plan: str, model: str, step: int, trained: Path
) -> None:
    models = ddpprobe.open_models(trained / plan)
    assert all(pages(trained, plan, name) for name in models)  # it goes from one to the other
    (first,) = models.first_causes()
    assert (first.model, first.anomaly.step) == (model, step)


def test_a_loss_that_only_one_of_two_models_has_is_not_what_the_lent_pass_had(
    trained: Path,
) -> None:
    critic = pages(trained, "bad-loss", "critic")[0]
    assert (critic.step, critic.kind, critic.phase) == (3 * CRITICS, "grad_output", "backward")


def test_models_that_are_installed_before_the_process_group_lie_side_by_side(
    torchrun, tmp_path: Path
) -> None:
    done = torchrun(BEFORE_THE_GROUP, nproc=RANKS)
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert told[0] == told[1]
    (home,) = (tmp_path / "ddpprobe-runs").iterdir()
    assert told[0] == [None, str(home), {n: str(home / n) for n in ("actor", "critic")}]
    for run in ddpprobe.open_models(home).values():
        assert [(r.step, r.ranks) for r in run.records()] == [(0, (0, 1)), (1, (0, 1))]


@pytest.mark.parametrize(
    ("plan", "model", "step", "micro", "rank", "module"),
    [
        ("bad-generator", "generator", 2, 0, 1, "1"),
        ("bad-critic", "critic", 3 * CRITICS + 1, 0, 0, "1"),
        ("bad-critic-10", "critic", 2 * CRITICS + 1, 0, 1, "1"),  # not a sampled step
        # The generator's pass, in the step of the critic that comes next.
        ("bad-critic-lent", "critic", 3 * CRITICS, 0, 0, "1"),
        ("bad-teacher", "teacher", 3, 0, 1, "1"),
        ("bad-teacher-10", "teacher", 3, 0, 0, None),  # what it returns is known, and no more
    ],
)
def test_a_nan_is_named_with_its_model_module_rank_and_step(
    plan: str, model: str, step: int, micro: int, rank: int, module: str, trained: Path
) -> None:
    first = pages(trained, plan, model)[0]
    assert first.detector == "nonfinite"
    assert first.first_cause
    assert (first.step, first.micro, first.rank, first.phase) == (step, micro, rank, "forward")
    assert first.module == (module if step % PLANS[plan][1] == 0 else None)


def test_what_came_into_a_model_bad_is_told_as_what_came_in(trained: Path) -> None:
    critic = pages(trained, "bad-generator", "critic")[0]
    assert (critic.module, critic.kind, critic.phase) == ("0", "input", "forward")
    generator = pages(trained, "bad-critic-lent", "generator")[0]
    assert (generator.kind, generator.phase) == (None, "forward")  # its loss
    assert generator.message.endswith("then 2:grad_output in backward")
