"""The every-step watch looks at all local gradients together, and at each where it must."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpprobe
from ddpprobe.rank.backward import Backward
from ddpprobe.rank.hooks.execution_order import ExecutionOrder
from ddpprobe.rank.hooks.sweep import SMALL, Sweep
from ddpprobe.rank.hooks.watch import Watch
from ddpprobe.rank.topology.describe import describe
from ddpprobe.rank.topology.replicas import ENOUGH, TURNS, in_turn
from ddpprobe.records.step import FirstBad
from ddpprobe.rundir.fuse import Fuse

from ... import far

SHAPES = [(3,), (), (2, 3), (5,), (4, 3), (2, 2, 2), (SMALL + 1,), (SMALL, 2)]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    found = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]
    for parameter in found:
        parameter.grad = torch.ones_like(parameter)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_sweep_sees_one_bad_element_wherever_it_is(dtype: torch.dtype, bad: float) -> None:
    found = parameters(dtype)
    sweep = Sweep(found)
    assert sweep.is_clean()
    assert sweep.peak() == 1
    for parameter in found:
        last = parameter.grad.view(-1)[-1:]
        last.fill_(bad)
        assert not sweep.is_clean()
        assert not torch.isfinite(sweep.peak())
        last.fill_(1)
    found[0].grad = None  # it is not known to be clean
    assert not sweep.is_clean()
    assert sweep.peak() is None


def run(tmp_path: Path, records_of, model: nn.Module, step, steps: int) -> list:
    """Train with `step(i) -> loss`; return (step, phase, FQN) of what the watch saw."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=100, first_step=1, daemon="none"):
        for i in range(1, steps):
            step(i).backward()
            for parameter in model.parameters():  # or all that follows would be NaN
                if parameter.grad is not None:
                    parameter.grad.nan_to_num_()
            optimizer.step()
            optimizer.zero_grad()
    seen = [r.first_bad for r in records_of(tmp_path / "r") if r.first_bad]
    return sorted({(b.step, b.phase, b.fqn) for b in seen})


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))


def nan_in(parameter: nn.Parameter) -> torch.Tensor:
    """Zero, with a gradient that is not."""
    return torch.sqrt(parameter.sum() * 0)


def test_after_the_first_step_nothing_hangs_on_a_parameter_and_all_is_seen(
    tmp_path: Path, records_of
) -> None:
    model, left = net(), []

    def step(i: int) -> torch.Tensor:
        left.append([p._post_accumulate_grad_hooks for p in model.parameters()])
        loss = model(torch.ones(2, 4)).sum()
        return loss + nan_in(model[1].weight) if i in (1, 4) else loss

    seen = run(tmp_path, records_of, model, step, 6)
    assert seen == [(1, "backward", "1.weight"), (4, "backward", "1.weight")]
    assert left[1:] == [[None] * 6] * 4


@pytest.mark.parametrize("since", [1, 3])
def test_a_gradient_that_does_not_outlive_the_backward_is_still_looked_at(
    since: int, tmp_path: Path, records_of
) -> None:
    model = net()  # trained inside the backward, as it is done to save memory
    consumed = model[1].weight

    def step(i: int) -> torch.Tensor:
        if i == since:
            consumed.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        loss = model(torch.ones(2, 4)).sum()
        return loss + nan_in(consumed) if i == 5 else loss

    assert run(tmp_path, records_of, model, step, 7) == [(5, "backward", "1.weight")]


def test_what_is_frozen_for_a_while_or_gets_its_loss_elsewhere_is_looked_at_again(
    tmp_path: Path, records_of
) -> None:
    model, inner = net(), []
    model[1].register_forward_hook(lambda _m, _a, output: inner.append(output))

    def step(i: int) -> torch.Tensor:
        model[1].requires_grad_(i not in (2, 3))
        loss = model(torch.ones(2, 4)).sum()
        if i in (4, 7):
            loss = loss + nan_in(model[1].bias)
        if i >= 6:  # the root's output has no part in it
            loss = inner[-1].sum() + (nan_in(model[0].bias) if i == 8 else 0)
        return loss

    seen = run(tmp_path, records_of, model, step, 10)
    assert seen == [(4, "backward", "1.bias"), (8, "backward", "0.bias")]


