"""In which words an exception is told: what it was raised because of, where, and how much of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ddpprobe.ends.words import died_of
from ddpprobe.records.events import ClosedEvent, to_json
from ddpprobe.records.fate import RaisedError, Reason
from ddpprobe.rundir import validate

from .test_judge import OWN, TIMED_OUT, at, raised, verdict

MISSING = Reason("KeyError", "'tokens'", "data.py:7 in load")
WRAPPED = RaisedError("TrainingFailed", "epoch 3", "train.py:12 in main", cause=MISSING)
SAID_MISSING = "KeyError: 'tokens' at data.py:7 in load"
SAID_FAILED = "TrainingFailed: epoch 3 at train.py:12 in main"
WORKER = "DataLoader worker (pid 7) is killed by signal:"
KILLED = Reason("RuntimeError", f"{WORKER} Killed.")
GLOO = "[/a/gloo/pair.cc:553] Connection closed by peer. This is typically caused by a remote"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            WRAPPED,
            f"{SAID_MISSING}, because of which it raised {SAID_FAILED}",
        ),
        (
            replace(OWN, handled=MISSING),
            f"ValueError: bad batch at train.py:40 in step, while it handled {SAID_MISSING}",
        ),
        (
            replace(WRAPPED, handled=Reason("OSError")),
            f"{SAID_MISSING}, because of which it raised {SAID_FAILED}, while it handled OSError",
        ),
        (
            replace(WRAPPED, cause=KILLED),
            f"RuntimeError: {WORKER} Killed, because of which it raised {SAID_FAILED}",
        ),
        (
            replace(WRAPPED, cause=Reason("RuntimeError", GLOO)),
            f"RuntimeError: Connection closed by peer, because of which it raised {SAID_FAILED}",
        ),
        (
            RaisedError("OSError", "no", group="ExceptionGroup: shards (2 sub-exceptions) at a:9"),
            "OSError: no, one of ExceptionGroup: shards (2 sub-exceptions) at a:9",
        ),
        (
            replace(OWN, where="subprocess.py:571 in run", script="train.py:88 in load"),
            "ValueError: bad batch at train.py:88 in load (subprocess.py:571 in run)",
        ),
        (RaisedError("E", "cut..."), "E: cut..."),
        (RaisedError("E", "."), "E"),
    ],
)
def test_an_exception_is_told_in_one_sentence_with_its_root_first(error, words) -> None:
    assert died_of(raised(0, error)) == words


def test_of_long_texts_only_the_first_to_be_read_is_told_in_full() -> None:
    long = "word " * 60
    error = replace(
        WRAPPED, message=long, cause=replace(MISSING, message=long), handled=Reason("E", long)
    )
    words = died_of(raised(0, error))
    assert words.count(long) == 1
    assert words.count("word...") == 2
    assert len(words) < 800


def test_of_ranks_that_raised_alike_only_that_is_told_which_is_the_same_for_all() -> None:
    other = replace(WRAPPED, cause=replace(MISSING, where="data.py:9 in load"))
    same = replace(WRAPPED, cause=replace(MISSING, message="'labels'"))
    both = "ranks 0 and 1 died of the same exception ({}) in step 12"
    assert verdict(raised(0, WRAPPED), raised(1, same)).message == both.format(
        f"{SAID_MISSING}, because of which it raised {SAID_FAILED}"
    )
    alone = both.format(SAID_FAILED)
    for rank_1 in (other, replace(WRAPPED, cause=None)):
        end = verdict(raised(0, WRAPPED), raised(1, rank_1))
        assert (end.message, end.ranks) == (alone, (0, 1))
    called = replace(OWN, script="train.py:1 in f")
    end = verdict(raised(0, called), raised(1, replace(OWN, script="train.py:2 in f")))
    assert end.message == both.format("ValueError: bad batch at train.py:40 in step")


def test_who_was_killed_for_want_of_memory_may_be_told_by_the_root_alone() -> None:
    for error in (replace(WRAPPED, cause=KILLED), replace(OWN, handled=KILLED)):
        message = verdict(raised(0, error, memory_kills=1)).message
        assert message.endswith("for want of memory just before rank 0 died")
    assert "want of memory" not in verdict(raised(0, WRAPPED, memory_kills=1)).message


def test_who_waited_in_vain_is_not_said_to_have_handled_what_broke_its_own_wait() -> None:
    fates = [raised(r, replace(TIMED_OUT, handled=MISSING), clock=at(17, "data")) for r in (0, 1)]
    assert "waited while it handled" not in verdict(*fates).message


def test_what_an_exception_was_raised_because_of_decides_nothing() -> None:
    plain = [raised(0, replace(WRAPPED, cause=None)), raised(1, TIMED_OUT)]
    more = [raised(0, WRAPPED), raised(1, replace(TIMED_OUT, cause=MISSING))]
    assert replace(verdict(*more), message="") == replace(verdict(*plain), message="")


def test_older_and_newer_versions_read_each_other_s_exceptions() -> None:
    said = json.loads(json.dumps(to_json(ClosedEvent(error=WRAPPED))))
    known = ("type", "message", "where", "collective", "asked", "behind")
    older = validate.event({**said, "error": {name: said["error"][name] for name in known}})
    assert older == ClosedEvent(error=replace(WRAPPED, cause=None))
    newer = validate.event({**said, "error": {**said["error"], "notes": ["unheard of"]}})
    assert newer == ClosedEvent(error=WRAPPED)
    with pytest.raises(ValueError, match="'error' of 'closed'"):
        validate.event({**said, "error": {**said["error"], "cause": "KeyError"}})
