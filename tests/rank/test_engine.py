"""A model that an engine trains: its steps and its reduced gradients are those the engine tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ddpprobe
from ddpprobe.errors import InstallError
from ddpprobe.probe import install_driven
from ddpprobe.rank.topology.engine import EngineGradient
from ddpprobe.records.events import FuseEvent
from ddpprobe.records.step import derive

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
MICROS = 2


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


class Partitioned:
    """As ZeRO-2 does: `.grad` is gone after each backward, and the optimizer has a flat copy."""

    wrapper = "zero2"

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        flat = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        self._flat = flat.requires_grad_()
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD([self._flat], lr=0.1)
        self._sums = [torch.zeros_like(p) for p in self._parameters]
        self._ready: Callable[[], object] = lambda: None
        self._over: Callable[[bool], object] = lambda _: None
        self._act: Callable[[], object] = lambda: None

    def gradients(self) -> Iterator[EngineGradient]:
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            yield EngineGradient(parameter, total.view(-1), 0)

    def listen(self, ready, over, act) -> None:
        self._ready, self._over, self._act = ready, over, act

    def mute(self) -> None:
        self.__init__(nn.ParameterList(self._parameters))

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            total.add_(parameter.grad)
            parameter.grad = None

    def step(self, *, overflow: bool = False) -> None:
        self._ready()
        self._flat.grad = torch.cat([total.reshape(-1) for total in self._sums]).clamp(-1, 1)
        if not overflow:
            self.optimizer.step()
            with torch.no_grad():
                for parameter, new in zip(
                    self._parameters,
                    self._flat.split([p.numel() for p in self._parameters]), strict=True,
                ):  # fmt: skip
                    parameter.copy_(new.view_as(parameter))
        for total in self._sums:
            total.zero_()
        self._over(overflow)
        self._act()


def train(engine: Partitioned, model: nn.Module, steps: int, *, overflow: int = -1) -> None:
    for step in range(steps):
        for _ in range(MICROS):
            engine.backward(model(X).sum())
        engine.step(overflow=step == overflow)


def test_a_step_is_the_engines_however_often_it_takes_the_gradients_away(
    tmp_path: Path, records_of
) -> None:
    model = net()
    engine = Partitioned(model)
    with install_driven(model, engine, run_dir=tmp_path / "r", every=1, daemon="none"):
        train(engine, model, 3, overflow=1)
    train(engine, model, 1)
    records = records_of(tmp_path / "r")
    assert [(r.step, r.skipped, r.partial) for r in records] == [
        (0, False, False), (1, True, False), (2, False, False),
    ]  # fmt: skip
    assert {r.scalars[0]["micro_batches"] for r in records} == {MICROS}
    assert {r.scalars[0]["lr"] for r in records} == {0.1}
    assert all("unreduced" not in r.scalars[0] for r in records)


def test_a_step_of_one_micro_batch_is_the_engines_too(tmp_path: Path, records_of) -> None:
    model = net()
    engine = Partitioned(model)
    with install_driven(model, engine, run_dir=tmp_path / "r", every=1, daemon="none"):
        for _ in range(3):
            engine.backward(model(X).sum())
            engine.step()
    records = records_of(tmp_path / "r")
    assert [(r.step, r.partial) for r in records] == [(0, False), (1, False), (2, False)]
    assert {r.scalars[0]["micro_batches"] for r in records} == {1.0}


def test_the_reduced_gradients_are_this_ranks_parts_before_they_are_clipped(
    tmp_path: Path, records_of
) -> None:
    model = net()
    engine = Partitioned(model)
    with install_driven(model, engine, run_dir=tmp_path / "r", every=1, daemon="none"):
        train(engine, model, 1)
    (record,) = records_of(tmp_path / "r")
    reference = net()
    (MICROS * reference(X).sum()).backward()
    expected = {n: p.grad.norm().item() for n, p in reference.named_parameters()}
    norms = derive("norm", record.counts, record.values)
    seen = {s.fqn: norms[i] for i, s in enumerate(record.sites) if s.kind == "grad"}
    assert seen == pytest.approx(expected, rel=1e-5)
    assert {s.placement for s in record.sites if s.kind == "grad"} == {"sharded"}


def test_a_captured_gradient_is_the_reduced_one(tmp_path: Path) -> None:
    model = net()
    engine = Partitioned(model)
    with install_driven(model, engine, run_dir=tmp_path / "r", every=1, daemon="none", capture="0"):
        train(engine, model, 1)
    reference = net()
    (MICROS * reference(X).sum()).backward()
    captured = ddpprobe.open(tmp_path / "r").tensor("0.weight:grad", 0)[...]
    assert np.allclose(captured, reference[0].weight.grad)


def test_a_model_whose_gradients_are_taken_away_is_refused_without_its_engine(
    tmp_path: Path,
) -> None:
    model = net()
    model[0].weight._hp_mapping = None  # as DeepSpeed leaves it
    with pytest.raises(InstallError, match=r"'0.weight' is trained .* write from ddpprobe"):
        ddpprobe.install(model, run_dir=tmp_path / "r", daemon="none")


def test_a_model_that_an_engine_takes_behind_install_is_told_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DDPPROBE_STRICT")
    model = net()
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        model[0].weight._hp_mapping = None
        model(X)
    happened = ddpprobe.open(tmp_path / "r")._merged_reader.events(0)
    errors = [e.what.error for e in happened if isinstance(e.what, FuseEvent)]
    assert any("trained by an engine of DeepSpeed" in error for error in errors)
