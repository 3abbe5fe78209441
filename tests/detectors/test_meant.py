"""What a script says is meant is not judged, live, afterwards and again, and no more than that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.cli.main import main
from ddpprobe.detectors.loss import mean_losses
from ddpprobe.detectors.settings import defaults
from ddpprobe.detectors.suite import DETECTORS, TASKS, chosen, default_suite, over, recorded
from ddpprobe.reader.run import open_run
from ddpprobe.records.every_loss import name_of
from ddpprobe.records.step import LEARNING_RATE, NOTED, OPTION, StepRecord
from ddpprobe.report.story import gather
from ddpprobe.report.tables import facts
from tests.detectors.made_records import record, run

BY_NAME = {kind.name: kind for kind in DETECTORS}


def losses(jump: int, *, noted: bool) -> list[StepRecord]:
    """A loss of 1 that is 30 from step `jump` on, and whether that was announced."""
    told = [
        {"loss": 1.0 if step < jump else 30.0, **({NOTED: 1.0} if noted and step == jump else {})}
        for step in range(2 * jump)
    ]
    return [record(step, {0: {"loss": 1.0}, 1: said}) for step, said in enumerate(told)]


def test_what_was_announced_by_any_rank_is_not_compared_with_what_was_before() -> None:
    spike = BY_NAME["loss_spike"]
    assert [a.step for a in run(spike(), losses(40, noted=False))] == [40]
    assert run(spike(), losses(40, noted=True)) == []


def test_losses_of_steps_before_a_note_are_not_those_after_it() -> None:
    said = {"loss": 1.0, name_of(2): 0.25, name_of(1): 0.5}
    assert mean_losses(record(40, {0: said})) == [(38, 0.25), (39, 0.5), (40, 1.0)]
    assert mean_losses(record(40, {0: {**said, NOTED: 1.0}})) == [(40, 1.0)]


def optimizers(kinds: list[set[str]], jump: int) -> list[StepRecord]:
    """A loss of 1 that is 30 from step `jump` on, and which options the optimizers had, in turn."""
    options = [{f"{OPTION}{name}": 1.0 for name in kind} for kind in kinds]
    return [
        record(s, {0: {"loss": 30.0 if s >= jump else 1.0, LEARNING_RATE: 0.1, **options[s]}})
        for s in range(2 * jump)
    ]


@pytest.mark.parametrize(
    ("before", "found"), [(["eps"], 0), (["nesterov"], 1), (["eps", "nesterov"], 1)]
)
def test_an_optimizer_of_a_kind_that_was_not_there_before_is_meant(before, found) -> None:
    kinds = [{before[s % len(before)]} if s < 40 else {"nesterov"} for s in range(80)]
    assert len(run(BY_NAME["loss_spike"](), optimizers(kinds, 40))) == found


def names(settings: Any) -> set[str]:
    """The detectors that find a loss that jumps."""
    suite = default_suite(settings)
    return {a.detector for each in losses(60, noted=False) for a in suite.update(each)}


def test_detectors_are_switched_off_and_set_by_name() -> None:
    assert "loss_spike" in names(None)
    assert "loss_spike" not in names(chosen({"loss_spike": False}, None))
    assert "loss_spike" not in names(chosen({"loss_spike": {"ratio": 100}}, None))
    assert chosen({"loss_spike": True}, "gan") == {
        "loss_spike": {}, "loss_runaway": None, "level_shift": None,
    }  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_a_task_switches_known_detectors_off(task: str) -> None:
    assert TASKS[task].keys() <= BY_NAME.keys()
    assert not names(chosen({}, task)) & TASKS[task].keys()


@pytest.mark.parametrize(
    ("detectors", "task", "says"),
    [
        ({"strangler": False}, None, "no detector 'strangler': choose one of straggler"),
        ({"grad_spike": {"zz": 3}}, None, "grad_spike has no setting 'zz'; it has z=10.0"),
        ({"grad_spike": {"z": "much"}}, None, "z=much: expected a number, such as 10.0"),
        ({"grad_spike": {"window": 3.5}}, None, "window=3.5: expected a whole number"),
        ({"grad_spike": {"window": 10**9}}, None, "window=1000000000: expected a number from"),
        ({"grad_spike": 3}, None, "must be True, False or settings, got 3"),
        (["grad_spike"], None, "detectors must be a mapping such as"),
        ({}, "vae", "task must be one of gan, rl, or None; got 'vae'"),
    ],
)
def test_wrong_choices_are_refused_with_what_there_is(
    detectors: Any, task: str | None, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ddpprobe.InstallError, match=says.replace("(", r"\(")):
        ddpprobe.install(
            nn.Linear(2, 2), run_dir=tmp_path / "r", daemon="none", detectors=detectors, task=task
        )
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "said",
    [
        None, 3, [], {"no_such": None}, {"grad_spike": 3}, {"grad_spike": {"z": "much"}},
        {"grad_spike": {"window": 10**400}}, {"grad_spike": {"window": float("inf")}},
        {"grad_spike": {"z": float("nan")}}, {3: {}},
    ],
)  # fmt: skip
def test_a_strangers_settings_are_as_if_none_were_written_down(said: object) -> None:
    found = recorded(said)
    assert found == {}
    default_suite(found)


def test_settings_hold_over_recorded_ones_and_bring_a_detector_back() -> None:
    own = {"straggler": None, "grad_spike": {"z": 9.0, "window": 40}}
    found = over({"straggler": {}, "grad_spike": {"z": 4.0}, "desync": None}, own)
    assert found == {"straggler": {}, "grad_spike": {"z": 4.0, "window": 40}, "desync": None}
    assert over({}, own) == own


def train(path: Path, noted: bool, **options: Any) -> None:
    """Sixty steps, of which the loss jumps in the fortieth."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with ddpprobe.install(model, run_dir=path, every=2, daemon="none", **options) as probe:
        probe.note(config={"lr": 1e-3, "optimizer": optimizer.__class__})
        for step in range(100):
            if noted and step == 79:  # not sampled: the next sampled one begins anew
                probe.note("harder data")
            loss = model(torch.ones(1, 2)).square().mean()
            loss.backward()
            probe.log(loss=1.0 if step < 80 else 30.0)
            optimizer.step()
            optimizer.zero_grad()
        probe.note()


