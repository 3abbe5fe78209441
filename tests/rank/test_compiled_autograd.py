"""Compiled autograd takes the None of a tensor's hook for its gradient: ours hand it back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import ddpprobe
from ddpprobe.testing import state_hash

STEPS = 3
compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def train(model: nn.Module, trained: nn.Module, backward: Callable[[Tensor], None]) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        backward(trained(torch.randn(8, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return state_hash(model, optimizer)


@pytest.mark.parametrize(
    ("fullgraph", "forward_is_compiled"), [(False, False), (True, False), (False, True)]
)
def test_a_backward_that_is_compiled_ends_with_the_same_bits(
    fullgraph: bool, forward_is_compiled: bool, tmp_path: Path, records_of
) -> None:
    compiled = functools.partial(torch.compile, backend="aot_eager")

    def run(*, probed: bool) -> str:
        torch._dynamo.reset()
        model = net()
        trained = compiled(model) if forward_is_compiled else model
        torch.manual_seed(7)
        with contextlib.ExitStack() as stack:
            if probed:
                options = {"run_dir": tmp_path / "r", "every": 2, "daemon": "none"}
                stack.enter_context(ddpprobe.install(trained, **options))
            stack.enter_context(compiled_autograd._enable(compiled(fullgraph=fullgraph)))
            return train(model, trained, lambda loss: loss.backward())

    bare = run(probed=False)
    assert run(probed=True) == bare
    records = [r for r in records_of(tmp_path / "r") if r.sampled]
    assert [r.step for r in records] == [0, 2]
    if not fullgraph:
        kinds = {site.kind for site in records[0].sites}
        assert kinds >= {"output", "grad_output", "grad_local", "grad"}


@torch._dynamo.config.patch(compiled_autograd=True)
def test_a_step_that_is_compiled_with_its_backward_ends_with_the_same_bits(tmp_path: Path) -> None:
    def run(*, probed: bool) -> str:
        torch._dynamo.reset()
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(7)

        @torch.compile(backend="aot_eager")
        def forward_and_backward(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss

        with contextlib.ExitStack() as stack:
            if probed:
                options = {"run_dir": tmp_path / "r", "every": 2, "daemon": "none"}
                stack.enter_context(ddpprobe.install(model, **options))
            for _ in range(STEPS):
                forward_and_backward(torch.randn(8, 8))
                optimizer.step()
                optimizer.zero_grad()
        return state_hash(model, optimizer)

    bare = run(probed=False)
    assert run(probed=True) == bare
