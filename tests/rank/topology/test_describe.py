"""Names are those of the unwrapped model; what cannot be observed truthfully is refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Self

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ddpprobe.errors import ModelRefused
from ddpprobe.rank.hooks import step_facts
from ddpprobe.rank.topology.describe import clean, describe
from ddpprobe.records.step import JOINED, LOCAL_SGD


@pytest.mark.parametrize(
    ("name", "fqn"),
    [
        ("_fsdp_wrapped_module.blocks.0._checkpoint_wrapped_module.mlp", "blocks.0.mlp"),
        ("_orig_mod.a.b", "a.b"),
        ("module.a", "module.a"),  # the user's own module may be called so
        ("", ""),
    ],
)
def test_wrapper_prefixes_are_removed(name: str, fqn: str) -> None:
    assert clean(name) == fqn


def test_checkpoint_wrappers_are_transparent() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Linear(2, 2))
    found = describe(model)
    assert [n for n, _ in found.named_modules()] == ["", "0", "1"]
    assert [n for n, _ in found.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(2, 2))


class Packed(torch.Tensor):
    """A wrapper subclass, as quantization libraries make them: there are no elements to read."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, shape)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return args[0] if func is torch.ops.aten.detach.default else NotImplemented


def subclassed() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(Packed((2, 2)))
    return model


def partitioned() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.ds_id = 3
    return model


class OnXpu(nn.Parameter):
    """Says that it lies where ddpprobe has never run."""

    @property
    def device(self) -> torch.device:
        return torch.device("xpu", 0)


def elsewhere() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = OnXpu(torch.ones(2, 2))
    return model


def engine() -> nn.Module:
    return type("Engine", (nn.Linear,), {"__module__": "deepspeed.runtime.engine"})(2, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nn.ReLU, r"ReLU has no parameters.*Pass the model that the optimizer updates"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), r"Use DistributedDataParallel"),
        (scripted, r"ScriptModule, which takes no hooks"),
        (lambda: nn.Sequential(nn.LazyLinear(2)), r"'0.weight' is not initialized yet. Run one"),
        (partitioned, r"'1.weight' is partitioned by DeepSpeed ZeRO-3.*exclude='1\*'"),
        (subclassed, r"'1.weight' is a .*Packed, a tensor subclass.*exclude='1\*'"),
        (elsewhere, r"'1.weight' is on 'xpu'.*CPU and on CUDA.*DDPPROBE_DISABLE=1"),
        (engine, r"the model is a Engine of deepspeed, which keeps gradients"),
    ],
)
def test_what_cannot_be_observed_is_refused(make, message: str) -> None:
    with pytest.raises(ModelRefused, match=message):
        describe(make())


def test_a_model_whose_memory_is_still_to_come_may_be_installed() -> None:
    assert describe(nn.Linear(2, 2, device="meta")).device.type == "cpu"  # for want of a better one


def test_what_cannot_be_observed_may_be_left_out() -> None:
    found = describe(subclassed(), lambda fqn: not fqn.startswith("1"))
    assert found.wrapper == "none"
    with pytest.raises(ModelRefused):
        describe(subclassed(), lambda fqn: fqn != "0")


def test_a_parameter_class_of_ones_own_with_plain_elements_is_observed() -> None:
    model = nn.Linear(2, 2)
    model.weight = type("Mine", (nn.Parameter,), {})(torch.ones(2, 2))
    assert describe(model).wrapper == "none"


def test_a_process_without_a_group_is_a_world_of_its_own() -> None:
    topology = describe(nn.Linear(2, 2))
    assert (topology.world_size, topology.wrapper) == (1, "none")


def test_tied_parameters_and_shared_modules_are_named_once() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(2, 2))
    model[3].weight = shared.weight
    found = describe(model)
    assert [n for n, _ in found.named_modules()] == [n for n, _ in model.named_modules()]
    assert [n for n, _ in found.named_parameters()] == [n for n, _ in model.named_parameters()]


@pytest.fixture
def alone() -> Iterator[None]:
    """Be the only rank of a job."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_in_ddp_s_join_says_so_from_there_on(alone: None) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    assert JOINED not in step_facts.modes(describe(model))
    with model.join():
        model(torch.ones(1, 2)).sum().backward()
        assert step_facts.modes(describe(model))[JOINED] == 1.0
    assert step_facts.modes(describe(model))[JOINED] == 1.0


def test_a_model_under_torch_s_hook_of_local_sgd_says_so_from_the_step_on_that_parts_it(
    alone: None,
) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    group = dist.new_group([0])
    model.register_comm_hook(PostLocalSGDState(None, group, 2), post_localSGD_hook)
    said = []
    for _ in range(4):
        said.append(LOCAL_SGD in step_facts.modes(describe(model)))  # as a forward begins
        model(torch.ones(1, 2)).sum().backward()
    assert said == [False, False, True, True]


# torch 2.6 warns of DTensors on a CPU.
@pytest.mark.filterwarnings("ignore:DTensor random operators")
@pytest.mark.parametrize("steps", [0, 1], ids=["before", "after"])
def test_ddp_around_tensor_parallelism_is_refused_before_its_first_step_and_after_it(
    steps: int, alone: None
) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    assert describe(model).wrapper == "tp"
    wrapped = DistributedDataParallel(model, device_mesh=mesh["dp"])
    for _ in range(steps):
        wrapped(torch.ones(1, 2)).sum().backward()
    for select in (lambda _: True, lambda fqn: fqn == "2"):
        with pytest.raises(ModelRefused, match=r"'0' is tensor-parallel within.*fully_shard"):
            describe(wrapped, select)
