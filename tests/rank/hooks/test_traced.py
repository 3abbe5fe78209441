"""What a graph of torch.compile tells of the tensors in it, without the compiler."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from ddpprobe.rank import torch_private
from ddpprobe.rank.backward import Backward
from ddpprobe.rank.hooks.eager import EagerHooks
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.topology.describe import describe
from ddpprobe.rundir.fuse import Fuse

SITES = (("m", "output", "y"), ("m", "grad_output", "y"))


class Clock:
    def __init__(self) -> None:
        self.micro, self.lent, self.evaluating, self.backward = 0, 0, False, Backward()
        self.without_grad = False

    def is_the_model(self, fqn: str, module: nn.Module) -> bool:
        return not fqn


class Told:
    """The hooks of one sampled step, that nothing but a graph tells anything."""

    def __init__(self, *, pipeline: bool = False) -> None:
        topology = describe(nn.Sequential(nn.Linear(2, 2)))
        if pipeline:
            topology = replace(topology, cut=frozenset({"0"}))
        self.rows, self.clock = StepRows(torch.device("cpu"), 0), Clock()
        self.hooks = EagerHooks(topology, lambda _: True, self.rows, self.clock, Fuse("hooks"))
        self.hooks.begin()
        self.hooks.attached = True

    def forward(self, micro: int, value: float = 1.0, *, trained: bool = True) -> None:
        self.clock.micro = micro
        self.hooks.traced_output("m", "y", torch.full((2,), value), trained=trained)

    def backward(self, value: float = 1.0) -> None:
        self.hooks.traced_gradient("m", "y", torch.full((2,), value))

    def micros(self, key: tuple[str, str, str]) -> list[int]:
        slot = self.rows.table.find(key)
        pending = self.rows.fetch()
        return pending.micros[pending.slots == slot].tolist()

    def counts(self) -> dict[str, tuple[int, int]]:
        """By kind: how often a hook was there, and how often something arrived."""
        found = self.rows.fetch().result(0, partial=True)
        return {s.kind: tuple(found.counts[i][5:].tolist()) for i, s in enumerate(found.sites)}


def test_each_backward_is_of_the_latest_forward_that_still_waits_for_one() -> None:
    told = Told()
    for micro in (0, 1, 2):
        told.forward(micro)
    for _ in range(3):
        told.backward()
    told.clock.micro = 7
    told.backward()  # nobody waits
    assert told.micros(SITES[0]) == [0, 1, 2]
    assert told.micros(SITES[1]) == [2, 1, 0, 7]
    assert told.counts() == {"output": (3, 3), "grad_output": (3, 4)}
    assert told.rows.fetch().confirmed == {0, 1, 2, 7}


def test_in_a_pipeline_it_is_of_the_first_forward_that_still_waits() -> None:
    told = Told(pipeline=True)
    for micro in (0, 1, 2):
        told.forward(micro)
    for _ in range(3):
        told.backward()
    assert told.micros(SITES[1]) == [0, 1, 2]


def test_a_hook_outside_of_the_graph_tells_of_which_forward_a_backward_is(monkeypatch) -> None:
    told, backward = Told(), 11
    for micro in (0, 1, 2):
        told.forward(micro)
    monkeypatch.setattr(torch_private, "backward_id", lambda: backward)
    outside = told.hooks._slot("head", "grad_output", "", torch.ones(1), tap=True)
    told.hooks.on_gradient(outside, 1, torch.ones(1))
    told.backward()
    told.backward()  # another call of the same module: the known one is taken
    backward = 12
    told.backward()
    assert told.micros(SITES[1]) == [1, 2, 0]
    local = told.hooks._slot("m.w", "grad_local", "", torch.ones(1), tap=True)
    told.clock.micro = 5
    told.hooks.on_gradient(local, -1, torch.ones(1))  # a parameter knows no forward: the latest
    backward = 11
    told.hooks.on_gradient(local, -1, torch.ones(1))
    assert told.micros(("m.w", "grad_local", "")) == [5, 1]


def test_a_recomputation_is_heard_only_where_the_first_forward_was_not(monkeypatch) -> None:
    told = Told()
    told.forward(0)
    monkeypatch.setattr(torch_private, "in_backward", lambda: True)
    told.forward(0)
    assert told.counts() == {"output": (1, 1), "grad_output": (1, 0)}
    told.forward(0, 2.0)  # more often than it was heard
    assert told.counts() == {"output": (2, 2), "grad_output": (1, 0)}
    told.backward()
    assert told.counts() == {"output": (2, 2), "grad_output": (1, 1)}
    told.hooks.begin()
    told.rows.begin()
    told.forward(3)  # reentrant checkpointing: the first forward said nothing
    assert told.micros(SITES[0]) == [3]


def test_what_no_gradient_comes_to_is_not_waited_for() -> None:
    told = Told()
    told.forward(0, trained=False)
    assert told.counts() == {"output": (1, 1)}
    told.clock.micro = 4
    told.backward()
    assert told.micros(SITES[1]) == [4]


def test_a_buffer_that_a_graph_writes_anew_is_read_anew() -> None:
    told = Told()
    buffer = torch.ones(2)
    for value in (1.0, 2.0):
        buffer.numpy()[:] = value
        told.hooks.traced_output("m", "y", buffer, trained=True)
    for value in (1.0, 2.0):
        buffer.numpy()[:] = value
        told.hooks.traced_gradient("m", "y", buffer)
    found = told.rows.fetch().result(0, partial=True)
    assert found.values[:, 2].tolist() == [6.0, 6.0]


def test_nothing_is_told_in_evaluation_of_ids_or_behind_the_step() -> None:
    told = Told()
    told.clock.evaluating = True
    told.forward(0)
    assert len(told.rows) == 0
    assert "0" in told.hooks.silent()
    told.clock.evaluating = False
    told.hooks.traced_output("m", "y", torch.ones(2, dtype=torch.int64), trained=False)
    assert told.counts() == {}
    told.hooks.attached = False
    told.backward()
    assert len(told.rows) == 0


@pytest.mark.parametrize("grads", [1, 2])
def test_of_several_outputs_of_a_graph_no_gradient_is_taken(grads: int) -> None:
    told = Told()
    start = torch.ones(2, requires_grad=True)
    outputs = [start * 2, (start * 3) if grads == 2 else start.detach()]
    told.hooks.forward("g", outputs, at_a_graph=True)
    sum(o.sum() for o in outputs).backward()
    taken = {"grad_output": (1, 1)} if grads == 1 else {"grad_output": (2, 0)}
    found = told.rows.fetch().result(0, partial=True)
    counts = [
        tuple(found.counts[i][5:]) for i, s in enumerate(found.sites) if s.kind == "grad_output"
    ]
    assert tuple(map(sum, zip(*counts, strict=True))) == taken["grad_output"]
    assert [s.leaf for s in found.sites if s.kind == "output"] == ["0", "1"]
