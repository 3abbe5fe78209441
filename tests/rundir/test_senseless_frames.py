"""Intact frames that make no sense: nobody fails over them, and `verify` lists each of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ddpprobe.cli.main import main
from ddpprobe.daemon.daemon_journal import DaemonJournal
from ddpprobe.detectors.suite import default_suite
from ddpprobe.ends import evidence
from ddpprobe.reader.run import open_run
from ddpprobe.reader.verify.verify import verify
from ddpprobe.records import events
from ddpprobe.rundir import framing, validate
from ddpprobe.rundir.journal_tail import JournalFacts, RankTail
from ddpprobe.store.writer import StoreWriter

from ..faults import hostile_captures, odd_json
from ..made_runs import NODE, Made

INFINITE = {"event": "dropped", "reason": "ENOSPC", "count": float("inf")}
MORE: tuple[dict[str, Any], ...] = (
    {"event": "last_beats", "ranks": {"0": {"step": 4, "sampled": 2, "state": "closed"}}},
    {"event": "budget", "step": 4, "every": 20, "budget": 0.01, "ratio": 0.02},
    {"event": "late_order", "number": 0, "action": "stop", "start": 7, "stop": 8},
    {"event": "order_dropped", "cause": "page/1", "reason": "too many"},
    {"event": "pinned", "first": 2, "last": 4, "cause": "page/1", "reason": "nonfinite"},
    {"event": "uncaptured", "modules": ["a"], "count": 1, "reason": "compiled"},
    {"event": "unkept", "step": 3, "names": ["score"], "reason": "the record was written by then"},
    {"event": "command", "words": ["t.py"], "directory": "/a", "commit": "0", "changed": True},
    {"event": "note", "step": 3, "what": "unfreeze", "config": {"lr": "0.1"}},
)
PLACE = {"step": 3, "steps": 4, "micro": 0, "state": "forward"}
# What an end is judged by.
OF_ENDS: tuple[dict[str, Any], ...] = (
    {"event": "closed", "status": "exception", "sampled": 2, "handles": True, **PLACE,
     "error": {"type": "ValueError", "message": "bad", "where": "train.py:4 in main",
               "collective": False, "asked": False}},
    {"event": "exit", "rank": 1, "how": "SIGKILL", "order": 0, "witness": "node_0000/7/1.5",
     "time_ns": 5, **PLACE},
    {"event": "end", "state": "crashed", "ranks": [1], "how": "SIGKILL", "step": 3,
     "phase": "forward", "message": "rank 1 died (SIGKILL) in step 3"},
    {"event": "end", "state": "vanished", "ranks": [], "how": "unknown", "step": None,
     "phase": None, "message": "no rank left a last word"},
    {"event": "stalled", "time_ns": 5},
    {"event": "moving", "time_ns": 6},
    {"event": "suspended", "rank": 1, "time_ns": 5},
    {"event": "continued", "rank": 1, "time_ns": 6},
    {"event": "stands", "where": "train.py:4 in load", "waits": False, "time_ns": 7, **PLACE},
    {"event": "job", "scheduler": "Slurm job 17"},
    {"event": "handles"},
    {"event": "peer_exit", "rank": 1, "how": "SIGKILL", "alive": [0, 2], "time_ns": 5},
    {"event": "launcher", "how": "exit:1", "time_ns": 5},
    {"event": "fate", "fate": {
        "rank": 3, "node": "node_0001", "how": "SIGKILL", "order": 0, "witness": "node_0001/7/1.5",
        "outlived_by": [2], "time_ns": 5, "closed": False, "raised": False, "error": None,
        "sets_handlers": False,
        "handles": False, "at_exit": False, "asked": False, "beat_closed": False,
        "clock": {"steps": 4, "micro": 0, "phase": "forward", "step": 3}, "suspended": False,
        "stands": {"where": "train.py:4 in load", "waits": True,
                   "clock": {"steps": 4, "micro": 0, "phase": "forward", "step": 3}},
        "stalled": False, "heard": True, "dead": True, "paused": False, "launcher": ""}},
)  # fmt: skip
LATER: tuple[dict[str, Any], ...] = (
    {"event": "first_cause", "detector": "nonfinite", "step": 3, "micro": 0, "rank": 1,
     "module": "a", "kind": "output", "phase": "forward", "time_ns": 5},
    {"event": "last_beats", "ranks": {"0": {**PLACE, "sampled": 2}}},
    {"event": "steady", "step": 3, "fqn": "a", "kind": "output", "leaf": "", "values": ["-Inf"],
     "told": False},
)  # fmt: skip
SAID = (*odd_json.OF_RANK, *odd_json.OF_DAEMON, *MORE, *OF_ENDS, *LATER)


def hostile() -> list[bytes]:
    """Return each kind of event with each hostile value in each of its places."""
    return [
        odd_json.changed(event, place, odd)
        for event in SAID
        for place in odd_json.places(event)
        for odd in odd_json.ODD
    ]


def journal(directory: Path, payloads: list[bytes]) -> Path:
    """Put frames after what a journal holds."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "00000000.wal"
    data = path.read_bytes() if path.exists() else b""
    due = len(list(framing.iter_frames(data)))
    frames = (framing.encode_frame(framing.LIFE, due + i, text) for i, text in enumerate(payloads))
    path.write_bytes(data + b"".join(frames))
    return path


