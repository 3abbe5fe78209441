"""A rank that stands still says once where in its code, and whether that is a call to others."""

from __future__ import annotations

import importlib
import inspect
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddpprobe.ends import stalls
from ddpprobe.rank import standing
from ddpprobe.rank.standing import STILL_SECONDS, STILL_STEPS, StandingLook, place, within
from ddpprobe.records.events import StandsEvent, to_json
from ddpprobe.rundir import validate
from ddpprobe.rundir.heartbeat import Heartbeat

STEP = 4.0  # seconds that a step takes here


class Rank:
    """A heartbeat, a clock, and what is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.beat: Heartbeat | None = None
        self.told: list[StandsEvent] = []
        self._now = 0
        clock = SimpleNamespace(time_ns=lambda: self._now)
        monkeypatch.setattr(standing, "time", clock)
        self.look = StandingLook(lambda: self.beat, self.told.append, lambda: False)

    def beats(self, state: str = "data", steps: int = 3, step_seconds: float = 0.01) -> None:
        spent = (steps * step_seconds, 0.0, 0.0, 0.0)
        self.beat = Heartbeat(self._now, 7, 1, state, steps, 0, steps, spent, 0.0)

    def passes(self, seconds: float) -> None:
        self._now += round(seconds * 1e9)
        self.look()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    rank = Rank(monkeypatch)
    rank.passes(100)
    return rank


def test_it_is_told_once_of_each_stillness_and_can_be_read_back(rank: Rank) -> None:
    rank.beats()
    rank.passes(STILL_SECONDS - 0.1)
    assert rank.told == []
    for _ in range(50):
        rank.passes(1.0)
    (told,) = rank.told
    assert (told.step, told.steps, told.micro, told.state) == (7, 3, 1, "data")
    assert (Path(__file__).name in told.where, told.waits) == (True, False)
    assert validate.event(to_json(told)) == told
    assert told.within == ""
    rank.beats()
    rank.passes(1.0)
    assert len(rank.told) == 1
    rank.passes(STILL_SECONDS)
    assert len(rank.told) == 2


def test_another_place_is_told_when_it_has_stood_for_twice_as_long(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = ["a.py:1 in f"]
    monkeypatch.setattr(standing, "place", lambda _, reducing: (now[0], reducing))
    rank.beats()
    rank.passes(STILL_SECONDS)
    now[0] = "b.py:2 in g"
    rank.passes(STILL_SECONDS - 0.1)
    assert [told.where for told in rank.told] == ["a.py:1 in f"]
    rank.passes(0.1)
    rank.passes(2 * STILL_SECONDS)
    assert [told.where for told in rank.told] == ["a.py:1 in f", "b.py:2 in g"]


@pytest.mark.parametrize("state", ["start", "paused", "closed"])
def test_who_does_not_train_does_not_stand_still(rank: Rank, state: str) -> None:
    rank.beats(state)
    rank.passes(1000)
    assert rank.told == []


def test_before_a_first_step_nobody_knows_how_long_one_takes(rank: Rank) -> None:
    rank.passes(1000)
    rank.beats(steps=0)
    rank.passes(1000)
    assert rank.told == []


def test_long_steps_make_it_patient_and_it_looks_before_anybody_is_late(rank: Rank) -> None:
    rank.beats(step_seconds=STEP)
    rank.passes(STILL_STEPS * STEP - 0.1)
    assert rank.told == []
    rank.passes(0.1)
    assert len(rank.told) == 1
    assert not stalls.is_late(STILL_STEPS * STEP, STEP)
    assert not stalls.is_late(STILL_SECONDS, 0.0)


# ---- what a place is called


@pytest.fixture
def frames() -> Iterator[Callable[[Callable[[], object]], object]]:
    """Return the innermost frame of a thread that is in a call which waits."""
    ends: list[Callable[[], object]] = []

    def frame_in(call: Callable[[], object], free: Callable[[], object]) -> object:
        thread = threading.Thread(target=call)
        thread.start()
        ends.extend([thread.join, free])
        while True:  # until it waits: nothing in it changes any more
            frame = sys._current_frames()[thread.ident or 0]
            if frame.f_code.co_name in ("wait", "get", "waits"):
                return frame
            time.sleep(0.001)

    yield frame_in
    while ends:
        ends.pop()()


def test_a_wait_of_the_standard_library_is_told_with_the_line_of_the_script(frames) -> None:
    event = threading.Event()

    def load() -> None:
        event.wait()

    where, waits = place(frames(load, event.set))
    line = load.__code__.co_firstlineno + 1
    assert where.startswith(f"{Path(__file__).name}:{line} in load (threading.py:")
    assert where.endswith(" in wait)")
    assert not waits


def of_torch(module: str, given: queue.SimpleQueue[int]) -> Callable[[], object]:
    """Return a function of such a module, which waits for what comes in."""
    names = {"__name__": module, "given": given}
    exec(compile("def waits():\n    given.get()", "/torch/c10d.py", "exec"), names)
    waits: Callable[[], object] = names["waits"]  # type: ignore[assignment]
    return waits


@pytest.mark.parametrize(
    ("module", "waits"),
    [
        ("torch.distributed.distributed_c10d", True), ("torch.nn.parallel.distributed", True),
        ("torch.distributed", True), ("torch.autograd.graph", False), ("torch.nn.modules", False),
        ("torch.distributedness", False), ("torch.distributed.checkpoint.filesystem", False),
    ],
)  # fmt: skip
def test_communication_is_what_torch_s_modules_for_it_do(frames, module: str, waits: bool) -> None:
    given: queue.SimpleQueue[int] = queue.SimpleQueue()
    barrier = of_torch(module, given)

    def main() -> None:
        barrier()

    found, communicates = place(frames(main, lambda: given.put(1)))
    line = main.__code__.co_firstlineno + 1
    assert found == f"{Path(__file__).name}:{line} in main (c10d.py:2 in waits)"
    assert communicates == waits


SAVER = "torch.distributed.checkpoint.state_dict_saver"


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ([("torch.serialization", "save")], "torch.save"),
        ([("torch.serialization", "load")], "torch.load"),
        ([("torch.serialization", "save"), (SAVER, "save")], f"{SAVER.rpartition('.')[0]}.save"),
        ([("train", "save")], ""),
        ([("torch.serialization", "_save")], ""),
        ([("threading", "_shutdown")], "the wait for threads at exit"),
    ],
)
def test_the_outermost_of_the_calls_that_wait_for_no_rank_is_named(frames, calls, told) -> None:
    """`calls`: module and name of each function, the innermost first."""
    event = threading.Event()
    call: Callable[[], object] = event.wait
    for module, name in calls:
        names = {"__name__": module, "call": call}
        exec(f"def {name}():\n    call()", names)
        call = names[name]  # type: ignore[assignment]
    assert within(frames(call, event.set)) == told


def test_the_names_of_these_calls_are_those_of_this_torch_and_this_python() -> None:
    for module, name in standing._CALLS:
        call = inspect.unwrap(getattr(importlib.import_module(module), name))
        assert (call.__module__, call.__code__.co_name) == (module, name)


@pytest.mark.parametrize("reducing", [True, False])
def test_a_backward_waits_for_others_once_it_has_its_gradients(frames, reducing: bool) -> None:
    given: queue.SimpleQueue[int] = queue.SimpleQueue()
    frame = frames(of_torch("torch.autograd.graph", given), lambda: given.put(1))
    assert place(frame, reducing=reducing)[1] == reducing


def test_what_a_script_s_hook_does_in_a_backward_is_no_waiting(frames) -> None:
    event = threading.Event()
    assert place(frames(event.wait, event.set), reducing=True)[1] is False


def test_where_a_gpu_is_used_no_line_proves_that_nobody_is_waited_for(
    frames, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing.torch.cuda, "is_initialized", lambda: True)
    event, given = threading.Event(), queue.SimpleQueue()
    assert place(frames(event.wait, event.set))[1] is None
    barrier = of_torch("torch.distributed.distributed_c10d", given)
    assert place(frames(barrier, lambda: given.put(1)))[1] is True
