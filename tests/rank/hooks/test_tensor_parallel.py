"""How tensors lie inside tensor parallelism, as each rank of a pair says it by itself.

The group is not there (`wrapped_models`): what a collective would make is not claimed, only how it
would lie. That the values of two real ranks agree with that is claimed in `tests/distributed`.

What is told of each model is kept in `tensor_parallel.json`. After a change that is meant:
`python -m tests.rank.hooks.test_tensor_parallel`, and read the difference.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement
from torch.utils.checkpoint import checkpoint

from ddpprobe.rank.backward import Backward
from ddpprobe.rank.hooks.eager import EagerHooks
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.hooks.tp_provenance import from_hidden, same_memory
from ddpprobe.rank.topology.describe import describe
from ddpprobe.rundir.fuse import Fuse
from tests.distributed import layouts_job

from ..topology.wrapped_models import WITHOUT_RANK_0, mesh, on_rank

FILE = Path(__file__).parent / "tensor_parallel.json"
Placements = dict[str, tuple[str, bool]]


class Clock:
    def __init__(self) -> None:
        self.micro, self.lent = 0, 0
        self.evaluating, self.backward = False, Backward()
        self.without_grad = False

    def is_the_model(self, fqn: str, module: nn.Module) -> bool:
        return not fqn


def pair() -> DeviceMesh:
    """Return the two ranks that share each tensor."""
    return mesh(2, 2)["inner"]


class Net(nn.Module):
    """A norm, a tensor-parallel `up`, `act`, `down`, and a head; `code` calls them."""

    def __init__(self, code: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.code = code
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)
        self.up, self.act, self.down = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)
        self.scatter, self.foreign, self.raises = (
            layouts_job.Scatter(),
            layouts_job.Foreign(),
            Raises(),
        )
        self.scale, self.ids, self.twice = Scale(), nn.Embedding(5, 8), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.code(self, x)).square().mean()

    def block(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        raise ArithmeticError(self.inner(x).shape)


class Scale(nn.Module):
    """Has a parameter of its own, in plain code."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, *, more: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        return {"y": x * self.by, **(more or {})}


def plain(net: Net, x: Tensor) -> Tensor:
    h = net.norm(x)
    return h + net.block(h)


def own_half(net: Net, x: Tensor) -> Tensor:
    h = net.norm(x)
    return h + net.down(net.scale(net.up(h))["y"])


def whole_in_code(net: Net, x: Tensor) -> Tensor:
    more = {"z": x.detach()}
    return net.scale(plain(net, x), more=more)["y"]


def scattered(net: Net, x: Tensor) -> Tensor:
    return net.scatter(plain(net, x))


def foreign(net: Net, x: Tensor) -> Tensor:
    return net.foreign(plain(net, x))


def checkpointed(net: Net, x: Tensor) -> Tensor:
    h = net.norm(x.requires_grad_())
    return h + checkpoint(net.block, h, use_reentrant=True)


def frozen(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = net.block(x)
    return net.norm(h)


def caught(net: Net, x: Tensor) -> Tensor:
    try:
        net.raises(x)
    except ArithmeticError:
        return plain(net, x)
    raise AssertionError


def of_ids(net: Net, x: Tensor) -> Tensor:
    return plain(net, net.ids(x.argmax(-1) % 5))


def twice(net: Net, x: Tensor) -> Tensor:
    h = net.twice(net.norm(x))
    return net.twice(net.up(h)).sum(-1, keepdim=True) + net.down(net.up(h))


def changed_in_place(net: Net, x: Tensor) -> Tensor:
    h = net.norm(x)
    half = net.up(h)
    h.mul_(half[..., :8])  # a replicated tensor, until here
    return net.twice(h) + net.down(half)


def split(net: nn.Module, **plan: object) -> nn.Module:
    whole = {"up": ColwiseParallel(), "down": RowwiseParallel(), **plan}
    return parallelize_module(net, pair(), whole, **WITHOUT_RANK_0)


def uncalled(net: Net, x: Tensor) -> Tensor:
    """Use a parameter of a module that is never called."""
    return plain(net, x) + net.spare.bias.to_local()


def nested() -> nn.Module:
    return nn.Sequential(split(Net(plain)))


def with_spare() -> nn.Module:
    net = Net(uncalled)
    net.spare = nn.Linear(8, 8)
    return split(net, spare=RowwiseParallel())


def late() -> nn.Module:
    """The user feeds each rank its part of the sequence, and says so after the norm."""
    net = layouts_job.Model("split-input")
    said = PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
    )
    plan = {"block": said, "block.inner.up": ColwiseParallel(), "block.down": RowwiseParallel()}
    return parallelize_module(net, pair(), plan, **WITHOUT_RANK_0)


def two_groups() -> nn.Module:
    net, both = Net(plain), mesh(2, 2)
    outer = both["outer"]
    if not WITHOUT_RANK_0:  # torch 2.6 splits over the innermost axis of a mesh only
        outer = DeviceMesh.from_group(both.get_group("outer"), "cpu")
    parallelize_module(net, both["inner"], {"up": ColwiseParallel()}, **WITHOUT_RANK_0)
    rows = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(net, outer, {"head": rows}, **WITHOUT_RANK_0)
    net.down = nn.Linear(8, 8)
    return net


