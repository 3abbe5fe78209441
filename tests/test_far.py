"""On a device that the host cannot look into: everything is seen, and nobody waits (see `far`)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.fuse import Fuse
from ddpprobe.hooks import lanes, peaks
from ddpprobe.hooks.watch import Watch
from ddpprobe.topology.describe import describe

from . import far
from .test_capturing import life_of
from .test_watch import nan_in, net

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EIGHTS = (
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)  # fmt: skip
COMPLEX = (torch.complex128, torch.complex64, torch.complex32)


class Clock:
    micro, evaluating, probe_seconds = 0, False, 0.0


def watch_of(model: nn.Module) -> tuple[Watch, list[tuple[int, str]]]:
    seen: list[tuple[int, str]] = []
    found = Watch(
        describe(model), Clock(), 0, Fuse("hooks"), lambda bad: seen.append((bad.step, bad.phase))
    )
    return found, seen


def seen_of(*tensors: torch.Tensor) -> list[tuple[int, str]]:
    """What a watch says of root outputs, of which each is a step's."""
    watch, seen = watch_of(nn.Linear(1, 1))
    for step, tensor in enumerate(tensors):
        watch.output([tensor])
        watch.end_step(step)
    watch.poll(wait=True)
    return seen


# ---- every dtype


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_bad_number_is_seen_in_every_dtype_and_the_largest_good_one_is_good(
    dtype: torch.dtype, monkeypatch
) -> None:
    far.pretend(monkeypatch)
    limits = torch.finfo(dtype)
    good = [limits.max, limits.min, limits.tiny, 0.0]
    bad = [math.nan, math.inf, -math.inf]
    tensors = [torch.tensor([0.0, value, 1.0], dtype=dtype) for value in (*good, *bad)]
    # The sum of squares of these, and their sum, would not be finite; they are.
    tensors.append(torch.full((70000,), limits.max, dtype=dtype))
    assert seen_of(*tensors) == [(step, "forward") for step in (4, 5, 6)]
    assert seen_of(*(t[1] for t in tensors)) == [(step, "forward") for step in (4, 5, 6)]


@pytest.mark.parametrize("dtype", EIGHTS, ids=str)
def test_a_nan_in_eight_bits_is_seen(dtype: torch.dtype, monkeypatch) -> None:
    far.pretend(monkeypatch)
    largest = torch.tensor([torch.finfo(dtype).max]).to(dtype)
    assert seen_of(largest, torch.tensor([1.0, math.nan]).to(dtype)) == [(1, "forward")]


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_a_gradient_of_complex_numbers_is_looked_at(dtype: torch.dtype, monkeypatch) -> None:
    far.pretend(monkeypatch)
    model = nn.Linear(1, 1)
    watch, seen = watch_of(model)
    largest = torch.finfo(dtype.to_real()).max
    for step, (real, imag) in enumerate([(largest, 1), (1, math.nan), (math.inf, 0)]):
        watch._arriving("weight", torch.tensor([complex(real, imag)], dtype=dtype))
        watch._arriving("weight", torch.tensor([1j], dtype=dtype).conj())
        watch.end_step(step)
    watch.poll(wait=True)
    assert seen == [(1, "backward"), (2, "backward")]


@pytest.mark.parametrize("near", [True, False])
def test_numbers_that_nobody_can_read_end_no_observation(near: bool, monkeypatch) -> None:
    if not near:
        far.pretend(monkeypatch)
    four_bits = torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert seen_of(four_bits, torch.zeros(2, device="meta"), torch.tensor(math.nan))[-1:] == [
        (2 if not near else -1, "forward")
    ]


def test_what_is_put_together_of_several_tensors_is_looked_at(monkeypatch) -> None:
    far.pretend(monkeypatch)
    twice = torch.tensor([[1, 1]])
    sparse = torch.sparse_coo_tensor(
        twice, torch.tensor([1.0, math.nan]), (3,), check_invariants=True
    )
    jagged = torch.nested.nested_tensor(
        [torch.ones(2), torch.full((3,), math.inf)], layout=torch.jagged
    )
    expanded = torch.tensor(math.nan).expand(1 << 40)
    with far.no_waiting() as mode:
        watch, seen = watch_of(nn.Linear(1, 1))
        for step, tensor in enumerate((sparse, jagged, expanded, torch.empty(0))):
            watch.output([tensor])
            watch.end_step(step)
        assert mode.seen
    watch.poll(wait=True)
    assert seen == [(step, "forward") for step in range(3)]


# ---- several devices


