"""Where a NaN began is told, or said not to be known: on every step, however the loop goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ddpprobe
from ddpprobe.records import Anomaly

NAN = float("nan")


class Scratched(nn.Module):
    """Returns its child's very tensor, with one element written past autograd's version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.bad = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        if self.bad:
            out.data[0, 0] = NAN
        return out


def train(
    run: Path, model: nn.Module, step: Callable[[int], Tensor | None], steps: int, every: int = 1
) -> list[Anomaly]:
    """Train with `step(i) -> loss`; None: the loop goes on to its next batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ddpprobe.install(model, run_dir=run, every=every, daemon="none"):
        for i in range(steps):
            loss = step(i)
            if loss is None:
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return ddpprobe.open(run).anomalies()


def pages(found: list[Anomaly]) -> list[tuple[int, str, str | None]]:
    return [(a.step, a.phase, a.module) for a in found if a.level == "page"]


def test_damage_between_a_childs_return_and_its_parents_is_the_parents(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Scratched(), nn.Linear(4, 1))

    def step(i: int) -> Tensor:
        model[1].bad = i == 2
        return model(torch.ones(2, 4)).sum()

    found = train(tmp_path / "r", model, step, 3)
    assert pages(found) == [(2, "forward", "1")]


class Poison(torch.autograd.Function):
    """Passes a tensor on, and makes its gradient NaN."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * NAN


class Layers(nn.Module):
    """Linear layers in a chosen order, poisoned behind one of them; a head that may be tied."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 4, bias=False)
        if tied:
            self.head.weight = self.layers[0].weight
        self.order, self.poisoned = [0, 1, 2, 3], ""

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = self._behind(f"layers.{i}", self.layers[i](x))
        x = self._behind("norm", self.norm(x))
        return self._behind("head", self.head(x)).square().mean()

    def _behind(self, name: str, x: Tensor) -> Tensor:
        return Poison.apply(x) if name == self.poisoned else x


def named_backward(
    tmp_path: Path, model: Layers, poisoned: str, order: list[int], wrapped: nn.Module | None = None
) -> str | None:
    """Return which parameter is named for a fault of an unsampled backward, behind a clean one."""

    def step(i: int) -> Tensor:
        model.poisoned, model.order = (poisoned, order) if i == 3 else ("", [0, 1, 2, 3])
        return (wrapped or model)(torch.ones(2, 4))

    found = train(tmp_path / "r", wrapped or model, step, 4, every=10)
    (page,) = [a for a in found if a.level == "page"]
    assert (page.step, page.phase, page.sampled) == (3, "backward", False)
    return page.module


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 3, 1, 0]], ids=["as ever", "another"])
@pytest.mark.parametrize("at", [0, 2])
def test_of_an_unsampled_backward_the_parameter_nearest_to_the_origin_is_named(
    at: int, order: list[int], tmp_path: Path
) -> None:
    named = named_backward(tmp_path, Layers(), f"layers.{order[at]}", order)
    assert named in {f"layers.{order[at]}.{name}" for name in ("weight", "bias")}


@pytest.mark.parametrize(
    ("poisoned", "named"),
    [("head", None), ("norm", None), ("layers.3", "layers.3.bias"), ("layers.1", "layers.1.bias")],
)
def test_nobody_is_named_if_another_use_of_a_shared_parameter_may_be_nearer(
    poisoned: str, named: str | None, tmp_path: Path
) -> None:
    assert named_backward(tmp_path, Layers(tied=True), poisoned, [0, 1, 2, 3]) == named
