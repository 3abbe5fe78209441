"""Which modules may carry a full backward hook, why others may not, and what the hooks read."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from ddpprobe.rank.backward import Backward
from ddpprobe.rank.hooks.full import FullHooks
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.topology.describe import describe
from ddpprobe.rundir.fuse import Fuse

from ..topology.wrapped_models import mesh, on_rank

IN_PLACE = "an input or output is changed in place"
NO_INPUT = "no positional input requires grad: there is no grad_input"
VIEW = "an output is a view, whose base may be changed in place"


class Clock:
    def __init__(self) -> None:
        self.micro, self.evaluating, self.backward = 0, False, Backward()
        self.without_grad = False


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


class Calls(nn.Module):
    """A module that is what a function says."""

    def __init__(self, call: Callable[..., object]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Tensor, **kwargs: Tensor) -> object:
        return self.call(*args, **kwargs)


def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x * y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.safe, self.pair = nn.Linear(2, 2), nn.Linear(2, 2), Calls(both)
        self.listed, self.named = Calls(lambda x: [x * 1]), Calls(lambda x: Pair(x * 1, x * 2))
        self.view, self.changed = Calls(lambda x: x.view(-1)), nn.Linear(2, 2)
        self.writes, self.mapped = nn.ReLU(inplace=True), nn.Tanh()
        self.unused, self.by_keyword = nn.Linear(2, 2), Calls(lambda *, x: x * 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        a, b = self.pair(self.safe(h), h * 3)
        out = self.listed(a)[0].sum() + self.named(b).b.sum() + self.view(a).sum()
        changed = self.changed(b)
        changed += 1
        mapped = torch.func.vmap(self.mapped)(b)
        return (
            out
            + changed.sum()
            + self.writes(a * 1).sum()
            + mapped.sum()
            + self.by_keyword(x=h).sum()
        )


UNSAFE = {
    "": NO_INPUT,
    "first": NO_INPUT,
    "by_keyword": NO_INPUT,
    "listed": "returns a list, not a tensor or tuple",
    "named": "returns a Pair, not a tensor or tuple",
    "view": VIEW,
    "changed": IN_PLACE,
    "writes": IN_PLACE,
    "mapped": "runs inside vmap, grad or jvp",
}


def hooks_of(
    model: nn.Module, select: Callable[[str], bool] = lambda _: True, resident: tuple = ()
) -> tuple[FullHooks, StepRows, Clock]:
    topology, rows, clock = describe(model), StepRows(torch.device("cpu"), 0), Clock()
    return FullHooks(topology, select, rows, clock, Fuse("hooks"), resident), rows, clock


def hung(model: nn.Module) -> set[str]:
    return {
        name
        for name, m in model.named_modules()
        if m._backward_hooks or m._forward_hooks or m._forward_pre_hooks
    }


def test_a_forward_tells_which_modules_are_safe_and_why_others_are_not() -> None:
    model = Model()
    hooks, rows, _ = hooks_of(model, lambda fqn: fqn != "pair")
    assert hooks.safe == set()
    hooks.attach()
    assert hung(model) == {name for name, _ in model.named_modules()}
    model(torch.ones(3, 2)).backward()
    assert len(rows) == 0
    hooks.probed()
    assert hooks.unsafe == UNSAFE
    assert hooks.safe == {"safe"}
    assert hung(model) == set()
    hooks.probed()  # once is enough
    assert hooks.safe == {"safe"}


@pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse CSR).*:UserWarning")
@pytest.mark.parametrize("kind", ["nested", "sparse", "compressed", "mkldnn"])
def test_what_no_view_is_made_of_goes_through_a_module_as_without_a_full_hook(kind: str) -> None:
    made = {
        "nested": lambda x: torch.nested.as_nested_tensor([x[:1], x[1:]]),
        "sparse": Tensor.to_sparse,
        "compressed": lambda x: x.detach().to_sparse_csr(),
        "mkldnn": lambda x: x.detach().to_mkldnn(),
    }[kind]

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.gives = nn.Linear(2, 2), Calls(lambda x: (x * 2, made(x)))
            self.takes, self.packed = Calls(lambda _, x: x * 3), Calls(lambda _, x: x * 4)

        def forward(self, x: Tensor) -> Tensor:
            y, odd = self.gives(self.first(x))
            return self.takes(odd, y).sum() + self.packed([odd], y).sum()

    model = Odd()
    hooks, _, _ = hooks_of(model)
    for _ in range(2):
        hooks.attach()
        model(torch.ones(3, 2)).backward()
        hooks.probed()
    assert hooks.safe == {"packed"}


def test_they_read_each_gradient_to_an_input_of_the_safe_ones() -> None:
    model = Model()
    hooks, rows, clock = hooks_of(model)
    hooks.attach()
    model(torch.ones(3, 2)).backward()
    hooks.probed()
    hooks.attach()
    assert hung(model) == {"safe", "pair"}
    seen: dict[str, tuple[Tensor | None, ...]] = {}
    for name in ("safe", "pair"):
        getattr(model, name).register_full_backward_hook(
            lambda _m, grads, _o, name=name: seen.update({name: grads})
        )
    clock.micro = 4
    for _ in range(2):
        model(torch.ones(3, 2)).backward()
    hooks.detach()
    model(torch.ones(3, 2)).backward()
    found = rows.fetch().result(0, partial=True)
    want = {("safe", "0"): seen["safe"][0], ("pair", "0"): seen["pair"][0],
            ("pair", "1"): seen["pair"][1]}  # fmt: skip
    assert {s.key for s in found.sites} == {(f, "grad_input", leaf) for f, leaf in want}
    for i, site in enumerate(found.sites):
        gradient = want[site.fqn, site.leaf]
        assert gradient is not None
        assert (site.dtype, site.placement, site.primary) == ("float32", "local", True)
        assert found.counts[i].tolist()[5:] == [2, 2]
        assert found.values[i][2] == pytest.approx(2 * gradient.sum().item())
    assert set(rows.fetch().micros.tolist()) == {4}


def test_a_compiled_module_and_what_runs_in_evaluation_or_a_recomputation_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    hooks, _, clock = hooks_of(model, resident=(model[0],))
    hooks.attach()
    assert hooks.unsafe == {"0": "compiled with torch.compile: a full hook would break the graph"}
    clock.evaluating = True
    model(torch.ones(1, 2))
    clock.evaluating = False
    start = torch.ones(1, 2, requires_grad=True)
    again = start * 1
    again.register_hook(lambda gradient: gradient + 0 * model(gradient))
    again.sum().backward()
    hooks.probed()
    assert hooks.unsafe.keys() == {"0"}
    assert hooks.safe == set()


def test_a_module_that_fsdp2_has_hooked_itself_gets_no_second_one() -> None:
    with on_rank(0):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh())
        fully_shard(model[1], mesh=mesh(4))
        hooks, _, _ = hooks_of(model)
        hooks.attach()
        model(torch.ones(1, 2))
        hooks.probed()
    assert hooks.unsafe["1"] == "fully_shard hooks this module's outputs itself"
    assert hooks.safe == {"2"}
