"""The loss of a step that is not sampled comes with the next record, as true as any other."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.rank.unsampled_losses import MOST, UnsampledLosses
from ddpprobe.records.every_loss import losses_of
from ddpprobe.records.step import StepRecord

from .. import far
from .test_held_record import net, train


class Returns(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def told(records: list[StepRecord]) -> dict[int, float]:
    """Loss by step, each told once."""
    found = [(step, by_rank[0]) for r in records for step, by_rank in losses_of(r)]
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.fixture(params=["near", "far"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "far":
        far.pretend(monkeypatch)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("place", ["forward", "zero_grad"])
def test_the_loss_of_every_step_is_told_up_to_the_last_sampled_one(
    place: str, tmp_path: Path, records_of
) -> None:
    model = net()
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=10, daemon="none") as probe:
        losses = train(probe, model, place, 25)
    records = records_of(tmp_path / "r")
    assert [r.step for r in records] == [0, 10, 20]
    assert told(records) == {step: losses[step] for step in range(21)}


@pytest.mark.usefixtures("device")
def test_losses_of_micro_batches_are_averaged_and_a_logged_one_replaces_them(
    tmp_path: Path, records_of
) -> None:
    model, true = Returns(), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=4, daemon="none") as probe:
        for step in range(5):
            losses = [model(torch.randn(3, 4)) for _ in range(3)]
            torch.stack(losses).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            true[step] = sum(x.item() for x in losses) / 3
            if step == 2:
                probe.log(loss=5.0)
                true[step] = 5.0
            with torch.no_grad():
                model(torch.randn(3, 4))
            if step == 3:
                probe.log(loss=-1.0)  # of the evaluation
    assert told(records_of(tmp_path / "r")) == pytest.approx(true, rel=1e-12)


@pytest.mark.usefixtures("device")
def test_a_long_interval_takes_records_for_the_losses_alone(tmp_path: Path, records_of) -> None:
    model = net()
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=150, daemon="none") as probe:
        losses = train(probe, model, "backward", 151)
    records = records_of(tmp_path / "r")
    assert [(r.step, r.sampled) for r in records] == [
        (0, True), (64, False), (128, False), (150, True),
    ]  # fmt: skip
    assert told(records) == losses
    assert all(len(r.sites) == 0 for r in records if not r.sampled)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("bad_at", [2, 4])
def test_a_loss_that_is_not_finite_behind_the_last_record_is_told_at_the_end(
    bad_at: int, tmp_path: Path, records_of
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=10, daemon="none") as probe:
        for step in range(5):
            loss = model(torch.randn(3, 4)).square().mean()
            loss.backward()
            probe.log(loss=loss + (math.inf if step == bad_at else 0.0))
            if step < 4:  # the last one never ends
                optimizer.step()
    (_, last) = records_of(tmp_path / "r")
    assert (last.step, last.sampled, last.partial) == (4, False, True)
    assert [s for s, x in told([last]).items() if not math.isfinite(x)] == [bad_at]
    (found,) = [a for a in ddpprobe.open(tmp_path / "r").anomalies() if a.detector == "nonfinite"]
    assert (found.level, found.step, found.rank, found.phase) == ("page", bad_at, 0, "forward")
    assert "loss" in found.message


@pytest.mark.usefixtures("device")
def test_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    def weights(run: Path | None) -> torch.Tensor:
        torch.manual_seed(3)
        model = net()
        if run is None:
            train(_Nothing(), model, "step", 12)  # type: ignore[arg-type]
        else:
            with ddpprobe.install(model, run_dir=run, every=10, daemon="none") as probe:
                train(probe, model, "step", 12)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(None), weights(tmp_path / "r"))


class _Nothing:
    def log(self, **_: object) -> None:
        """Stand in for a probe."""


class _Rows:
    """Takes scalars as the rows of a step do."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def add_scalars(self, names: list[str], values: torch.Tensor) -> None:
        self.found |= dict(zip(names, values.tolist(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_losses_of_a_device_share_one_piece_of_its_memory_and_none_replaces_another(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    far.pretend(monkeypatch)
    losses = UnsampledLosses()
    for turn in range(3):
        for step in range(MOST + 3):
            losses.add(step, torch.tensor(float(turn * 1000 + step), dtype=dtype), logged=True)
        assert len({loss.cell.untyped_storage().data_ptr() for loss in losses._kept}) == 1
        rows = _Rows()
        assert losses.take(MOST + 3, rows) == {}
        assert sorted(rows.found.values()) == [turn * 1000.0 + n for n in range(3, MOST + 3)]
        assert rows.found["loss@-1"] == turn * 1000 + MOST + 2


def test_only_what_is_not_finite_in_its_own_precision_is_bad(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for near in (True, False):
        if not near:
            far.pretend(monkeypatch)
        losses = UnsampledLosses()
        losses.add(0, torch.tensor(1e300, dtype=torch.float64), logged=False)
        assert not losses.has_bad()
        losses.add(1, torch.tensor(math.nan), logged=False)
        assert losses.has_bad()
        losses = UnsampledLosses()
        for value in (1.0, 2.0, 6.0):
            losses.add(4, torch.tensor(value), logged=False)
        losses.add(4, torch.ones(2), logged=False)  # no single number
        rows = _Rows()
        assert (losses.take(5, rows) | rows.found) == {"loss@-1": 3.0}


def test_the_mean_of_two_micro_batches_on_a_device_is_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    far.pretend(monkeypatch)
    losses, rows = UnsampledLosses(), _Rows()
    for value in (1.0, 4.0):
        losses.add(4, torch.tensor(value), logged=False)
    assert (losses.take(5, rows) | rows.found) == {"loss@-1": 2.5}


def test_a_bad_number_of_the_hosts_is_not_forgotten_beside_one_on_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    far.pretend(monkeypatch)
    losses = UnsampledLosses()
    losses.add(0, math.nan, logged=True)
    losses.add(1, torch.tensor(1.0), logged=False)
    assert losses.has_bad()


def test_losses_of_several_devices_are_told_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    far.pretend(monkeypatch)
    told: list[tuple[list[str], torch.device]] = []

    class Rows:
        def add_scalars(self, names: list[str], values: torch.Tensor) -> None:
            told.append((names, values.device))

    losses = UnsampledLosses()
    for step, device in enumerate(("cpu", "meta", "cpu")):
        losses.add(step, torch.zeros((), device=device), logged=True)
    assert losses.take(3, Rows()) == {}
    assert told == [
        (["loss@-3", "loss@-1"], torch.device("cpu")), (["loss@-2"], torch.device("meta")),
    ]  # fmt: skip
