"""What is bad on several ranks is ordered by what is known of them, and by nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.pipelining import stage as stages

from ddpprobe.rank.hooks import execution_order
from ddpprobe.rank.hooks.execution_order import ExecutionOrder
from ddpprobe.rank.hooks.watch import Watch
from ddpprobe.rank.topology.describe import describe
from ddpprobe.records.step import PHASES, UNORDERED, FirstBad
from ddpprobe.rundir.fuse import Fuse

from ... import far
from .test_far import Clock


def on_a_device() -> ExecutionOrder:
    return ExecutionOrder(pipelined=True, near=False)


def called_as_stage(number: object, called: Callable[[], object]) -> None:
    """Call it as torch's pipeline calls the part of the model that is a stage."""
    caller = SimpleNamespace(stage_index=number, submod=called)
    stages._PipelineStageBase.forward_maybe_with_nosync(caller)


def order_of(*numbers: int) -> ExecutionOrder:
    order = on_a_device()
    for number in numbers:
        called_as_stage(number, order.look)
    return order


def test_beside_each_other_ranks_are_ordered_by_their_places_and_a_pipeline_by_the_clock() -> None:
    for order in (ExecutionOrder(), ExecutionOrder(near=False), ExecutionOrder(pipelined=True)):
        called_as_stage(3, order.look)
        assert [order.number(phase, 7) for phase in PHASES] == [7] * 3
    assert ExecutionOrder(pipelined=True).timed
    assert not ExecutionOrder().timed
    assert not on_a_device().timed


def test_on_a_device_a_pipeline_is_ordered_by_stages_that_go_back_in_the_backward() -> None:
    first, last = order_of(0, 0), order_of(3, 3)
    assert first.number("forward", 90) < last.number("forward", 1)
    assert last.number("backward", 90) < first.number("backward", 1)
    assert first.number("forward", 1) < first.number("forward", 90)
    assert first.number("backward", 1) < first.number("backward", 90)
    assert first.number("step", 1) < last.number("step", 90)
    huge = order_of(1 << 40).number("forward", 1)
    assert last.number("forward", 90) < huge < UNORDERED


def test_where_no_number_is_found_or_more_than_one_nobody_is_said_to_be_first() -> None:
    unknown = on_a_device()
    unknown.look()
    for order in (unknown, order_of(1, 3), order_of(-1)):
        assert order.number("forward", 1) == order.number("backward", 2) == UNORDERED


def test_only_what_drives_a_pipeline_is_asked_for_a_number() -> None:
    class Script:
        stage_index = 5

        def __init__(self) -> None:
            self.stage_index = self.stage_id = 5

        def step(self, order: ExecutionOrder) -> None:
            order.look()

    order = on_a_device()
    Script().step(order)
    assert order.number("forward", 1) == UNORDERED


def test_the_engine_of_deepspeed_is_asked_for_its_stage() -> None:
    source = "def forward(self, look):\n    look()\n"
    names = {"__name__": "deepspeed.runtime.pipe.engine"}
    exec(source, names)
    order = on_a_device()
    names["forward"](SimpleNamespace(stage_id=2), order.look)
    assert order.number("forward", 0) == order_of(2).number("forward", 0)


def test_the_stages_of_torch_keep_their_number_where_it_is_looked_for() -> None:
    assert "stage_index" in execution_order._NUMBERS
    assert "self.stage_index = stage_index" in inspect.getsource(stages._PipelineStageBase)


def test_of_what_arrives_late_no_rank_is_first_by_when_it_has_asked(monkeypatch) -> None:
    far.pretend(monkeypatch)
    found: list[FirstBad] = []
    for looks in (0, 5):
        clock = Clock()
        watch = Watch(describe(nn.Linear(1, 1)), clock, 0, Fuse("hooks"), found.append)
        watch._on_late = lambda bad, skipped: found.append(bad)
        watch.output([torch.tensor(float("nan"))])
        watch.end_step(3)
        for _ in range(looks):  # of the step in which it asks
            watch.output([torch.tensor(1.0)])
        watch.poll(wait=True)
    assert found[0] == found[1]
