"""Orders: heard once and whole by every rank, and followed at the steps they name."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ddpprobe
from ddpprobe.errors import AnomalyStop
from ddpprobe.rank.order_handler import OrderHandler
from ddpprobe.rank.schedule import KEPT_RANGES, Pace, Schedule
from ddpprobe.rundir import framing, orders
from ddpprobe.rundir.journal import JournalTail, JournalWriter
from ddpprobe.rundir.orders import MAX_BYTES, MAX_STEPS, Order, OrderBoard, OrderReader
from ddpprobe.rundir.paths import RunDir
from ddpprobe.rundir.tensor_pack import Pack

from ..made_runs import ANOMALY

FOUND = replace(ANOMALY, values={"nan": 3.0})  # NaN is not equal to itself
CAPTURE = Order(0, "capture", 10, 12, ("blocks.1", "größer"), "nonfinite", FOUND, "cause/0")
NODE = "node_0000"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return RunDir(tmp_path).orders(0, NODE)


def every(reader: OrderReader) -> list[Order]:
    return list(iter(reader.look, None))


def numbered(count: int, first: int = 0) -> list[Order]:
    return [replace(CAPTURE, number=n, reason=str(n)) for n in range(first, first + count)]


def test_an_order_is_read_once_and_whole_and_two_between_two_looks_are_both_read(path) -> None:
    board, reader = OrderBoard(path), OrderReader(path)
    assert reader.look() is None
    assert board.post(CAPTURE)
    assert every(reader) == [CAPTURE]
    assert every(reader) == []
    for order in numbered(3, first=1):
        assert board.post(order)
    assert every(reader) == numbered(3, first=1)
    assert every(OrderReader(path)) == [CAPTURE, *numbered(3, first=1)]
    assert path.stat().st_mode & 0o777 == 0o600


def test_no_order_is_posted_or_read_twice_after_a_restart_of_the_daemon(path) -> None:
    reader = OrderReader(path)
    first = OrderBoard(path)
    for order in numbered(2):
        first.post(order)
    assert every(reader) == numbered(2)
    second = OrderBoard(path)
    assert list(second.orders.values()) == numbered(2)
    assert second.post(numbered(2)[1])
    assert second.post(replace(CAPTURE, number=2))
    assert every(reader) == [replace(CAPTURE, number=2)]


@pytest.mark.parametrize("cut", [1, framing.HEADER.size, -1])
def test_an_order_torn_by_a_death_hides_none_behind_it(path, cut) -> None:
    OrderBoard(path).post(CAPTURE)
    with path.open("ab") as file:
        file.write(orders.encode(replace(CAPTURE, number=1))[:cut])
    reader = OrderReader(path)
    assert every(reader) == [CAPTURE]
    board = OrderBoard(path)
    assert board.last == 0
    assert board.post(replace(CAPTURE, number=1, reason="short"))
    assert every(reader) == [replace(CAPTURE, number=1, reason="short")]


@given(seed=st.integers(0, 2**32), garbage=st.binary(min_size=1, max_size=400))
@settings(max_examples=25, deadline=None)
def test_garbage_on_a_board_never_raises_and_hides_no_order_behind_it(
    tmp_path_factory, seed, garbage
) -> None:
    rng = random.Random(seed)
    path = tmp_path_factory.mktemp("board") / "orders"
    reader = OrderReader(path)
    blocks = [orders.encode(order) for order in numbered(3)]
    blocks.insert(rng.randrange(4), rng.choice([framing.MAGIC, b""]) + garbage)
    with path.open("wb") as file:
        file.write(b"".join(blocks))
    heard = every(reader)
    assert all(order in numbered(3) for order in heard)
    assert OrderBoard(path).post(replace(CAPTURE, number=7, reason="behind"))
    assert every(reader)[-1:] == [replace(CAPTURE, number=7, reason="behind")]
    flipped = bytearray(path.read_bytes())
    flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    path.write_bytes(flipped)
    written = [*numbered(3), replace(CAPTURE, number=7, reason="behind")]
    assert all(order in written for order in every(OrderReader(path)))


def test_a_flood_of_garbage_is_passed_over_in_bounded_pieces(path) -> None:
    board, reader = OrderBoard(path), OrderReader(path)
    with path.open("ab") as file:
        file.write(framing.MAGIC + b"\0" * 3 * MAX_BYTES)
    for _ in range(8):
        assert reader.look() is None
    assert board.post(CAPTURE)
    assert [order for _ in range(8) for order in every(reader)] == [CAPTURE]
    board.close()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"action": "dance"}, "'dance'"),
        ({"number": -1}, "makes no sense"),
        ({"start": 12, "stop": 12}, "1 to"),
        ({"stop": 10 + MAX_STEPS + 1}, str(MAX_STEPS)),
        ({"action": "stop", "stop": 11, "anomaly": None}, "names no anomaly"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused_and_never_read(path, changes, says) -> None:
    with pytest.raises(ValueError, match=says):
        replace(CAPTURE, **changes)
    value = {**framing.decode_frame(orders.encode(CAPTURE))[0].json(), **changes}
    frame = framing.encode_frame(framing.LIFE, 0, framing.encode_json(value))
    assert orders.decode_all(frame + orders.encode(CAPTURE)) == [CAPTURE]


def test_an_order_that_is_too_long_is_refused(path) -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_BYTES}"):
        OrderBoard(path).post(replace(CAPTURE, modules=("m" * MAX_BYTES,)))


def test_a_board_on_a_disk_that_refuses_says_so_and_raises_nothing(path, monkeypatch) -> None:
    board, reader = OrderBoard(path), OrderReader(path)
    monkeypatch.setattr(orders.os, "pwrite", lambda *_: 5)
    assert not board.post(CAPTURE)
    monkeypatch.undo()
    assert every(reader) == []
    assert board.post(CAPTURE)
    assert every(reader) == [CAPTURE]
    for each in (board, reader):
        each.close()
    assert not board.post(replace(CAPTURE, number=1))
    assert reader.look() is None


class Rank:
    """A responder with its ears, and what it did."""

    def __init__(self, tmp_path: Path, on_anomaly: Any = "stop") -> None:
        path = RunDir(tmp_path).orders(0, NODE)
        self.board = OrderBoard(path)
        self.did: list[Any] = []
        self.journal = JournalWriter(tmp_path / "journal", {})
        self.order_handler = OrderHandler(
            OrderReader(path), lambda *steps: self.did.append(("sample", *steps)),
            lambda order: self.did.append(("capture", order)), self.journal, on_anomaly,
        )  # fmt: skip

    def go(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.order_handler.hear(step)
            self.order_handler.act()

    def said(self) -> list[tuple[str, int, int]]:
        tail = JournalTail(self.journal.directory)
        events = [frame.json() for frame in tail.poll() if frame.type == framing.LIFE]
        tail.close()
        return [(e["event"], e["number"], e["step"]) for e in events]


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    for each in (made.order_handler, made.board, made.journal):
        each.close()


def test_a_capture_heard_in_time_is_made_in_its_steps_which_are_sampled(rank) -> None:
    rank.board.post(CAPTURE)
    rank.go(9, 20)
    assert rank.did == [("sample", 10, 12), ("capture", CAPTURE)]
    assert rank.said() == [("order", 0, 10)]


@pytest.mark.parametrize(("at", "first"), [(10, 11), (11, None), (500, None)])
def test_a_rank_that_hears_late_says_so_and_joins_from_its_next_step(rank, at, first) -> None:
    rank.go(9, at - 1)
    rank.board.post(CAPTURE)
    rank.go(at, at + 3)
    captured = ("capture", replace(CAPTURE, start=first or 0))
    assert rank.did == ([("sample", first, 12), captured] if first else [])
    assert rank.said() == [("late_order", 0, at + 1)]


def test_a_stop_is_raised_behind_its_step_and_names_the_verdict(rank) -> None:
    rank.board.post(replace(CAPTURE, action="stop", stop=11))
    rank.go(4, 9)
    with pytest.raises(AnomalyStop) as stopped:
        rank.go(10, 10)
    assert (stopped.value.step, stopped.value.anomaly) == (10, FOUND)
    assert str(stopped.value) == (
        "ddpprobe stopped training after step 10, as on_anomaly='stop' asks for: nonfinite at "
        "step 3, rank 0, blocks.1.mlp: 3 NaN in blocks.1.mlp"
    )
    assert isinstance(stopped.value, RuntimeError)
    rank.go(11, 20)  # whoever catches it goes on
    assert rank.said() == [("order", 0, 5 - 1)]


def test_the_users_function_is_called_once_behind_the_step_and_what_it_raises_is_the_users(
    tmp_path,
) -> None:
    heard = []

    def tell(anomaly: ddpprobe.Anomaly) -> None:
        heard.append(anomaly)
        raise KeyError("mine")

    rank = Rank(tmp_path, tell)
    rank.board.post(replace(CAPTURE, action="tell", stop=11))
    rank.go(4, 9)
    assert heard == []
    with pytest.raises(KeyError, match="mine"):
        rank.go(10, 10)
    rank.go(11, 20)
    assert heard == [FOUND]


@pytest.mark.parametrize("wants", ["record", "stop", print])
def test_an_order_does_nothing_in_the_loop_that_the_user_has_not_asked_for(tmp_path, wants) -> None:
    rank = Rank(tmp_path, wants)
    action = "tell" if wants == "stop" else "stop"
    rank.board.post(replace(CAPTURE, action=action, stop=11))
    rank.go(4, 20)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 5)), max_size=6), st.integers(1, 9))
def test_steps_of_an_order_are_sampled_whatever_the_interval(ranges, interval) -> None:
    pace = Pace(Schedule(interval))
    for start, length in ranges:
        pace.add(start, start + length)
    for step in range(70):
        wanted = any(start <= step < start + length for start, length in ranges)
        assert pace.besides(step) == wanted
        assert pace.sampled(step) == (wanted or step % interval == 0)
    assert len(ranges) < KEPT_RANGES


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def install(tmp_path: Path, **options: Any) -> tuple[nn.Module, ddpprobe.Probe, OrderBoard]:
    model = Tiny()
    probe = ddpprobe.install(model, run_dir=tmp_path / "run", daemon="none", **options)
    return model, probe, OrderBoard(RunDir(tmp_path / "run").orders(0, NODE))


def test_the_steps_of_an_order_are_kept_in_full_and_sampled_late_ones_from_the_next_on(
    tmp_path, records_of
) -> None:
    model, probe, board = install(tmp_path, every=50)
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(16):
        if step == 2:
            board.post(replace(CAPTURE, start=5, stop=7, modules=("inner",)))
        if step == 10:
            board.post(replace(CAPTURE, number=1, start=9, stop=12, modules=("inner",)))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    probe.close()
    board.close()
    run = RunDir(tmp_path / "run")
    packs = sorted(run.captures(0, NODE, 0).iterdir())
    assert packs == [run.pack(0, NODE, 0, step) for step in (5, 6, 11)]
    for file in packs:
        pack = Pack.open(file)
        assert list(pack.header["modules"]) == ["inner"]
        assert pack.header["reason"] == "nonfinite"
    assert [record.step for record in records_of(run.path)] == [0, 5, 6, 11]


def test_a_stop_leaves_an_optimizers_step_or_a_declared_one_or_a_forward(tmp_path) -> None:
    """The last is how a step ends that a GradScaler gave up: no optimizer steps in it."""
    order = replace(CAPTURE, action="stop", start=2, stop=3)
    for number, way in enumerate(("optimizer", "declared", "forward")):
        model, probe, board = install(tmp_path / way, on_anomaly="stop", every=100)
        optimizer = torch.optim.SGD(model.parameters())
        if way == "forward":  # one that steps a part of the parameters ends no step by itself
            optimizer = torch.optim.SGD([model.inner.weight])
        board.post(replace(order, number=number))

        def step(model=model, optimizer=optimizer, probe=probe, way=way) -> None:
            try:
                loss = model(torch.ones(1, 2)).sum()
            except AnomalyStop:
                assert way == "forward"
                raise
            loss.backward()
            optimizer.zero_grad() if way == "declared" else optimizer.step()
            if way == "declared":
                probe.step()

        for _ in range(2 + (way == "forward")):
            step()
        with pytest.raises(AnomalyStop) as stopped:
            step()
        assert stopped.value.step == 2
        step()
        probe.close()
        board.close()


def test_asking_leaves_a_word_in_the_journal_and_nothing_raises(tmp_path) -> None:
    _, probe, _ = install(tmp_path)
    probe.trigger("x" * 1000)
    probe.trigger()
    probe.close()
    probe.trigger("too late")
    tail = JournalTail(RunDir(tmp_path / "run").rank_journal(0, NODE, 0))
    said = [frame.json() for frame in tail.poll() if frame.type == framing.LIFE]
    tail.close()
    asked = [(e["number"], e["reason"]) for e in said if e["event"] == "trigger"]
    assert asked == [(0, "x" * 200), (1, "asked for")]


@pytest.mark.parametrize("wrong", ["page", "tell", "", None, 3, ["stop"]])
def test_a_wrong_on_anomaly_is_refused_by_install(tmp_path, wrong) -> None:
    with pytest.raises(ddpprobe.InstallError, match="'record', 'stop' or a function"):
        install(tmp_path, on_anomaly=wrong)
