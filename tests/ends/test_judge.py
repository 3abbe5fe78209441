"""What a run died of is judged by evidence: who is named is never guessed, in whatever order it
was noticed."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from ddpprobe.ends.anomalies import anomalies_of
from ddpprobe.ends.death_order import DeathOrder
from ddpprobe.ends.end import End
from ddpprobe.ends.evidence import Case, Evidence
from ddpprobe.ends.judge import is_well, judge, stuck_of
from ddpprobe.ends.rank_ends import may_be_told
from ddpprobe.ends.stalls import is_still
from ddpprobe.records.events import ClosedEvent, ExitEvent, FateEvent
from ddpprobe.records.fate import Fate, Progress, RaisedError, Standing
from ddpprobe.rundir import validate
from ddpprobe.rundir.heartbeat import Heartbeat

GONE = RaisedError("RuntimeError", "[gloo] Connection closed by peer", "train.py:9 in main", True)
TIMED_OUT = RaisedError("RuntimeError", "[gloo] Timed out waiting 1800000ms", "train.py:9", True)
NETWORK = RaisedError("DistBackendError", "NCCL error: unhandled system error", "t.py:9", True)
OWN = RaisedError("ValueError", "bad batch", "train.py:40 in step")
REFUSED = RaisedError("ConnectionResetError", "by peer", "train.py:40 in fetch")
OWN_STOP = RaisedError("AnomalyStop", "nonfinite at step 6, rank 1", "train.py:50 in train")
RETOLD = RaisedError(
    "CheckpointException", "of another rank: OSError: [Errno 28] timed out", "train.py:70", True
)
PREEMPTED = RaisedError("Preempted", "", "train.py:7 in on_term", asked=True)


def at(steps: int, phase: str = "forward", micro: int = 0) -> Progress:
    return Progress(steps, micro, phase, steps)


def fate(rank: int, how: str = "", clock: Progress | None = None, **more: Any) -> Fate:
    more.setdefault("witness", "w" if more.get("order", -1) >= 0 else "")
    return Fate(rank, "node_0000", how, clock=clock or at(12), heard=True, **more)


def raised(rank: int, error: RaisedError | None, how: str = "exit:1", **more: Any) -> Fate:
    return fate(rank, how, closed=True, raised=True, error=error, **more)


def left(rank: int, clock: Progress, **more: Any) -> Fate:
    """Return a rank of a script with a handler of SIGTERM that closed at its interpreter's end."""
    more = {"closed": True, "handles": True, "at_exit": True, **more}
    return fate(rank, "exit:0", clock, **more)


def standing(
    rank: int, *, waits: bool | None, where: str = "a.py:5 in f", within: str = ""
) -> Fate:
    """Return a rank that stands still at its data, in a call to other ranks or not."""
    clock = at(12, "data")
    return fate(rank, clock=clock, stalled=True, stands=Standing(where, waits, clock, within))


def verdict(*fates: Fate, **case: Any) -> End:
    return judge(Case(fates, **case))


GLOO = RaisedError(
    "RuntimeError", "[/__w/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:86"
    "14. This is typically caused by a remote worker crashing. Check the logs.", "a.py:9 in f",
    True,
)  # fmt: skip


def test_of_what_gloo_says_only_what_happened_is_told() -> None:
    end = judge(Case((fate(0, "exit:3"), raised(1, GLOO))))
    (_, taken_along) = anomalies_of(end, Case((fate(0, "exit:3"), raised(1, GLOO))), 0)
    said = "RuntimeError: Connection closed by peer [10.0.0.1]:8614 at a.py:9 in f"
    assert taken_along.message.startswith(f"rank 1 died ({said}) in step 12")


