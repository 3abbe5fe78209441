"""Under a GradScaler gradients are told unscaled, and every skipped step is an event."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.rank import torch_private
from ddpprobe.records.step import VALUES

SUM_SQ = VALUES.index("sum_sq")
GRADIENTS = ("grad_output", "grad_local", "grad")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x))).square().mean()


def train(run: Path | None, scaler, *, steps: int, every: int = 1, fused: bool = False,
          micros: int = 1, unscale: bool = False, log: bool = False,
          late_zero: bool = False) -> nn.Module:  # fmt: skip
    gc.collect()  # scalers of other tests
    torch.manual_seed(0)
    model = Net()
    options = {"fused": True} if fused else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    probe = ddpprobe.install(model, run_dir=run, every=every, daemon="none") if run else None
    for _ in range(steps):
        for _ in range(micros):
            loss = model(30 * torch.randn(5, 4))
            if log:
                probe.log(loss_scale=scaler.get_scale())
            if late_zero:
                optimizer.zero_grad()
            scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if not late_zero:
            optimizer.zero_grad()
    if probe:
        probe.close()
    return model


def gradients(record) -> dict[str, np.ndarray]:
    return {str(s): record.values[i] for i, s in enumerate(record.sites) if s.kind in GRADIENTS}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("micros", "unscale"), [(1, False), (2, True)])
def test_gradients_are_told_unscaled_with_the_scale_beside_them(
    tmp_path: Path, records_of, fused: bool, micros: int, unscale: bool
) -> None:
    kind = torch.amp.GradScaler
    how = {"steps": 3, "fused": fused, "micros": micros, "unscale": unscale}
    train(tmp_path / "plain", kind("cpu", enabled=False), **how)
    train(tmp_path / "scaled", kind("cpu", init_scale=2.0**10), **how)
    plain, scaled = records_of(tmp_path / "plain"), records_of(tmp_path / "scaled")
    assert len(plain) == len(scaled) == 3
    for a, b in zip(plain, scaled, strict=True):
        assert "loss_scale" not in a.scalars[0]
        assert b.scalars[0]["loss_scale"] == 2.0**10
        wanted, got = gradients(a), gradients(b)
        assert wanted.keys() == got.keys()
        for site, values in wanted.items():
            assert got[site] == pytest.approx(values, rel=1e-5, abs=1e-12), site
        for norm in ("grad_norm_local", "grad_norm"):
            assert b.scalars[0][norm] == pytest.approx(a.scalars[0][norm], rel=1e-5)


@pytest.mark.parametrize("late_zero", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_every_skipped_step_is_a_record_sampled_or_not(
    tmp_path: Path, records_of, fused: bool, late_zero: bool
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=10_000)
    train(tmp_path / "r", scaler, steps=11, every=4, fused=fused, late_zero=late_zero)
    records = records_of(tmp_path / "r")
    skipped = [r for r in records if r.skipped and not r.partial]
    taken = [r.step for r in records if not r.skipped and not r.partial]
    steps = sorted({r.step for r in skipped})
    assert steps == list(range(len(steps)))
    assert len(steps) >= 3
    assert set(taken) == {s for s in range(len(steps), 11) if s % 4 == 0}
    for record in skipped:
        assert record.sampled == (record.step % 4 == 0)
        assert record.scalars[0]["loss_scale"] == 2.0 ** (127 - record.step)


def test_of_two_scalers_the_one_that_steps_our_optimizer_is_taken(
    tmp_path: Path, records_of, caplog
) -> None:
    other = torch.amp.GradScaler("cpu", init_scale=8.0)
    other.scale(torch.ones(1))
    with caplog.at_level(logging.WARNING, "ddpprobe"):
        train(tmp_path / "r", torch.amp.GradScaler("cpu", init_scale=4.0), steps=3)
    (said,) = [r.getMessage() for r in caplog.records if "several enabled" in r.getMessage()]
    assert "until it steps an optimizer of this model" in said
    scales = [r.scalars[0].get("loss_scale") for r in records_of(tmp_path / "r")]
    assert scales == [None, 4.0, 4.0]  # before its first step it is not known
    del other  # a lone one would be taken for that of the run below
    train(tmp_path / "plain", torch.amp.GradScaler("cpu", enabled=False), steps=3)
    plain, scaled = (records_of(tmp_path / name)[1] for name in ("plain", "r"))
    for site, values in gradients(plain).items():
        assert gradients(scaled)[site] == pytest.approx(values, rel=1e-5), site


def test_a_scaler_that_steps_only_another_model_is_not_that_of_this_one(
    tmp_path: Path, records_of
) -> None:
    gc.collect()
    torch.manual_seed(0)
    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=1e-3) for m in (model, other))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    norms = []
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        for _ in range(3):
            scaler.scale(other(torch.ones(2, 4)).sum()).backward()
            scaler.step(theirs)
            scaler.update()
            model(torch.ones(2, 4)).sum().backward()
            norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
            ours.step()
            ours.zero_grad()
            theirs.zero_grad()
    told = [r.scalars[0] for r in records_of(tmp_path / "r")]
    assert ["loss_scale" in scalars for scalars in told] == [True, False, False]
    assert [s["grad_norm"] for s in told[1:]] == pytest.approx(norms[1:])


def test_a_scale_told_by_the_user_is_taken(tmp_path: Path, records_of, caplog) -> None:
    other = torch.amp.GradScaler("cpu", init_scale=8.0)
    other.scale(torch.ones(1))
    how = {"steps": 2}
    train(tmp_path / "scaled", torch.amp.GradScaler("cpu", init_scale=4.0), log=True, **how)
    del other
    train(tmp_path / "plain", torch.amp.GradScaler("cpu", enabled=False), **how)
    a, b = records_of(tmp_path / "plain")[0], records_of(tmp_path / "scaled")[0]
    assert caplog.records == []
    assert b.scalars[0]["loss_scale"] == 4.0
    for site, values in gradients(a).items():
        assert gradients(b)[site] == pytest.approx(values, rel=1e-5), site


def test_a_scaler_lives_no_longer_because_of_the_probe(tmp_path: Path) -> None:
    gc.collect()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    train(tmp_path / "r", scaler, steps=2)
    del scaler
    assert torch_private.loss_scalers() == []


@pytest.mark.parametrize("every", [1, 10])
def test_a_last_step_that_the_scaler_skipped_is_a_skipped_step_and_no_page(
    tmp_path: Path, records_of, every: int
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=10_000)
    train(tmp_path / "r", scaler, steps=2, every=every, late_zero=True)
    last = records_of(tmp_path / "r")[-1]
    assert (last.step, last.skipped, last.partial) == (1, True, False)
    told = ddpprobe.open(tmp_path / "r").anomalies()
    assert [(a.detector, a.level) for a in told if a.level == "page"] == []


def adversaries(run: Path, scaler, *, steps: int, bad: int = -1, every: int = 1) -> None:
    """Train a critic that is observed, and through it a maker whose gradients it gets as well."""
    gc.collect()
    torch.manual_seed(0)
    critic, maker = Net(), nn.Linear(4, 4)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=1e-3) for m in (critic, maker))
    with ddpprobe.install(critic, run_dir=run, every=every, daemon="none"):
        for step in range(steps):
            for optimizer, x in ((ours, torch.randn(5, 4)), (theirs, maker(torch.randn(5, 4)))):
                ours.zero_grad()
                theirs.zero_grad()
                loss = critic(x)
                if optimizer is theirs and step == bad:
                    loss = loss + torch.sqrt(critic.a.weight.sum() * 0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("every", [1, 10])
def test_nothing_is_said_of_a_scaler_where_there_is_none(
    tmp_path: Path, records_of, every: int
) -> None:
    adversaries(
        tmp_path / "r", torch.amp.GradScaler("cpu", enabled=False), steps=4, bad=2, every=every
    )
    assert not any(r.skipped for r in records_of(tmp_path / "r"))
    told = ddpprobe.open(tmp_path / "r").anomalies()
    assert {(a.level, a.phase) for a in told if a.detector == "nonfinite"} == {("page", "backward")}
    assert not any("GradScaler" in a.message for a in told)


def test_a_step_that_another_models_optimizer_took_is_not_one_that_the_scaler_skipped(
    tmp_path: Path, records_of
) -> None:
    adversaries(tmp_path / "r", torch.amp.GradScaler("cpu", init_scale=4.0), steps=4)
    told = [(r.step, r.skipped) for r in records_of(tmp_path / "r") if not r.partial]
    assert told == [(step, False) for step in range(4)]
