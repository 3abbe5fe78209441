"""The loggers of frameworks, by clients that only note what they are told."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe import AnomalyStop
from ddpprobe.integrations import verdict
from ddpprobe.integrations.fit import Fit
from ddpprobe.integrations.loggers import LoggerLink, attach, sink_of
from ddpprobe.rank.listener import known_numbers
from ddpprobe.records.step import Anomaly, Site

from ..made_runs import record

PAGE = Anomaly(
    detector="nonfinite", level="page", step=3, micro=0, rank=0, module="x", kind="output",
    phase="forward", first_cause=True, values={"nan": 1}, sampled=True, message="NaN in x",
)  # fmt: skip


class Notes:
    """A sink."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.kept: dict[str, str] = {}

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        self.rows.append((step, dict(values)))

    def facts(self, values: Mapping[str, str]) -> None:
        self.kept |= values


class Broken(Notes):
    """A sink whose client raises."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        self.calls += 1
        raise OSError("the server is gone")


class Writer:
    """A SummaryWriter."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def add_scalar(self, *said: Any) -> None:
        self.said.append(said)

    def add_text(self, *said: Any) -> None:
        self.said.append(said)

    def flush(self) -> None:
        self.said.append(("flush",))


def of_package(name: str, **members: Any) -> Any:
    return type("Client", (), {"__module__": f"{name}.inner", **members})()


def train(net: nn.Module, steps: int = 3, bad_at: int = -1) -> list[float]:
    """Return the norm of the gradients of each step."""
    optimizer, norms = torch.optim.SGD(net.parameters(), lr=0.1), []
    for step in range(steps):
        x = torch.arange(8.0).view(2, 4) * (float("nan") if step == bad_at else 1 + step)
        net(x).pow(2).mean().backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in net.parameters()])))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def fitted(
    tmp_path: Path, *sinks: Any, bad_at: int = -1, **options: Any
) -> tuple[list[float], Path]:
    fit, net = Fit({"every": 1, "daemon": "none", **options}), nn.Linear(4, 1)
    probe = fit.begin(net, tmp_path, 0, lambda: sinks)
    norms = train(net, bad_at=bad_at)
    fit.end()
    return norms, Path(str(probe.run_dir))


def test_a_logger_hears_of_the_run_of_each_sampled_step_and_of_the_verdict(tmp_path: Path) -> None:
    notes = Notes()
    norms, run_dir = fitted(tmp_path, notes)
    assert [step for step, _ in notes.rows] == [0, 1, 2]
    assert [row["ddpprobe/grad_norm"] for _, row in notes.rows] == pytest.approx(norms, rel=1e-6)
    assert notes.kept == {
        "ddpprobe/run_id": ddpprobe.open(run_dir).identity["run_id"],
        "ddpprobe/run_dir": str(run_dir),
        "ddpprobe/verdict": "no anomalies in 3 sampled steps",
    }


@pytest.mark.parametrize(
    ("error", "told"), [(ValueError("bad batch"), False), (AnomalyStop(PAGE, 4), True)]
)
def test_a_training_that_raises_has_no_verdict_but_for_the_stop_that_was_asked_for(
    tmp_path: Path, error: Exception, told: bool
) -> None:
    writer, net = Writer(), nn.Linear(4, 1)
    options = {"every": 1, "daemon": "none", "run_dir": tmp_path / "run"}
    with pytest.raises(type(error)), ddpprobe.install(net, **options) as probe:
        attach(probe, writer)
        raise error
    assert any(said[0] == "ddpprobe/run_id" for said in writer.said)
    assert any(said[0] == "ddpprobe/verdict" for said in writer.said) == told


def test_the_verdict_names_the_first_cause(tmp_path: Path) -> None:
    notes = Notes()
    fitted(tmp_path, notes, bad_at=1)
    assert notes.kept["ddpprobe/verdict"].startswith("page: step 1, rank 0: nonfinite: ")


def test_pages_are_counted_from_the_first_one_that_the_daemon_tells(tmp_path: Path) -> None:
    notes, heard = Notes(), []
    fit, net = Fit({"every": 1, "daemon": "none", "on_anomaly": heard.append}), nn.Linear(4, 1)
    fit.begin(net, tmp_path, 0, lambda: [notes])
    train(net, 3)
    before = len(notes.rows)  # a record is sent in one of the next steps
    fit.probe._order_handler._on_anomaly(PAGE)  # as an order of the head's would
    train(net, 1)
    fit.end()
    counted = [row.get("ddpprobe/pages") for _, row in notes.rows]
    assert 0 < before < 4
    assert counted == [None] * before + [1.0] * (4 - before)
    assert heard == [PAGE]  # and the user's own function, too


def test_with_on_anomaly_stop_the_framework_is_asked_and_the_page_is_counted(
    tmp_path: Path,
) -> None:
    fit = Fit({"every": 1, "daemon": "none", "on_anomaly": "stop"})
    fit.begin(nn.Linear(4, 1), tmp_path, 0, lambda: [Notes()])
    fit.probe._order_handler._on_anomaly(PAGE)
    assert fit.stopped_for is PAGE
    fit.end()


def test_what_is_no_answer_to_an_anomaly_is_left_to_install() -> None:
    link = LoggerLink(lambda: [Notes()])
    assert link.counting("stop") == "stop"
    assert link.counting("perhaps") == "perhaps"
    assert LoggerLink(None).counting("record") == "record"
    assert callable(link.counting("record"))


