"""A model computes where its parameters are moved to, not where they wait."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ddpprobe.rank.topology import devices
from ddpprobe.rank.topology.describe import outermost

from .wrapped_models import net, on_rank

FAR = torch.device("cuda", 1)


def at(kind: str) -> nn.Parameter:
    """Return a parameter that says it lies there; there may be no such device."""
    made = nn.Parameter(torch.zeros(2))
    made.__class__ = type("Elsewhere", (nn.Parameter,), {"device": torch.device(kind)})
    return made


def of(*kinds: str) -> nn.Module:
    return nn.ParameterList([at(kind) for kind in kinds])


@pytest.mark.parametrize(
    ("kinds", "device"),
    [
        (("cpu",), "cpu"),
        (("meta",), "cpu"),
        (("cpu", "cuda:1", "cuda:0"), "cuda:1"),
        (("meta", "cuda:2"), "cuda:2"),
        (("cuda:0", "cpu"), "cuda:0"),
    ],
)
def test_the_first_parameter_that_does_not_wait_says_where(
    kinds: tuple[str, ...], device: str
) -> None:
    model = of(*kinds)
    assert devices.device_of(model, model) == torch.device(device)


@pytest.mark.parametrize(("computes", "device"), [(FAR, FAR), (torch.device("cpu"), "cpu")])
def test_fsdp1_says_where_it_takes_parameters_that_wait_on_the_cpu(
    computes: torch.device, device: torch.device | str
) -> None:
    with on_rank(0):
        inner = FullyShardedDataParallel(net(frozen=False), device_id=torch.device("cpu"))
        inner.compute_device = computes
        outer = nn.Sequential(nn.ReLU(), inner)
        assert devices.device_of(net(), outer) == torch.device(device)
        assert devices.device_of(of("cuda:0"), outer) == torch.device("cuda:0")


@pytest.mark.parametrize(("kind", "device"), [("cuda", "cuda:3"), ("cpu", "cpu")])
def test_a_dtensor_that_waits_on_the_cpu_computes_on_the_device_of_its_mesh(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FSDP2 leaves it that offloads: no mesh of another device can be had here."""
    waiting = at("cpu")
    waiting.device_mesh = SimpleNamespace(device_type=kind)
    monkeypatch.setattr(devices, "is_dtensor", lambda p: hasattr(p, "device_mesh"))
    modules = {kind: SimpleNamespace(current_device=lambda: 3)}
    monkeypatch.setattr(torch, "get_device_module", modules.__getitem__)
    model = nn.ParameterList([waiting])
    assert devices.device_of(model, model) == torch.device(device)


def test_inside_a_forward_a_ddp_around_something_compiled_is_known() -> None:
    with on_rank(0):
        model, other = net(), net()
        around = DistributedDataParallel(torch.compile(model, backend="eager"))
        assert outermost(model) is model
        with around._inside_ddp_forward():
            assert outermost(model) is around
            assert outermost(model[0]) is model[0]
            assert outermost(other) is other  # of another model
        assert outermost(model) is model