def dtensors() -> nn.Module:
    return split(
        Net(plain),
        up=ColwiseParallel(use_local_output=False),
        down=RowwiseParallel(use_local_output=True),
    )


def sequence() -> nn.Module:
    return split(
        Net(lambda net, x: net.twice(net.block(net.norm(x)))),
        norm=SequenceParallel(use_local_output=True),
        up=ColwiseParallel(input_layouts=Shard(1)),
        down=RowwiseParallel(output_layouts=Shard(1)),
    )


def with_fsdp2() -> nn.Module:
    net, both = Net(plain), mesh(2, 2)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(net, both["inner"], plan, **WITHOUT_RANK_0)
    fully_shard(net.norm, mesh=both["outer"])
    return fully_shard(net, mesh=both["outer"])


CODE = (
    plain,
    own_half,
    whole_in_code,
    scattered,
    foreign,
    checkpointed,
    frozen,
    caught,
    of_ids,
    twice,
    changed_in_place,
)
MODELS = {code.__name__: (lambda code=code: split(Net(code))) for code in CODE}
MODELS |= {
    m.__name__: m for m in (nested, with_spare, late, two_groups, dtensors, sequence, with_fsdp2)
}


def placements(build: Callable[[], nn.Module], rank: int, micros: int = 1) -> Placements:
    """Return (placement, primary) by FQN, kind and leaf, of a sampled step on this rank of four."""
    with on_rank(rank):
        torch.manual_seed(0)
        model, rows, clock = build(), StepRows(torch.device("cpu"), rank), Clock()
        hooks = EagerHooks(describe(model), lambda _: True, rows, clock, Fuse("hooks"))
        hooks.begin()
        for clock.micro in range(micros):
            hooks.attach()
            model(torch.randn(3, 4, 8)).backward()
        hooks.reduced.read(clock.micro)
        hooks.detach()
        return {" ".join(s.key).strip(): (s.placement, s.primary) for s in rows.table.sites()}


def told(name: str) -> dict[str, list[str]]:
    """Return the sites of a model by placement, and those that the second rank does not count."""
    ours, theirs = (placements(MODELS[name], rank) for rank in (0, 1))
    assert {site: where for site, (where, _) in ours.items()} == {
        site: where for site, (where, _) in theirs.items()
    }
    assert all(primary for _, primary in ours.values())
    found = {where: sorted(s for s in ours if ours[s][0] == where) for where, _ in ours.values()}
    counted_once = sorted(site for site, (_, primary) in theirs.items() if not primary)
    return {**dict(sorted(found.items())), "counted by the first rank alone": counted_once}


@pytest.mark.parametrize("name", MODELS)
def test_how_each_tensor_lies_is_told_as_it_was_read_once_by_somebody(name: str) -> None:
    assert told(name) == json.loads(FILE.read_text())[name]


@pytest.mark.parametrize("name", ["plain", "scattered"])
def test_a_second_micro_batch_and_a_second_step_change_nothing(name: str) -> None:
    assert placements(MODELS[name], 1, micros=2) == placements(MODELS[name], 1)


def test_what_lies_otherwise_in_the_next_micro_batch_is_unknown_from_then_on() -> None:
    code = iter((plain, scattered, plain, plain))

    def changing(net: Net, x: Tensor) -> Tensor:
        return next(code)(net, x)

    found = placements(lambda: split(Net(changing)), 1, micros=4)
    assert found["head output"] == ("unknown", True)
    assert found["down output"] == ("local", False)
    assert next(code, None) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_plain_output_was_a_moment_ago_tells_how_it_lies(rank: int) -> None:
    def of(placement: Placement, *shape: int) -> DTensor:
        return DTensor.from_local(torch.ones(shape), over, [placement], run_check=False)

    with on_rank(rank):
        over = pair()
        whole, half, one = of(Replicate(), 4, 8), of(Shard(0), 2, 8), of(Shard(0), 1, 8)
        assert from_hidden(half, half.to_local()) == ("sharded", True)
        assert from_hidden(whole, whole.to_local()) == ("local", rank == 0)
        # Other memory, so redistributed or cast since: only the shape tells.
        assert from_hidden(whole, torch.ones(4, 8)) == ("local", rank == 0)
        assert from_hidden(whole, torch.ones(2, 8)) == ("sharded", True)
        assert from_hidden(half, torch.ones(2, 8)) == ("sharded", True)
        assert from_hidden(half, torch.ones(4, 8)) is None  # gathered, or changed otherwise
        assert from_hidden(whole, torch.ones(2, 4)) is None
        assert from_hidden(whole, torch.ones(4)) is None
        assert from_hidden(of(Replicate(), 1, 8), torch.ones(1, 8)) is None
        assert from_hidden(one, torch.ones(1, 8)) == ("sharded", True)
        assert from_hidden(whole, whole) is None
        assert from_hidden(torch.ones(2), torch.ones(2)) is None
        assert same_memory(half, half.to_local())
        assert not same_memory(half, half.to_local().double())
        assert not same_memory(half, half.to_local().view(-1))
        assert not same_memory(torch.ones(2), torch.ones(2))
        assert same_memory(torch.ones(0, 2), torch.ones(0, 2))
        assert not same_memory(torch.ones(0, 2), torch.ones(0, 3))


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: told(name) for name in MODELS}, indent=1) + "\n")
