"""What torch exchanges in place, parameters and their gradients, it can exchange with a probe, too.

`torch.utils.swap_tensors` refuses a tensor that has a weak reference. `model.to()` calls it for a
DTensor, and for any parameter after `set_swap_module_params_on_conversion(True)`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import ddpprobe
from ddpprobe.testing import state_hash


class Listed(nn.Module):
    """Some of its parameters torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)
        self.hidden = [nn.Linear(8, 8)]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden[0](self.first(x).relu())).square().mean()


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def turn(model: nn.Module, optimizer: torch.optim.Optimizer, *, converted: bool = False) -> None:
    model(torch.ones(3, 4, dtype=next(model.parameters()).dtype)).backward()
    if converted:  # with its gradients
        convert(model)
    optimizer.step()
    optimizer.zero_grad()


def convert(model: nn.Module) -> None:
    model.double()
    model.float()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    weight = next(model.parameters())
    torch.utils.swap_tensors(weight, nn.Parameter(weight.detach().clone()))


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("every", [1, 3])
def test_parameters_can_be_swapped_between_steps_in_a_pause_and_after_the_end(
    every: int, tmp_path, records_of
) -> None:
    def run(*, probed: bool) -> str:
        model, probe = Listed(), None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if probed:
            probe = ddpprobe.install(
                model, run_dir=tmp_path / "r", every=every, daemon="none", capture="last"
            )
        for step in range(7):
            turn(model, optimizer, converted=step in (2, 3))
            convert(model)
            model.hidden[0].double().float()
        if probe is not None:
            with probe.pause("conversion"):
                convert(model)
            turn(model, optimizer)
            probe.close()
        else:
            convert(model)
            turn(model, optimizer)
        convert(model)
        return state_hash(model, optimizer)

    bare = run(probed=False)
    assert run(probed=True) == bare
    assert len({r.step for r in records_of(tmp_path / "r") if r.sampled}) > 2


def test_nothing_of_a_model_has_a_weak_reference_but_in_a_forward_or_backward(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters())

    def held() -> list[Tensor]:
        tensors = [*model.parameters(), *model.buffers()]
        tensors += [p.grad for p in model.parameters() if p.grad is not None]
        return [tensor for tensor in tensors if weakref.getweakrefs(tensor)]

    with ddpprobe.install(model, run_dir=tmp_path / "r", every=2, daemon="none", capture="*"):
        for _ in range(6):
            for _ in range(2):
                model(torch.randn(6, 4)).square().mean().backward()
                assert held() == []
            optimizer.step()
            assert held() == []
            optimizer.zero_grad()


RANKS = """
import sys
import torch
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module,
)
import ddpprobe

way, directory = sys.argv[1:]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
if way == "fsdp2":
    fully_shard(model[0])
    fully_shard(model)
else:
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
probe = ddpprobe.install(model, run_dir=directory, every=2, daemon="none")
for _ in range(4):
    model(torch.randn(6, 4)).square().sum().backward()
    model.to("cpu", torch.float32)
    optimizer.step()
    optimizer.zero_grad()
    model.to("cpu", torch.float32)
with probe.pause("conversion"):
    model.to("cpu", torch.float32)
probe.close()
model.double()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("way", ["fsdp2", "tp"])
def test_a_model_of_dtensors_can_be_moved_and_converted(way: str, torchrun, tmp_path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    done = torchrun([script, way, tmp_path / "run"])
    assert done.returncode == 0, done.stderr
