"""What the report says of a guilty module of which the rank kept the call."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import ddpprobe
from ddpprobe.records.step import Anomaly
from ddpprobe.report.captured_cause import CapturedCause, look

CAUSE = Anomaly(
    "nonfinite", "page", 2, 0, 0, "bad", "output", "forward", first_cause=True, message="",
    values={}, sampled=True,
)  # fmt: skip


class Bad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + (math.nan if self.calls == 3 else shift)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.bad = nn.Linear(2, 2), Bad()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bad(self.first(x), shift=torch.ones(2))


def test_inputs_of_the_module_where_a_nan_began_were_looked_at(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path / "run", every=1, daemon="none"):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).mean().backward()
            optimizer.step()
    run = ddpprobe.open(tmp_path / "run")
    captures = run.captures()
    assert look(run, CAUSE, captures) == CapturedCause("bad", 2, ())
    assert look(run, replace(CAUSE, kind="grad_input"), captures) == CapturedCause("bad", 0, ())
    assert look(run, replace(CAUSE, rank=None), captures) == CapturedCause("bad", 0, ())
    assert look(run, replace(CAUSE, module="first"), captures) is None
    assert look(run, replace(CAUSE, step=1), captures) is None