def test_the_peaks_of_devices_meet_on_the_host(monkeypatch) -> None:
    """`meta` stands in for a second device: what is computed there has no numbers."""
    lane = far.SlowLane(polls=1)
    sent: list[tuple[str, torch.Tensor]] = []

    def post(source: torch.Tensor, host: torch.Tensor) -> far.Arrival:
        sent.append((source.device.type, host))
        values = [1.0, math.nan] if source.is_meta and len(sent) == 2 else [0.0, 2.0]
        return far.Arrival(torch.tensor(values, dtype=torch.float64), host, 1)

    monkeypatch.setattr(lane, "post", post)
    monkeypatch.setattr(lanes, "lane_of", lambda _: lane)
    seen: list[tuple[int, int]] = []
    found = peaks.Peaks(lambda step, phase: seen.append((step, phase)))
    for step in range(3):
        found.keep(1, torch.tensor(2.0, dtype=torch.float16))
        if step < 2:
            found.keep(0, torch.tensor(1.0, device="meta"))
        found.end_step(step)
    assert [kind for kind, _ in sent] == ["cpu", "meta", "cpu", "meta", "cpu"]
    for _ in range(10):
        found.poll()
    assert seen == [(0, 1)]


def test_a_step_that_ends_with_nothing_kept_sends_nothing(monkeypatch) -> None:
    far.pretend(monkeypatch)
    found = peaks.Peaks(lambda *_: None)
    for step in range(3 * peaks.AHEAD):
        found.end_step(step)
    assert found.lost == 0


def test_a_device_that_is_too_far_behind_costs_readings_and_they_are_counted(monkeypatch) -> None:
    far.pretend(monkeypatch, polls=10**9)
    seen: list[int] = []
    found = peaks.Peaks(lambda step, _: seen.append(step))
    for step in range(peaks.AHEAD + 3):
        found.keep(0, torch.tensor(math.nan if step in (0, 5, peaks.AHEAD + 1) else 1.0))
        found.end_step(step)
        found.poll()
    assert (seen, found.lost) == ([], 3)
    found.poll(wait=True)
    assert seen == [0, 5]  # the first of all, which is what matters, is among them
    found.keep(0, torch.tensor(1.0))
    found.end_step(99)
    found.poll(wait=True)
    assert seen == [0, 5]  # a NaN that was not told does not come back under another number


# ---- a run


def train(model: nn.Module, run, steps: int, step, every: int = 100, **options) -> None:
    """Train with `step(i) -> loss`, in which nothing may wait; 0 is the first step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    probe = ddpprobe.install(model, run_dir=run, every=every, daemon="none", **options)
    with far.no_waiting() as mode:
        for i in range(steps):
            step(i).backward()
            optimizer.step()
            optimizer.zero_grad()
            before = mode.seen
        assert before
    probe.close()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_bad_step_of_a_model_of_any_dtype_is_named(
    dtype: torch.dtype, tmp_path, records_of, monkeypatch
) -> None:
    far.pretend(monkeypatch)
    model = net().to(dtype)

    def step(i: int) -> torch.Tensor:
        loss = model(torch.ones(2, 4, dtype=dtype)).sum()
        return loss + nan_in(model[1].weight) if i == 3 else loss

    train(model, tmp_path / "r", 4, step, first_step=1)
    seen = [(r.step, r.first_bad.phase) for r in records_of(tmp_path / "r") if r.first_bad]
    assert seen == [(4, "backward")]
    assert not [e for e in life_of(tmp_path / "r") if e["event"] in ("fuse", "dropped")]


def test_steps_the_watch_could_not_tell_of_are_told(tmp_path, monkeypatch) -> None:
    far.pretend(monkeypatch, polls=10**9)
    monkeypatch.setattr(peaks, "AHEAD", 3)
    model = net()
    train(model, tmp_path / "r", 8, lambda _: model(torch.ones(2, 4)).sum(), first_step=1)
    told = [e for e in life_of(tmp_path / "r") if e["event"] == "dropped"]
    assert {e["reason"] for e in told} == {"watch: the device is too far behind"}
    assert sum(e["count"] for e in told) == 5


def test_an_operator_that_waits_is_caught_here() -> None:
    """What the tests above stand on."""
    tensor = torch.ones(3)
    twice = torch.tensor([[1, 1]])
    sparse = torch.sparse_coo_tensor(twice, torch.ones(2), (3,), check_invariants=True)
    waiting = [
        tensor.sum().item, lambda: bool(tensor.any()), tensor.nonzero, sparse.coalesce,
        lambda: tensor[tensor > 0], lambda: torch.equal(tensor, tensor), tensor.unique,
    ]  # fmt: skip
    with far.no_waiting():
        for act in waiting:
            with pytest.raises(far.Waited):
                act()
