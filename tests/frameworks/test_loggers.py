"""The loggers of each framework, by their own packages, which write to files here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ddpprobe

from ..conftest import torchrun_in
from .trained import FULL, Trained, need, train

pytestmark = FULL
JOB = Path(__file__).with_name("loggers_job.py")
STEPS = 4
NEEDS = {
    "huggingface": "transformers", "accelerate": "accelerate",
    "lightning": "lightning", "fabric": "lightning",
}  # fmt: skip


@pytest.fixture(scope="module", params=[(n, w) for n in NEEDS for w in (1, 2)], ids=str)
def logged(request, tmp_path_factory) -> Iterator[Trained]:
    name, world = request.param
    for package in (NEEDS[name], "wandb", "mlflow", "tensorboard"):
        need(package)
    out = tmp_path_factory.mktemp(name)
    with torchrun_in(out) as run:
        yield train(run, JOB, out, name, world)


def norms_of(trained: Trained) -> list[float]:
    found = [r.scalars[0]["grad_norm"] for r in trained.records()]
    assert len(found) == STEPS
    return found


def assert_facts(trained: Trained, facts: dict[str, str]) -> None:
    run = trained.run
    assert facts == {
        "ddpprobe/run_id": run.identity["run_id"],
        "ddpprobe/run_dir": trained.told[0]["run"],
        "ddpprobe/verdict": f"no anomalies in {STEPS} sampled steps",
    }


def test_training_with_loggers_is_the_same_and_draws_no_random_number(logged) -> None:
    assert all(one["same"] for one in logged.told)
    assert logged.run.info()["state"] == "ended"


def test_mlflow_has_the_numbers_of_each_sampled_step_and_the_verdict(logged, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"file://{logged.out}/mlflow")
    experiments = [e.experiment_id for e in client.search_experiments()]
    told = [r for r in client.search_runs(experiments) if "ddpprobe/run_id" in r.data.tags]
    assert len(told) == 1  # of the ranks only one speaks, and nothing without the probe
    tags = {k: v for k, v in told[0].data.tags.items() if k.startswith("ddpprobe/")}
    assert_facts(logged, tags)
    history = client.get_metric_history(told[0].info.run_id, "ddpprobe/grad_norm")
    seen = sorted((metric.step, metric.value) for metric in history)
    assert [step for step, _ in seen] == list(range(STEPS))
    assert [value for _, value in seen] == pytest.approx(norms_of(logged), rel=1e-6)


def test_tensorboard_has_the_numbers_of_each_sampled_step_and_the_verdict(logged) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told: list[Any] = []
    for directory in {path.parent for path in logged.out.rglob("events.out.tfevents.*")}:
        events = EventAccumulator(str(directory)).Reload()
        if "ddpprobe/grad_norm" in events.Tags()["scalars"]:
            told.append(events)
    (events,) = told
    seen = [(event.step, event.value) for event in events.Scalars("ddpprobe/grad_norm")]
    assert [step for step, _ in seen] == list(range(STEPS))
    assert [value for _, value in seen] == pytest.approx(norms_of(logged), rel=1e-5)
    suffix = "/text_summary"
    names = [n for n in events.Tags()["tensors"] if n.startswith("ddpprobe/")]
    texts = {n: events.Tensors(n)[-1].tensor_proto.string_val[0].decode() for n in names}
    assert_facts(logged, {n.removesuffix(suffix): text for n, text in texts.items()})


def test_wandb_has_the_numbers_and_the_verdict(logged) -> None:
    told = [data for path in logged.out.rglob("run-*.wandb")
            if b"ddpprobe/verdict" in (data := path.read_bytes())]  # fmt: skip
    (data,) = told
    assert f"no anomalies in {STEPS} sampled steps".encode() in data
    assert logged.told[0]["run"].encode() in data
    assert data.count(b"ddpprobe/grad_norm") >= 1


def test_what_other_loggers_are_told_is_in_their_files(logged) -> None:
    found = list(logged.out.rglob("metrics.csv"))
    if not found:
        pytest.skip("this framework has no such logger here")
    (told,) = [p for p in found if "ddpprobe/grad_norm" in p.read_text()]
    assert len(told.read_text().splitlines()) > STEPS


def test_a_plain_loop_attaches_the_client_of_its_logger(torchrun, tmp_path: Path) -> None:
    need("wandb")
    code = """
import json, torch, wandb, ddpprobe
from ddpprobe.integrations.loggers import attach
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
run = wandb.init(project="p", mode="offline")
probe = ddpprobe.install(net, every=1, daemon="none", run_dir="run")
attach(probe, run)
for step in range(3):
    loss = net(torch.ones(2, 4)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.log({"loss": loss.item()}, step=step)
probe.close()
print("SUMMARY", json.dumps({k: run.summary.get(k) for k in ("ddpprobe/verdict", "loss")}))
run.finish()
"""
    done = torchrun(code, nproc=0, env={"WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"})
    assert done.returncode == 0, done.stderr
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("SUMMARY ")]
    assert json.loads(line[8:])["ddpprobe/verdict"] == "no anomalies in 3 sampled steps"
    assert len(list(ddpprobe.open(tmp_path / "run").records())) == 3
