"""`install({...})`: a run of each model, side by side, and what is said to all of them at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.rank.probes import Probes


def models() -> dict[str, nn.Module]:
    return {"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 1)}


def train(model: nn.Module, steps: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def sampled(run: str | Path) -> list[int]:
    return [r.step for r in ddpprobe.open(run).records() if r.sampled]


def test_each_model_has_a_run_in_a_directory_of_its_name(tmp_path: Path) -> None:
    named = models()
    with ddpprobe.install(named, run_dir=tmp_path / "job", every=1, daemon="none") as probes:
        assert isinstance(probes, Probes)
        assert list(probes) == ["actor", "critic"]
        assert len(probes) == 2
        assert probes.run_dir == str(tmp_path / "job")
        for name, probe in probes.items():
            assert probe.run_dir == str(tmp_path / "job" / name)
        train(named["critic"], 2)
        train(named["actor"])
    opened = ddpprobe.open_models(tmp_path / "job")
    assert {name: run.name for name, run in opened.items()} == {
        "actor": "job/actor", "critic": "job/critic",
    }  # fmt: skip
    assert {name: sampled(run.path) for name, run in opened.items()} == {
        "actor": [0], "critic": [0, 1],
    }  # fmt: skip
    assert len({run.info()["run_id"] for run in opened.values()}) == 2


@pytest.mark.parametrize(
    ("options", "home"),
    [({}, None), ({"name": "faces"}, "ddpprobe-runs/faces"), ({"env": "there"}, "there")],
)
def test_without_a_directory_they_lie_side_by_side_all_the_same(
    options: dict[str, str], home: str | None, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    if where := options.pop("env", None):
        monkeypatch.setenv("DDPPROBE_DIR", where)
    with ddpprobe.install(models(), daemon="none", **options) as probes:
        parents = {Path(str(probe.run_dir)).parent for probe in probes.values()}
        assert parents == {Path(str(probes.run_dir))}
        expected = tmp_path / home if home else next((tmp_path / "ddpprobe-runs").iterdir())
        assert parents == {expected}


def test_an_option_may_be_said_for_each_model(tmp_path: Path) -> None:
    named = models()
    with ddpprobe.install(
        named, run_dir=tmp_path / "job", daemon="none", every={"actor": 1, "critic": 2},
        first_step={"critic": 100}, detectors={"grad_spike": False},
    ):  # fmt: skip
        for model in named.values():
            train(model, 3)
    assert sampled(tmp_path / "job" / "actor") == [0, 1, 2]
    assert sampled(tmp_path / "job" / "critic") == [100, 102]
    for run in ddpprobe.open_models(tmp_path / "job").values():
        (attempt,) = run.info()["attempts"]
        assert attempt["detectors"] == {"grad_spike": None}


def test_a_job_that_starts_again_is_a_further_attempt_of_each(tmp_path: Path) -> None:
    for _ in range(2):
        named = models()
        with ddpprobe.install(named, run_dir=tmp_path / "job", every=1, daemon="none"):
            for model in named.values():
                train(model)
    opened = ddpprobe.open_models(tmp_path / "job")
    assert [run.attempts() for run in opened.values()] == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "no model"),
        ({"": nn.Linear(1, 1)}, "'' is no name"),
        ({"a/b": nn.Linear(1, 1)}, "'a/b' is no name"),
        ({"..": nn.Linear(1, 1)}, "'..' is no name"),
        ({1: nn.Linear(1, 1)}, "1 is no name"),
    ],
)
def test_names_that_are_no_directories_are_refused(given: dict, says: str) -> None:
    with pytest.raises(ddpprobe.InstallError, match=says):
        ddpprobe.install(given, daemon="none")


def test_if_one_model_is_refused_none_is_observed(tmp_path: Path) -> None:
    named = {**models(), "loss": torch.nn.functional.mse_loss}
    with pytest.raises(ddpprobe.InstallError, match=r"takes a torch\.nn\.Module"):
        ddpprobe.install(named, run_dir=tmp_path / "job", daemon="none")
    for model in models().values():
        assert not model._forward_hooks
    named.pop("loss")
    ddpprobe.install(named, run_dir=tmp_path / "job", daemon="none").close()  # nobody holds it


def test_a_job_that_is_not_to_be_observed_has_probes_that_do_nothing(
    monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DDPPROBE_DISABLE", "1")
    monkeypatch.chdir(tmp_path)
    with ddpprobe.install(models()) as probes:
        probes["actor"].log(loss=1.0)
        assert probes.run_dir is None
    assert not list(tmp_path.iterdir())


def test_what_concerns_all_models_is_said_once(tmp_path: Path) -> None:
    named = models()
    with ddpprobe.install(named, run_dir=tmp_path / "job", every=1, daemon="none") as probes:
        probes.note("unfreeze", config={"lr": 0.1})
        with probes.pause("checkpoint"):
            for model in named.values():
                train(model)
        for model in named.values():
            train(model)
    for run in ddpprobe.open_models(tmp_path / "job").values():
        (attempt,) = run.info()["attempts"]
        assert [note["what"] for note in attempt["notes"]] == ["unfreeze"]
        assert attempt["config"] == {"lr": "0.1"}
        assert sampled(run.path) == [0]
