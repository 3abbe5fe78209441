"""Full tensors leave a far device without waiting, and take no memory that the training needs."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

import ddpprobe
from ddpprobe.cli.commands.info import lines
from ddpprobe.rank.capture import headroom, pack_writer, staging
from ddpprobe.rank.capture.headroom import Headroom, Memory
from ddpprobe.rank.capture.host_copy import HostCopier
from ddpprobe.rank.capture.staging import Staging
from ddpprobe.rank.hooks import lanes
from ddpprobe.rundir.tensor_pack import ITEM_SIZES

from ... import far
from .test_capturing import build, data, install, life_of, pack_of, tensors_of

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MiB = 1 << 20
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")


# ---- the memory of the device


def test_a_step_takes_its_share_and_no_more() -> None:
    asked: list[torch.device] = []

    def look(device: torch.device) -> Memory:
        asked.append(device)
        return Memory(total=3200 * MiB, free=800 * MiB, used=100 * MiB, peak=100 * MiB)

    room = Headroom(look)
    room.begin()
    assert [room.take(GPU, 150 * MiB) for _ in range(3)] == [True, False, False]
    assert room.take(GPU, 50 * MiB)  # a quarter of what is free
    assert not room.take(GPU, 1)
    assert asked == [GPU]
    room.begin()
    assert room.take(GPU, 1)
    assert asked == [GPU, GPU]


def test_what_the_training_had_at_its_largest_it_gets_again() -> None:
    """Of 1000 MiB that are free it will want 850; a part of the device stays free."""
    room = Headroom(lambda _: Memory(3200 * MiB, 1000 * MiB, 50 * MiB, 900 * MiB))
    room.begin()
    assert not room.take(GPU, 51 * MiB)
    assert room.take(GPU, 50 * MiB)
    room = Headroom(lambda _: Memory(3200 * MiB, 900 * MiB, 50 * MiB, 900 * MiB))
    room.begin()
    assert not room.take(GPU, 1)


def test_what_captures_took_does_not_count_as_the_training_s() -> None:
    told = [Memory(3200 * MiB, 2000 * MiB, 50 * MiB, 900 * MiB)]
    room = Headroom(lambda _: told[0])
    for _ in range(5):  # each capture came on top of the largest moment
        room.begin()
        assert room.take(GPU, 400 * MiB)
        told[0] = told[0]._replace(peak=1300 * MiB)
    told[0] = told[0]._replace(peak=0)  # the script has reset the counter; we have not forgotten
    room.begin()
    assert not room.take(GPU, 1100 * MiB)
    told[0] = told[0]._replace(free=950 * MiB)
    room.begin()
    assert not room.take(GPU, 1 * MiB)


def test_each_device_has_its_own_room() -> None:
    other = torch.device("cuda", 1)
    room = Headroom(lambda d: Memory(0, 400 * MiB if d == other else 0, 0, 0))
    room.begin()
    assert not room.take(GPU, 1)
    assert room.take(other, 100 * MiB)
    assert not room.take(other, 1)
    room.begin()
    room.refused(other)
    assert not room.take(other, 1)


def test_a_device_that_tells_nothing_is_not_held_back() -> None:
    room = Headroom()
    room.begin()
    assert room.take(torch.device("xpu", 0), 1 << 40)


def test_the_driver_and_the_allocator_are_asked_together(monkeypatch) -> None:
    told = {
        "allocated_bytes.all.current": 30, "allocated_bytes.all.peak": 70,
        "reserved_bytes.all.current": 100,
    }  # fmt: skip
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (200, 1000))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: told)
    assert headroom.memory_of(GPU) == Memory(total=1000, free=270, used=30, peak=70)

    def unknown(_: torch.device) -> dict[str, int]:
        raise RuntimeError("the allocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "memory_stats", unknown)
    assert headroom.memory_of(GPU) == Memory(total=1000, free=200, used=0, peak=0)


def keeper(monkeypatch, free: int, polls: int = 3) -> HostCopier:
    far.pretend(monkeypatch, polls)
    room = Headroom(lambda _: Memory(0, 4 * free, 0, 0))
    room.begin()
    return HostCopier(1 << 40, Staging(), room)


def test_what_a_device_has_no_memory_for_is_counted_apart(monkeypatch) -> None:
    keep = keeper(monkeypatch, free=100)
    kept = [keep.take(torch.ones(n)) for n in (20, 10, 5)]
    assert [k is not None for k in kept] == [True, False, True]
    assert (keep.taken, keep.dropped, keep.starved, keep.refused) == (100, 40, 1, 0)


def test_an_allocator_that_refuses_costs_the_tensor_and_ends_the_step(monkeypatch) -> None:
    keep = keeper(monkeypatch, free=1000)

    def refuse(self: torch.Tensor, **_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("made to fail")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", refuse)
        assert keep.take(torch.ones(3)) is None
    assert keep.take(torch.ones(3)) is None
    assert (keep.taken, keep.starved) == (0, 2)


# ---- the way to the host


class Stream:
    """Stands in for `torch.cuda.Stream`: notes what it is told."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def wait_stream(self, other: Stream) -> None:
        self.notes.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.notes.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.notes.append(f"event on {self.name}")
        return f"event of {self.name}"


class OnGpu(torch.Tensor):
    """A tensor that can be told which streams use it."""

    def record_stream(self, stream: Stream) -> None:
        stream.notes.append(f"{stream.name} uses it")