@pytest.fixture
def alone() -> Iterator[None]:
    """Be the only rank of a job."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("every", [1, 2], ids=["sampled", "unsampled"])
@pytest.mark.parametrize("far_away", [False, True], ids=["near", "far"])
def test_sums_that_a_reduction_has_spoilt_are_not_of_the_next_micro_batchs_backward(
    every: int, far_away: bool, alone: None, tmp_path: Path, records_of, monkeypatch
) -> None:
    if far_away:
        far.pretend(monkeypatch)
    place = [0, 0]

    def hook(_state, bucket):
        future = torch.futures.Future()
        bad = torch.nan if place == [3, 0] else 1.0
        future.set_result(bucket.buffer() * bad)
        return future

    model = DistributedDataParallel(net())
    model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=every, daemon="none"):
        for place[0] in range(5):
            for place[1] in range(2):
                model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    records = [r for r in records_of(tmp_path / "r") if r.first_bad or r.sampled]
    assert {r.first_bad.phase for r in records if r.first_bad} <= {"forward", "step"}
    (page,) = [a for a in ddpprobe.open(tmp_path / "r").anomalies() if a.level == "page"]
    if every == 1 or not far_away:
        assert (page.step, page.phase) == (3, "step")
        assert page.kind == ("grad" if every == 1 else "param")


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.body(x)
        return self.a(h), self.b(h)


@pytest.mark.parametrize("every", [1, 100], ids=["sampled", "unsampled"])
@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_an_output_that_the_loss_leaves_out_gives_no_gradient_and_the_watch_goes_on(
    every: int, alone: None, tmp_path: Path
) -> None:
    """Where DDP looks for unused parameters, those behind such an output are given none."""
    model = DistributedDataParallel(_TwoHeads(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=every, first_step=1, daemon="none"):
        for step in range(1, 6):
            a, b = model(torch.ones(2, 4))
            loss = a.square().mean()
            if step % 2:
                loss = loss + b.square().mean()
            if step == 4:
                loss = loss + nan_in(model.module.a.bias)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    (page,) = [a for a in ddpprobe.open(tmp_path / "r").anomalies() if a.level == "page"]
    assert (page.step, page.phase, page.module) == (4, "backward", "a.bias")


def test_a_second_order_gradient_is_swept_without_a_word(tmp_path: Path, records_of) -> None:
    model = net()

    def step(i: int) -> torch.Tensor:
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward(create_graph=True) if i == 3 else None
        return model(torch.ones(2, 4)).sum()

    with pytest.warns(UserWarning, match="create_graph"):
        assert run(tmp_path, records_of, model, step, 6) == []


@pytest.mark.parametrize("sizes", [[10] * 9, [ENOUGH // 4 + 1, 3, 5], [ENOUGH // 8] * 40 + [7]])
def test_each_parameter_has_its_turn_and_a_small_model_is_compared_whole(sizes: list[int]) -> None:
    held = [(str(i), "", torch.empty(n, dtype=torch.float32)) for i, n in enumerate(sizes)]
    turns = [{fqn for fqn, _, _ in in_turn(iter(held), turn)} for turn in range(TURNS)]
    everything = {fqn for fqn, _, _ in held}
    assert set.union(*turns) == everything
    if 4 * sum(sizes) <= ENOUGH:
        assert turns == [everything] * TURNS
    else:
        assert all(turn < everything for turn in turns)


class Clock:
    def __init__(self) -> None:
        self.micro, self.evaluating, self.backward = 0, False, Backward()
        self.without_grad = False


NAN, INF, GOOD = torch.nan, torch.inf, 1.0
# By step: what the model returns (in a loss, or in logits), its gradient, and the phases told of.
STEPS = {
    "finite": ("loss", [(GOOD, GOOD, []), (GOOD, GOOD, [])]),
    "a bad gradient": (
        "loss", [(GOOD, NAN, ["backward"]), (GOOD, GOOD, []), (GOOD, -INF, ["backward"])],
    ),
    "a bad loss": ("loss", [(NAN, GOOD, ["forward"]), (-INF, GOOD, ["forward"]), (GOOD, GOOD, [])]),
    "bad from the loss on": ("loss", [(NAN, NAN, ["forward"])]),
    "a mask": ("logits", [(-INF, GOOD, []), (-INF, GOOD, []), (NAN, GOOD, ["forward"])]),
    "a mask that does harm": ("logits", [(-INF, NAN, ["forward"]), (-INF, NAN, ["forward"])]),
    "an infinity where all was finite": (
        "logits",
        [(GOOD, GOOD, []), (INF, GOOD, ["forward"]), (INF, GOOD, []), (GOOD, NAN, ["backward"])],
    ),
    "a mask, and a gradient that is bad of its own": (
        "logits", [(INF, GOOD, []), (INF, NAN, ["backward"]), (INF, GOOD, [])],
    ),
    "no gradient, so nothing is learned": ("logits", [(INF, None, []), (INF, NAN, ["forward"])]),
}  # fmt: skip


@pytest.mark.parametrize("far_away", [False, True], ids=["near", "far"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_bad_from_its_first_phase_on_that_did_harm(
    name: str, far_away: bool, monkeypatch
) -> None:
    if far_away:
        far.pretend(monkeypatch)
    kind, steps = STEPS[name]
    model, heard = nn.Linear(2, 1, bias=False), list[FirstBad]()
    late = lambda bad, _: heard.append(bad)  # noqa: E731
    watch = Watch(describe(model), Clock(), 5, Fuse("hooks"), heard.append, late)
    for step, (value, gradient, phases) in enumerate(steps):
        heard.clear()
        watch.seek()
        output = torch.tensor(value) if kind == "loss" else torch.tensor([GOOD, value, GOOD])
        watch.output([torch.arange(3), output])
        watch.found()
        if gradient is not None:
            (model.weight * torch.tensor([[gradient, 2.0]])).sum().backward()
            watch.backward_ends()
        watch.end_step(step)
        watch.poll(wait=True)
        model.weight.grad = None
        assert list(dict.fromkeys(bad.phase for bad in heard))[:1] == phases, step
        assert {bad.step for bad in heard} <= ({step} if far_away else {-1})
        assert {bad.rank for bad in heard} <= {5}
        assert watch.lost == 0


def test_a_witness_has_its_place_and_its_numbers() -> None:
    model, heard, clock = net(), list[FirstBad](), Clock()
    watch = Watch(describe(model), clock, 3, Fuse("hooks"), heard.append)
    clock.micro = 2
    watch.seek()
    watch.output([torch.ones(())])
    watch.found()
    bad = torch.ones(4, 4)
    bad[0] = torch.tensor([NAN, INF, -INF, -INF])
    (model[1].weight * bad).sum().backward()
    want = {
        "step": -1, "micro": 2, "phase": "backward", "order": 2, "rank": 3, "fqn": "1.weight",
        "kind": "grad_local", "nan": 1, "pos_inf": 1, "neg_inf": 2, "numel": 16,
    }  # fmt: skip
    assert [{name: getattr(one, name) for name in want} for one in heard] == [want]
    watch.end_step(0)
    clock.micro = -1  # not known
    watch.output([torch.full((), NAN)])
    last = heard[-1]
    assert (last.micro, last.phase, last.order, last.fqn, last.kind, last.numel) == (
        0, "forward", 1, None, None, 1,
    )  # fmt: skip


def test_in_a_pipeline_the_time_says_which_stage_was_bad_first(monkeypatch) -> None:
    monkeypatch.setattr("time.time_ns", lambda: 10**18 + 7)
    for cut, order in ((frozenset(), 1), (frozenset({"0"}), 10**18 + 7)):
        model, heard = net(), list[FirstBad]()
        topology, among = replace(describe(model), cut=cut), ExecutionOrder(pipelined=bool(cut))
        watch = Watch(topology, Clock(), 0, Fuse("hooks"), heard.append, order=among)
        watch.seek()
        watch.output([torch.full((), NAN)])
        assert [bad.order for bad in heard] == [order]


def test_nothing_of_a_watch_that_is_closed_hangs_on_anything() -> None:
    model, heard = net(), list[FirstBad]()
    watch = Watch(describe(model), Clock(), 0, Fuse("hooks"), heard.append)
    for _ in range(3):
        watch.seek()
        watch.found()
        hooks = [p._post_accumulate_grad_hooks for p in model.parameters()]
    assert [len(h) for h in hooks] == [1] * 6
    watch.close()
    assert [len(h) for h in hooks] == [0] * 6
    (model[0].weight * NAN).sum().backward()
    assert heard == []


def test_a_gradient_that_is_taken_away_in_each_backward_has_one_hook_for_good() -> None:
    model, heard = nn.Linear(2, 1, bias=False), list[FirstBad]()
    weight = model.weight
    watch = Watch(describe(model), Clock(), 0, Fuse("hooks"), heard.append)
    weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for step in range(4):
        watch.seek()
        watch.found()
        (weight * (NAN if step == 3 else 1.0)).sum().backward()
        watch.backward_ends()
        watch.end_step(step)
        assert len(weight._backward_hooks) == 1
    assert {(bad.fqn, bad.phase) for bad in heard} == {("weight", "backward")}
