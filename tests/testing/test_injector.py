"""The fault injector and the state hash, which every other proof leans on."""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddpprobe.testing import Fault, Injection, inject, state_hash

Pair = collections.namedtuple("Pair", ["first", "second"])  # noqa: PYI024  (a tuple subclass)


@dataclasses.dataclass(frozen=True)
class Out:
    index: Tensor
    hidden: Tensor


class Net(nn.Module):
    """a, then b, and c on their sum: three linear layers, of which `shape` wraps b's output."""

    def __init__(self, shape: Callable[[Tensor], object] | None = None) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), Shaped(shape), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        out = self.b(h)
        return self.c(h + find(out))


class Shaped(nn.Module):
    def __init__(self, shape: Callable[[Tensor], object] | None) -> None:
        super().__init__()
        self.linear, self.shape = nn.Linear(6, 6), shape

    def forward(self, x: Tensor) -> object:
        y = self.linear(x)
        return y if self.shape is None else self.shape(y)


def find(out: object) -> Tensor:
    """Return the first floating-point tensor of a nested output."""
    if isinstance(out, Tensor):
        assert out.is_floating_point()
        return out
    if isinstance(out, dict):
        return find(out["hidden"])
    if dataclasses.is_dataclass(out):
        return find(out.hidden)
    return find(out[-1])


@pytest.fixture
def plant() -> Iterator[Callable[..., Injection]]:
    planted: list[Injection] = []

    def one(model: nn.Module, spec: str | Fault, **more: int) -> Injection:
        planted.append(inject(model, spec, **more))
        return planted[-1]

    yield one
    for injection in planted:
        injection.remove()