def test_a_logger_that_fails_is_left_alone_and_the_others_go_on(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    monkeypatch.setenv("DDPPROBE_STRICT", "0")
    broken, notes = Broken(), Notes()
    _, run_dir = fitted(tmp_path, broken, notes)
    assert broken.calls == 1
    assert [step for step, _ in notes.rows] == [0, 1, 2]
    assert "telling Broken failed and is contained" in caplog.text
    assert ddpprobe.open(run_dir).info()["complete"]


def test_loggers_that_cannot_be_had_do_not_end_the_training(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    monkeypatch.setenv("DDPPROBE_STRICT", "0")

    def sinks() -> list[Any]:
        raise RuntimeError("no account")

    fit, net = Fit({"every": 1, "daemon": "none"}), nn.Linear(4, 1)
    fit.begin(net, tmp_path, 0, sinks)
    assert len(train(net)) == 3
    fit.end()
    assert "no account" in caplog.text


def test_a_probe_that_is_switched_off_tells_nobody(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DDPPROBE_DISABLE", "1")
    notes = Notes()
    fit, net = Fit({}), nn.Linear(4, 1)
    fit.begin(net, tmp_path, 0, lambda: [notes])
    train(net)
    fit.end()
    assert (notes.rows, notes.kept) == ([], {})


def test_a_norm_that_is_not_finite_is_told_as_such(tmp_path: Path) -> None:
    notes = Notes()
    fitted(tmp_path, notes, bad_at=1)
    assert [str(row["ddpprobe/grad_norm"]) for _, row in notes.rows[1:]] == ["nan", "nan"]


@pytest.mark.parametrize(
    ("placement", "known"), [("replicated", True), ("sharded", False), ("local", False)]
)
def test_of_gradients_that_other_ranks_hold_a_part_of_no_norm_is_known(placement, known) -> None:
    site = Site("x.weight", "grad", placement=placement)
    of_one = replace(record(0, 1, n=1), sites=(site,))
    assert ("grad_norm" in known_numbers(of_one, 2, math.nan)) is known
    assert "grad_norm" in known_numbers(of_one, 1, math.nan)
    assert known_numbers(of_one, 2, 0.25)["overhead_ratio"] == 0.25


def test_nothing_can_be_told_of_a_probe_without_a_run(tmp_path: Path) -> None:
    probe = ddpprobe.install(nn.Linear(1, 1), run_dir=tmp_path / "run", daemon="none")
    probe.close()
    with pytest.raises(ddpprobe.InstallError, match="while this probe has a run_dir"):
        probe.listen(LoggerLink(None))


# ---- clients


def test_wandb_gets_rows_over_a_step_of_our_own() -> None:
    defined: list[Any] = []
    rows: list[Any] = []
    run = of_package(
        "wandb", define_metric=lambda _, *a, **k: defined.append((*a, *k.values())),
        log=lambda _, row, *, commit: rows.append((row, commit)),
        summary={},
    )  # fmt: skip
    sink = sink_of(run, commit=True)
    sink.numbers({"a": 1.0}, 7)
    sink.facts({"b": "c"})
    assert defined == [("ddpprobe/step", True), ("ddpprobe/*", "ddpprobe/step")]
    assert rows == [({"a": 1.0, "ddpprobe/step": 7}, True)]
    assert run.summary == {"b": "c"}


def test_mlflow_gets_metrics_in_its_own_thread_and_tags(monkeypatch) -> None:
    batches: list[Any] = []
    tags: dict[Any, Any] = {}
    client = of_package(
        "mlflow", log_batch=lambda _, run_id, **k: batches.append((run_id, k)),
        set_tag=lambda _, *tag: tags.update({tag[:2]: tag[2]}),
    )  # fmt: skip
    entities = types.SimpleNamespace(Metric=lambda name, value, _, step: (name, value, step))
    package = types.SimpleNamespace(entities=entities, MlflowClient=lambda: client)
    monkeypatch.setitem(sys.modules, "mlflow", package)
    active = of_package("mlflow", info=types.SimpleNamespace(run_id="r"))
    for sink in (sink_of(active), sink_of(client, run_id="r")):
        sink.numbers({"a": 1.0}, 7)
        sink.facts({"b": "c"})
        assert batches.pop() == ("r", {"metrics": [("a", 1.0, 7)], "synchronous": False})
        assert tags.pop(("r", "b")) == "c"
    assert sink_of(client) is None


def test_tensorboard_gets_scalars_and_texts() -> None:
    writer = Writer()
    sink = sink_of(writer)
    sink.numbers({"a": 1.0}, 7)
    sink.facts({"b": "c"})
    assert writer.said == [("a", 1.0, 7), ("b", "c"), ("flush",)]


def test_a_loop_of_ones_own_attaches_clients(tmp_path: Path) -> None:
    writer, net = Writer(), nn.Linear(4, 1)
    probe = ddpprobe.install(net, run_dir=tmp_path / "run", every=1, daemon="none")
    with pytest.raises(TypeError, match=r"attach\(\) takes a wandb.Run, .* got str"):
        attach(probe, "wandb")
    attach(probe, writer)
    train(net)
    probe.close()
    names = [said[0] for said in writer.said]
    assert names.count("ddpprobe/grad_norm") == 3
    assert ("ddpprobe/verdict", "no anomalies in 3 sampled steps") in writer.said


# ---- the verdict


def test_of_a_run_that_goes_on_nothing_is_decided(tmp_path: Path) -> None:
    net = nn.Linear(4, 1)
    probe = ddpprobe.install(net, run_dir=tmp_path / "run", every=1, daemon="none")
    train(net)
    said = verdict.verdict(str(tmp_path / "run"), seconds=5.0)
    probe.close()
    assert said.startswith("undecided: ")
    assert said.endswith(f"see ddpprobe anomalies {tmp_path / 'run'}")


def test_of_what_cannot_be_read_nothing_is_decided(tmp_path: Path) -> None:
    assert verdict.verdict(str(tmp_path), seconds=3.0).startswith(
        "undecided: the run could not be read"
    )
