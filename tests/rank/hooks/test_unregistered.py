"""Modules that torch does not know are found, if they have gradients and no optimizer."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ddpprobe
from ddpprobe.rank.hooks.unregistered import Unregistered
from ddpprobe.rank.topology.describe import describe
from ddpprobe.records.step import UNREGISTERED


class Listed(nn.Module):
    """A model one of whose parts is kept as `keep` says."""

    def __init__(self, keep) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.parts = keep([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part in self.parts.values() if isinstance(self.parts, dict) else self.parts:
            x = part(x)
        return x.sum()


def by_number(parts: list[nn.Module]) -> dict[int, nn.Module]:
    return dict(enumerate(parts))


def told(model: nn.Module, *trained: Tensor) -> dict[str, float]:
    return dict(Unregistered(describe(model)).told(lambda: set(map(id, trained))))


@pytest.mark.parametrize("keep", [list, tuple, by_number])
def test_parameters_in_a_container_of_python_are_counted_once_they_have_gradients(keep) -> None:
    model = Listed(keep)
    assert told(model) == {}
    model(torch.randn(2, 4)).backward()
    assert told(model) == {f"{UNREGISTERED}parts": 4.0}
    wrapped = nn.Sequential(model)
    assert told(wrapped) == {f"{UNREGISTERED}0.parts": 4.0}


def test_what_torch_knows_an_optimizer_has_or_nobody_trains_is_not_counted() -> None:
    known = Listed(nn.ModuleList)
    known(torch.randn(2, 4)).backward()
    known.again = [known.first, *known.parts]  # a list beside what is registered
    assert told(known) == {}
    model = Listed(list)
    model(torch.randn(2, 4)).backward()
    parameters = [p for part in model.parts for p in part.parameters()]
    assert told(model, *parameters) == {}
    assert told(model, *parameters[:3]) == {f"{UNREGISTERED}parts": 1.0}
    for parameter in parameters:
        parameter.requires_grad_(False)
    assert told(model) == {}


def test_parameters_themselves_count_and_other_data_does_not() -> None:
    model = nn.Linear(2, 2)
    model.scales = [nn.Parameter(torch.ones(1)), torch.ones(1), "text", 3]
    model.scales[0].grad = torch.ones(1)
    model._private = [nn.Linear(2, 2)]
    model.many = [nn.Linear(1, 1)] * 2000
    assert told(model) == {f"{UNREGISTERED}scales": 1.0}


def test_a_part_that_the_script_puts_another_in_the_place_of_is_freed() -> None:
    model = Listed(list)
    unregistered = Unregistered(describe(model))
    model(torch.randn(2, 4)).backward()
    assert unregistered.told(set) == {f"{UNREGISTERED}parts": 4.0}
    freed = weakref.ref(model.parts.pop().get_parameter("0.weight"))
    gc.collect()
    assert freed() is None
    assert unregistered.told(set) == {f"{UNREGISTERED}parts": 2.0}


def test_a_run_tells_them_at_each_sampled_step_and_not_those_of_another_optimizer(
    tmp_path: Path, records_of
) -> None:
    model, teacher = Listed(list), Listed(list)
    others = torch.optim.SGD([p for part in teacher.parts for p in part.parameters()], lr=0.1)
    model.teachers = teacher.parts
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        for _ in range(3):
            loss = model(torch.randn(2, 4))
            for teacher_part in model.teachers:
                loss = loss + teacher_part(torch.randn(2, 4)).sum()
            loss.backward()
            others.step()
            optimizer.step()
            optimizer.zero_grad()
    said = [
        {k: v for k, v in r.scalars[0].items() if k.startswith(UNREGISTERED)}
        for r in records_of(tmp_path / "r")
    ]
    assert said == [{f"{UNREGISTERED}parts": 4.0}] * 3