def test_the_lane_of_cuda_copies_little_in_the_stream_and_much_beside_it(monkeypatch) -> None:
    notes: list[str] = []
    own, now = Stream("own", notes), Stream("current", notes)

    @contextlib.contextmanager
    def within(stream: Stream):
        notes.append(f"in {stream.name}")
        yield
        notes.append(f"out of {stream.name}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: own)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: now)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "Event", str)
    lane, source, host = lanes.lane_of(GPU), torch.ones(2).as_subclass(OnGpu), torch.zeros(2)
    assert lane.post(source, host) == "event of current"
    assert notes == ["event on current"]
    assert host.tolist() == [1, 1]
    notes.clear()
    lane.fence()
    arrival = lane.send(source, host.zero_())
    lane.follow(arrival)
    assert host.tolist() == [1, 1]
    assert notes == [
        "own waits for current", "in own", "out of own", "own uses it", "event on own",
        "current waits for event of own",
    ]  # fmt: skip


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(7)
    bits = torch.randint(0, 255, (5, 3, 16), dtype=torch.uint8)
    kinds = [getattr(torch, name) for name in ITEM_SIZES if hasattr(torch, name)]
    found = [bits.view(kind) for kind in kinds if kind != torch.bool]
    odd = [torch.tensor(3.5), torch.empty(0, 4), torch.ones(2, 3).t(), torch.ones(3) > 0]
    return [*found, *odd, torch.tensor([1 + 2j]).conj(), torch.randn(9000)]


def raw(tensor: torch.Tensor) -> bytes:
    plain = tensor.resolve_conj().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("size", [64, 256, 1 << 20])
def test_tensors_of_every_kind_cross_in_pieces_through_little_memory(
    size: int, monkeypatch
) -> None:
    """Blocks far smaller than a tensor, or larger than all of them together."""
    monkeypatch.setattr(staging, "BLOCK", size)
    monkeypatch.setattr(staging, "BLOCKS", 3)
    made: list[far.SlowLane] = []
    keep = keeper(monkeypatch, free=1 << 30)
    monkeypatch.setattr(lanes, "lane_of", lambda _: made.append(far.SlowLane(2)) or made[-1])
    given = tensors()
    want = [raw(t) for t in given]
    with far.no_waiting():
        kept = [keep.take(tensor) for tensor in given]
        given[-1].zero_()  # the training goes on
        assert not keep.ready()
        turns = 0
        while not keep.ready():
            turns += 1
    assert turns < 10_000
    assert [k.raw().tobytes() for k in kept] == want
    assert [(k.dtype, k.shape) for k in kept][:2] == [
        ("float64", (5, 3, 2)),
        ("float32", (5, 3, 4)),
    ]
    (lane,) = made
    assert len(lane.rooms) <= 3
    assert all(room.nbytes == size for room in lane.rooms)


def test_the_end_of_a_run_waits_for_all_of_it(monkeypatch) -> None:
    monkeypatch.setattr(staging, "BLOCK", 128)
    keep = keeper(monkeypatch, free=1 << 30, polls=10**9)
    given = tensors()
    kept = [keep.take(tensor) for tensor in given]
    assert not keep.ready()
    keep.wait()
    assert keep.ready()
    assert [k.raw().tobytes() for k in kept] == [raw(t) for t in given]


def test_copies_on_the_device_are_let_go_as_they_leave(monkeypatch) -> None:
    monkeypatch.setattr(staging, "BLOCK", 1024)
    monkeypatch.setattr(staging, "BLOCKS", 1)
    far.pretend(monkeypatch, polls=2)
    way = Staging()
    trips = [way.put(torch.ones(256)) for _ in range(3)]
    assert [trip.source is None for trip in trips] == [True, False, False]
    for _ in range(6):
        way.pump()
    assert all(trip.source is None for trip in trips)
    way.pump(wait=True)
    way.release()
    assert (way._made, way._empty) == (0, [])


def test_pinned_memory_is_bounded_whatever_is_captured() -> None:
    assert 128 * MiB >= staging.BLOCK * staging.BLOCKS
    assert staging.BLOCK & (staging.BLOCK - 1) == 0  # or torch would round it up


# ---- a run


def captured(run: Path) -> tuple[list[dict], dict]:
    """Train three steps; the optimizer is one that reads no number itself."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with install(model, run, every=2, capture=["part", "head"]):
        with contextlib.nullcontext() if lanes.is_near(CPU) else far.no_waiting():
            for step in range(3):
                model(data(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
    return [tensors_of(pack_of(run, step)) for step in (0, 2)], pack_of(run, 2).header


def test_a_pack_from_a_far_device_is_that_of_a_near_one(tmp_path, monkeypatch) -> None:
    near, _ = captured(tmp_path / "near")
    far.pretend(monkeypatch)
    monkeypatch.setattr(staging, "BLOCK", 4096)
    found, header = captured(tmp_path / "far")
    assert header["dropped"] == 0
    for a, b in zip(near, found, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_step_that_does_not_fit_the_device_is_kept_in_part_and_told(
    tmp_path, monkeypatch
) -> None:
    far.pretend(monkeypatch)
    little = Memory(0, 4 * 6000, 0, 0)  # a state of random numbers takes 5056
    monkeypatch.setattr(pack_writer, "Headroom", lambda: Headroom(lambda _: little))
    found, header = captured(tmp_path)
    assert all(sum(t.nbytes for t in one.values()) <= 6000 for one in found)
    assert header["dropped"] > 0
    told = [e for e in life_of(tmp_path) if e["event"] == "dropped"]
    assert {e["reason"] for e in told} == {"capture: no device memory"}
    info = ddpprobe.open(tmp_path).info()
    lost = info["attempts"][0]["ranks"][0]["dropped"]
    assert lost == {"capture: no device memory": sum(e["count"] for e in told)}
    assert any("lost: capture: no device memory (" in line for line in lines(info))
