"""Each event and each heartbeat says of a rank exactly what it is for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpprobe.ends.end import STATES, by_state, told
from ddpprobe.ends.evidence import Evidence, clock_of
from ddpprobe.records.events import (
    ClosedEvent,
    ContinuedEvent,
    DeathEvent,
    Event,
    ExitEvent,
    FateEvent,
    HandlesEvent,
    JobEvent,
    LastBeatsEvent,
    LauncherEvent,
    MovingEvent,
    PausedEvent,
    PeerExitEvent,
    ResumedEvent,
    StalledEvent,
    StandsEvent,
    SuspendedEvent,
)
from ddpprobe.records.fate import Fate, Progress, RaisedError, Standing
from ddpprobe.rundir.heartbeat import Heartbeat

NODE = "node_0003"
OWN = RaisedError("ValueError", "bad batch", "train.py:40 in step")


def beat(steps: int, state: str = "forward", micro: int = 0, step: int | None = None) -> Heartbeat:
    step = steps + 100 if step is None else step
    return Heartbeat(1, step, micro, state, steps, 0, steps, (0.0,) * 4, 0.0)


def fate_of(evidence: Evidence, rank: int = 0) -> Fate:
    return evidence.case(1, live=False).fates[rank]


@pytest.mark.parametrize(
    ("steps", "micro", "state", "step", "clock"),
    [
        (4, 1, "backward", 104, Progress(4, 1, "backward", 104)),
        (4, 1, "closed", 104, Progress(4, 1, "data", 104)),
        (0, 0, "forward", 0, Progress(0, 0, "forward", 0)),
        (4, 1, "backward", -1, None),
        (4, 1, "lunch", 104, None),
    ],
)
def test_a_clock_is_of_a_known_state_in_a_step_that_began(
    steps: int, micro: int, state: str, step: int, clock: Progress | None
) -> None:
    assert clock_of(steps, micro, state, step) == clock


def test_a_phase_that_no_step_has_is_refused_by_those_it_has() -> None:
    with pytest.raises(ValueError, match="no phase 'lunch': it is one of data, forward, backward"):
        Progress(0, 0, "lunch", 0)


def test_a_heartbeat_says_where_a_rank_is_and_none_moves_it_back() -> None:
    evidence = Evidence()
    evidence.take_beat(0, NODE, beat(4, "backward", 1))
    assert fate_of(evidence) == Fate(0, NODE, clock=Progress(4, 1, "backward", 104), heard=True)
    for earlier in (beat(3, "optimizer"), beat(4, "forward", 1), beat(4, "backward", 1)):
        evidence.take_beat(0, "", earlier)
        assert fate_of(evidence).clock == Progress(4, 1, "backward", 104)
    evidence.take_beat(0, "", beat(5, "closed"))
    assert fate_of(evidence).clock == Progress(5, 0, "data", 105)
    assert fate_of(evidence).beat_closed
    assert fate_of(evidence).node == NODE


def test_last_beats_are_of_each_rank_that_they_name() -> None:
    evidence = Evidence()
    evidence.take_event(LastBeatsEvent(ranks={0: beat(4), 1: beat(6, "data")}), None, NODE)
    first, second = evidence.case(1, live=False).fates
    assert (first.clock, second.clock) == (
        Progress(4, 0, "forward", 104),
        Progress(6, 0, "data", 106),
    )
    assert {first.node, second.node} == {NODE}


def test_a_death_of_an_old_version_says_that_and_how_it_died_and_in_which_step() -> None:
    evidence = Evidence()
    evidence.take_event(DeathEvent(rank=0, signal="SIGKILL", step=7, time_ns=5), None, NODE)
    assert fate_of(evidence) == Fate(
        0, NODE, "SIGKILL", time_ns=5, dead=True, clock=Progress(7, 0, "data", 7), heard=True
    )
    seen = Evidence()
    seen.take_event(exit_of("SIGSEGV"), None, NODE)
    seen.take_event(DeathEvent(rank=0, signal="SIGKILL", step=7, time_ns=9), None, NODE)
    assert (fate_of(seen).how, fate_of(seen).time_ns, fate_of(seen).dead) == ("SIGSEGV", 5, True)


def test_an_exit_says_how_many_the_kernel_killed_around_it() -> None:
    evidence = Evidence()
    evidence.take_event(replace(exit_of("SIGKILL"), memory_kills=2), None, NODE)
    assert (fate_of(evidence).how, fate_of(evidence).memory_kills) == ("SIGKILL", 2)


def test_a_peer_s_word_says_how_a_rank_ended_if_no_daemon_does_and_who_lived_then() -> None:
    evidence = Evidence()
    evidence.take_event(peer_exit("unknown", (1,), 4), 1, NODE)
    evidence.take_event(peer_exit("SIGSEGV", (2,), 6), 2, NODE)
    told = Fate(0, NODE, "SIGSEGV", outlived_by=(1, 2), time_ns=6, heard=True)
    assert fate_of(evidence) == told
    evidence.take_event(
        ExitEvent(rank=0, how="unknown", order=-1, witness="w", time_ns=9), None, NODE
    )
    assert fate_of(evidence) == replace(told, witness="w")
    seen = Evidence()
    seen.take_event(exit_of("SIGKILL"), None, NODE)
    seen.take_event(peer_exit("unknown", (1,), 6), 1, NODE)
    assert fate_of(seen) == Fate(
        0, NODE, "SIGKILL", order=2, witness="w", outlived_by=(1,), time_ns=5, heard=True,
        clock=Progress(4, 1, "forward", 104),
    )  # fmt: skip
    first, second = Fate(0, outlived_by=(1,)), Fate(1)
    assert first.died_before(second)
    assert not second.died_before(first)


def peer_exit(how: str, alive: tuple[int, ...], time_ns: int) -> PeerExitEvent:
    return PeerExitEvent(rank=0, how=how, alive=alive, time_ns=time_ns)


def exit_of(how: str) -> ExitEvent:
    return ExitEvent(rank=0, how=how, order=2, witness="w", time_ns=5, state="forward", steps=4,
                     micro=1, step=104)  # fmt: skip


def test_an_exit_says_how_in_which_order_by_whom_when_and_where() -> None:
    evidence = Evidence()
    evidence.take_event(exit_of("unknown"), None, NODE)
    evidence.take_event(exit_of("SIGSEGV"), None, NODE)
    evidence.take_event(exit_of("SIGKILL"), None, NODE)  # the first that knows is right
    assert fate_of(evidence) == Fate(
        0, NODE, "SIGSEGV", order=2, witness="w", time_ns=5, heard=True,
        clock=Progress(4, 1, "forward", 104),
    )  # fmt: skip


def test_a_goodbye_says_all_that_it_has() -> None:
    evidence = Evidence()
    evidence.take_event(
        ClosedEvent(status="exception", error=OWN, handles=True, at_exit=True, asked=True,
                    pool="Ray", state="optimizer", steps=4, micro=1, step=104),
        0, NODE,
    )  # fmt: skip
    assert fate_of(evidence) == Fate(
        0, NODE, closed=True, raised=True, error=OWN, handles=True, at_exit=True, asked=True,
        pool="Ray", heard=True, clock=Progress(4, 1, "optimizer", 104),
    )  # fmt: skip
    plain = Evidence()
    plain.take_event(ClosedEvent(), 0, NODE)
    assert fate_of(plain) == Fate(0, NODE, closed=True, heard=True)
    plain.take_event(ClosedEvent(step=9), 0, NODE)  # without a state it is between two steps
    assert fate_of(plain).clock == Progress(9, 0, "data", 9)


def test_a_pause_a_handler_and_the_scheduler_are_kept() -> None:
    evidence = Evidence()
    evidence.take_event(PausedEvent(), 0, NODE)
    assert fate_of(evidence) == Fate(0, NODE, paused=True, heard=True)
    evidence.take_event(ResumedEvent(), 0, NODE)
    evidence.take_event(HandlesEvent(), 0, NODE)
    assert fate_of(evidence) == Fate(0, NODE, sets_handlers=True, heard=True)
    first = Evidence()
    first.take_event(HandlesEvent(), 0, NODE)
    assert fate_of(first) == Fate(0, NODE, sets_handlers=True, heard=True)
    for scheduler in ("", "Slurm job 7", "another"):
        evidence.take_event(JobEvent(scheduler=scheduler), 0, NODE)
    assert evidence.case(1, live=False).scheduler == "Slurm job 7"


def test_the_newest_word_of_a_stall_or_a_suspension_holds_whichever_comes_last() -> None:
    events = [StalledEvent(time_ns=3), MovingEvent(time_ns=2)]
    events += [SuspendedEvent(rank=0, time_ns=4), ContinuedEvent(rank=0, time_ns=1)]
    for order in (events, events[::-1]):
        evidence = Evidence()
        evidence.take_rank(0, NODE)
        assert not evidence.is_stalled(NODE)
        assert not evidence.is_suspended(0)
        for event in order:
            evidence.take_event(event, None, NODE)
        assert fate_of(evidence) == Fate(0, NODE, stalled=True, suspended=True, heard=True)
        assert not evidence.is_stalled("node_0000")
        evidence.take_event(MovingEvent(time_ns=9), None, NODE)
        evidence.take_event(ContinuedEvent(rank=0, time_ns=9), None, NODE)
        assert fate_of(evidence) == Fate(0, NODE, heard=True)
        [fate] = evidence.case(1, live=True, stalled=True).fates
        assert fate.stalled


@pytest.mark.parametrize("told_of", [False, True])
@pytest.mark.parametrize("seen", [False, True])
def test_a_rank_of_another_node_stands_still_if_it_is_told_or_seen(
    told_of: bool, seen: bool
) -> None:
    evidence, far = Evidence(), Fate(1, NODE, heard=True, stalled=told_of, suspended=True)
    evidence.take_event(FateEvent(fate=far), None, "node_0000")
    case = evidence.case(2, live=True, stalled=seen)
    assert case.fates[1] == replace(far, stalled=told_of or seen)
    assert not evidence.is_suspended(1)  # that is for its own node's daemon to say


def test_a_launcher_is_of_its_node_and_its_first_known_end_holds() -> None:
    evidence = Evidence()
    evidence.take_rank(0, NODE)
    evidence.take_rank(1, "node_0000")
    for how in ("unknown", "exit:1", "SIGKILL"):
        evidence.take_event(LauncherEvent(how=how), None, NODE)
    assert [f.launcher for f in evidence.case(2, live=False).fates] == ["exit:1", ""]


def test_a_case_has_a_fate_for_each_rank_of_the_job_and_for_those_heard_of_beyond() -> None:
    evidence = Evidence()
    evidence.take_rank(3, NODE)
    case = evidence.case(2, live=True, partial=True)
    assert [f.rank for f in case.fates] == [0, 1, 3]
    assert [f.heard for f in case.fates] == [False, False, True]
    assert (case.live, case.partial) == (True, True)


@pytest.mark.parametrize(
    ("end", "attempt", "text"),
    [
        ({"state": "running", "how": "", "message": "it is under way"}, None, ""),
        ({"state": "ended", "how": "", "message": "every rank came to its end"}, 2, ""),
        ({"state": "unknown", "how": "unknown", "message": "not known"}, None, ""),
        ({"state": "unknown", "how": "exit:1", "message": "open"}, None, "unknown: open"),
        ({"state": "crashed", "how": "SIGKILL", "message": "rank 1 died"}, None,
         "crashed: rank 1 died"),
        ({"state": "crashed", "how": "SIGKILL", "message": "rank 1 died"}, 0,
         "attempt 0: crashed: rank 1 died"),
        ({"state": "stopped", "how": "SIGTERM", "message": "stopped from outside: x"}, 3,
         "attempt 3: stopped from outside: x"),
    ],
)  # fmt: skip
def test_what_is_told_of_an_end_is_its_state_and_its_message_once(
    end: dict[str, str], attempt: int | None, text: str
) -> None:
    assert told(end, attempt) == text


def test_counts_by_state_are_of_every_state_that_an_attempt_can_end_in() -> None:
    counts = by_state({"crashed": 2, "hung": 1})
    assert set(counts) == set(STATES) - {"running"}
    assert {state: n for state, n in counts.items() if n} == {"crashed": 2, "hung": 1}
    assert set(counts.values()) == {0, 1, 2}


def stands(where: str = "a.py:5 in f", steps: int = 4, state: str = "data") -> StandsEvent:
    return StandsEvent(
        step=steps + 100, steps=steps, micro=0, state=state, where=where, waits=True, time_ns=9
    )


def test_where_a_rank_stands_is_known_until_it_moves_on() -> None:
    evidence = Evidence()
    evidence.take_event(stands(), 0, NODE)
    here = Progress(4, 0, "data", 104)
    assert fate_of(evidence).stands == Standing("a.py:5 in f", True, here)
    assert fate_of(evidence).clock == here
    evidence.take_beat(0, NODE, beat(4, "data"))
    assert fate_of(evidence).stands is not None
    evidence.take_beat(0, NODE, beat(4, "forward"))
    assert fate_of(evidence).stands is None


def test_the_last_place_counts_and_an_older_step_s_does_not() -> None:
    evidence = Evidence()
    for event in (stands(), stands("b.py:6 in g"), stands("c.py:7 in h", steps=3)):
        evidence.take_event(event, 0, NODE)
    found = fate_of(evidence).stands
    assert found is not None
    assert found.where == "b.py:6 in g"


def test_what_says_no_step_says_not_where_a_rank_stands() -> None:
    evidence = Evidence()
    evidence.take_event(StandsEvent(where="a.py:5 in f", waits=False, time_ns=9), 0, NODE)
    assert fate_of(evidence).stands is None


TOLD = Fate(0, NODE, "SIGKILL", witness="w", order=3, heard=True)
SAID: list[tuple[Event | Heartbeat, int | None]] = [
    (beat(4), 0),
    (stands(), 0),
    (FateEvent(fate=Fate(1, "node_0004", stalled=True)), None),
    (SuspendedEvent(rank=0, time_ns=5), None),
    (StalledEvent(time_ns=6), None),
    (beat(5), 0),
    (ContinuedEvent(rank=0, time_ns=7), None),
    (PeerExitEvent(rank=0, how="SIGKILL", time_ns=8, alive=(1,)), 1),
    (FateEvent(fate=TOLD), None),
    (LauncherEvent(how="SIGTERM", time_ns=9), None),
    (MovingEvent(time_ns=10), None),
]


def test_who_is_asked_after_each_word_says_in_the_end_what_one_does_who_is_asked_once() -> None:
    asked, once = Evidence(), Evidence()
    for said, rank in SAID:
        for evidence in (asked, once):
            if isinstance(said, Heartbeat):
                evidence.take_beat(0, NODE, said)
            else:
                evidence.take_event(said, rank, NODE)
        fresh = replace(asked, _made={})
        assert asked.case(3, live=True) == fresh.case(3, live=True)
    assert asked.case(3, live=True) == once.case(3, live=True)
    assert asked.case(3, live=True, stalled=True) == once.case(3, live=True, stalled=True)


def test_news_of_one_rank_make_nothing_new_of_the_thousands_of_others() -> None:
    """A head is asked seven times a second: at 1,024 ranks that took a third of a core."""
    evidence = Evidence()
    before = evidence.case(1024, live=True).fates
    evidence.take_beat(5, NODE, beat(4))
    evidence.take_event(FateEvent(fate=TOLD), None)
    after = evidence.case(1024, live=True).fates
    assert [a.rank for a, b in zip(after, before, strict=True) if a is not b] == [0, 5]
    evidence.take_beat(5, NODE, beat(4))
    evidence.take_rank(5, NODE)
    assert all(a is b for a, b in zip(evidence.case(1024, live=True).fates, after, strict=True))
