"""What a step leaves behind is looked at: a fault of the optimizer is told as one, in its step."""

from __future__ import annotations

import contextlib
import math
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.rank.topology.describe import describe
from ddpprobe.rank.topology.outliving import Inventory, outliving
from ddpprobe.records.step import FirstBad, StepRecord

from ... import far

EVERY = 4
FIRST = "spare"  # in the order of the model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        self.register_buffer("mean", torch.zeros(4))
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x))).square().mean() + 0 * self.spare[0]


def train(tmp_path: Path, records_of, between, *, steps: int = 12, every: int = EVERY, kind=None):
    """Call `between(step, model, optimizer)` before each optimizer step; the records by step."""
    torch.manual_seed(0)
    model = Net()
    make = kind or (lambda p: torch.optim.Adam(p, lr=1e-3))
    optimizer = make(model.parameters())
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=every, daemon="none"):
        for step in range(steps):
            model(torch.randn(2, 4)).backward()
            between(step, model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return {r.step: r for r in records_of(tmp_path / "r") if not r.partial}


def rate(step: int, value: float = math.inf):
    def between(now: int, _model, optimizer) -> None:
        if now == step:
            optimizer.param_groups[0]["lr"] = value

    return between


def place(bad: FirstBad | None) -> tuple[object, ...] | None:
    return bad and (bad.step, bad.phase, bad.kind, bad.fqn, bad.leaf, bad.rank)


def test_a_fault_of_the_optimizer_is_told_in_its_own_step_where_that_is_sampled(
    tmp_path: Path, records_of
) -> None:
    records = train(tmp_path, records_of, rate(4))
    assert records[0].first_bad is None
    born = records[4].first_bad
    assert place(born) == (4, "step", "param", FIRST, "", 0)
    assert born.nan + born.pos_inf + born.neg_inf == born.numel == 3
    # What follows names the same origin, so that no step of its own looks guilty.
    assert place(records[8].first_bad) == place(born)


def spoilt(step: int):
    """Put a NaN into a buffer that no forward reads, after the backward of a step."""

    def between(now: int, model: Net, _optimizer: object) -> None:
        if now == step:
            model.mean[1] = math.nan

    return between


@pytest.mark.parametrize(
    ("between", "kind", "fqn"), [(rate(10), "param", FIRST), (spoilt(9), "buffer", "mean")]
)
def test_what_only_the_last_steps_left_which_were_not_sampled_is_told_at_the_end(
    between, kind: str, fqn: str, tmp_path: Path, records_of
) -> None:
    records = train(tmp_path, records_of, between, steps=11)
    assert [step for step, r in records.items() if r.first_bad] == [10]
    assert place(records[10].first_bad) == (10, "step", kind, fqn, "", 0)


def test_what_is_told_of_the_last_step_is_not_told_anew_as_what_it_left(
    tmp_path: Path, records_of
) -> None:
    def between(now: int, model: Net, _optimizer: object) -> None:
        if now == 10:
            model.a.weight.grad[0, 0] = math.nan

    def bad_loss(now: int, model: Net, _optimizer: object) -> None:
        if now == 10:
            (model(torch.full((2, 4), math.nan))).backward()

    assert place(train(tmp_path, records_of, between, steps=11)[10].first_bad)[1] == "step"
    other = tmp_path / "other"
    other.mkdir()
    assert place(train(other, records_of, bad_loss, steps=11)[10].first_bad)[1] == "forward"


def test_a_model_that_is_let_go_of_before_the_end_is_no_error(tmp_path: Path, records_of) -> None:
    def between(now: int, model: Net, _optimizer: object) -> None:
        if now == 9:
            model.to("meta")  # the optimizer then steps what is left of it

    with contextlib.suppress(RuntimeError, NotImplementedError):
        train(tmp_path, records_of, between, steps=10)
    assert not any(r.first_bad for r in records_of(tmp_path / "r"))


@pytest.mark.parametrize("step", [2, 3])  # the step after it: not sampled, sampled
def test_a_fault_of_the_optimizer_in_an_unsampled_step_is_no_fault_of_the_next_forward(
    step: int, tmp_path: Path, records_of
) -> None:
    records = train(tmp_path, records_of, rate(step))
    first = min(n for n, r in records.items() if r.first_bad)
    assert first == step + 1
    assert place(records[first].first_bad) == (step, "step", "param", FIRST, "", 0)


@pytest.mark.parametrize("step", [EVERY, EVERY + 1], ids=["sampled", "not sampled"])
def test_a_parameter_that_is_written_between_the_forwards_of_a_step_is_told_in_the_later_one(
    step: int, tmp_path: Path, records_of
) -> None:
    def between(now: int, model: nn.Module, _optimizer) -> None:
        if now == step:
            nn.init.constant_(model.b.bias, math.nan)
            model(torch.randn(2, 4)).backward()

    records = train(tmp_path, records_of, between, steps=step + 2)
    bad = records[step].first_bad
    assert (*place(bad), bad.micro) == (step, "forward", "param", "b.bias", "", 0, 1)
    (page,) = [a for a in ddpprobe.open(tmp_path / "r").anomalies() if a.level == "page"]
    assert "the parameter b.bias was so before the forward of micro-batch 1 began" in page.message


def train_spoilt(tmp_path: Path, steps: tuple[int, ...], every: int) -> list[StepRecord]:
    """Weights are spoilt between two forwards of these steps of 6, and loaded anew after them."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=every, daemon="none"):
        for step in range(6):
            model(torch.randn(2, 4)).backward()
            if step in steps:
                nn.init.constant_(model.b.bias, math.nan)
            model(torch.randn(2, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in steps:
                model.load_state_dict(kept)
    return [r for r in ddpprobe.open(tmp_path / "r").records() if r.first_bad]


@pytest.mark.parametrize("where", ["near", "far"])
def test_weights_that_the_script_went_back_to_are_not_what_made_the_next_step_bad(
    where: str, tmp_path: Path, monkeypatch
) -> None:
    """As LBFGS does, which steps between the forwards."""
    if where == "far":
        far.pretend(monkeypatch)
    found = {r.step: r.first_bad for r in train_spoilt(tmp_path, (2, 3), every=1)}
    assert {n: (b.step, b.phase, b.micro) for n, b in found.items()} == {
        n: (n, "forward", 1) for n in (2, 3)
    }


@pytest.mark.parametrize("spoilt", [(5,), (2, 5)])
def test_a_fault_of_the_last_step_keeps_its_name_where_that_is_not_sampled(
    spoilt: tuple[int, ...], tmp_path: Path
) -> None:
    """The losses that are written after the end are of the same step."""
    last = train_spoilt(tmp_path, spoilt, every=2)[-1]
    assert (last.step, last.sampled, *place(last.first_bad)) == (
        5, False, 5, "forward", "param", "b.bias", "", 0,
    )  # fmt: skip
    page = [a for a in ddpprobe.open(tmp_path / "r").anomalies() if a.level == "page"][-1]
    if spoilt == (5,):
        assert (page.step, page.micro, page.module) == (5, 1, "b.bias")


def test_division_by_an_epsilon_of_zero_is_told_as_the_optimizers(
    tmp_path: Path, records_of
) -> None:
    zero = lambda p: torch.optim.Adam(p, lr=1e-3, eps=0.0)  # noqa: E731
    records = train(tmp_path, records_of, lambda *_: None, kind=zero, every=1, steps=2)
    # Its gradient is zero, and always was.
    assert place(records[0].first_bad) == (0, "step", "param", "spare", "", 0)
    assert records[0].first_bad.nan == 3


def test_state_that_overflows_without_a_trace_in_the_forward_is_told_once(
    tmp_path: Path, records_of
) -> None:
    def between(step: int, model: Net, _optimizer) -> None:
        if step == 4:
            model.b.weight.grad.fill_(1e30)  # finite, and its square is not

    records = train(tmp_path, records_of, between)
    assert place(records[4].first_bad) == (4, "step", "optim_state", "b.weight", "exp_avg_sq", 0)
    assert records[8].first_bad is None


def test_a_buffer_that_goes_bad_is_told_and_a_mask_is_not(tmp_path: Path, records_of) -> None:
    def between(step: int, model: Net, _optimizer) -> None:
        if step == 2:
            model.mask = torch.full((6, 6), -math.inf).triu(1)  # a longer one
            model.register_buffer("late", torch.tensor([0.0, -math.inf]))
        if step == 6:
            model.mean[2] = math.inf
        if step == 10:
            model.mask[0, 0] = math.nan

    records = train(tmp_path, records_of, between, steps=14)
    found = {n: place(r.first_bad) for n, r in records.items() if r.first_bad}
    assert found == {
        8: (8, "step", "buffer", "mean", "", 0),
        12: (12, "step", "buffer", "mask", "", 0),
    }


def test_a_bad_parameter_that_harms_nobody_hides_no_fault_after_it(
    tmp_path: Path, records_of
) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(4, 1), "idle": nn.Linear(4, 4)})

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts["used"](x).sum()

    half = Half()
    optimizer = torch.optim.SGD(half.parameters(), lr=1e-3)
    with ddpprobe.install(half, run_dir=tmp_path / "r", every=2, daemon="none"):
        for step in range(10):
            half(torch.full((2, 4), math.nan if step in (6, 9) else 1.0)).backward()
            for parameter in half.parameters():
                if parameter.grad is not None:
                    parameter.grad.nan_to_num_()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                with torch.no_grad():
                    model["idle"].weight[0, 0] = math.nan
    found = {
        r.step: place(r.first_bad)[:4]
        for r in records_of(tmp_path / "r")
        if r.first_bad and not r.partial
    }
    assert found[2] == (2, "step", "param", "parts.idle.weight")
    assert found[6][:2] == (6, "forward")
    assert found[9][:2] == (9, "forward")


def test_a_parameter_that_came_bad_is_of_no_step(tmp_path: Path, records_of) -> None:
    model = Net()
    with torch.no_grad():
        model.b.bias.fill_(math.nan)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=2, daemon="none", first_step=3):
        for _ in range(2):
            model(torch.randn(2, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
    bad = next(r.first_bad for r in records_of(tmp_path / "r") if r.first_bad)
    assert place(bad) == (3, "forward", "param", "b.bias", "", 0)
    assert bad.order == -1  # before any module's output


def test_a_buffer_that_came_bad_and_harms_nobody_was_so_before_any_forward(
    tmp_path: Path, records_of
) -> None:
    model = Net()
    model.mean.fill_(math.nan)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        model(torch.randn(2, 4)).backward()
        optimizer.step()
    (record,) = records_of(tmp_path / "r")
    assert place(record.first_bad) == (0, "forward", "buffer", "mean", "", 0)
    assert (record.first_bad.micro, record.first_bad.order) == (0, -1)


def test_on_a_device_nobody_waits_and_the_same_is_told(
    tmp_path: Path, records_of, monkeypatch
) -> None:
    far.pretend(monkeypatch)
    plain = lambda p: torch.optim.SGD(p, lr=1e-3)  # noqa: E731  (which itself never waits)
    with far.no_waiting() as mode:
        records = train(tmp_path, records_of, rate(4), kind=plain)
    assert mode.seen
    assert place(records[4].first_bad) == (4, "step", "param", FIRST, "", 0)
    assert place(records[8].first_bad) == (4, "step", "param", FIRST, "", 0)


def test_on_a_device_a_sampled_step_knows_that_its_parameters_came_bad(
    tmp_path: Path, records_of, monkeypatch
) -> None:
    far.pretend(monkeypatch)
    records = train(tmp_path, records_of, rate(3), steps=5)
    assert place(records[4].first_bad) == (3, "step", "param", FIRST, "", 0)


class Chain(nn.Module):
    def __init__(self, spoil) -> None:
        super().__init__()
        self.a, self.b, self.spoil = nn.Linear(4, 4), nn.Linear(4, 1), spoil

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.spoil(self.a(x)))


@pytest.mark.parametrize(
    ("data", "between", "want"),
    [
        (math.nan, 1.0, ("input", "a", "0")),
        (1.0, math.nan, ("input", "b", "0")),
        (1.0, 1.0, None),
    ],
)
@pytest.mark.parametrize("step", [0, 1])
def test_what_came_in_bad_is_told_as_that_and_not_as_the_modules_output(
    data: float, between: float, want: tuple[str, ...] | None, step: int, tmp_path: Path, records_of
) -> None:
    factor = [1.0]
    model = Chain(lambda h: h * factor[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        for now in range(step + 1):
            factor[0] = between if now == step else 1.0
            model(torch.full((2, 4), data if now == step else 1.0)).sum().backward()
            optimizer.step()
    *clean, bad = [r.first_bad for r in records_of(tmp_path / "r") if not r.partial]
    assert clean == [None] * step
    assert (bad and (bad.kind, bad.fqn, bad.leaf)) == want
    if bad:
        assert (bad.step, bad.phase, bad.nan, bad.numel) == (step, "forward", 8, 8)


def test_what_a_module_makes_of_good_input_is_its_own(tmp_path: Path, records_of) -> None:
    model = Chain(lambda h: h)
    model.b.register_forward_hook(lambda _m, _a, output: output * math.inf)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    (bad,) = [r.first_bad for r in records_of(tmp_path / "r") if not r.partial]
    assert (bad.kind, bad.fqn) == ("output", "b")


def _exchange_buffer(net: Net, _adam: torch.optim.Adam) -> None:
    net.mean = torch.ones(4)


def _exchange_parameter(net: Net, _adam: torch.optim.Adam) -> None:
    net.b.bias = nn.Parameter(torch.ones(1))


def _exchange_state(net: Net, adam: torch.optim.Adam) -> None:
    adam.state[net.b.bias]["exp_avg"] = torch.ones(1)


def _rename(net: Net, _adam: torch.optim.Adam) -> None:
    net.c = net.b
    del net.b


def _tie(net: Net, _adam: torch.optim.Adam) -> None:
    net.spare = net.a.bias


def _add_state(net: Net, adam: torch.optim.Adam) -> None:
    adam.state[net.spare]["more"] = torch.ones(3)


@pytest.mark.parametrize(
    "exchange",
    [_exchange_buffer, _exchange_parameter, _exchange_state, _rename, _tie, _add_state],
)
def test_what_outlives_a_step_is_named_anew_only_where_it_was_exchanged(exchange) -> None:
    net = Net()
    adam = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 4)).backward()
    adam.step()
    topology = describe(net)
    with torch.no_grad():
        inventory = Inventory(topology, lambda: [adam], lambda: outliving(topology, [adam]))
        keys, tensors = inventory.take()
        assert [one.key for one in outliving(topology, [adam])] == list(keys)
        again = inventory.take()[0]
        assert again is keys
        gone = weakref.ref(net.mean)
        exchange(net, adam)
        del tensors
        assert (gone() is None) == (exchange is _exchange_buffer)  # it keeps nothing alive
        named = list(outliving(topology, [adam]))
        keys, tensors = inventory.take()
        assert keys is not again
        assert list(keys) == [one.key for one in named]
        assert all(a is b.tensor for a, b in zip(tensors, named, strict=True))


JOINED = """
import math
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import ddpprobe

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with ddpprobe.install(model, run_dir="run", every=4, daemon="none"):
    with model.join():
        for step in range(3 + 4 * rank):
            optimizer.zero_grad()
            x = torch.full((2, 3), math.nan if step == 6 else 1.0)
            model(x).sum().backward()
            optimizer.step()
    assert model.module.weight.isnan().all()
    dist.barrier()
dist.destroy_process_group()
"""


def test_what_another_rank_has_made_of_the_weights_by_the_end_of_a_join_is_not_this_one_s(
    tmp_path: Path, torchrun, records_of
) -> None:
    done = torchrun(JOINED, nproc=2)
    assert done.returncode == 0, done.stderr
    bad = [[r.first_bad for r in records_of(tmp_path / "run", rank)] for rank in (0, 1)]
    assert not any(bad[0])
    assert {(one.step, one.rank) for one in bad[1] if one is not None} == {(6, 1)}
