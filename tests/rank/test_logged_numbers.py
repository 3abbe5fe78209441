"""What a script logs is kept where it is a number; whatever else it is, the run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh

import ddpprobe
from ddpprobe.rank.logged_numbers import as_number, returned_loss

NUMBERS = {
    "a number": 2.0,
    "a flag": True,
    "a fraction": Fraction(1, 2),
    "a NumPy number": np.float32(2.0),
    "a NumPy array of one": np.array([2.0]),
    "a tensor": torch.tensor(2.0),
    "a tensor of one": torch.tensor([[2.0]]),
    "a whole tensor": torch.tensor(2),
    "a weight": nn.Parameter(torch.tensor(2.0)),
    "an infinity": float("inf"),
}
OTHERS = {
    "nothing": None,
    "a text": "2.0",
    "a list": [1.0],
    "a complex number": 1j,
    "a number that no float holds": 10**400,
    "a NumPy array of two": np.ones(2),
    "a tensor of three": torch.ones(3),
    "an empty tensor": torch.ones(0),
    "a complex tensor": torch.tensor(1j),
    "a sparse tensor": torch.ones(1).to_sparse(),
    "a tensor without memory": torch.ones(1, device="meta"),
}


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("value", NUMBERS.values(), ids=NUMBERS)
def test_a_number_is_kept_as_what_it_is(value) -> None:
    number = as_number(value)
    assert number is not None
    assert float(number) == float(value.item() if hasattr(value, "item") else value)
    assert not (isinstance(number, torch.Tensor) and (number.dim() or number.requires_grad))


@pytest.mark.parametrize("value", OTHERS.values(), ids=OTHERS)
def test_what_is_none_is_left_out(value) -> None:
    assert as_number(value) is None


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("value", OTHERS.values(), ids=OTHERS)
def test_what_is_no_number_is_told_once_and_all_behind_it_is_recorded(
    value, every: int, tmp_path: Path, records_of, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path, every=every, daemon="none") as probe:
        for step in range(7):
            loss = model(torch.ones(3, 2)).square().mean()
            probe.log(loss=value if step in (1, 2) else loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [r.step for r in records_of(tmp_path)] == list(range(0, 7, every))
    last = records_of(tmp_path)[-1].scalars[0]
    assert last["loss"] == pytest.approx(loss.item())
    assert caplog.text.count("loss is not kept: it is no number") == 1
    assert "contained" not in caplog.text


def test_a_tensor_of_all_ranks_is_a_number_where_this_rank_has_all_of_it(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    whole = DTensor.from_local(torch.tensor(2.0), mesh, [Replicate()])
    assert float(as_number(whole)) == 2.0
    assert type(as_number(whole)) is torch.Tensor
    for placement, local in ((Partial(), torch.tensor(2.0)), (Shard(0), torch.tensor([2.0]))):
        assert as_number(DTensor.from_local(local, mesh, [placement])) is None


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).square().mean()


def by_transform(model: nn.Module, x: Tensor) -> Tensor:
    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (x,))

    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients, value = torch.func.grad_and_value(loss)(weights)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    return value


def over_ranks(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(DTensor.from_local(x, init_device_mesh("cpu", (1,)), [Replicate()]))
    loss.backward()
    return loss


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("get_loss", [by_transform, over_ranks])
def test_a_model_that_returns_a_loss_nobody_can_read_here_is_recorded_all_the_same(
    get_loss, every: int, tmp_path: Path, records_of, one_rank: None, caplog
) -> None:
    model = Loss()
    if get_loss is over_ranks:
        mesh = init_device_mesh("cpu", (1,))
        model.weight = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path, every=every, daemon="none"):
        for _ in range(5):
            get_loss(model, torch.ones(4))
            optimizer.step()
            optimizer.zero_grad()
    assert [r.step for r in records_of(tmp_path)] == list(range(0, 5, every))
    assert all(r.sites for r in records_of(tmp_path))
    assert "contained" not in caplog.text


def test_the_loss_of_a_model_is_the_only_number_that_it_returns() -> None:
    loss, logits, count = torch.tensor(2.0, requires_grad=True), torch.ones(3), torch.tensor(3)
    assert float(returned_loss([logits, loss, count])) == 2.0
    assert returned_loss([loss, loss]) is None
    assert returned_loss([logits]) is None