def run(model: nn.Module, steps: int = 4, accumulate: int = 1) -> list[list[float]]:
    """Train on fixed data; return the losses, one list of micro-batches per step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.linspace(-1, 1, 12).view(3, 4)
    losses = []
    for step in range(steps):
        micro = []
        for i in range(accumulate):
            loss = model(x + step + 10 * i).sum()
            loss.backward()
            micro.append(loss.item())
        losses.append(micro)
        optimizer.zero_grad()  # the parameters stay, so that only the fault makes a difference
        optimizer.step()
    return losses


def net(shape: Callable[[Tensor], object] | None = None) -> Net:
    torch.manual_seed(0)
    return Net(shape)


def where_nan(losses: list[list[float]]) -> list[tuple[int, int]]:
    return [(s, i) for s, row in enumerate(losses) for i, v in enumerate(row) if math.isnan(v)]


# ---- what is hit


def test_a_nan_lands_in_one_element_at_its_step_and_micro_batch_only(plant):
    model = net()
    seen = []
    injection = plant(model, "nan:step=2,rank=0,module=a,micro=1")
    model.a.register_forward_hook(lambda _m, _i, o: seen.append(int(o.isnan().sum())))
    assert where_nan(run(model, accumulate=2)) == [(2, 1)]
    assert seen == [0, 0, 0, 0, 0, 1, 0, 0]
    assert injection.fired


def test_everything_else_is_bit_identical_until_then(plant):
    clean = run(net())
    model = net()
    plant(model, "nan:step=3,rank=0,module=b.linear")
    assert run(model)[:3] == clean[:3]


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(
    "shape",
    [
        None,
        lambda y: (None, y),
        lambda y: [torch.tensor([1]), y],
        lambda y: Pair(torch.tensor([1]), y),
        lambda y: {"index": torch.tensor([1]), "hidden": (y,)},
        lambda y: Out(torch.tensor([1]), y),
        lambda y: y.view(-1).view(y.shape),
    ],
)
def test_every_output_structure_is_hit_and_keeps_its_type(plant, shape, phase):
    model = net(shape)
    injection = plant(model, f"nan:step=1,rank=0,module=b,phase={phase}")
    kinds, grads = [], []
    model.b.register_forward_hook(lambda _m, _i, o: kinds.append(type(o)))

    def watch(_m: nn.Module, _i: object, o: Tensor) -> None:
        o.register_hook(lambda g: grads.append(int(g.isnan().sum())))

    model.b.linear.register_forward_hook(watch)
    losses = run(model, steps=3)
    assert len(set(kinds)) == 1
    assert injection.fired
    assert where_nan(losses) == ([(1, 0)] if phase == "forward" else [])
    assert [n > 0 for n in grads] == [False, phase == "backward", False]


def test_a_gradient_is_hit_although_the_output_is_then_changed_in_place(plant):
    model = nn.Sequential(
        nn.Linear(4, 6), nn.Flatten(0), nn.ReLU(inplace=True), nn.Unflatten(0, (3, 6))
    )
    injection = plant(model, "nan:step=1,rank=0,module=1,phase=backward")
    run(model, steps=2)
    assert injection.fired


def test_the_module_that_is_observed_by_a_later_or_earlier_hook_shows_the_fault(plant):
    model, seen = net(), []
    model.a.register_forward_hook(lambda _m, _i, o: seen.append(bool(o.isnan().any())))
    plant(model, "nan:step=0,rank=0,module=a")
    model.a.register_forward_hook(lambda _m, _i, o: seen.append(bool(o.isnan().any())))
    run(model, steps=1)
    assert seen == [True, True]


def test_elements_and_factor_say_how_much(plant):
    model, outputs = net(), []
    plant(model, "inf:step=0,rank=0,module=a,elements=5")
    plant(model, "explode:step=1,rank=0,module=a,factor=1e3")
    model.a.register_forward_hook(lambda _m, _i, o: outputs.append(o.detach().clone()))
    run(model, steps=2)
    assert int(outputs[0].isposinf().sum()) == 5
    x = torch.linspace(-1, 1, 12).view(3, 4) + 1
    assert torch.equal(outputs[1], nn.functional.linear(x, model.a.weight, model.a.bias) * 1e3)


def test_an_explosion_of_a_gradient_scales_what_lies_behind_it_and_nothing_else(plant):
    model, twin = net(), net()
    plant(model, "explode:step=0,rank=0,module=b,phase=backward,factor=1e4")
    x = torch.ones(3, 4)
    for one in (model, twin):
        one(x).sum().backward()
    torch.testing.assert_close(model.b.linear.weight.grad, twin.b.linear.weight.grad * 1e4)
    assert torch.equal(model.c.weight.grad, twin.c.weight.grad)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_checkpointed_module_is_hit_once(plant, reentrant, phase):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            return self.last(checkpoint(self.inner, x, use_reentrant=reentrant))

    model = Checkpointed()
    injection = plant(model, f"nan:step=1,rank=0,module=inner.0,phase={phase}")
    nan_grads: list[bool] = []
    model.inner[0].bias.register_post_accumulate_grad_hook(
        lambda p: nan_grads.append(bool(p.grad.isnan().any()))
    )
    losses = run(model, steps=3)
    assert injection.fired
    assert where_nan(losses) == ([(1, 0)] if phase == "forward" else [])
    assert nan_grads == [False, phase == "backward", False]


# ---- when


def test_eval_passes_and_strangers_optimizers_do_not_count(plant):
    model, stranger = net(), nn.Linear(2, 2)
    injection = plant(model, "nan:step=1,rank=0,module=a")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    other = torch.optim.SGD(stranger.parameters(), lr=0.1)
    x, fired = torch.ones(3, 4), []
    for _ in range(2):
        model(x).sum().backward()
        fired.append(injection.fired)
        other.step()
        optimizer.step()
        optimizer.step()  # twice before the next forward: still one step
        with torch.no_grad():
            model(x)
    assert fired == [False, True]


def test_an_optimizer_step_before_any_forward_is_none(plant):
    """Loading a checkpoint takes such a step to create the optimizer's state."""
    model = net()
    injection = plant(model, "nan:step=0,rank=0,module=a")
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    model(torch.ones(3, 4))
    assert injection.fired


def test_a_resumed_run_counts_on_from_its_first_step(plant):
    model = net()
    plant(model, "nan:step=41,rank=0,module=a", first_step=40)
    assert where_nan(run(model)) == [(1, 0)]


