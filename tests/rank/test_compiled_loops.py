"""Loops that torch compiles, or parts of them: what runs of ours runs beside their graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpprobe
from ddpprobe.rank.torch_private import dynamo
from ddpprobe.testing import state_hash

# What torch's compiler imports is deprecated by torch itself.
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS, EVERY = 8, 3

Loop = Callable[[Tensor], Tensor]
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    return (net(x) - x[:, :1]).square().mean()


def optimizer_step(net: nn.Module, optimizer: torch.optim.Optimizer, wrap: Compile) -> Loop:
    """As PyTorch's tutorial on compiled optimizers has it."""

    @wrap
    def step() -> None:
        optimizer.step()

    def loop(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, x)
        loss.backward()
        step()
        return loss

    return loop


def backward(net: nn.Module, optimizer: torch.optim.Optimizer, wrap: Compile) -> Loop:
    back = wrap(lambda loss: loss.backward())

    def loop(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, x)
        back(loss)
        optimizer.step()
        return loss

    return loop


def closure(net: nn.Module, optimizer: torch.optim.Optimizer, wrap: Compile) -> Loop:
    """The step alone is compiled, and calls what is not."""

    def loop(x: Tensor) -> Tensor:
        @torch.compiler.disable
        def loss() -> Tensor:
            optimizer.zero_grad()
            value = loss_of(net, x)
            value.backward()
            return value

        return step(loss)

    @wrap
    def step(closure: Callable[[], Tensor]) -> Tensor:
        return optimizer.step(closure)

    return loop


class Trained:
    """What a run has come to: bits, graphs that torch made, and what the probe recorded."""

    def __init__(
        self, run_dir: Path | None, loop: Callable[..., Loop], *, compiled: bool = True,
        kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **how: object,
    ) -> None:  # fmt: skip
        torch._dynamo.reset()
        breaks = torch._dynamo.utils.counters["graph_break"]
        breaks.clear()
        self.graphs: list[str] = []

        def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
            self.graphs.append(str(graph.graph))
            return graph.forward

        def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(fn, backend=backend, **how) if compiled else fn

        net = model()
        probe = (
            ddpprobe.install(net, run_dir=run_dir, every=EVERY, daemon="none") if run_dir else None
        )
        optimizer = kind(net.parameters(), lr=0.01)
        train = loop(net, optimizer, wrap)
        for _ in range(STEPS):
            loss = train(torch.randn(16, 4))
            if probe is not None:
                probe.log(loss=loss)
        self.bits = state_hash(net, optimizer)
        self.breaks = sum(breaks.values())
        if probe is not None:
            probe.close()
            records = list(ddpprobe.open(run_dir).records())
            self.steps = [record.step for record in records]
            self.rows = [{(s.fqn, s.kind) for s in record.sites} for record in records]
            self.scalars = [without_times(record.scalars[0]) for record in records]


def without_times(scalars: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in scalars.items() if "seconds" not in name}


@pytest.mark.parametrize("loop", [optimizer_step, backward, closure])
def test_a_compiled_part_of_the_loop_is_recorded_as_the_same_in_python(
    loop: Callable[..., Loop], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    alone = Trained(None, loop)
    capfd.readouterr()
    probed = Trained(tmp_path / "compiled", loop)
    said = capfd.readouterr().err
    plain = Trained(tmp_path / "python", loop, compiled=False)
    assert probed.bits == alone.bits
    assert probed.graphs == alone.graphs
    assert probed.breaks <= alone.breaks + 2  # a call of ours in front of the optimizer, one after
    assert "ddpprobe" not in said
    assert "recompile" not in said
    assert probed.steps == plain.steps == [0, 3, 6]
    assert probed.rows == plain.rows
    for ours, theirs in zip(probed.scalars, plain.scalars, strict=True):  # Adam rounds otherwise
        assert ours == pytest.approx(theirs, rel=1e-4)


class Plain(torch.optim.Optimizer):
    """None of torch's own, whose `step` breaks every graph off itself."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: None = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


@pytest.fixture
def said_anew() -> Iterator[None]:
    """What is said once in a process is said to this test, and not to those after it."""
    dynamo._say_unheard.cache_clear()
    yield
    dynamo._say_unheard.cache_clear()


@pytest.mark.usefixtures("said_anew")
def test_an_optimizer_in_a_graph_that_may_not_break_trains_on_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = Trained(None, optimizer_step, kind=Plain, fullgraph=True)
    probed = Trained(tmp_path / "r", optimizer_step, kind=Plain, fullgraph=True)
    assert probed.bits == alone.bits
    assert len(probed.graphs) == len(alone.graphs) == 1
    assert len([r for r in caplog.records if r.name == "ddpprobe"]) == 1
    assert probed.steps == [0, 3, 6]  # told by the gradients that the loop throws away


def test_numbers_are_logged_from_within_a_compiled_loop(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    probe = ddpprobe.install(net, run_dir=tmp_path / "r", every=1, daemon="none")

    @torch.compile(backend="eager")
    def told(loss: Tensor) -> None:
        probe.log(twice=loss * 2)

    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_of(net, torch.randn(16, 4))
        loss.backward()
        told(loss.detach())
        optimizer.step()
        losses.append(float(loss.detach()))
    probe.close()
    logged = ddpprobe.open(tmp_path / "r").scalars("twice")
    assert logged.values.ravel().tolist() == pytest.approx([2 * loss for loss in losses])
