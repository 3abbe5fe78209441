"""An optimizer of each parameter steps inside the backward, and lets go of the gradient there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ddpprobe
from ddpprobe.rank.topology.describe import Topology
from ddpprobe.records.step import LEARNING_RATE, USED_NORM, StepRecord


def chain(linears: int) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(linears)])


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded(model: nn.Sequential) -> nn.Sequential:
    for linear in model:
        fully_shard(linear)
    return fully_shard(model)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank, as FSDP2 asks for one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def step_in_backward(model: nn.Module) -> dict[str, list[Tensor]]:
    """Have each parameter stepped as soon as its gradient is there; return what they were."""
    seen: dict[str, list[Tensor]] = {}
    optimizers = {
        name: torch.optim.SGD([parameter], lr=0.01 + index / 1000)
        for index, (name, parameter) in enumerate(model.named_parameters())
    }

    def hook(name: str) -> Callable[[Tensor], None]:
        def step(parameter: Tensor) -> None:
            seen.setdefault(name, []).append(whole(parameter.grad).clone())
            optimizers[name].step()
            optimizers[name].zero_grad()

        return step

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(hook(name))
    return seen


def train(model: nn.Module, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(3, 4)).square().mean().backward()


def l2_of(record: StepRecord) -> dict[str, float]:
    """Return the L2 norm of each gradient that a record has a row of."""
    return {
        site.fqn: math.sqrt(value[-1])
        for site, value, count in zip(record.sites, record.values, record.counts, strict=True)
        if site.kind == "grad" and count[-1]
    }


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("wrap", [None, sharded])
@pytest.mark.parametrize("linears", [2, 8])
def test_each_gradient_is_told_as_its_optimizer_took_it(
    linears: int, wrap: Callable[[nn.Sequential], nn.Sequential] | None, tmp_path: Path, records_of
) -> None:
    model = chain(linears)
    model = model if wrap is None else wrap(model)
    seen = step_in_backward(model)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        train(model, 3)
    records = records_of(tmp_path / "r")
    assert [r.step for r in records] == [0, 1, 2]
    for record in records:
        want = {name: took[record.step].norm().item() for name, took in seen.items()}
        assert l2_of(record) == pytest.approx(want)
        norm = pytest.approx(math.hypot(*want.values()))
        said = record.scalars[0]
        assert (said["grad_norm"], said["grad_norm_local"], said[USED_NORM]) == (norm, norm, norm)
        assert said[LEARNING_RATE] == pytest.approx(0.01 + (2 * linears - 1) / 1000)


def test_what_a_sampled_step_looks_through_does_not_grow_with_the_optimizers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks: list[int] = []

    def counted(walk: Callable[..., object]) -> Callable[..., object]:
        def count(self: Topology) -> object:
            walks.append(1)
            return walk(self)

        return count

    for name in ("own_parameters", "named_parameters", "reduced_gradients"):
        monkeypatch.setattr(Topology, name, counted(getattr(Topology, name)))
    found = []
    for linears in (4, 16, 64):  # beyond the few optimizers whose combinations are remembered
        model = chain(linears)
        step_in_backward(model)
        path = tmp_path / str(linears)
        with ddpprobe.install(model, run_dir=path, every=1, daemon="none"):
            train(model, 1)
            first = len(walks)
            train(model, 1)
            found.append((first, len(walks) - first))
        walks.clear()
    assert found[1] == found[2]
    assert found[2][0] < 64


def test_what_one_optimizer_took_stays_where_a_further_backward_is_for_another(
    tmp_path: Path, records_of
) -> None:
    model = chain(2)
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    took: dict[str, float] = {}
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        found = model(torch.randn(3, 4))
        for index, optimizer in enumerate((first, second)):
            (found[index] ** (index + 1)).sum().backward(retain_graph=not index)
            for name, parameter in model[index].named_parameters():
                took[f"{index}.{name}"] = parameter.grad.norm().item()
            optimizer.step()
            model.zero_grad()
    (record,) = records_of(tmp_path / "r")
    assert l2_of(record) == pytest.approx(took)


def test_of_a_closure_that_is_called_again_and_again_the_last_gradients_stay(
    tmp_path: Path, records_of
) -> None:
    model, last = chain(1), {}
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, tolerance_grad=0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        last.update({name: p.grad.norm().item() for name, p in model.named_parameters()})
        return loss

    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        optimizer.step(closure)
    (record,) = records_of(tmp_path / "r")
    assert l2_of(record) == pytest.approx(last)
