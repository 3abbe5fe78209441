"""What overrides torch's functions, a mode or a tensor of its own class, sees nothing of ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import ddpprobe
from ddpprobe.probe import Probe  # what it imports calls torch: not to be in a mode
from ddpprobe.testing import state_hash

STEPS = 7


class Noisy(TorchFunctionMode):
    """Counts the calls that it sees, and draws a random number for each; some results get noise."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen[getattr(func, "__qualname__", str(func))] += 1
        noise = torch.rand(1)
        result = func(*args, **(kwargs or {}))
        return result + 1e-3 * noise if func is nn.functional.linear else result


class Overriding(Tensor):
    seen: ClassVar[Counter[str]] = Counter()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen[getattr(func, "__qualname__", str(func))] += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def plain(model: nn.Module, probe: Probe | None) -> torch.optim.Optimizer:
    optimizer = adam(model)
    for step in range(STEPS):
        labels = torch.arange(6) % 4
        loss = nn.functional.cross_entropy(model(torch.randn(6, 4)), labels)
        if probe is not None:
            probe.log(loss=loss, indices=range(6))
        if step == 4:
            loss = loss * torch.nan
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(1, 4))
    return optimizer


def scaled(model: nn.Module, probe: Probe | None) -> torch.optim.Optimizer:
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu", init_scale=2.0**14)
    for step in range(STEPS):
        for _ in range(2):
            loss = model(torch.randn(6, 4)).square().sum()
            scaler.scale(loss * torch.inf if step == 3 else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if probe is not None:
            with probe.pause("in between"):
                pass
    return optimizer


def with_a_closure(model: nn.Module, probe: Probe | None) -> torch.optim.Optimizer:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4)).square().sum()
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
    return optimizer


@pytest.mark.parametrize("way", [plain, scaled, with_a_closure])
@pytest.mark.parametrize(
    "options", [
        {"every": 1, "histograms": "*"}, {"every": 3}, {"every": 2, "capture": "*"},
        {"every": 1, "backward": "full"},
    ], ids=str,
)  # fmt: skip
def test_a_function_mode_sees_what_it_sees_without_us(way: Callable, options, tmp_path) -> None:
    def run(*, probed: bool) -> tuple[Counter[str], str]:
        with Noisy() as mode:
            model, probe = net(), None
            torch.manual_seed(7)
            if probed:
                probe = ddpprobe.install(model, run_dir=tmp_path / "r", daemon="none", **options)
            optimizer = way(model, probe)
            if probe is not None:
                probe.close()
            seen = Counter(mode.seen)
        return seen, state_hash(model, optimizer)

    bare = run(probed=False)
    assert run(probed=True) == bare


def test_a_tensor_that_overrides_functions_sees_what_it_sees_without_us(tmp_path) -> None:
    def run(*, probed: bool) -> tuple[Counter[str], str]:
        Overriding.seen.clear()
        model = net()
        optimizer = adam(model)
        probe = None
        if probed:
            probe = ddpprobe.install(model, run_dir=tmp_path / "r", every=2, daemon="none")
        for _ in range(STEPS):
            model(torch.randn(6, 4).as_subclass(Overriding)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if probe is not None:
            probe.close()
        return Counter(Overriding.seen), state_hash(model, optimizer)

    bare = run(probed=False)
    assert run(probed=True) == bare


def test_full_hooks_stay_under_the_default_device(tmp_path, records_of) -> None:
    """`torch.set_default_device` is a function mode, too."""
    model = net()
    optimizer = adam(model)
    torch.set_default_device("cpu")
    try:
        options = {"run_dir": tmp_path / "r", "every": 1, "daemon": "none", "backward": "full"}
        with ddpprobe.install(model, **options):
            for _ in range(3):
                model(torch.randn(6, 4)).square().sum().backward()
                optimizer.step()
    finally:
        torch.set_default_device(None)
    kinds = {site.kind for r in records_of(tmp_path / "r") for site in r.sites}
    assert "grad_input" in kinds


RANKS = """
import sys
from collections import Counter
import torch
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module,
)
import ddpprobe
from tests.rank.test_function_modes import Noisy, adam, net

way, directory = sys.argv[1:]
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))

def wrapped():
    model = net()
    if way == "fsdp2":
        fully_shard(model[0])
        fully_shard(model)
    elif way == "tp":
        model = nn.Sequential(model[0], model[2], model[3])
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    else:
        model = nn.parallel.DistributedDataParallel(model)
    return model

def run(number, probed):
    model = wrapped()
    optimizer = adam(model)
    with Noisy() as mode:
        torch.manual_seed(7)
        probe = None
        if probed:
            probe = ddpprobe.install(model, run_dir=directory, every=2, daemon="none")
        for _ in range(7):
            model(torch.randn(6, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if probe is not None:
            probe.close()
        seen = Counter(mode.seen)
    local = [getattr(p, "_local_tensor", p) for p in model.parameters()]
    values = b"".join(p.detach().numpy().tobytes() for p in local)
    return seen, values, torch.get_rng_state().numpy().tobytes()

run(0, False)  # torch makes and keeps some things at the first time
bare, probed = run(1, False), run(2, True)
assert bare[0] == probed[0], (bare[0] - probed[0], probed[0] - bare[0])
assert bare == probed
dist.destroy_process_group()
"""


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "tp"])
def test_a_function_mode_on_several_ranks_sees_nothing_of_ours(
    way: str, torchrun, tmp_path, records_of
) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    done = torchrun([script, way, tmp_path / "run"])
    assert done.returncode == 0, done.stderr
    records = [r for r in records_of(tmp_path / "run") if r.sampled]
    assert {r.step for r in records} == {0, 2, 4, 6}
