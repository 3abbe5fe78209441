"""Names are those of the unwrapped model; what cannot be observed truthfully is refused by name."""

from __future__ import annotations

import warnings
from typing import Self

import pytest
import torch
from torch import nn

from ddpprobe.topology.describe import Refused, clean, describe


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
    with pytest.raises(Refused, match=message):
        describe(make())


def test_a_model_whose_memory_is_still_to_come_may_be_installed() -> None:
    assert describe(nn.Linear(2, 2, device="meta")).device.type == "cpu"  # for want of a better one


def test_what_cannot_be_observed_may_be_left_out() -> None:
    found = describe(subclassed(), lambda fqn: not fqn.startswith("1"))
    assert found.wrapper == "none"
    with pytest.raises(Refused):
        describe(subclassed(), lambda fqn: fqn != "0")


def test_a_parameter_class_of_ones_own_with_plain_elements_is_observed() -> None:
    model = nn.Linear(2, 2)
    model.weight = type("Mine", (nn.Parameter,), {})(torch.ones(2, 2))
    assert describe(model).wrapper == "none"


def test_tied_parameters_and_shared_modules_are_named_once() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(2, 2))
    model[3].weight = shared.weight
    found = describe(model)
    assert [n for n, _ in found.named_modules()] == [n for n, _ in model.named_modules()]
    assert [n for n, _ in found.named_parameters()] == [n for n, _ in model.named_parameters()]
