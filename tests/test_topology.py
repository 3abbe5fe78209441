"""Names are those of the unwrapped model; what cannot be observed truthfully is refused by name."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from ddpprobe import topology
from ddpprobe.topology import Refused, clean


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
    found = topology.describe(model)
    assert [n for n, _ in found.named_modules()] == ["", "0", "1"]
    assert [n for n, _ in found.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(2, 2))


def compiled(*, whole: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates what its compiler imports
        if whole:
            return torch.compile(model)
        model[0].compile()
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nn.ReLU, r"ReLU has no parameters.*Pass the model that the optimizer updates"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), r"Use DistributedDataParallel"),
        (scripted, r"ScriptModule, which takes no hooks"),
        (lambda: compiled(whole=True), r"the model is compiled with torch.compile"),
        (lambda: compiled(whole=False), r"module '0' is compiled with torch.compile"),
    ],
)
def test_what_cannot_be_observed_is_refused(make, message: str) -> None:
    with pytest.raises(Refused, match=message):
        topology.describe(make())