def test_every_reader_goes_on_behind_every_event_that_makes_no_sense(tmp_path: Path) -> None:
    told, last = hostile(), framing.encode_json({"event": "closed", "status": "ok"})
    assert len(told) > 1000
    journal(tmp_path / "rank_00000", [*told, last])
    tail = RankTail(tmp_path / "rank_00000", 0)
    tail.read(1)
    tail.close()
    assert tail.facts.closed
    assert tail.malformed > 100
    finished = framing.encode_json({"event": "finished"})
    journal(tmp_path / "daemon", [*told, finished])
    daemon_journal = DaemonJournal(tmp_path / "daemon", {}, default_suite())
    daemon_journal.close()
    assert daemon_journal.finished


@pytest.fixture
def infinite(tmp_path: Path) -> Made:
    made = Made(tmp_path / "run", ranks=1, segment_frames=64).whole(6)
    made.writer(0).append_json(framing.LIFE, INFINITE)
    return made


@pytest.mark.parametrize("folded", [False, True])
def test_an_infinite_count_is_listed_by_verify_and_ends_nothing(
    infinite: Made, folded: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = infinite.close()
    if folded:
        folder = StoreWriter(run, NODE, block=2, durable=False)
        folder.seal()
        folder.close()
    out = str(tmp_path / "out")
    assert main(["export", str(run.path), "--format", "openmetrics", "-o", out]) == 0
    (found,) = verify(open_run(run.path)).damage
    assert "makes no sense" in found.why
    assert "'count'" in found.why
    assert main(["verify", str(run.path)]) == 3


@pytest.mark.parametrize(
    ("type_", "payload"),
    [
        (framing.LIFE, b'["closed"]'),
        (framing.LIFE, b'{"event":"death","rank":-7}'),
        (framing.LIFE, b'{"event":"sites","expected":"x","observed":1}'),
        (framing.LIFE, b'{"event":"exit","rank":0,"how":"SIGKILL","order":1,"time_ns":5}'),
        (framing.LIFE, b'{"event":"steady","step":3,"values":"+Inf"}'),
        (
            framing.LIFE,
            b'{"event":"last_beats","ranks":{"0":{"step":4,"sampled":2,"state":"x","steps":1e999}}}',
        ),
        (framing.LIFE, b"{"),
        (framing.SAMPLE, b'{"time_ns":1e999}'),
        (framing.ANOMALY, b'{"detector":"nonfinite"}'),
        (framing.META, b"7"),
    ],
)
def test_verify_lists_every_frame_that_it_cannot_take(
    infinite: Made, type_: int, payload: bytes
) -> None:
    infinite.writer(0).append(type_, payload)
    run = open_run(infinite.close().path)
    found = [lost.why for lost in verify(run).damage]
    assert len(found) == 2  # the infinite one, and this


def test_what_ranks_and_daemons_say_makes_sense(tmp_path: Path) -> None:
    assert {type(validate.event(event)) for event in SAID} >= {*events.KINDS.values()}
    assert validate.event({"event": "of a newer version", "count": "x"}) is None
    run = odd_json.make_all(tmp_path / "run")
    assert verify(open_run(run.path)).damage == []


@pytest.mark.parametrize(
    ("event", "field"),
    [(event, field) for event in OF_ENDS for field in event if field != "event"],
    ids=lambda value: value["event"] if isinstance(value, dict) else value,
)
def test_a_word_about_an_end_that_makes_no_sense_is_found_out(
    event: dict[str, Any], field: str
) -> None:
    for odd in (["x"], float("inf"), {"type": 3}):
        with pytest.raises(ValueError, match=f"^'{field}' of "):
            validate.event({**event, field: odd})


# ---- what is lost besides frames


def test_verify_says_that_the_run_json_is_lost(infinite: Made) -> None:
    run = Made(infinite.path.parent / "whole", ranks=1).whole(4).close()
    assert verify(open_run(run.path)).damage == []
    run.run_json.unlink()
    (lost,) = verify(open_run(run.path)).damage
    assert lost.where == "run.json"
    assert main(["verify", str(run.path)]) == 3


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("captured") / "run"
    hostile_captures.make(path)
    return path


@pytest.mark.parametrize("what", ["bytes", "gone"])
def test_captures_say_which_manifest_is_damaged(captured: Path, tmp_path: Path, what: str) -> None:
    path = tmp_path / "run"
    shutil.copytree(captured, path)
    run = open_run(path)
    assert run.captures()
    assert run.expired() == []
    assert run.lost == []
    (log,) = (path / "manifest").glob("attempt_000.captures.log")
    if what == "gone":
        log.unlink()
    else:
        log.write_bytes(log.read_bytes()[:-4] + b"oops")
    for ask in (
        lambda r: r.captures(),
        lambda r: r.expired(),
        lambda r: r.capsules(7, hostile_captures.MODULE),
    ):
        run = open_run(path)
        ask(run)
        assert [lost for lost in run.lost if "captures" in lost.where]
    assert not verify(open_run(path)).ok


def test_what_verify_finds_no_fault_with_every_reader_takes() -> None:
    faults = 0
    for text in hostile():
        said = json.loads(text) if b"[[[[" not in text else {}
        event = validate.known_event(said) if isinstance(said, dict) else None
        if event is not None:
            JournalFacts().take_life(event)
            evidence.Evidence().take_event(event, 0, NODE)
            evidence.Evidence().take_event(event, None, NODE)
            assert validate.event(json.loads(framing.encode_json(events.to_json(event)))) == event
        else:
            faults += 1
    assert faults > 500


def within(written: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Return what was written with what was said in its place: fields that came later stay."""
    return written | {
        key: within(written[key], value) if isinstance(value, dict) else value
        for key, value in said.items()
    }


def test_an_event_is_written_as_it_was_before_it_had_a_type() -> None:
    for said in SAID:
        event = validate.event(said)
        if event is not None and said is not MORE[0]:  # which says less than it does today
            written = json.loads(framing.encode_json(events.to_json(event)))
            unknown = (
                {"first"} if isinstance(event, events.DeathEvent) else set()
            )  # an older version's
            assert written == within(written, {k: said[k] for k in said.keys() - unknown})


def test_an_event_says_nothing_of_what_its_writer_does_not_know() -> None:
    place = {"step": 3, "steps": 4, "micro": 0, "state": "data"}
    died = {
        "memory_kills": 0,
        "rank": 1,
        "how": "SIGKILL",
        "order": 0,
        "witness": "w",
        "time_ns": 5,
    }
    heard = {"number": 0, "action": "stop", "start": 7, "stop": 8}
    assert events.to_json(events.ExitEvent(**died)) == {"event": "exit", **died}
    assert events.to_json(events.ExitEvent(**died, **place)) == {"event": "exit", **died, **place}
    assert events.to_json(events.OrderEvent(**heard, step=6)) == {
        "event": "order",
        **heard,
        "step": 6,
    }
    paced = {"step": 4, "every": 9, "budget": 0.01, "ratio": None}
    assert events.to_json(events.BudgetEvent(**paced)) == {"event": "budget", **paced}
