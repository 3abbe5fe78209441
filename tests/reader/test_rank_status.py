"""What is said of a rank's end follows from the judgement of the attempt, in every place."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpprobe.ends.evidence import Case
from ddpprobe.ends.judge import judge
from ddpprobe.reader.endings import Ending
from ddpprobe.reader.rank_status import (
    CLOSED,
    DIED,
    NO_WORD,
    RUNNING,
    UNKNOWN,
    ends_of,
    statuses_of,
)
from ddpprobe.reader.run import open_run
from ddpprobe.records.events import ClosedEvent, ExitEvent, to_json
from ddpprobe.records.fate import Fate, Progress, RaisedError
from ddpprobe.rundir import framing

from ..made_runs import Made, record

Call = Callable[..., tuple[int, str, str]]
OWN = RaisedError("ValueError", "bad batch", "train.py:40 in step")
BACKWARD, DATA = Progress(23, 0, "backward", 23), Progress(24, 0, "data", 23)
CAUGHT = {"closed": True, "at_exit": True, "clock": BACKWARD}


@pytest.mark.parametrize(
    ("fate", "end", "status"),
    [
        (Fate(0, how="exit:0", closed=True, clock=DATA), CLOSED, "closed"),
        (Fate(0, how="SIGABRT", closed=True, clock=DATA), CLOSED, "closed"),  # torch's threads
        (Fate(0, how="exit:1", closed=True, error=OWN, clock=DATA), DIED, "died (ValueError)"),
        (Fate(0, how="exit:1", closed=True, raised=True, error=OWN), DIED, "died (ValueError)"),
        (Fate(0, closed=True, raised=True), DIED, "closed by an exception"),
        (Fate(0, how="exit:3", closed=True, clock=DATA), DIED, "died (exit:3)"),
        (Fate(0, how="SIGKILL", clock=BACKWARD, heard=True), DIED, "died (SIGKILL)"),
        (Fate(0, how="exit:0", **CAUGHT), CLOSED, "closed after the forward of step 23"),
        (Fate(0, how="SIGTERM", **CAUGHT), CLOSED, "closed after the forward of step 23"),
        (Fate(0, **CAUGHT), CLOSED, "closed after the forward of step 23"),  # nobody saw
        (Fate(0, beat_closed=True, heard=True), CLOSED, "closed"),
        (Fate(0, how="exit:0", clock=DATA, heard=True), UNKNOWN, NO_WORD),
        (Fate(0, clock=DATA, heard=True), UNKNOWN, NO_WORD),
        (Fate(0, how="unknown", dead=True, heard=True), DIED, NO_WORD),
        (Fate(0), UNKNOWN, NO_WORD),
    ],
)
def test_a_rank_s_end_is_told_as_it_is_judged(fate: Fate, end: str, status: str) -> None:
    case = Case((fate, Fate(1, how="exit:0", closed=True, clock=DATA)))
    ending = Ending(0, case, judge(case))
    assert (ends_of(ending)[0], statuses_of(ending)[0]) == (end, status)


def test_a_rank_that_trains_is_running() -> None:
    case = Case((Fate(0, clock=DATA, heard=True),), live=True)
    ending = Ending(0, case, judge(case))
    assert (ends_of(ending), statuses_of(ending)) == ({0: RUNNING}, {0: "running"})


def made(path: Path, *closed: ClosedEvent, hows: tuple[str, ...]) -> Path:
    """Write a run of two ranks that said and did this."""
    its = Made(path)
    its.write(record(rank, step) for step in range(3) for rank in range(2))
    for rank, (said, how) in enumerate(zip(closed, hows, strict=True)):
        its.writer(rank).append_json(framing.LIFE, to_json(said))
        seen = ExitEvent(rank=rank, how=how, order=1 - rank, witness="w", time_ns=1)
        its.tell(framing.LIFE, to_json(seen))
    its.close(cleanly=False)
    return path


def test_info_says_of_ranks_that_a_with_block_closed_what_anomalies_says(
    tmp_path: Path, call: Call
) -> None:
    """The probe was closed in good order, and an exception was under way."""
    gone = RaisedError("RuntimeError", "Connection closed by peer", "train.py:9", collective=True)
    said = [
        ClosedEvent(step=24, steps=24, micro=0, state="backward", sampled=3, error=gone),
        ClosedEvent(step=23, steps=24, micro=0, state="data", sampled=3, error=OWN),
    ]
    path = made(tmp_path / "run", *said, hows=("SIGTERM", "exit:1"))
    (attempt,) = open_run(path).info()["attempts"]
    died = ["died (RuntimeError)", "died (ValueError)"]
    assert [rank["status"] for rank in attempt["ranks"]] == died
    assert [share.end for share in open_run(path).completeness().shares] == [DIED, DIED]
    code, out, _ = call("anomalies", path)
    assert code == 1
    assert "rank 0 died (RuntimeError: " in out
    assert "rank 1 died (ValueError: " in out


def test_a_rank_that_left_within_a_step_is_told_of_where_another_one_is_the_cause(
    tmp_path: Path, call: Call
) -> None:
    """Each script caught what it met and called sys.exit(1); torchrun ended the second one."""
    said = [
        ClosedEvent(step=23, steps=23, micro=0, state="backward", sampled=3, at_exit=True),
        ClosedEvent(step=22, steps=23, micro=0, state="data", sampled=3, at_exit=True),
    ]
    path = made(tmp_path / "run", *said, hows=("SIGTERM", "exit:1"))
    code, out, _ = call("anomalies", path)
    assert code == 1
    assert "rank 1 died (exit:1) after step 22" in out
    left = "rank 0 left after the forward of step 23, after rank 1, and did not say why: an exc"
    assert left in out
    assert re.search(r"rank 0  -  after forward  rank_lost: ", out)
    _, out, _ = call("info", path)
    assert "closed after the forward of step 23\n" in out


@pytest.mark.parametrize("verb", ["anomalies", "info", "trace", "verify", "report"])
def test_an_end_that_may_be_well_or_bad_is_not_known_in_every_verb(
    verb: str, tmp_path: Path, call: Call
) -> None:
    """A script that swallows what its training raises ends with 0."""
    said = [
        ClosedEvent(step=23, steps=23, micro=0, state="backward", sampled=3, at_exit=True),
        ClosedEvent(step=22, steps=23, micro=0, state="data", sampled=3, at_exit=True),
    ]
    path = made(tmp_path / "run", *said, hows=("exit:0", "exit:0"))
    more = ["--site", "*"] if verb == "trace" else ["-o", tmp_path / "p.html"]
    code, _, err = call(verb, path, *(more if verb in {"trace", "report"} else ()))
    assert code == 4
    why = "not every rank came to the end of its step (rank 0, after the forward of"
    assert f"not known: {why}" in err