def test_another_rank_is_not_touched(plant, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    model = net()
    injection = plant(model, "nan:step=1,rank=0,module=a")
    assert where_nan(run(model)) == []
    assert not injection.fired


def test_a_removed_fault_never_happens_and_leaves_no_hook():
    model = net()
    with inject(model, "nan:step=1,rank=0,module=a"):
        pass
    assert where_nan(run(model)) == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_copies_and_saved_models_are_free_of_it(plant):
    model = net()
    plant(model, "nan:step=0,rank=0,module=a")
    assert where_nan(run(copy.deepcopy(model))) == []
    torch.save(model, io.BytesIO())


# ---- what is refused


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nan:step=1,module=blocks.2.mpl", "did you mean blocks.2.mlp"),
        ("nun:step=1,module=head", "no fault 'nun': did you mean nan?"),
        ("nan:stpe=1,module=head", "no key 'stpe': did you mean step?"),
        ("nan:step=1,module=head,phase=backwards", "no phase 'backwards': did you mean backward"),
        ("nan:module=head", "lacks step"),
        ("nan:step=one,module=head", "step=one: expected an integer"),
        ("nan:step=-1,module=head", "step=-1: expected an integer of at least 0"),
        ("nan:step=1,step=2,module=head", "each key once"),
        ("nan:step=1,module=head,factor=2", "no key 'factor'"),
        ("explode:step=1,module=head,factor=big", "factor=big: expected a number"),
        ("", "no fault ''"),
    ],
)
def test_a_wrong_specification_says_what_to_type(spec, says):
    model = nn.ModuleDict({"head": nn.Linear(2, 2), "blocks": nn.ModuleList()})
    model["blocks"].extend(nn.ModuleDict({"mlp": nn.Linear(2, 2)}) for _ in range(3))
    with pytest.raises(ValueError, match=says.replace("?", r"\?")):
        inject(model, spec)


def test_a_module_that_returns_no_number_is_an_error_at_the_step_not_a_silent_miss(plant):
    model = net(lambda y: (y.long(),))
    plant(model, "nan:step=0,rank=0,module=b")
    with pytest.raises(RuntimeError, match="returned no floating-point tensor but tuple"):
        model(torch.ones(3, 4))


# ---- the hash


def test_equal_trainings_have_equal_hashes_and_every_ingredient_counts():
    def state() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    def flip(x: Tensor) -> None:
        x.view(torch.int32)[(0,) * x.ndim] ^= 1  # the smallest difference there is

    changes: list[Callable[[nn.Module, torch.optim.Optimizer], object]] = [
        lambda m, _o: flip(m[0].weight.data),
        lambda m, _o: flip(m[1].running_mean),
        lambda m, o: flip(o.state[m[0].bias]["exp_avg_sq"]),
        lambda _m, o: o.param_groups[0].update(lr=0.1 + 1e-16 * 2),
        lambda _m, _o: torch.rand(1),
        lambda _m, _o: random.random(),
        lambda _m, _o: np.random.random(),
    ]
    reference = state_hash(*state())
    assert state_hash(*state()) == reference
    for change in changes:
        model, optimizer = state()
        change(model, optimizer)
        assert state_hash(model, optimizer) != reference


# ---- real ranks

RANKS = """
import sys, time, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from ddpprobe.testing import inject, state_hash
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
before = [inject(model, "nan:step=1,rank=1,module=0")]
if sys.argv[1] == "ddp":
    model = DistributedDataParallel(model)
else:
    fully_shard(model[0]); fully_shard(model[2]); fully_shard(model)
late = [inject(model, "inf:step=2,rank=0,module=2,phase=backward")]
try:
    inject(model, "nan:step=1,rank=2,module=0")
except ValueError as error:
    assert "this job has ranks 0 to 1" in str(error)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
bad = []
for step in range(4):
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    grads = [p.grad.to_local() if sys.argv[1] == "fsdp2" else p.grad for p in model.parameters()]
    bad.append((loss.isnan().item(), not all(g.isfinite().all() for g in grads)))
    optimizer.zero_grad(); optimizer.step()
fired = f"{before[0].fired} {late[0].fired}"
print(f"{dist.get_rank()} {bad} {fired} {len(state_hash(model, optimizer))}\\n", end="", flush=True)
dist.destroy_process_group(); time.sleep(0.5)
"""


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_under_wrappers_the_fault_is_local_and_its_gradients_are_everywhere(
    torchrun, tmp_path: Path, wrap
):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    done = torchrun([script, wrap], nproc=2)
    assert done.returncode == 0, done.stderr
    f, t = (False, False), (False, True)
    assert sorted(done.stdout.splitlines()) == [
        f"0 {[f, t, t, f]} False True 64",
        f"1 {[f, (True, True), t, f]} True False 64",
    ]
