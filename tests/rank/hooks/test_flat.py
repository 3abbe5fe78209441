"""The gradients of a flat parameter of FSDP1 are those of the parameters in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.fsdp import ShardingStrategy

from ddpprobe.rank.backward import Backward
from ddpprobe.rank.hooks import lanes
from ddpprobe.rank.hooks.eager import EagerHooks
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.hooks.watch import Watch
from ddpprobe.rank.topology.describe import Topology, describe
from ddpprobe.rank.topology.flat import FlatUnit
from ddpprobe.records.step import FirstBad
from ddpprobe.rundir.fuse import Fuse

from ... import far
from ..topology.wrapped_models import HIDDEN, flat, on_rank


class Clock:
    def __init__(self) -> None:
        self.micro, self.evaluating, self.backward = 2, False, Backward()
        self.without_grad = False

    def is_the_model(self, fqn: str, module: object) -> bool:
        return not fqn


@pytest.fixture
def topology() -> Iterator[Topology]:
    """A model whose parameters are one flat one, on a rank that holds it whole."""
    with on_rank(1):
        yield describe(flat(sharding_strategy=ShardingStrategy.NO_SHARD))


def arrive(unit: FlatUnit, gradient: torch.Tensor) -> None:
    """Let this be the gradient of the flat parameter."""
    (unit.flat * gradient).sum().backward()


def gradient_of(unit: FlatUnit, **bad: float) -> torch.Tensor:
    """Return 0, 1, 2, ..., and at the beginning of the named parameters something else."""
    gradient = torch.arange(float(unit.flat.numel()))
    for fqn, part in unit.split(gradient):
        if fqn.replace(".", "_") in bad:
            part[0] = bad[fqn.replace(".", "_")]
    return gradient


def test_each_parameter_in_it_has_its_own_row(topology: Topology) -> None:
    (unit,), clock = topology.flat, Clock()
    rows = StepRows(torch.device("cpu"), 1)
    chosen = {"0", "2"}
    hooks = EagerHooks(topology, chosen.__contains__, rows, clock, Fuse("hooks"))
    hooks.begin()
    hooks.attach()
    hooks.attach()  # at a further forward of the step
    gradient = gradient_of(unit)
    arrive(unit, gradient)
    hooks.detach()
    assert unit.flat._backward_hooks is None  # not even an empty table of them
    arrive(unit, gradient)
    found = rows.fetch().result(0, partial=True)
    want = {fqn: part for fqn, part in unit.split(gradient) if fqn.rpartition(".")[0] in chosen}
    told = {s.fqn: i for i, s in enumerate(found.sites) if s.kind == "grad_local"}
    assert told.keys() == want.keys()
    assert len(want) == 4
    for fqn, part in want.items():
        assert found.counts[told[fqn]].tolist()[5:] == [1, 1]
        assert found.counts[told[fqn]][0] == part.numel()
        assert found.values[told[fqn]][:3].tolist() == [part.min(), part.max(), part.sum()]
    assert set(rows.fetch().micros.tolist()) == {2}


CASES = {
    "finite": ({}, []),
    "one parameter": ({"2_bias": torch.nan}, [("2.bias", "grad_local", 1, 5)]),
    "infinite": ({"2_bias": torch.inf}, [("2.bias", "grad_local", 0, 5)]),
    "one module": (
        {"2_weight": torch.nan, "2_bias": torch.nan}, [("2.weight", "grad_local", 1, 5 * HIDDEN)],
    ),
    "two modules": ({"0_bias": torch.nan, "2_bias": torch.nan}, [(None, None, 0, 0)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_bad_one_is_named_if_its_module_is_the_only_one(name: str, topology: Topology) -> None:
    bad, want = CASES[name]
    (unit,), heard = topology.flat, list[FirstBad]()
    watch = Watch(topology, Clock(), 1, Fuse("hooks"), heard.append)
    watch.seek()
    watch.found()
    arrive(unit, gradient_of(unit, **bad))
    assert [(b.fqn, b.kind, b.nan, b.numel) for b in heard] == want
    told = {(b.step, b.micro, b.phase, b.rank, b.order) for b in heard}
    assert told <= {(-1, 2, "backward", 1, 1)}
    watch.close()
    arrive(unit, gradient_of(unit, **bad))
    assert len(heard) == len(want)


def test_a_sum_that_overflows_is_no_fault(topology: Topology) -> None:
    (unit,), heard = topology.flat, list[FirstBad]()
    watch = Watch(topology, Clock(), 1, Fuse("hooks"), heard.append)
    watch.seek()
    arrive(unit, torch.full_like(unit.flat, 3e38))
    assert heard == []


@pytest.mark.parametrize("was_read", [False, True])
def test_on_a_device_it_is_looked_at_unless_a_sampled_step_has_read_it(
    was_read: bool, topology: Topology, monkeypatch
) -> None:
    far.pretend(monkeypatch)
    assert not lanes.is_near(torch.device("cpu"))
    (unit,), heard = topology.flat, list[FirstBad]()
    watch = Watch(
        topology, Clock(), 1, Fuse("hooks"), heard.append, lambda bad, _: heard.append(bad),
        flat_was_read=lambda u: was_read,
    )  # fmt: skip
    watch.seek()
    arrive(unit, gradient_of(unit, **{"2_bias": torch.nan}))
    watch.end_step(6)
    watch.poll(wait=True)
    assert [(b.step, b.phase, b.fqn) for b in heard] == [(6, "backward", None)] * (not was_read)
