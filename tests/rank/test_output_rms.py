"""What a rank says of all its outputs in one number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.records.step import derive


def test_it_is_the_geometric_mean_of_the_outputs_rms(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path / "run", every=1, daemon="none"):
        for size in (1.0, 0.0):
            (model(size * torch.ones(3, 4)) * size).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    records = list(ddpprobe.open(tmp_path / "run").records())
    assert len(records) == 2
    for record in records:
        outputs = [i for i, s in enumerate(record.sites) if s.kind == "output"]
        rms = derive("rms", record.counts[outputs], record.values[outputs])
        assert len(rms) == 4  # with the root's
        told = record.scalars[0]["output_rms"]
        np.testing.assert_allclose(told, np.exp(np.log(rms).mean()), rtol=1e-12)


def test_a_layer_of_zeros_moves_it_far(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ddpprobe.install(model, run_dir=tmp_path / "run", every=1, daemon="none"):
        for size in (1.0, 0.0):
            model(size * torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    plain, zeros = ddpprobe.open(tmp_path / "run").records()
    assert zeros.scalars[0]["output_rms"] < 1e-6 * plain.scalars[0]["output_rms"]


def test_the_mean_slope_of_an_activation_follows_from_the_row_of_its_output(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid())
    model[2].weight.data.mul_(30)  # saturated
    given: dict[int, torch.Tensor] = {}
    for place in (1, 3):
        model[place].register_forward_hook(
            lambda _, args, __, place=place: given.update({place: args[0].detach().double()})
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        model(torch.randn(32, 4)).sum().backward()
        optimizer.step()
    data = ddpprobe.open(tmp_path / "r").to_xarray().isel(step=0)
    rows = {str(site).partition(":output")[0]: i for i, site in enumerate(data["site"].values)
            if str(site).endswith(":output")}  # fmt: skip
    rms, mean = data.rms.values, data["mean"].values

    def slope(place: int) -> float:
        x = given[place].requires_grad_()
        return float(torch.autograd.grad(model[place](x).sum(), x)[0].mean())

    assert 1 - rms[rows["1"]] ** 2 == pytest.approx(slope(1), rel=1e-5)
    assert mean[rows["3"]] - rms[rows["3"]] ** 2 == pytest.approx(slope(3), rel=1e-4)
    assert slope(3) < 0.1 < slope(1)


def test_beside_a_nan_there_is_none(tmp_path: Path) -> None:
    """What is left of an output, or of the outputs, is not comparable with other steps."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ddpprobe.install(model, run_dir=tmp_path / "run", every=1, daemon="none"):
        for size in (1.0, float("nan"), 1.0):
            x = torch.ones(3, 4)
            x[0] *= size
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            with torch.no_grad():
                for p in model.parameters():
                    p.fill_(0.5)
    told = ["output_rms" in r.scalars[0] for r in ddpprobe.open(tmp_path / "run").records()]
    assert told == [True, False, True]
