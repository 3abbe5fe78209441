"""A model that the loop freezes for a pass, and then trains: an attack on its inputs, say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.records.step import TRAINABLE

STEPS = 12


def train(run_dir: Path, *, frozen: bool, stops: int = STEPS) -> ddpprobe.Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with ddpprobe.install(model, run_dir=run_dir, every=1, daemon="none"):
        for step in range(STEPS):
            if step == stops:
                optimizer.param_groups[0]["lr"] = 0.0
            x = torch.randn(6, 4, requires_grad=True)
            if frozen:
                model.requires_grad_(False)
                torch.autograd.grad(model(x).sum(), x)
                model.requires_grad_(True)
            optimizer.zero_grad()
            model(x.detach()).square().mean().backward()
            optimizer.step()
    return ddpprobe.open(run_dir)


def test_a_step_whose_first_pass_was_frozen_has_the_rows_of_any_other_step(tmp_path: Path) -> None:
    frozen, plain = (
        train(tmp_path / name, frozen=name == "frozen") for name in ("frozen", "plain")
    )
    for site in ("0.weight:param", "0.weight:update", "0.weight:optim_state"):
        ours, theirs = frozen.series(site, "rms"), plain.series(site, "rms")
        assert ours.steps.tolist() == theirs.steps.tolist() == list(range(STEPS))
        assert ours.values.ravel().tolist() == pytest.approx(theirs.values.ravel().tolist())
    assert set(frozen.scalars(TRAINABLE).values.ravel().tolist()) == {4.0}
    assert [a.detector for a in frozen.anomalies()] == [a.detector for a in plain.anomalies()]