VERDICTS = {
    "two came to their end, and one made a call after as many steps": (
        [*(fate(r, "exit:0", at(40, "data"), closed=True) for r in (0, 1)),
         raised(2, GONE, clock=at(40, "data"))], "crashed", [0, 1, 2], "exit:0"),
    "two came to their end, and one was in the step after it": (
        [*(fate(r, "exit:0", at(39, "data"), closed=True) for r in (0, 1)),
         raised(2, GONE, clock=at(40))], "crashed", [0, 1], "exit:0"),
    "all by a signal that a scheduler sends": (
        [fate(0, "SIGUSR1"), fate(1, "SIGUSR1")], "stopped", [], "SIGUSR1"),
    "the same, and nobody saw how one of them ended": (
        [fate(0), fate(1, "SIGUSR1"), fate(2, "SIGUSR1")], "stopped", [], "SIGUSR1"),
    "a crash whose last word found no room on the disk": (
        [fate(0, "exit:1", at(150, "data"), beat_closed=True), fate(1, "SIGTERM")],
        "crashed", [0], "exit:1"),
    "one by it, and nobody saw how the other ended": (
        [fate(0), fate(1, "SIGUSR1")], "unknown", [], "SIGUSR1"),
    "one of them by such a signal": (
        [fate(0, "SIGUSR1"), fate(1, "SIGTERM")], "crashed", [0], "SIGUSR1"),
    "all of them, each by another one": (
        [fate(0, "SIGUSR1"), fate(1, "SIGUSR2")], "crashed", [0, 1], "SIGUSR1"),
    # A cause and those it took along.
    "a killed rank, its peer by a broken connection": (
        [fate(0, "SIGKILL"), raised(1, GONE)], "crashed", [0], "SIGKILL"),
    "a killed rank, its peers told to stop by the launcher": (
        [fate(0, "SIGTERM"), fate(1, "SIGKILL"), fate(2, "SIGTERM")], "crashed", [1], "SIGKILL"),
    "the same, and the daemon saw the peer's end first of all": (
        [raised(0, GONE, order=0), fate(1, "SIGKILL", order=1)], "crashed", [1], "SIGKILL"),
    "an exception, its peers told to stop": (
        [raised(0, OWN), fate(1, "SIGTERM")], "crashed", [0], "ValueError"),
    "an exception that takes long to exit": (
        [raised(0, OWN, how=""), fate(1)], "crashed", [0], "ValueError"),
    "an exception, and its own process told to stop while it fell": (
        [raised(0, OWN, "SIGTERM"), raised(1, GONE, "SIGTERM")], "crashed", [0], "ValueError"),
    "an exception after close()": (
        [fate(0, "exit:1", closed=True, error=OWN), raised(1, GONE)], "crashed", [0], "ValueError"),
    "an exit code, its peer by a broken connection": (
        [fate(0, "exit:3"), raised(1, GONE)], "crashed", [0], "exit:3"),
    "an exit code, its peers told to stop": (
        [fate(0, "exit:3", closed=True), fate(1, "SIGTERM")], "crashed", [0], "exit:3"),
    "an exit without a word and without a fault code, in mid-training": (
        [fate(0, "exit:0"), raised(1, GONE)], "crashed", [0], "exit:0"),
    "a crash, and its peer's script answered by an exit code": (
        [fate(0, "SIGSEGV"), fate(1, "exit:1", closed=True)], "crashed", [0], "SIGSEGV"),
    "a crash in C++, its peers told to stop": (
        [fate(0, "SIGABRT"), fate(1, "SIGTERM")], "crashed", [0], "SIGABRT"),
    "a rank of which nobody knows how it died, and its peer by a broken connection": (
        [fate(0, "unknown"), raised(1, GONE)], "crashed", [0], "unknown"),
    "one by itself": ([fate(0, "SIGKILL", at(12, "data"))], "crashed", [0], "SIGKILL"),
    "one that chose": ([fate(0, "exit:3", at(12, "data"))], "crashed", [0], "exit:3"),
    "a launcher that kills the others at once": (
        [fate(0, "SIGSEGV", order=0), fate(1, "SIGKILL", order=1)], "crashed", [0], "SIGSEGV"),
    "who chose its code while the other was behind it answered": (
        [fate(0, "exit:3", at(12)), fate(1, "exit:1", at(12, "backward"))], "crashed", [0],
        "exit:3"),
    # Seen by other ranks only, who say who lived then (`outlived_by`).
    "a crash, and nobody saw how its peers ended": (
        [fate(0, "SIGSEGV", outlived_by=(1, 2)), fate(1), fate(2)], "crashed", [0], "SIGSEGV"),
    "an exit code, and nobody saw how its peers ended then": (
        [fate(0), fate(1, "exit:7", outlived_by=(0,))], "crashed", [1], "exit:7"),
    "the same, of which the peer was dead before, for all that is known": (
        [fate(0), fate(1, "exit:7")], "crashed", [0, 1], "unknown"),
    "the same, and the peer was further on, so that it is no reason": (
        [fate(0, clock=at(12, "backward")), fate(1, "exit:7")], "crashed", [1], "exit:7"),
    "an exit code of a script with a handler of signals, which all may have heard": (
        [fate(0), fate(1, "exit:7", outlived_by=(0,), sets_handlers=True)],
        "unknown", [], "exit:7"),
    "an exit code between two steps, as of a worker that is not needed any more": (
        [fate(0, clock=at(12, "data")), fate(1, "exit:1", at(12, "data"), outlived_by=(0,))],
        "unknown", [], "exit:1"),
    "a killed rank, and nobody saw how its peers ended then: one, or all of them": (
        [fate(0, "SIGKILL", outlived_by=(1, 2)), fate(1), fate(2)], "vanished", [], "unknown"),
    "a killed rank, its peers told to stop then, and the daemon saw them together": (
        [fate(0, "SIGTERM", at(12, "backward"), order=0),
         fate(1, "SIGKILL", order=0, outlived_by=(0,))], "crashed", [1], "SIGKILL"),
    "a killed rank behind one that was told to stop, seen together by the daemon": (
        [fate(0, "SIGTERM", at(12, "backward"), order=0, outlived_by=(1,)),
         fate(1, "SIGKILL", order=0)], "stopped", [], "SIGTERM"),
    "an abort while nobody was behind, and nobody saw how its peers ended then": (
        [fate(0, "SIGABRT", outlived_by=(1,)), fate(1)], "crashed", [0], "SIGABRT"),
    "an abort while one was behind of which nobody saw how it ended then": (
        [fate(0, "SIGABRT", at(12, "backward"), outlived_by=(1,)), fate(1)],
        "unknown", [0, 1], "SIGABRT"),
    "told to stop when all the others lived, of which nobody saw how they ended": (
        [fate(0, "SIGTERM", outlived_by=(1, 2)), fate(1), fate(2)], "stopped", [], "SIGTERM"),
    "told to stop when one was dead, for all that is known": (
        [fate(0, "SIGTERM", outlived_by=(1,)), fate(1), fate(2)], "unknown", [], "unknown"),
    # More than one may be it.
    "two killed, and a third one told to stop": (
        [fate(0, "SIGTERM"), fate(1, "SIGKILL"), fate(3, "SIGKILL")], "crashed", [1, 3], "SIGKILL"),
    "two killed, one proven to be the first": (
        [fate(1, "SIGKILL", order=1), fate(3, "SIGKILL", order=0)], "crashed", [3], "SIGKILL"),
    "seen by different daemons, which proves nothing": (
        [fate(0, "SIGTERM"), fate(1, "SIGKILL", order=1),
         fate(3, "SIGKILL", order=0, witness="other")], "crashed", [1, 3], "SIGKILL"),
    "one killed in the middle of a step, another one by its own exception": (
        [fate(0, "SIGKILL", order=0), raised(1, OWN, order=1)], "crashed", [0, 1], "SIGKILL"),
    "everybody killed in the middle of a step": (
        [fate(0, "SIGKILL"), fate(1, "SIGKILL", at(12, "backward"))], "unknown", [], "SIGKILL"),
    "everybody killed, without a proof that means anything": (
        [fate(1, "SIGKILL", order=1), fate(3, "SIGKILL", order=0, witness="other")],
        "unknown", [], "SIGKILL"),
    "aborted while another one was behind: a watchdog's work or its own": (
        [fate(0, "SIGABRT", at(12, "backward")), fate(1, "SIGTERM")], "unknown", [0, 1], "SIGABRT"),
    "aborted while one was behind that was killed, seen together": (
        [fate(0, "SIGABRT", at(12, "backward"), order=0), fate(1, "SIGKILL", order=0)],
        "unknown", [0, 1], "SIGABRT"),
    "aborted while one was behind that was killed then": (
        [fate(0, "SIGABRT", at(12, "backward"), order=0), fate(1, "SIGKILL", order=1)],
        "crashed", [0], "SIGABRT"),
    "aborted after the death of one that was killed": (
        [fate(0, "SIGABRT", at(12, "backward"), order=1), fate(1, "SIGKILL", order=0)],
        "crashed", [1], "SIGKILL"),
    "aborted while nobody was behind, and another one killed then": (
        [fate(0, "SIGABRT", order=0), fate(1, "SIGKILL", at(12, "backward"), order=1)],
        "crashed", [0], "SIGABRT"),
    "killed behind the others, who were told to stop, seen together": (
        [fate(0, "SIGTERM", at(12, "backward"), order=0), fate(1, "SIGKILL", order=0)],
        "unknown", [1], "SIGKILL"),
    "the same, and one of them had lost the connection": (
        [fate(0, "SIGTERM", at(12, "backward"), order=0), fate(1, "SIGKILL", order=0),
         raised(2, GONE, "SIGTERM", order=0)], "crashed", [1], "SIGKILL"),
    "killed as far as the others, who were told to stop, seen together": (
        [fate(0, "SIGTERM", order=0), fate(1, "SIGKILL", order=0)], "crashed", [1], "SIGKILL"),
    "killed after a time in which all stood still, proven to be the first": (
        [fate(0, "SIGTERM", order=1, stalled=True), fate(1, "SIGKILL", order=0, stalled=True)],
        "crashed", [1], "SIGKILL"),
    "one that left in mid-training, and its peers by broken connections": (
        [fate(1, "unknown", at(4, "data"), closed=True), raised(0, GONE), raised(2, GONE)],
        "crashed", [1], "unknown"),
    "the same, and another one is gone without a last word": (
        [fate(1, "unknown", at(4, "data"), closed=True), raised(0, GONE), fate(2, "unknown")],
        "crashed", [1, 2], "unknown"),
    "one that left further on than all who lost the connection to one that is gone": (
        [fate(1, "exit:0", at(40, "data"), closed=True), raised(0, GONE), fate(2, "unknown")],
        "crashed", [2], "unknown"),
    "closed in the middle of a step, and nobody knows its exit code": (
        [fate(n, closed=True, clock=at(4, "backward")) for n in (0, 1)], "unknown", [], "unknown"),
    "everybody raised": ([raised(0, OWN), raised(1, OWN)], "crashed", [0, 1], "ValueError"),
    "everybody chose, without a handler of signals": (
        [fate(n, "exit:3", closed=True) for n in (0, 1)], "crashed", [0, 1], "exit:3"),
    "only broken connections": ([raised(0, GONE), raised(1, GONE)], "crashed", [0, 1],
                                "RuntimeError"),
    "a signal that nobody sends, behind the others, who were told to stop, seen together": (
        [fate(0, "SIGTERM", at(12, "backward"), order=0), fate(1, "SIGSEGV", order=0)],
        "crashed", [1], "SIGSEGV"),
    "killed before its first step, the other told to stop, seen together": (
        [fate(0, "SIGTERM", order=0), replace(fate(1, "SIGKILL", order=0), clock=None)],
        "crashed", [1], "SIGKILL"),
    "killed behind the others, who were told to stop then": (
        [fate(0, "SIGTERM", at(12, "backward"), order=1), fate(1, "SIGKILL", order=0)],
        "crashed", [1], "SIGKILL"),
    "a crash, and an exit code of one that was behind it": (
        [fate(0, "SIGSEGV", at(12, "backward")), fate(1, "exit:3")], "crashed", [0, 1], "SIGSEGV"),
    "raised, of a version that did not say what, and exited": (
        [raised(0, None), fate(1, "SIGTERM")], "crashed", [0], "exit:1"),
    "two gone without a last word in one phase, and their peer by a broken connection": (
        [fate(0), fate(1, "unknown"), raised(2, GONE)], "crashed", [0, 1], "unknown"),
    "an error that was caught, and killed behind it by nobody knows whom": (
        [fate(0, "", error=OWN), raised(1, GONE)], "crashed", [0], "unknown"),
    # Told to stop.
    "raised, of a version that did not say what, and ended by a signal": (
        [raised(0, None, "SIGTERM"), fate(1, "SIGTERM")], "stopped", [], "SIGTERM"),
    "SIGTERM for all": ([fate(0, "SIGTERM"), fate(1, "SIGTERM")], "stopped", [], "SIGTERM"),
    "SIGINT for all": ([raised(n, replace(PREEMPTED, type="KeyboardInterrupt"), "SIGINT")
                        for n in (0, 1)], "stopped", [], "SIGINT"),
    "a handler that raises": ([raised(0, PREEMPTED), fate(1, "SIGTERM")], "stopped", [],
                              "SIGTERM"),
    "handlers that exit as a shell would say it": (
        [fate(0, "exit:143", closed=True), raised(1, GONE)], "stopped", [], "exit:143"),
    "the same after the end of the training": (
        [fate(n, "exit:143", at(40, "data"), closed=True) for n in (0, 1)], "ended", [], ""),
    "the same, as its handler had closed": (
        [fate(n, "exit:143", at(40, "data"), closed=True, handles=True) for n in (0, 1)],
        "stopped", [], "exit:143"),
    "the same, at the interpreter's end": (
        [fate(n, "exit:143", at(40, "data"), closed=True, at_exit=True) for n in (0, 1)],
        "stopped", [], "exit:143"),
    "stopped for an anomaly, as the user wants it": (
        [raised(n, OWN_STOP, clock=at(20, "data")) for n in (0, 1)], "stopped", [], "AnomalyStop"),
    "the same, and the launcher ends the one that is slower": (
        [raised(0, OWN_STOP), fate(1, "SIGTERM")], "stopped", [], "AnomalyStop"),
    "the same, and another one failed on its own": (
        [raised(0, OWN_STOP), raised(1, OWN)], "crashed", [1], "ValueError"),
    "workers that closed, and that their pool ended by an exit code": (
        [fate(0, "exit:1", at(40, "data"), closed=True, pool="Ray"),
         fate(1, "exit:1", at(40, "backward"), closed=True, pool="Ray")], "ended", [], ""),
    "the same of processes that nobody else ends": (
        [fate(n, "exit:1", at(40, "data"), closed=True, at_exit=True) for n in (0, 1)], "crashed",
        [0, 1], "exit:1"),
    "the same, and one of them was ended on its way out": (
        [fate(0, "SIGTERM", at(40, "data"), closed=True, at_exit=True, order=1),
         fate(1, "exit:85", at(40, "data"), closed=True, at_exit=True, order=0)], "crashed",
        [0, 1], "exit:85"),
    "one left by a code, and one came to its end in the same place": (
        [fate(0, "exit:3", at(40, "data"), closed=True, at_exit=True),
         fate(1, "exit:0", at(40, "data"), closed=True, at_exit=True)], "crashed", [0], "exit:3"),
    "one left by a code, and its peer in the step after it": (
        [fate(0, "exit:3", at(40, "data"), closed=True, at_exit=True),
         fate(1, "SIGTERM", at(41, "data"), closed=True, at_exit=True)], "crashed", [0], "exit:3"),
    "processes that had closed after their training, and failed at something later": (
        [fate(0, "exit:1", at(40, "data"), closed=True),
         fate(1, "SIGTERM", at(40, "data"), closed=True)], "unknown", [], "exit:1"),
    "the same, and one of them had closed in the middle of a step": (
        [fate(0, "exit:1", at(40, "data"), closed=True), fate(1, "SIGTERM", closed=True)],
        "unknown", [0, 1], "exit:1"),
    "one that had closed, and was killed as the others had": (
        [fate(0, "SIGSEGV", at(40, "data"), closed=True, dead=True),
         fate(1, "exit:0", at(40, "data"), closed=True)], "crashed", [0], "SIGSEGV"),
    "the same while another one still trained": (
        [fate(0, "exit:1", at(40, "data"), closed=True), raised(1, GONE, clock=at(41))],
        "crashed", [0], "exit:1"),
    "one swallowed a broken connection, and the other had left before that step": (
        [fate(0, "exit:0", at(23, "backward"), closed=True, at_exit=True),
         fate(1, "exit:0", at(23, "data"), closed=True, at_exit=True)], "unknown", [1], "exit:0"),
    "a worker that raised, and its peer, which waited until the pool ended both": (
        [fate(0, "exit:1", at(13, "backward")),
         fate(1, "exit:1", at(12, "backward"), closed=True, pool="Ray", error=OWN)],
        "crashed", [1], "ValueError"),
    "workers that had not closed when their pool was ended": (
        [fate(n, "SIGKILL", at(40, "data"), closed=True, handles=True, at_exit=True, pool="Ray")
         for n in (0, 1)], "stopped", [], "Ray (SIGKILL)"),
    "one handler that exits as a shell would say it, and SIGTERM for the other": (
        [fate(0, "exit:143", closed=True), fate(1, "SIGTERM")], "stopped", [], "SIGTERM"),
    "a handler that exits out of the middle of a forward": (
        [fate(0, "exit:1", closed=True, handles=True), fate(1, "exit:1", at(12, "backward"),
                                                            closed=True, handles=True)],
        "stopped", [], "exit:1"),
    "SIGTERM for all, one killed when it did not go": (
        [fate(0, "SIGTERM", order=0), fate(1, "SIGKILL", order=1)], "stopped", [], "SIGTERM"),
    "one told to stop, and its peer by a broken connection": (
        [fate(0, "SIGTERM"), raised(1, GONE)], "stopped", [], "SIGTERM"),
    "the same, seen in this order": (
        [fate(0, "SIGTERM", order=0), raised(1, GONE, order=1)], "stopped", [], "SIGTERM"),
    "a broken connection while all others lived, who were told to stop after it": (
        [fate(0, "SIGTERM", order=1), raised(1, NETWORK, order=0), fate(2, "SIGTERM", order=2)],
        "crashed", [1], "DistBackendError"),
    "the same, and one of the others had ended before": (
        [fate(0, "SIGTERM", order=1), raised(1, GONE, order=0), fate(2, "SIGTERM", order=0)],
        "stopped", [], "SIGTERM"),
    "the same on two ranks": (
        [raised(0, NETWORK, order=0), raised(1, NETWORK, order=0), fate(2, "SIGTERM", order=1)],
        "crashed", [0, 1], "DistBackendError"),
    "the same, and the others may have closed it in a handler of their own": (
        [fate(0, "exit:143", order=1, sets_handlers=True), raised(1, NETWORK, order=0)],
        "unknown", [1], "DistBackendError"),
    "the same, and a handler had run in the one that broke": (
        [fate(0, "exit:143", order=1, sets_handlers=True),
         raised(1, GONE, order=0, handles=True, sets_handlers=True)], "stopped", [], "exit:143"),
    "the same, and Python's answer to SIGINT ended the other": (
        [raised(0, PREEMPTED, order=1), raised(1, GONE, order=0)], "stopped", [],
        "a handler of a signal (Preempted)"),
    # Left early, or killed after its last word.
    "left behind the others, who stood in a later step until they were told to stop": (
        [fate(0, "exit:0", at(5, "data"), closed=True, at_exit=True),
         *(fate(n, "SIGTERM", at(5, "backward"), stalled=True) for n in (1, 2))], "hung", [0],
        "hang"),
    "the same, and nobody stands still": (
        [fate(0, "exit:0", at(5, "data"), closed=True, at_exit=True),
         *(fate(n, "SIGTERM", at(5, "backward")) for n in (1, 2))], "stopped", [], "SIGTERM"),
    "left where all others stand after their last step, as for a checkpoint": (
        [fate(0, "exit:0", at(5, "data"), closed=True, at_exit=True),
         *(fate(n, "SIGTERM", at(6, "data"), stalled=True) for n in (1, 2))], "stopped", [],
        "SIGTERM"),
    "killed after close() while others trained on": (
        [fate(0, "SIGKILL", at(40, "data"), closed=True, order=0),
         fate(1, "SIGTERM", at(40, "data"), order=1)], "crashed", [0], "SIGKILL"),
    "killed after close(), as all had closed": (
        [fate(0, "SIGKILL", at(40, "data"), closed=True, order=0),
         fate(1, "exit:0", at(40, "data"), closed=True, order=1)], "ended", [], ""),
    "an abort, and one had left behind it": (
        [fate(0, "exit:0", at(5, "data"), closed=True, at_exit=True, order=0),
         fate(1, "SIGABRT", at(5, "backward"), order=1)], "unknown", [0, 1], "SIGABRT"),
    "an exit code, and one had left behind it": (
        [fate(0, "exit:0", at(5, "data"), closed=True, at_exit=True, order=0),
         fate(1, "exit:3", at(5, "backward"), closed=True, order=1)], "unknown", [0, 1], "exit:3"),
    # Stood still.
    "suspended, and killed by the launcher at last": (
        [fate(0, "SIGTERM", at(12, "backward"), order=0), fate(1, "SIGKILL", suspended=True,
                                                               order=1)], "hung", [1], "SIGSTOP"),
    "suspended, and all killed": (
        [fate(0, "SIGKILL", at(12, "backward")), fate(1, "SIGKILL", suspended=True)],
        "hung", [1], "SIGSTOP"),
    "behind the others, which stood still as well": (
        [fate(0, "SIGTERM", at(12, "backward"), stalled=True), fate(1, "SIGKILL", stalled=True)],
        "hung", [1], "hang"),
    "NCCL's watchdog ended those who waited": (
        [fate(0, "SIGABRT", at(12, "backward"), stalled=True), fate(1, "SIGTERM", stalled=True)],
        "hung", [1], "hang"),
    "those who waited gave up": (
        [raised(0, TIMED_OUT, clock=at(12, "backward")), fate(1, "SIGTERM")], "hung", [1], "hang"),
    "all in one place": (
        [fate(n, "SIGTERM", at(12, "backward"), stalled=True) for n in (0, 1)], "hung", [0, 1],
        "hang"),
    "one after three others": (
        [fate(n, clock=at(12, "backward"), stalled=True) for n in (0, 2, 3)]
        + [fate(1, stalled=True)], "hung", [1], "hang"),
    "all stood still, and of one nothing is known": (
        [fate(0, stalled=True), Fate(1)], "hung", [], "hang"),
    "ranks in one place, of which one alone is in no call to others": (
        [standing(0, waits=True), standing(1, waits=False), standing(2, waits=True)],
        "hung", [1], "hang"),
    "ranks in one place, two of which are in no call to others": (
        [standing(0, waits=False), standing(1, waits=True), standing(2, waits=False)],
        "hung", [0, 2], "hang"),
    "ranks in one place, each in a call to others, and not in the same one": (
        [standing(0, waits=True, where="b.py:7 in f"), standing(1, waits=True),
         standing(2, waits=True)], "hung", [0, 1, 2], "hang"),
    "ranks in one place, of one of which it is not known where it stands": (
        [standing(0, waits=True), standing(1, waits=False),
         fate(2, clock=at(12, "data"), stalled=True)], "hung", [0, 1, 2], "hang"),
    "ranks in one place, of one of which its line proves nothing": (
        [standing(0, waits=True), standing(1, waits=None), standing(2, waits=False)],
        "hung", [0, 1, 2], "hang"),
    "a rank behind the others, and where both stand": (
        [fate(0, clock=at(12, "backward"), stalled=True,
              stands=Standing("a.py:9 in f (c10d.py:1 in wait)", True, at(12, "backward"))),
         standing(1, waits=False)], "hung", [1], "hang"),
    "a rank behind the others, and each waits for the other": (
        [fate(0, clock=at(12, "backward"), stalled=True,
              stands=Standing("a.py:9 in f (c10d.py:1 in wait)", True, at(12, "backward"))),
         standing(1, waits=True)], "hung", [1], "hang"),
    "stood still until they were told to stop, and nobody saw how those of a lost node ended": (
        [*(fate(n, "SIGTERM", at(12, "data"), stalled=True) for n in (0, 1)),
         *(fate(n, clock=at(12, "data")) for n in (2, 3))], "hung", [0, 1, 2, 3], "hang"),
    # In a checkpoint.
    "a rank that hangs in torch.save, and the others wait after it": (
        [standing(0, waits=True, where="a.py:9 in f (c10d.py:1 in barrier)"),
         standing(1, waits=False, within="torch.save")], "hung", [1], "hang"),
    "two of three ranks in one place, one of them in torch.save": (
        [standing(0, waits=False), standing(1, waits=False, within="torch.save"),
         standing(2, waits=True)], "hung", [0, 1], "hang"),
    "one that hangs in a checkpoint of all ranks": (
        [standing(n, waits=not n, within="torch.distributed.checkpoint.save") for n in (0, 1)],
        "hung", [1], "hang"),
    "a rank that hangs in a checkpoint after its backward": (
        [fate(0, clock=at(13), stalled=True),
         fate(1, clock=at(12, "backward"), stalled=True,
              stands=Standing("a.py:9 in f", False, at(12, "backward"), "torch.save"))],
        "hung", [1], "hang"),
    "killed where it had stood for long": (
        [fate(0, "SIGTERM"),
         fate(1, "SIGKILL", at(12, "data"),
              stands=Standing("a.py:9 in f", False, at(12, "data"), "torch.save"))],
        "crashed", [1], "SIGKILL"),
    "an error of its own where it had stood for long": (
        [raised(0, OWN, clock=at(12, "data"),
                stands=Standing("a.py:9 in f", False, at(12, "data"), "torch.save"))],
        "crashed", [0], "ValueError"),
    "a checkpoint of all ranks that failed on one of them": (
        [raised(0, RETOLD), raised(1, replace(RETOLD, collective=False, message="OSError"))],
        "crashed", [1], "CheckpointException"),
    "the same, and of the one on which it failed nothing is known": (
        [raised(0, RETOLD), Fate(1)], "crashed", [], "CheckpointException"),
    # Killed where all stood still: by who lost patience, or by what takes memory back.
    "killed in a long checkpoint, and its peer's connection broke after it": (
        [raised(0, GONE, clock=at(12, "data"), stalled=True),
         fate(1, "SIGKILL", at(12, "data"), stalled=True,
              stands=Standing("a.py:9 in f", False, at(12, "data"), "torch.save"))],
        "crashed", [1], "SIGKILL"),
    "the same, and a handler of a signal may have closed the connection": (
        [raised(0, GONE, clock=at(12, "data"), stalled=True, handles=True),
         fate(1, "SIGKILL", at(11, "data"), stalled=True)], "hung", [1], "hang"),
    "the same, and it was suspended": (
        [raised(0, GONE, clock=at(12, "data"), stalled=True),
         fate(1, "SIGKILL", at(11, "data"), stalled=True, suspended=True)], "hung", [1],
        "SIGSTOP"),
    "killed in a long evaluation, when all others had left": (
        [fate(0, "SIGKILL", at(40, "data"), stalled=True),
         fate(1, "exit:0", at(40, "data"), closed=True)], "crashed", [0], "SIGKILL"),
    "two killed in a long evaluation, when a third one had left": (
        [*(fate(n, "SIGKILL", at(40, "data"), stalled=True) for n in (0, 1)),
         fate(2, "exit:0", at(40, "data"), closed=True)], "crashed", [0, 1], "SIGKILL"),
    "two killed in a step that a third one had left before": (
        [*(fate(n, "SIGKILL", at(40, "backward"), stalled=True) for n in (0, 1)),
         fate(2, "exit:0", at(40, "data"), closed=True)], "hung", [2], "hang"),
    "killed in a long checkpoint, by itself": (
        [fate(0, "SIGKILL", at(40, "data"), stalled=True)], "crashed", [0], "SIGKILL"),
    # Nothing to blame anybody for.
    "all closed": (
        [fate(n, "exit:0", at(40, "data"), closed=True) for n in (0, 1)], "ended", [], ""),
    "closed, and aborted by a thread of torch after it": (
        [fate(0, "SIGABRT", closed=True), fate(1, "exit:0", closed=True)], "ended", [], ""),
    "closed without a daemon": (
        [fate(n, clock=at(40, "data"), closed=True) for n in (0, 1)], "ended", [], ""),
    "came to the end of the interpreter, and nobody saw the exit code": (
        [fate(0, "exit:0", at(40, "data"), closed=True, at_exit=True),
         fate(1, "unknown", at(40, "data"), closed=True, at_exit=True)], "ended", [], ""),
    "caught after close(), out of a forward": (
        [fate(0, "exit:0", closed=True, error=OWN)], "unknown", [], "exit:0"),
    "caught after close(), between two steps, as what ends a training early": (
        [fate(0, "exit:0", at(12, "data"), closed=True, error=OWN)], "ended", [], ""),
    "an exception between two steps, and nobody saw the exit code": (
        [fate(0, "", at(12, "data"), closed=True, error=OWN)], "unknown", [], "ValueError"),
    "the same, seen by a daemon that does not know the code": (
        [fate(n, "unknown", at(12, "data"), closed=True, error=OWN) for n in (0, 1)], "unknown", [],
        "ValueError"),
    "everybody gone without a word or a witness": (
        [fate(0), fate(1, "unknown")], "vanished", [], "unknown"),
    "a copy of records without a heartbeat": (
        [replace(fate(n), clock=None) for n in (0, 1)], "unknown", [], "unknown"),
    "one of whom nothing is known": (
        [fate(0, clock=at(40, "data"), closed=True), fate(1)], "unknown", [], "unknown"),
    "workers that are ended by their code when all is done": (
        [fate(n, "exit:1", at(40, "data")) for n in (0, 1)], "unknown", [], "exit:1"),
    "workers that are killed when all is done": (
        [fate(n, "SIGKILL", at(40, "data")) for n in (0, 1)], "unknown", [], "SIGKILL"),
    "workers that ended in every way that may be harmless, when all is done": (
        [fate(n, how, at(40, "data")) for n, how in enumerate(("exit:0", "exit:1", "SIGKILL"))],
        "unknown", [], "SIGKILL"),
    "ended without a word, not in the same step": (
        [fate(n, "exit:0", at(40 + n, "data")) for n in (0, 1)], "unknown", [], "exit:0"),
    "one told to stop, and one of whom nothing is known": (
        [fate(0, "SIGTERM"), Fate(1)], "unknown", [], "unknown"),
    "one told to stop, and one gone without a word": (
        [fate(0, "SIGTERM"), fate(1)], "unknown", [], "unknown"),
    # Handlers of signals that exit with 0.
    "a handler that exits with 0 out of the middle of a forward": (
        [left(0, at(7)), left(1, at(7, "data"))], "stopped", [], "exit:0"),
    "the same, of a rank whose last word was an error": (
        [left(0, at(7)), raised(1, GONE, clock=at(7, "backward"))], "stopped", [], "exit:0"),
    "ranks that left in different places, one of them after its forward": (
        [left(0, at(7, "backward")), left(1, at(7, "data"))], "stopped", [], "exit:0"),
    "who left by sys.exit() out of a handler, as its close() saw": (
        [fate(n, "exit:0", at(7, "data"), closed=True, asked=True) for n in (0, 1)], "stopped",
        [], "exit:0"),
    "all after the same forward, by a handler or not": (
        [left(n, at(7, "backward")) for n in (0, 1)], "unknown", [], "unknown"),
    "all between two steps, by a handler or not": (
        [left(n, at(7, "data")) for n in (0, 1)], "unknown", [], "unknown"),
    "one between two steps, by a handler or not, and its peer by a broken connection": (
        [left(0, at(7, "data")), raised(1, GONE)], "unknown", [], "exit:0"),
    "the same, and a third one was told to stop": (
        [left(0, at(7, "data")), raised(1, GONE), fate(2, "SIGTERM")], "stopped", [], "SIGTERM"),
    "all in one place after close(), whatever handlers there are": (
        [left(n, at(7, "data"), at_exit=False) for n in (0, 1)], "ended", [], ""),
    "all in one place, without a handler": (
        [left(n, at(7, "data"), handles=False) for n in (0, 1)], "ended", [], ""),
    "one in the middle of a forward, without a handler, and one between two steps, with one": (
        [left(0, at(7), handles=False), left(1, at(7, "data"))], "unknown", [], "unknown"),
    "one in the middle of a forward, without a handler": (
        [left(0, at(7), handles=False), raised(1, GONE)], "crashed", [0], "exit:0"),
    # What a launcher's SIGKILL may have followed from.
    "an exception, and all others killed, seen together": (
        [fate(0, "SIGKILL", order=0), raised(1, OWN, order=0), fate(2, "SIGKILL", order=0)],
        "crashed", [1], "ValueError"),
    "the same of a connection of the script's own": (
        [fate(0, "SIGKILL", order=0), raised(1, REFUSED, order=0)], "crashed", [0, 1], "SIGKILL"),
    "the same, by different daemons, which proves nothing": (
        [fate(0, "SIGKILL", order=0), raised(1, OWN, order=0, witness="other")], "crashed", [0, 1],
        "SIGKILL"),
    "a signal that nobody sends, and another one killed, seen together": (
        [fate(0, "SIGKILL", order=0), fate(1, "SIGSEGV", order=0)], "crashed", [1], "SIGSEGV"),
    "killed first, and then a signal that nobody sends": (
        [fate(0, "SIGKILL", order=0), fate(1, "SIGSEGV", order=1)], "crashed", [0], "SIGKILL"),
    "an exit code, behind the others, who were killed": (
        [fate(0, "SIGKILL", at(6, "backward"), order=0), fate(1, "exit:17", at(5), order=0)],
        "crashed", [1], "exit:17"),
    "the same, of a script that handles signals": (
        [fate(0, "SIGKILL", at(6, "backward"), order=0),
         fate(1, "exit:17", at(5), closed=True, handles=True, order=0)],
        "crashed", [0, 1], "SIGKILL"),
    "an exit code, as far as the others, who were killed: it may be an answer": (
        [fate(0, "SIGKILL", at(6), order=0), fate(1, "exit:17", at(6), order=0)],
        "crashed", [0, 1], "SIGKILL"),
    "the same, killed first": (
        [fate(0, "SIGKILL", at(6), order=0), fate(1, "exit:17", at(6), order=1)],
        "crashed", [0], "SIGKILL"),
    # The last word found no room.
    "all ended well, and their heartbeats say that they closed": (
        [fate(n, "exit:0", at(40, "data"), beat_closed=True) for n in (0, 1)], "ended", [], ""),
    "one of them did not": (
        [fate(0, "exit:0", at(40, "data"), beat_closed=True), fate(1, "exit:0", at(40, "data"))],
        "unknown", [], "exit:0"),
    "a heartbeat says that one closed, and nobody knows how it ended": (
        [fate(n, "unknown", at(40, "data"), beat_closed=True) for n in (0, 1)], "unknown", [],
        "unknown"),
    # Who waited for whom, and who had gone.
    "one ended after its last batch, and another waited for it in vain": (
        [fate(0, "exit:0", at(20, "data"), closed=True),
         raised(1, TIMED_OUT, clock=at(20, "backward"))], "crashed", [0], "exit:0"),
    "the same, and it does something else since": (
        [fate(0, "", at(20, "data"), closed=True),
         raised(1, TIMED_OUT, clock=at(20, "backward"))], "crashed", [0], "unknown"),
    "two that waited for each other in the same place": (
        [raised(0, TIMED_OUT, clock=at(18, "data")), raised(1, GONE, clock=at(18, "data"))],
        "hung", [0, 1], "hang"),
    "one that waited in vain, and one that stood still in the same place": (
        [raised(0, TIMED_OUT, clock=at(18, "data")), fate(1, "SIGTERM", at(18, "data"))],
        "hung", [1], "hang"),
    "one behind by its micro-batch alone": (
        [raised(0, TIMED_OUT, clock=at(17, "backward", 3)),
         fate(1, "SIGTERM", at(17, "backward", 1))], "hung", [1], "hang"),
    "one that waited in a finally, after an error of its own": (
        [raised(0, TIMED_OUT, clock=at(17, "data")),
         raised(1, replace(TIMED_OUT, behind="ValueError: bad batch at train.py:40 in step"),
                clock=at(17, "data"))], "hung", [1], "hang"),
    "the same, and of the other one nobody knows whether it waited": (
        [fate(0, "SIGTERM", at(17, "data")),
         raised(1, replace(TIMED_OUT, behind="ValueError: bad batch at train.py:40 in step"),
                clock=at(17, "data"))], "hung", [0, 1], "hang"),
    "one that waited in vain for one that had said it does something else": (
        [fate(0, "SIGTERM", at(11, "data"), paused=True),
         raised(1, TIMED_OUT, clock=at(11, "data"))], "hung", [0], "hang"),
    "one that does something else, while the others stand still as long": (
        [fate(0, clock=at(11, "data"), paused=True), fate(1, clock=at(11, "data"), stalled=True)],
        "hung", [1], "hang"),
    "one that waited after its last batch for one that waited for its next": (
        [fate(0, "SIGTERM", at(20, "backward")), raised(1, TIMED_OUT, clock=at(20, "data"))],
        "hung", [0, 1], "hang"),
    # An exception of a prompt within the script stays where Python keeps the last one.
    "an exception of old, and a script that came to its end": (
        [fate(0, "exit:0", at(30, "data"), closed=True),
         raised(1, OWN, "exit:0", clock=at(30, "data"), at_exit=True)], "ended", [], ""),
    "an exception in the middle of a step, and an exit code of 0": (
        [raised(0, OWN, "exit:0", clock=at(30))], "crashed", [0], "ValueError"),
    # Errors that a script has swallowed leave no code.
    "ended well to all appearance, each in the middle of another place": (
        [fate(0, "exit:0", at(17, "backward"), closed=True, at_exit=True),
         fate(1, "exit:0", at(17), closed=True, at_exit=True)], "unknown", [], "exit:0"),
    "ended well, one of them with a forward after its last step, as all said that it was over": (
        [fate(0, "exit:0", at(17, "data"), closed=True), fate(1, "exit:0", at(17), closed=True)],
        "ended", [], ""),
    "ended well after the same forward": (
        [fate(n, "exit:0", at(17, "backward"), closed=True, at_exit=True) for n in (0, 1)],
        "ended", [], ""),
    "left out of the same forward, where only an exception leads": (
        [fate(n, "exit:0", at(17), closed=True, at_exit=True) for n in (0, 1)],
        "unknown", [], "exit:0"),
    "one alone that left out of its optimizer": (
        [fate(0, "exit:0", at(17, "optimizer"), closed=True, at_exit=True)],
        "unknown", [], "exit:0"),
    "ended well with unlike numbers of batches": (
        [fate(n, "exit:0", at(17 + n, "data"), closed=True, at_exit=True) for n in (0, 1)],
        "ended", [], ""),
    # What the launcher knows of a signal.
    "all left, a handler may have run, and their torchrun was told to end": (
        [left(n, at(7, "data"), launcher="exit:1") for n in (0, 1)], "stopped", [], "exit:0"),
    "the same, and their torchrun says that all is well": (
        [left(n, at(7, "data"), launcher="exit:0") for n in (0, 1)], "unknown", [], "unknown"),
    "the same, and their torchrun was killed, which tells them nothing": (
        [left(n, at(7, "data"), launcher="SIGKILL") for n in (0, 1)], "unknown", [], "unknown"),
    "no handler ran, and torchrun failed after an orderly end": (
        [left(n, at(7, "data"), handles=False, launcher="exit:1") for n in (0, 1)], "ended", [],
        ""),
    "without a goodbye, of a script that handles signals, and torchrun was told to end": (
        [fate(n, "exit:0", at(7, "data"), sets_handlers=True, launcher="SIGTERM") for n in (0, 1)],
        "stopped", [], "exit:0"),
    "torchrun failed because a rank did": (
        [left(0, at(7, "data"), launcher="exit:1"), raised(1, OWN, launcher="exit:1")], "crashed",
        [1], "ValueError"),
    "one exit code of all in the same forward, and a handler of signals had run": (
        [fate(n, "exit:5", closed=True, handles=True) for n in (0, 1)], "stopped", [], "exit:5"),
    "the same, of which nobody knows whether it had": (
        [fate(n, "exit:5", sets_handlers=True) for n in (0, 1)], "unknown", [], "exit:5"),
    "the same between two steps": (
        [fate(n, "exit:5", at(7, "data"), sets_handlers=True) for n in (0, 1)], "unknown", [],
        "exit:5"),
    "everybody chose one code between two steps, with a handler of signals": (
        [fate(n, "exit:1", at(40, "data"), closed=True, handles=True) for n in (0, 1)],
        "unknown", [], "exit:1"),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_the_end_is_what_the_evidence_shows(name: str) -> None:
    fates, state, ranks, how = VERDICTS[name]
    for order in (fates, fates[::-1]):
        end = judge(Case(tuple(order)))
        assert (end.state, list(end.ranks), end.how) == (state, ranks, how), end.message


@pytest.mark.parametrize("name", VERDICTS)
def test_a_bad_end_is_a_page_and_blames_whom_it_names_and_nobody_else(name: str) -> None:
    fates, state, ranks, _ = VERDICTS[name]
    case = Case(tuple(fates))
    found = anomalies_of(judge(case), case, 0)
    pages = [a for a in found if a.level == "page"]
    grave = judge(case).grave and state == "unknown"
    assert all(a.sampled is False for a in found)
    assert len(pages) == (grave or state in {"crashed", "hung", "vanished"})
    for page in pages:
        assert page.first_cause
        assert page.rank == (ranks[0] if len(ranks) == 1 else None)
    if state == "stopped":
        assert [(a.level, a.rank) for a in found] == [("info", None)]
    assert all(a.level != "page" for a in found if not grave and state in {"unknown", "ended"})
    assert not {a.rank for a in found if a.level == "info"} & set(ranks)


@pytest.mark.parametrize(
    ("orders", "witness", "told"),
    [
        ((0, 1), "w", "rank 1 died (SIGTERM) in step 12, after rank 0"),
        ((1, 0), "w", "rank 1 died (SIGTERM) in step 12, before rank 0"),
        ((0, 0), "w", "rank 1 died (SIGTERM) in step 12"),
        ((-1, -1), "w", "rank 1 died (SIGTERM) in step 12"),
        ((0, 1), "another", "rank 1 died (SIGTERM) in step 12"),
    ],
)
def test_of_who_was_taken_along_it_is_said_when_only_where_that_is_proven(
    orders: tuple[int, int], witness: str, told: str
) -> None:
    killed = fate(0, "SIGSEGV", order=orders[0], witness="w")
    case = Case((killed, fate(1, "SIGTERM", order=orders[1], witness=witness)))
    page, other = anomalies_of(judge(case), case, 0)
    assert (page.message, other.message) == ("rank 0 died (SIGSEGV) in step 12", told)


WORKER_KILLED = replace(OWN, message="DataLoader worker (pid 7) is killed by signal: Killed.")


@pytest.mark.parametrize(
    ("fates", "killed", "whom"),
    [
        ([fate(0, "SIGTERM"), fate(1, "SIGKILL", memory_kills=1)], "1 process", "rank 1"),
        ([fate(n, "SIGKILL", memory_kills=2) for n in (0, 1)], "2 processes", "ranks 0 and 1"),
        ([raised(0, WORKER_KILLED, memory_kills=1)], "1 process", "rank 0"),
    ],
)
def test_that_the_kernel_was_killing_is_told_beside_the_verdict_and_decides_nothing(
    fates: list[Fate], killed: str, whom: str
) -> None:
    without = judge(Case(tuple(replace(f, memory_kills=0) for f in fates)))
    told = f"; the kernel killed {killed} for want of memory just before {whom} died"
    assert judge(Case(tuple(fates))) == replace(without, message=without.message + told)


def test_that_the_kernel_was_killing_is_not_told_of_who_failed_on_its_own() -> None:
    message = verdict(fate(0), raised(1, OWN, memory_kills=3)).message
    assert message == "rank 1 died (ValueError: bad batch at train.py:40 in step) in step 12"


def test_the_scheduler_that_may_have_ended_a_job_is_named() -> None:
    fates = [fate(n, "SIGTERM") for n in (0, 1)]
    assert verdict(*fates, scheduler="Slurm job 7, time limit").message == (
        "stopped from outside: ranks 0 and 1 ended because of SIGTERM; Slurm job 7, time limit"
    )


def test_who_is_waited_for_is_told_with_the_phase_and_only_while_it_hangs() -> None:
    case = Case((fate(0, clock=at(12, "backward"), stalled=True), fate(1, stalled=True)))
    assert stuck_of(judge(case), case) == {1: "forward"}
    nowhere = Case((replace(fate(0, stalled=True), clock=None),))
    assert stuck_of(judge(nowhere), nowhere) == {0: ""}
    dead = Case((fate(0, "SIGKILL"), fate(1, "SIGTERM")))
    assert stuck_of(judge(dead), dead) == {}


def test_an_end_that_followed_from_a_first_cause_is_none_itself() -> None:
    case = Case((raised(0, OWN), raised(1, GONE)))
    [page, taken] = anomalies_of(judge(case), case, 0)
    assert (page.first_cause, taken.first_cause) == (True, False)
    nan = replace(page, detector="nonfinite", rank=0, kind="output", module="mlp")
    earlier, later = replace(nan, step=page.step - 1), replace(nan, step=page.step + 50)
    for causes, first in (([earlier], False), ([later], True), ([later, earlier], False)):
        [page, _] = anomalies_of(judge(case), case, 0, causes)
        assert page.first_cause is first


def test_an_exit_code_is_not_called_a_signal_that_a_handler_may_not_have_got() -> None:
    end = verdict(fate(0, "exit:143", closed=True), fate(1, "exit:143", closed=True))
    assert (end.state, end.how) == ("stopped", "exit:143")
    assert end.message == (
        "stopped from outside: ranks 0 and 1 ended because of exit code 143 (in shells SIGTERM)"
    )


def test_a_node_ended_well_whatever_is_known_of_others() -> None:
    well, absent = [left(n, at(40, "data")) for n in (0, 1)], Fate(2)
    assert is_well(Case((*well, absent), partial=True))
    assert is_well(Case(tuple(well)))
    for bad in (fate(1, "SIGKILL"), fate(1, "exit:3", closed=True), left(1, at(40)), fate(1)):
        assert not is_well(Case((well[0], bad, absent), partial=True))
    assert not is_well(Case((absent,), partial=True))


def test_while_ranks_live_only_what_is_certain_is_said() -> None:
    end = verdict(fate(0), fate(1), live=True)
    assert (end.state, end.message) == ("running", "it is under way")
    assert verdict(raised(0, GONE), fate(1), live=True).state == "running"
    assert verdict(fate(0, "SIGKILL"), fate(1), live=True).ranks == (0,)
    stuck = verdict(fate(0, clock=at(12, "backward")), fate(1, suspended=True), live=True)
    assert (stuck.state, stuck.ranks, stuck.step, stuck.phase) == ("hung", (1,), 12, "forward")
    assert stuck.message == (
        "rank 1, in forward of step 12, was suspended (SIGSTOP) and did not go on; rank 0 waited"
    )


def test_where_all_ranks_are_suspended_none_waits_for_another() -> None:
    places = at(12, "forward"), at(12, "backward"), at(12, "backward")
    fates = [fate(rank, clock=clock, suspended=True) for rank, clock in enumerate(places)]
    end = verdict(*fates, live=True)
    assert (end.state, end.ranks, end.how) == ("hung", (0, 1, 2), "SIGSTOP")
    assert end.message == "ranks 0, 1 and 2 were suspended (SIGSTOP) and did not go on"
    killed = [replace(one, how="SIGKILL") for one in fates[1:]]
    end = verdict(*(replace(one, rank=rank) for rank, one in enumerate(killed)))
    assert end.message == (
        "ranks 0 and 1, after the forward of step 12, were suspended (SIGSTOP) and did not go on, "
        "until the ranks ended (SIGKILL)"
    )


def test_what_a_node_tells_of_its_ranks_counts_where_they_left_nothing_here() -> None:
    evidence = Evidence()
    evidence.take_rank(0, "node_0000")
    evidence.take_event(ClosedEvent(status="exception", error=GONE), 0, "node_0000")
    killed = Fate(1, "node_0001", "SIGKILL", heard=True, launcher="exit:1", clock=at(12))
    evidence.take_event(FateEvent(fate=killed), None, "node_0000")
    case = evidence.case(2, live=False)
    assert case.fates[1] == killed
    assert judge(case).ranks == (1,)
    assert evidence.told == {1}
    evidence.take_event(ExitEvent(rank=1, how="SIGSEGV", order=0, witness="w", time_ns=5), None)
    assert evidence.case(2, live=False).fates[1].how == "SIGSEGV"  # first-hand


def test_where_ranks_are_missing_nobody_here_is_taken_for_them() -> None:
    absent = Fate(2)
    assert verdict(raised(0, GONE), fate(1, "SIGTERM"), absent, partial=True).ranks == ()
    assert verdict(fate(0), fate(1), absent, partial=True).state == "unknown"
    assert verdict(fate(0, stalled=True), absent, partial=True, live=True).ranks == ()
    assert verdict(fate(0, "SIGSEGV"), raised(1, GONE), absent, partial=True).ranks == (0,)


def test_a_kill_of_all_that_are_seen_is_as_open_where_other_nodes_are_not_seen() -> None:
    absent = Fate(2), Fate(3)
    between = [fate(n, "SIGKILL", at(40, "data"), order=n) for n in (0, 1)]
    end = verdict(*between, *absent, partial=True)
    assert (end.state, end.ranks, end.grave) == ("unknown", (), False), end.message
    assert end.message == (
        "ranks 0 and 1 ended (SIGKILL) after step 40 without a last word: nothing says whether "
        "training was over; of ranks 2 and 3 nothing is known here"
    )
    end = verdict(*(fate(n, "SIGKILL") for n in (0, 1)), *absent, partial=True)
    assert (end.state, end.ranks, end.grave) == ("unknown", (), True), end.message
    ordered = [fate(n, "SIGKILL", order=n) for n in (0, 1)]
    assert verdict(*ordered, *absent, partial=True).ranks == (0,)
    for alone in (fate(0, "SIGKILL", at(40, "data")), fate(0, "exit:1", at(40, "data"))):
        assert verdict(alone, *absent, partial=True).ranks == (0,)


def test_a_kill_of_all_between_two_steps_is_a_page_where_torchrun_had_started_them() -> None:
    """Others may kill workers when all is done; torchrun does so to none that SIGTERM ends."""
    between = [fate(n, "SIGKILL", at(40, "data"), launcher="exit:1") for n in (0, 1)]
    end = verdict(*between)
    assert (end.state, end.ranks, end.how, end.grave) == ("unknown", (), "SIGKILL", True)
    assert end.message == (
        "ranks 0 and 1 were all killed (SIGKILL), and nothing says by whom or which was first"
    )
    assert verdict(*(replace(f, order=n) for n, f in enumerate(between))) == end
    deaf = [replace(f, sets_handlers=True) for f in between]  # SIGTERM may not have ended them
    for quiet in (deaf, [replace(f, launcher="") for f in between]):
        end = verdict(*quiet)
        assert (end.state, end.ranks, end.grave) == ("unknown", (), False), end.message


def test_where_one_that_was_told_to_end_had_stood_is_said() -> None:
    over = Standing(
        "threading.py:1590 in _shutdown", False, at(40, "data"), "the wait for threads at exit"
    )
    end = verdict(
        fate(0, "exit:0", at(40, "data"), closed=True, at_exit=True),
        fate(1, "SIGTERM", at(40, "data"), stands=over),
    )
    assert end.state == "stopped"
    assert end.message == (
        "stopped from outside: rank 1 ended because of SIGTERM; it was last seen in the wait for "
        "threads at exit, at threading.py:1590 in _shutdown"
    )


def test_who_answered_a_signal_by_a_code_may_have_been_told_to_because_of_another_node() -> None:
    here = [fate(n, "exit:5", at(12), closed=True, handles=True) for n in (0, 1)]
    assert verdict(*here).state == "stopped"
    end = verdict(*here, Fate(2), partial=True)
    assert (end.state, end.ranks, end.how) == ("unknown", (), "exit:5"), end.message


def test_who_left_before_a_step_in_which_all_others_stand_is_named_while_it_lasts() -> None:
    gone = fate(0, "exit:0", at(5, "data"), closed=True, at_exit=True)
    waiting = [fate(n, clock=at(5, "backward"), stalled=True) for n in (1, 2)]
    end = verdict(gone, *waiting, live=True)
    assert (end.state, end.ranks) == ("hung", (0,))
    assert "rank 0 had ended (exit:0) after step 5; ranks 1 and 2 wait for it" in end.message
    elsewhere = Standing("a.py:5 in f", False, at(5, "backward"))
    for others in (
        [replace(one, stalled=False) for one in waiting],
        [replace(one, stands=elsewhere) for one in waiting],  # seen to wait for nobody
        [replace(waiting[0], paused=True), waiting[1]],
        [replace(waiting[0], clock=at(5, "data")), waiting[1]],  # not begun either
    ):
        assert verdict(gone, *others, live=True).state == "running"
    assert verdict(replace(gone, how=""), *waiting, live=True).state == "running"


def test_who_closed_and_lives_is_waited_for_by_who_is_seen_to_wait_in_a_later_step() -> None:
    """Its script may train on unseen after close(), or stand in a barrier that all must reach."""
    gone = fate(0, clock=at(5, "data"), closed=True)
    waiting = [
        fate(n, clock=at(5, "backward"), stalled=True,
             stands=Standing("a.py:5 in f (c10d.py:1 in wait)", True, at(5, "backward")))
        for n in (1, 2)
    ]  # fmt: skip
    end = verdict(gone, *waiting, live=True)
    assert (end.state, end.ranks, end.step) == ("hung", (0,), 5)
    place = "rank 0 had closed after step 5; ranks 1 and 2 wait for it, after the forward of step 5"
    assert end.message == place
    ended = verdict(replace(gone, how="SIGTERM"), *(replace(f, how="SIGTERM") for f in waiting))
    assert (ended.state, ended.ranks) == ("hung", (0,))
    assert ended.message == place.replace("wait for", "waited for")
    unseen = replace(waiting[1], stands=None)
    assert verdict(gone, waiting[0], unseen, live=True).state == "running"
    within = replace(gone, clock=at(40))  # closed in a step; the other evaluates for long
    alone = fate(1, clock=at(40, "data"), stalled=True)
    assert verdict(within, alone, live=True).state == "running"


def test_a_broken_connection_is_no_rank_s_doing_while_another_node_is_not_seen() -> None:
    for here in (fate(0, "unknown"), fate(0, "exit:0", at(12, "data"), closed=True)):
        assert verdict(here, raised(1, GONE)).ranks == (0,)
        end = verdict(here, raised(1, GONE), Fate(2), partial=True)
        assert (end.state, end.ranks) == ("crashed", ()), end.message
        assert "rank 0" not in end.message
        assert end.message.endswith("the cause may not be among the ranks that are known here")
    end = verdict(raised(1, GONE), Fate(2), partial=True)
    assert end.message.endswith("the cause is not among the ranks that are known here")


def test_who_was_aborted_in_its_wait_waited_though_a_rank_left_well_to_all_appearance() -> None:
    end = verdict(
        fate(0, "SIGABRT", at(12, "backward"), stalled=True), fate(1, "SIGTERM", stalled=True),
        left(2, at(12, "backward"), stalled=True),
    )  # fmt: skip
    assert (end.state, end.ranks, end.phase) == ("hung", (1,), "forward")


def test_an_end_without_a_word_may_be_told_as_well_as_one_that_is_known() -> None:
    may = {how for how in ("", "exit:0", "unknown", "exit:1", "SIGKILL")
           if may_be_told(fate(0, how, handles=True, at_exit=True))}  # fmt: skip
    assert may == {"", "exit:0", "unknown"}
    assert not may_be_told(fate(0, handles=True))
    assert not may_be_told(fate(0, at_exit=True))


def test_the_logical_clock_orders_micro_batches_and_phases_within_a_step() -> None:
    places = [
        at(3, "data", micro=1), at(3), at(3, "backward"), at(3, micro=1),
        at(3, "backward", micro=1), at(3, "optimizer", micro=1), at(4, "data", micro=1), at(4),
    ]  # fmt: skip
    assert [p.key for p in places] == sorted({p.key for p in places})


def events_of(rng: random.Random) -> list[tuple[dict[str, Any], int | None]]:
    """Return events of three ranks, as daemons and ranks say them."""
    events: list[tuple[dict[str, Any], int | None]] = []
    for rank in range(3):
        how = rng.choice(["SIGKILL", "SIGTERM", "exit:1", "exit:3", "exit:0", "unknown", "SIGABRT"])
        place = {"step": rng.randrange(2), "steps": rng.randrange(2), "micro": 0,
                 "state": rng.choice(["data", "forward", "backward", "optimizer", "closed"]),
                 }  # fmt: skip
        told = {"rank": rank, "how": how, "order": rng.randrange(-1, 3), "witness": "w"}
        if rng.random() < 0.8:
            events.append(({"event": "exit", "time_ns": rng.randrange(9), **told, **place}, None))
        if rng.random() < 0.5:
            error = rng.choice([None, GONE, OWN, PREEMPTED])
            said = {"status": "exception" if error else "ok", "handles": rng.random() < 0.5,
                    "at_exit": rng.random() < 0.5}  # fmt: skip
            fields = {n: getattr(error, n) for n in ("type", "message", "collective", "asked")
                      } if error else None  # fmt: skip
            events.append(({"event": "closed", **said, "error": fields, **place}, rank))
        word = rng.choice(["suspended", "continued", ""])
        if word:
            events.append(({"event": word, "rank": rank, "time_ns": rng.randrange(9)}, None))
    for _ in range(rng.randrange(3)):
        word = rng.choice(["stalled", "moving"])
        events.append(({"event": word, "time_ns": rng.randrange(9**9)}, None))
    return events


@pytest.mark.parametrize("draw", range(300))
def test_the_order_in_which_it_is_noticed_never_matters(draw: int) -> None:
    rng = random.Random(draw)
    events = events_of(rng)
    found = []
    for _ in range(4):
        rng.shuffle(events)
        evidence = Evidence()
        for said, rank in events:
            event = validate.event(said)
            assert event is not None
            evidence.take_event(event, rank, "node_0000")
        case = evidence.case(3, live=draw % 2 == 0)
        found.append((case, judge(case)))
    assert found == [found[0]] * 4
    case, end = found[0]
    named = {f.rank for f in case.fates}
    assert set(end.ranks) <= named
    assert bool(end.ranks) <= (end.grave or end.state in {"crashed", "hung"})
    assert end.message


@pytest.mark.parametrize(
    "event",
    [
        {"event": "exit"}, {"event": "exit", "rank": 1e400, "how": "SIGKILL"},
        {"event": "exit", "rank": -1, "how": "x", "order": 0, "witness": "", "time_ns": 0},
        {"event": "last_beats", "ranks": {"x": {}}}, {"event": "stalled", "time_ns": "soon"},
        {"event": "death", "rank": 0, "time_ns": float("inf")},
        {"event": "suspended", "rank": None, "time_ns": 1}, {"event": "closed", "error": 3},
    ],
    ids=str,
)  # fmt: skip
def test_an_event_that_makes_no_sense_says_nothing(event: dict[str, Any]) -> None:
    assert validate.known_event(event) is None
    with pytest.raises(ValueError, match=f"of '{event['event']}' is "):
        validate.event(event)


def beat(time_ns: int, steps: int = 10, state: str = "forward", seconds: float = 0.1) -> Heartbeat:
    spent = (0.0, seconds * steps, 0.0, 0.0)
    return Heartbeat(time_ns, steps, 0, state, steps, 0, steps, spent, 0.0)


def test_ranks_stand_still_only_when_none_of_them_moves_for_many_steps() -> None:
    second = 10**9
    assert is_still([beat(0), beat(second)], 12 * second)
    assert not is_still([beat(0), beat(second)], 9 * second)
    assert not is_still([beat(0), beat(second, seconds=2.0)], 12 * second)
    assert not is_still([beat(0), beat(second, state="paused")], 99 * second)
    assert not is_still([beat(0, steps=0)], 99 * second)
    assert not is_still([], 99 * second)
    assert is_still([beat(0), beat(second, state="closed")], 12 * second)
    assert not is_still([beat(0), beat(second, state="closed")], 9 * second)
    assert not is_still([beat(0, state="closed")], 99 * second)


OF_MANY = {
    "ended": lambda n: ([left(r, at(40, "data")) for r in range(n)], {}),
    "killed, the others told to stop": lambda n: (
        [fate(0, "SIGKILL"), *(fate(r, "SIGTERM") for r in range(1, n))], {}),
    "killed, the others lost the connection": lambda n: (
        [fate(0, "SIGKILL"), *(raised(r, GONE) for r in range(1, n))], {}),
    "all killed": lambda n: ([fate(r, "SIGKILL") for r in range(n)], {}),
    "half killed, half told to stop": lambda n: (
        [fate(r, "SIGKILL" if r % 2 else "SIGTERM", order=1 - r % 2) for r in range(n)], {}),
    "half lost the connection before the others were told to stop": lambda n: (
        [raised(r, NETWORK, order=0) if r % 2 else fate(r, "SIGTERM", order=1)
         for r in range(n)], {}),
    "all chose a code": lambda n: ([fate(r, "exit:3", closed=True) for r in range(n)], {}),
    "aborted": lambda n: ([fate(r, "SIGABRT", order=r) for r in range(n)], {}),
    "trains": lambda n: ([fate(r, clock=at(41 - r % 2)) for r in range(n)], {"live": True}),
    "hangs": lambda n: (
        [fate(r, clock=at(41 - (r == 3), "backward"), stalled=True) for r in range(n)],
        {"live": True}),
}  # fmt: skip


def calls_of(what: str, ranks: int) -> int:
    """Count calls, of Python and of C, that it takes to judge a job."""
    fates, more = OF_MANY[what](ranks)
    case, counted = Case(tuple(fates), **more), count()

    def note(_: object, event: str, __: object) -> None:
        if event in {"call", "c_call"}:
            next(counted)

    sys.setprofile(note)
    try:
        anomalies_of(judge(case), case, 0)
    finally:
        sys.setprofile(None)
    return next(counted)


@pytest.mark.parametrize("what", OF_MANY)
def test_a_job_of_four_times_as_many_ranks_takes_not_much_more_than_four_times_as_long(
    what: str,
) -> None:
    """It was their cube, 15 s of a daemon at 256 ranks."""
    assert calls_of(what, 256) < 6 * calls_of(what, 64)


def test_a_head_asks_little_of_each_rank_while_a_job_trains() -> None:
    """It asks seven times a second."""
    assert calls_of("trains", 256) < 4 * 256


def test_ranks_that_all_stand_still_are_told_without_looking_for_each_in_a_list_of_all() -> None:
    ranks = range(2048)
    case = Case(tuple(fate(r, stalled=True) for r in ranks), live=True)
    end = judge(case)
    assert end.ranks == tuple(ranks)
    assert stuck_of(End(end.state, _Ranks(end.ranks), end.how), case).keys() == set(ranks)


class _Ranks(tuple[int, ...]):
    """Ranks that must not be looked for one by one."""

    __slots__ = ()

    def __contains__(self, _: object) -> bool:
        raise AssertionError


def test_an_order_says_of_all_at_once_what_each_pair_of_deaths_does() -> None:
    rng = random.Random(3)

    def any_fate(rank: int) -> Fate:
        outlived = rng.choice([(), (), tuple(rng.sample(range(5), 3))])
        order = rng.randrange(-1, 3)
        return Fate(rank, order=order, witness=rng.choice(["", "w", "v"]), outlived_by=outlived)

    for _ in range(3000):
        fates = [any_fate(rank) for rank in range(rng.randrange(4))]
        one, order = any_fate(4), DeathOrder(fates)
        behind, before = ([a.died_before(b) for a, b in pairs] for pairs in (
            [(one, f) for f in fates], [(f, one) for f in fates]))  # fmt: skip
        together = [f.witness == one.witness and 0 <= one.order <= f.order for f in fates]
        assert order.before_any(one) == any(behind)
        assert order.after_any(one) == any(before)
        assert order.before_all(one) == all(behind)
        either = [a or b for a, b in zip(behind, together, strict=True)]
        assert order.before_all(one, together=True) == all(either)
        assert order.unordered([one]) == ([] if any(behind) or any(before) else [one])
