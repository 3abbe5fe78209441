"""What is said of every end is what somebody has read once: `said.json`, one entry a case.

After a change that is meant: `python -m tests.ends.test_said`, and read the difference.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpprobe.ends.anomalies import (
    anomalies_of,
    code_of,
    first_cause_of,
    last_words,
    taken_back,
)
from ddpprobe.ends.evidence import Case
from ddpprobe.ends.judge import judge
from ddpprobe.records.events import FirstCauseEvent
from ddpprobe.records.fate import Fate, Reason

from .test_judge import OWN, VERDICTS, at, fate, raised

FILE = Path(__file__).parent / "said.json"


def cases() -> dict[str, Case]:
    """Return the cases whose words are kept: those of the verdicts, and each as one of many."""
    found = {name: Case(tuple(fates)) for name, (fates, *_) in VERDICTS.items()}
    killed = [fate(rank, "SIGKILL", at(12 + (rank == 3)), time_ns=rank) for rank in range(7)]
    found["seven killed"] = Case(tuple(killed))
    found["five raised"] = Case(tuple(raised(rank, OWN, time_ns=5) for rank in range(5)))
    found["four of which nothing is heard"] = Case(tuple(Fate(rank) for rank in range(4)))
    found["no ranks at all"] = Case(())
    nowhere = replace(raised(0, replace(OWN, where="")), clock=None)
    found["one that raised before its first step, nobody knows where"] = Case((nowhere,))
    silent = raised(0, replace(OWN, message=""))
    found["one that raised without a message"] = Case((silent,))
    because = replace(OWN, cause=Reason("KeyError", "'tokens'", "data.py:7 in load"))
    found["one that raised because of another exception"] = Case((raised(0, because),))
    library = replace(OWN, where="subprocess.py:571 in run", script="train.py:88 in load")
    found["one that called what raised"] = Case((raised(0, library),))
    found["one in its second micro-batch"] = Case((fate(0, "SIGSEGV", at(12, micro=1)),))
    found["a part of them"] = Case((fate(0), Fate(1)), partial=True)
    return found


def said(case: Case) -> dict[str, Any]:
    """Return an end, and its anomalies in the second attempt, as plain values."""
    end = judge(case)
    return {
        **end.to_json(),
        "grave": end.grave,
        "anomalies": [
            [a.level, a.step, a.micro, a.rank, a.phase, a.first_cause, a.attempt, a.wall_time_ns,
             a.message]
            for a in anomalies_of(end, case, 1)
        ],
    }  # fmt: skip


def test_every_end_is_told_in_the_words_that_were_read_once() -> None:
    kept = json.loads(FILE.read_text())
    now = {name: said(case) for name, case in cases().items()}
    assert list(now) == list(kept)
    assert {name: now[name] for name in now if now[name] != kept[name]} == {}


def test_the_ends_are_told_in_the_same_words_in_whatever_order_the_ranks_come() -> None:
    for name, case in cases().items():
        there, back = judge(case), judge(replace(case, fates=case.fates[::-1]))
        assert (there.state, there.ranks, there.message) == (
            back.state,
            back.ranks,
            back.message,
        ), name


def test_a_first_cause_that_is_told_again_as_none_is_taken_back() -> None:
    case = cases()["one by itself"]
    (found,) = anomalies_of(judge(case), case, 1)
    assert found.first_cause
    demoted = replace(found, first_cause=False)
    other = replace(found, step=99, values={"nan": float("nan")})
    assert last_words([found, other]) == [found, other]
    assert last_words([found, other, demoted]) == [other, demoted]
    assert code_of(replace(found, values={"n": 3})) == code_of(replace(found, values={"n": 3.0}))
    assert code_of(other) == code_of(replace(other))
    placed = replace(found, module="a", kind="param", micro=2, wall_time_ns=7)
    assert first_cause_of(placed) == FirstCauseEvent(
        detector="rank_lost", step=12, micro=2, rank=0, module="a", kind="param",
        phase=placed.phase, time_ns=7,
    )  # fmt: skip


def test_of_a_hang_that_was_told_with_more_words_it_is_said_once_that_it_is_over() -> None:
    """The daemon takes back each page that it has written, so that readers forget all of them."""
    case = Case((fate(0, clock=at(13)), fate(1, suspended=True, stalled=True)), live=True)
    (short,) = anomalies_of(judge(case), case, 0)
    assert short.level == "page"
    longer = replace(short, message=f"{short.message}; rank 0 stood at train.py:31 in step")
    over = [taken_back(short), taken_back(longer)]
    assert last_words([short, longer, *over]) == over[1:]
    assert last_words([short, over[0], longer, over[1]]) == over[1:]
    later = replace(longer, step=short.step + 1)
    assert last_words([short, over[0], later, taken_back(later)]) == [over[0], taken_back(later)]


if __name__ == "__main__":
    entries = (f"{json.dumps(name)}: {json.dumps(said(case))}" for name, case in cases().items())
    FILE.write_text("{\n" + ",\n".join(entries) + "\n}\n")
