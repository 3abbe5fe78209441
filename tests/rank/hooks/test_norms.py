"""The norms of this rank's gradients are those of its parts, whatever wraps the model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ddpprobe.rank.hooks import gradients
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.topology.describe import describe
from ddpprobe.records.step import USED_NORM

from ... import far
from ..topology.wrapped_models import WRAPPED, net, on_rank, put_gradients


def here(gradient: Tensor) -> Tensor:
    return (gradient.to_local() if isinstance(gradient, DTensor) else gradient).double()


def expected(parameters: list[nn.Parameter]) -> float:
    squares = [here(p.grad).square().sum().item() for p in parameters if p.grad is not None]
    return math.sqrt(math.fsum(squares))


def pending(rows: StepRows) -> dict[str, float]:
    found = rows.fetch()
    found.wait()
    return found.result(0, partial=False).scalars


def used(model: nn.Module, *optimizers: object, scale: Tensor | None = None) -> float | None:
    topology, norms = describe(model), gradients.UsedNorms()
    norms.begin_step()
    for optimizer in optimizers:
        norms.add(optimizer, topology, scale)
    rows = StepRows(torch.device("cpu"), 0)
    norms.tell(rows)
    return pending(rows).get(USED_NORM)


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("wrapper", WRAPPED)
def test_of_a_wrapped_model_it_is_that_of_what_lies_on_this_rank(wrapper: str, rank: int) -> None:
    """Nothing is told where nothing lies here: of FSDP2 a last rank may have no row."""
    with on_rank(rank), torch.no_grad():
        model = WRAPPED[wrapper]()
        put_gradients(model)
        parameters = list(model.parameters())
        norm = expected(parameters)
        want = pytest.approx(norm, rel=1e-6) if norm else None
        assert used(model, sgd(parameters)) == want
        assert norm or (wrapper, rank) == ("fsdp2", 3)


@pytest.mark.parametrize("far_away", [False, True], ids=["near", "far"])
def test_the_used_norm_is_of_all_optimizers_of_this_model_and_unscaled(
    far_away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if far_away:
        far.pretend(monkeypatch)
    model, other = net(frozen=False), nn.Linear(2, 2)
    put_gradients(model)
    put_gradients(other)
    parameters = list(model.parameters())
    first, second = sgd([*parameters[:3], *other.parameters()]), sgd(parameters[3:])
    whole = expected(parameters)
    assert used(model, first, second) == pytest.approx(whole)
    assert used(model, second, first, object()) == pytest.approx(whole)
    assert used(model, second) == pytest.approx(expected(parameters[3:]))
    assert used(model, first, second, scale=torch.tensor(4.0)) == pytest.approx(whole / 4)
    assert used(model, sgd(other.parameters())) is None
    for parameter in parameters:
        parameter.grad = None
    assert used(model, first, second) is None


def test_of_a_gradient_that_has_no_plain_norm_the_whole_one_is_not_known() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    model(torch.tensor([1, 1, 4])).sum().backward()
    assert used(model, sgd(model.parameters())) is None
    assert used(model, sgd(model[1].parameters())) == pytest.approx(
        expected(list(model[1].parameters()))
    )


def test_the_norms_of_a_step_before_are_forgotten() -> None:
    model = net(frozen=False)
    put_gradients(model)
    topology, norms = describe(model), gradients.UsedNorms()
    for _ in range(2):
        norms.begin_step()
        norms.add(sgd(model.parameters()), topology, None)
        rows = StepRows(torch.device("cpu"), 0)
        norms.tell(rows)
        (found,) = pending(rows).values()
        assert found == pytest.approx(expected(list(model.parameters())))
        model[0].register_parameter("late", nn.Parameter(torch.ones(2)))
        model[0].late.grad = torch.full((2,), 1e3)


def test_where_no_row_tells_a_norm_the_used_one_is_the_gradient_norm() -> None:
    model = net(frozen=False)
    put_gradients(model)
    norms = gradients.UsedNorms()
    norms.begin_step()
    for parameter in model.parameters():
        norms.add(sgd([parameter]), describe(model), None)
    rows = StepRows(torch.device("cpu"), 0)
    norms.tell(rows, alone=True)
    want = pytest.approx(expected(list(model.parameters())))
    assert pending(rows) == {USED_NORM: want, "grad_norm": want}
