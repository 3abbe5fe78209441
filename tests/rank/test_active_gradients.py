"""What a rank says of how many of its parameters have a gradient."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import ddpprobe
from ddpprobe.records.step import ACTIVE


def test_gradients_that_are_none_or_zero_are_not_counted(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight, bias = model[1].weight, model[1].bias
    zeroed: set[int] = set()
    for parameter in (weight, bias):
        parameter.register_hook(lambda g, p=parameter: g * 0 if id(p) in zeroed else g)
    with ddpprobe.install(model, run_dir=tmp_path / "run", every=1, daemon="none"):
        for number in range(4):
            zeroed = set() if number == 0 else {id(bias)}
            weight.requires_grad_(number < 2)
            out = model(torch.randn(3, 4)).sum()
            (out * torch.nan if number == 3 else out).backward()
            optimizer.step()
            optimizer.zero_grad()
    told = [r.scalars[0][ACTIVE] for r in ddpprobe.open(tmp_path / "run").records()]
    assert told == [4.0, 3.0, 2.0, 3.0]