@pytest.mark.parametrize(
    ("options", "noted", "found"),
    [
        ({}, False, [("loss_spike", 80)]),
        ({}, True, []),
        ({"task": "gan"}, False, []),
        ({"detectors": {"loss_spike": {"ratio": 100}}}, False, []),
    ],
    ids=["nothing said", "announced", "a task", "a setting"],
)
def test_daemon_reader_and_replay_judge_as_the_script_said(
    options: dict[str, Any],
    noted: bool,
    found: list[tuple[str, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DDPPROBE_LINGER", "0")
    path = tmp_path / "r"
    train(path, noted, **options)
    spikes = [
        (a.detector, a.step) for a in open_run(path).anomalies() if a.detector == "loss_spike"
    ]
    assert spikes == found
    if noted or options.get("task"):  # the daemon reads the same journals, and takes its time
        return
    assert main(["daemon", "--dir", str(path), "--node", "node_0000"]) == 0
    sealed = open_run(path)
    told = [(a.detector, a.step) for a in sealed.anomalies() if a.detector == "loss_spike"]
    assert told == found
    assert [(a.detector, a.step) for a in sealed.replayed() if a.detector == "loss_spike"] == found


def test_info_and_report_show_what_was_chosen_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r"
    train(path, noted=True, task="rl", detectors={"straggler": {"steps": 30}})
    assert main(["info", str(path)]) == 0
    out = capsys.readouterr().out
    off = "loss_spike off, loss_runaway off, level_shift off"
    tails = "grad_spike off, unsampled_spike off, cross_entropy off"
    assert f"detectors: {off}, {tails}, straggler steps=30" in out
    assert "config: lr=0.001, optimizer=<class 'torch.optim.sgd.SGD'>" in out
    assert "noted after step 78: harder data" in out
    main(["info", str(path), "--json"])
    (attempt,) = json.loads(capsys.readouterr().out)["attempts"]
    assert attempt["notes"] == [{"step": 78, "what": "harder data"}]
    shown = dict(facts(gather(open_run(path))))
    assert shown["noted"] == "harder data (after step 78)"
    assert shown["config"].startswith("lr=0.001, ")
    assert shown["detectors off"] == (
        "loss_spike, loss_runaway, level_shift, grad_spike, unsampled_spike, cross_entropy"
    )


def test_long_notes_are_kept_in_part(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none") as probe:
        probe.note("x" * 10_000, config={f"name {n}": "y" * 10_000 for n in range(1000)})
    (attempt,) = open_run(tmp_path / "r").info()["attempts"]
    assert len(attempt["notes"][0]["what"]) == 500
    assert len(attempt["config"]) == 256
    assert max(map(len, attempt["config"].values())) == 500


def test_every_detector_has_settings_that_install_takes() -> None:
    every = {name: defaults(kind) for name, kind in BY_NAME.items()}
    assert chosen(every, None) == every
    assert recorded(json.loads(json.dumps(chosen(every, None)))) == every
