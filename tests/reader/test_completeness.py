"""A verdict says how much of the run it is about; of what nobody holds nothing is claimed."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddpprobe.reader.rank_status import CLOSED, DIED, RUNNING, UNKNOWN
from ddpprobe.reader.run import open_run
from ddpprobe.reader.series_plot import figure_of
from ddpprobe.records.step import Site
from ddpprobe.report.heat import column_names
from ddpprobe.report.story import gather
from ddpprobe.rundir import framing, heartbeat
from ddpprobe.rundir.journal import JournalWriter
from ddpprobe.rundir.paths import write_json
from ddpprobe.store.writer import StoreWriter

from ..made_runs import ANOMALY, NODE, Made, bad, head_merge, record, sites, tree

Call = Callable[..., tuple[int, str, str]]
STEPS, HELD = 40, 16


def beat(made: Made, rank: int, step: int, sampled: int, state: str = "forward") -> None:
    writer = heartbeat.HeartbeatWriter(made.run.heartbeat(0, NODE, rank))
    writer.beat(
        step=step, micro=0, state=heartbeat.STATES.index(state), steps=step, skipped=0,
        sampled=sampled, phase_seconds=(0, 0, 0, 0), probe_seconds=0,
    )  # fmt: skip
    writer.close()


def say_closed(made: Made, rank: int, sampled: int) -> None:
    made.writer(rank).append_json(
        framing.LIFE, {"event": "closed", "status": "ok", "sampled": sampled}
    )


def dead_journal(path: Path, *, beats: bool = True) -> Made:
    """A healthy run, but for rank 1's disk, which took nothing more after 16 of 40 steps."""
    made = Made(path)
    for step in range(STEPS):
        parts = [record(r, step) for r in range(2 if step < HELD else 1)]
        made.write(parts)
        missing = () if step < HELD else (1,)
        made.tell(framing.RECORD, replace(head_merge(parts), missing=missing))
    say_closed(made, 0, STEPS)
    for rank in range(2 if beats else 1):
        beat(made, rank, STEPS - 1, STEPS, "closed" if rank == 0 else "optimizer")
    made.tell(framing.LIFE, {"event": "finished"})
    made.close(cleanly=False)
    return made


def folded(made: Made, *, journals: bool = True) -> Made:
    """Put all into the store; without `journals` as in a copy that was uploaded."""
    writer = StoreWriter(made.run, NODE, block=8, durable=False)
    writer.seal()
    writer.close()
    if not journals:
        for name in ("journal", "heartbeat"):
            shutil.rmtree(made.path / name, ignore_errors=True)
    return made


@pytest.mark.parametrize("stored", [False, True])
def test_a_step_that_never_came_to_its_end_is_held_and_is_no_sampled_step_of_the_run(
    stored: bool, tmp_path: Path
) -> None:
    made = Made(tmp_path).whole(4, told=False)
    made.write([record(r, 4, partial=True) for r in range(2)])
    for rank in range(2):
        say_closed(made, rank, 4)
    made.close(cleanly=False)
    if stored:
        folded(made)
    run = open_run(tmp_path)
    assert [r.step for r in run.records()] == [0, 1, 2, 3, 4]
    assert [(s.held, s.sampled, s.last_held) for s in run.completeness().shares] == [(4, 4, 3)] * 2


@pytest.mark.parametrize(("component", "known"), [("hooks", False), ("capture", True)])
def test_what_came_behind_hooks_that_switched_themselves_off_is_not_known(
    component: str, known: bool, tmp_path: Path, call: Call
) -> None:
    """The rank counts no step from there on, so that nothing of what it counts is missing."""
    made = Made(tmp_path).whole(STEPS, told=False)
    blown = {"event": "fuse", "component": component, "error": "NotImplementedError: _values"}
    made.writer(1).append_json(framing.LIFE, blown)
    made.close()
    held = open_run(tmp_path).completeness()
    assert held.complete is known
    code, out, err = call("anomalies", tmp_path)
    assert code == (0 if known else 4)
    assert ("no anomalies" in out) is known
    said = "rank 1: a part of ddpprobe failed and switched itself off (hooks: NotImpl"
    assert (said in out + err) is not known


def test_a_complete_run_is_judged_as_a_whole(tmp_path: Path, call: Call) -> None:
    made = Made(tmp_path).whole(STEPS, told=False)
    made.close()
    held = open_run(tmp_path).completeness()
    assert (held.complete, held.held, held.sampled, held.unknown()) == (True, STEPS, STEPS, [])
    assert {share.end for share in held.shares} == {CLOSED}
    assert call("anomalies", tmp_path) == (0, f"no anomalies in {STEPS} sampled steps\n", "")


@pytest.mark.parametrize("store", [False, True], ids=["journals", "folded"])
def test_of_a_dead_journal_no_verb_says_that_all_is_well(
    tmp_path: Path, call: Call, store: bool
) -> None:
    made = dead_journal(tmp_path / "run")
    if store:
        folded(made)
    code, out, err = call("anomalies", made.path)
    assert code == 4
    assert out.startswith("nothing found in what is held: 16 of 40 sampled steps of all ranks")
    said = "rank 1: 16 of 40 sampled steps are held, the last one step 15; it was last in step 39"
    assert said in err
    goods = [shutil.copytree(made.path, tmp_path / f"good-{i}") for i in range(2)]
    for verb in (["info"], ["verify"], ["trace", "--site", "*"], ["replay"],
                 ["report", "-o", tmp_path / "page.html"], ["export", "--format", "csv"],
                 ["compare", made.path], ["baseline", made.path, *goods]):  # fmt: skip
        code, out, err = call(verb[0], made.path, *verb[1:])
        assert (verb, code) == (verb, 4)
        assert said in err
    assert said in (tmp_path / "page.html").read_text()
    (first, second) = open_run(made.path).info()["attempts"][0]["ranks"]
    assert (first["sampled"], first["expected"], first["completeness"]) == (40, 40, 1.0)
    assert (second["sampled"], second["expected"], second["completeness"]) == (16, 40, 0.4)
    judged = json.loads(call("anomalies", made.path, "--json")[1])["judged"]
    assert (judged["complete"], judged["held"], judged["sampled"]) == (False, HELD, STEPS)
    assert [r["end"] for r in judged["ranks"]] == [CLOSED, UNKNOWN]


def test_a_disk_that_took_the_heartbeat_too_leaves_the_end_unknown(
    tmp_path: Path, call: Call
) -> None:
    made = dead_journal(tmp_path, beats=False)
    code, _, err = call("anomalies", made.path)
    assert code == 4
    assert "rank 1: how it ended is not known; 16 sampled steps are held, the last one" in err
    assert open_run(made.path).info()["attempts"][0]["ranks"][1]["status"] == "no last word"


def test_how_far_a_rank_came_stands_in_a_store_without_its_heartbeat(tmp_path: Path) -> None:
    made = Made(tmp_path)
    for step in range(STEPS):
        made.write([record(r, step) for r in range(2 if step < HELD else 1)])
    say_closed(made, 0, STEPS)
    last = {"step": STEPS, "steps": STEPS, "sampled": STEPS, "state": "closed"}
    made.tell(framing.LIFE, {"event": "last_beats", "ranks": {"1": last, "7": last}})
    made.close(cleanly=False)
    folded(made, journals=False)
    shares = open_run(tmp_path).completeness().shares
    assert [(s.held, s.sampled, s.end) for s in shares] == [(40, 40, CLOSED), (16, 40, CLOSED)]


def test_a_rank_with_fewer_batches_is_whole_by_its_own_word(tmp_path: Path) -> None:
    made = Made(tmp_path)
    for step in range(STEPS):
        made.write([record(r, step) for r in range(2 if step < HELD else 1)])
    say_closed(made, 0, STEPS)
    say_closed(made, 1, HELD)
    made.close(cleanly=False)
    assert open_run(tmp_path).completeness().complete


def test_what_a_live_rank_has_not_shipped_yet_is_not_missing(tmp_path: Path, call: Call) -> None:
    made = Made(tmp_path).whole(STEPS, told=False)
    made.run.lock.touch()
    from ddpprobe.rundir.paths import DirectoryLock

    lock = DirectoryLock(made.run.lock)
    assert lock.acquire()
    for rank in range(2):
        beat(made, rank, STEPS + 2, STEPS + 2)
    assert {s.end for s in open_run(tmp_path).completeness().shares} == {RUNNING}
    assert call("anomalies", tmp_path)[:2] == (0, "no anomalies so far in 42 sampled steps\n")
    beat(made, 1, 3 * STEPS, 2 * STEPS)  # it trains, and its journal stands still
    code, _, err = call("anomalies", tmp_path)
    assert code == 4
    assert "rank 1: 40 of 80 sampled steps are held" in err
    lock.release()
    made.close()


def test_nothing_is_said_of_a_run_that_recorded_nothing(tmp_path: Path, call: Call) -> None:
    made = Made(tmp_path)
    made.writer(0)
    made.writer(1)
    made.close(cleanly=False)
    code, out, _ = call("anomalies", tmp_path)
    assert code == 4
    assert out.endswith("nothing found in what is held: no sampled step of all ranks\n")


def test_damage_and_pages_go_before_what_is_not_known(tmp_path: Path, call: Call) -> None:
    made = nan_told(tmp_path / "run")
    assert "how each ended is not known" in call("anomalies", made.path)[2]
    assert call("anomalies", made.path)[0] == 1
    (made.path / "journal/000" / NODE / "rank_00000/00000000.wal").write_bytes(b"x" * 100)
    assert call("anomalies", made.path)[0] == 3


# -- stored verdicts ------------------------------------------------------------------------------


def nan_told(path: Path) -> Made:
    """A NaN at step 30 that the daemon paged, in a run that nobody brought to its end."""
    made = Made(path)
    for step in range(STEPS):
        parts = [record(r, step) for r in range(2)]
        if step >= 30:
            parts[1] = replace(parts[1], first_bad=bad(1, step))
        made.write(parts)
        made.tell(framing.RECORD, head_merge(parts))
        if step == 30:
            page = {"step": 30, "rank": 1, "micro": 1, "values": {"nan": 3.0}, "message": "told"}
            made.tell(framing.ANOMALY, replace(ANOMALY, **page))
    made.close(cleanly=False)
    return made


def test_a_page_in_the_store_is_told_though_no_record_is_left(tmp_path: Path, call: Call) -> None:
    made = folded(nan_told(tmp_path), journals=False)
    for name in ("merged", "rank_00000", "rank_00001"):  # as if only the verdict had been uploaded
        shutil.rmtree(made.run.store / "attempt_000" / name)
        (made.path / f"manifest/attempt_000.{name}.log").unlink()
    code, out, _ = call("anomalies", tmp_path)
    assert code == 1
    assert out.startswith("PAGE  step 30 micro 1  rank 1  blocks.1.mlp:output")
    assert "(first cause)" in out


def test_what_was_told_and_what_is_replayed_is_said_once(tmp_path: Path) -> None:
    nan_told(tmp_path)
    (found,) = open_run(tmp_path).anomalies()
    assert (found.step, found.rank, found.message, found.first_cause) == (30, 1, "told", True)


def test_what_follows_a_told_page_whose_evidence_is_gone_is_no_first_cause(
    tmp_path: Path,
) -> None:
    made = Made(tmp_path)
    made.tell(framing.ANOMALY, replace(ANOMALY, step=2, rank=1))
    for step in range(300, 310):  # the NaN lasts, and these are the records that are left of it
        made.write([replace(record(r, step), first_bad=bad(r, step)) for r in range(2)])
    made.close(cleanly=False)
    found = open_run(tmp_path).anomalies()
    assert [(a.step, a.first_cause) for a in found] == [(2, True), (300, False)]


# -- a part of the nodes --------------------------------------------------------------------------


def other_node(path: Path, *, told: bool = False) -> Path:
    """The directory of node 1 with a disk of its own: ranks 2 and 3 of 4, bad from step 30 on."""
    made = Made(path, ranks=4)
    for step in range(STEPS):
        parts = [record(r, step) for r in (2, 3)]
        if step >= 30:
            parts = [replace(p, first_bad=bad(p.ranks[0], step)) for p in parts]
        made.write(parts)
        if told:
            merged = head_merge([record(r, step) for r in range(4)])
            made.tell(
                framing.RECORD, replace(merged, first_bad=bad(0, step) if step >= 30 else None)
            )
            if step == 30:
                made.tell(framing.ANOMALY, replace(ANOMALY, step=30, rank=0))
    made.close()
    return path


def test_a_partial_view_says_so_and_claims_no_first_cause(tmp_path: Path, call: Call) -> None:
    path = other_node(tmp_path)
    code, out, err = call("anomalies", path)
    assert code == 1
    assert out.startswith("PAGE  step 30")
    assert "(first cause)" not in out
    assert out.splitlines()[-1] != ""
    assert "ranks 0-1 of 4: nothing is held here; their records are on their own nodes" in err
    assert "rank 0 ran on here" in err
    assert "ddpprobe collect DEST DIR" in err
    assert not any(a.first_cause for a in open_run(path).replayed())


def test_a_death_in_a_partial_view_is_no_first_cause(tmp_path: Path) -> None:
    path = other_node(tmp_path)
    made = Made(path, ranks=4)
    died = {"event": "death", "rank": 2, "signal": "SIGKILL", "time_ns": 5, "step": 12}
    made.tell(framing.LIFE, {**died, "first": True})
    made.close(cleanly=False)
    found = open_run(path).anomalies()
    assert ("rank_lost", "page", 2) in [(a.detector, a.level, a.rank) for a in found]
    assert not any(a.first_cause for a in found)
    ends = {s.rank: s.end for s in open_run(path).completeness().shares}
    assert ends == {0: UNKNOWN, 1: UNKNOWN, 2: DIED, 3: CLOSED}


@pytest.mark.parametrize(
    ("how", "end"), [("SIGSEGV", DIED), ("exit:7", DIED), ("exit:0", UNKNOWN), ("unknown", UNKNOWN)]
)
def test_the_end_of_a_rank_that_another_one_saw_fall_is_known(
    tmp_path: Path, how: str, end: str
) -> None:
    made = Made(tmp_path / "run", ranks=2).whole(6)
    seen = {"event": "peer_exit", "rank": 1, "how": how, "alive": [0], "time_ns": 5}
    made.writer(0).append_json(framing.LIFE, seen)
    made.close(cleanly=False)
    shares = open_run(made.path).completeness().shares
    assert [share.end for share in shares] == [UNKNOWN, end]
    told = next((text for text in open_run(made.path).completeness().unknown() if "1" in text), "")
    left = "rank 1: it left with exit code 0 and without a last word, so there may have been more"
    assert told.startswith(left) == (how == "exit:0")


def test_ranks_that_were_seen_to_leave_are_told_of_in_one(tmp_path: Path) -> None:
    made = Made(tmp_path / "run", ranks=3).whole(6)
    for rank in (1, 2):
        seen = {"event": "peer_exit", "rank": rank, "how": "exit:0", "alive": [0], "time_ns": 5}
        made.writer(0).append_json(framing.LIFE, seen)
    made.close(cleanly=False)
    _, told = open_run(made.path).completeness().unknown()
    assert told.startswith("ranks 1-2: each left with exit code 0 and without a last word, ")


def test_the_head_s_own_directory_keeps_its_verdict_and_names_what_is_elsewhere(
    tmp_path: Path, call: Call
) -> None:
    path = other_node(tmp_path, told=True)
    (found, *_) = open_run(path).anomalies()
    assert (found.step, found.rank, found.first_cause) == (30, 0, True)
    shares = open_run(path).completeness().shares
    assert [(s.rank, s.held, s.end) for s in shares][:2] == [(0, 40, UNKNOWN), (1, 40, UNKNOWN)]
    assert "ranks 0-1 of 4: how each ended is on its own node" in call("anomalies", path)[2]


@pytest.mark.parametrize("store", [False, True], ids=["journals", "folded"])
def test_trace_marks_merged_steps_that_lack_a_rank(tmp_path: Path, call: Call, store: bool) -> None:
    made = dead_journal(tmp_path)
    if store:
        folded(made)
    words = ("trace", tmp_path, "--site", "blocks.0.mlp:output", "--steps", "14:18")
    out = call(*words)[1].splitlines()
    assert out[0].split()[-1] == "without"
    assert [line.endswith("1 rank") for line in out[1:]] == [False, False, True, True]
    assert json.loads(call(*words, "--json")[1])["absent"] == [0, 0, 1, 1]
    assert call(*words, "--rank", 0)[1].count("rank") == 0
    plotted = call(*words, "--plot")[1]
    assert "(2 of 4 steps without 1 rank)" in plotted
    assert "without" not in call(*words, "--rank", 0, "--plot")[1]


@pytest.mark.parametrize("store", [False, True], ids=["journals", "store"])
def test_numbers_of_a_whole_step_are_marked_where_it_lacks_a_rank(
    tmp_path: Path, call: Call, store: bool
) -> None:
    made = Made(tmp_path)
    blocks = (*sites(3), *(Site(f"blocks.{n}", "output") for n in range(3)))
    for step in range(4):
        parts = [replace(record(r, step, 6), sites=blocks) for r in range(1 + (step < 2))]
        made.write(parts)
        missing = () if step < 2 else (1,)
        made.tell(framing.RECORD, replace(head_merge(parts), missing=missing))
    made.close()
    if store:
        folded(made)
    (growth,) = open_run(tmp_path).derived("output_growth")
    assert growth.absent.tolist() == [0, 0, 1, 1]
    words = ("trace", tmp_path, "--derived", "output_growth")
    out = call(*words)[1].splitlines()
    assert out[0].split() == ["attempt", "step", "output_growth", "without"]
    assert [line.endswith("1 rank") for line in out[1:]] == [False, False, True, True]
    assert json.loads(call(*words, "--json")[1])["derived"][0]["absent"] == [0, 0, 1, 1]
    assert "(2 of 4 steps without 1 rank)" in call(*words, "--plot")[1]
    whole = call(*words, "--steps", "0:2")[1]
    assert "without" not in whole


def test_a_picture_says_at_how_many_steps_it_lacks_a_rank(tmp_path: Path) -> None:
    run = open_run(dead_journal(tmp_path).path)
    title = "24 of 40 steps without 1 rank"
    assert title in run.plot("*:output", "rms").axes[0].get_title()
    many = replace(run.series("*:output", "rms"), sites=sites(20), values=np.ones((40, 20)),
                   nonfinite=np.zeros((40, 20)))  # fmt: skip
    assert title in figure_of(many).axes[0].get_title()
    assert run.plot("*:output", "rms", steps=slice(16)).axes[0].get_title() == ""


def test_a_table_and_a_report_mark_what_is_merged_without_a_rank(
    tmp_path: Path, call: Call
) -> None:
    made = dead_journal(tmp_path / "r")
    out = tmp_path / "out.csv"
    assert call("export", made.path, "--format", "csv", "-o", out)[0] == 4  # it is not whole
    rows = list(csv.DictReader(out.read_text().splitlines()))
    sites = [row for row in rows if row["kind"] == "output"]
    merged = {int(row["step"]): row["absent"] for row in sites if not row["rank"]}
    assert {merged[step] for step in range(16)} == {"0"}
    assert {merged[step] for step in merged if step >= 16} == {"1"}
    # A scalar is one rank's.
    assert {row["absent"] for row in rows if row["kind"] == "scalar"} <= {""}
    story = gather(open_run(made.path))
    names = column_names(story.maps)
    marked = [name for name in names if name.endswith(", without 1 rank")]
    assert 0 < len(marked) < len(names)
    assert names[-len(marked) :] == marked


def test_reading_changes_nothing(tmp_path: Path, call: Call) -> None:
    made = dead_journal(tmp_path)
    before = tree(tmp_path)
    call("anomalies", made.path)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "said",
    [{"sampled": float("inf")}, {"sampled": -1}, {"sampled": "many"}, {"sampled": 10**400}],
    ids=str,
)
def test_a_last_word_that_makes_no_sense_counts_for_nothing(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    made = Made(tmp_path).whole(STEPS, told=False)
    directory = made.run.rank_journal(0, NODE, 0)
    made.close(cleanly=False)
    text = json.dumps({"event": "closed", "status": "ok", **said}).encode()
    writer = JournalWriter(directory, {}, first_segment=9, first_seq=10**6)
    writer.append(framing.LIFE, text)
    writer.close()
    assert open_run(tmp_path).completeness().shares[0].sampled == STEPS


def test_no_run_json_leaves_out_where_rank_0_ran(tmp_path: Path, call: Call) -> None:
    path = other_node(tmp_path)
    write_json(path / "run.json", {"format_version": 1})
    assert "on their own nodes;" in call("anomalies", path)[2]


@pytest.mark.parametrize("store", [False, True], ids=["journals", "folded"])
def test_a_rank_that_the_head_merged_too_early_is_heard_afterwards(
    tmp_path: Path, store: bool
) -> None:
    """Its node's daemon was dead: the head saw the reduced gradient, and the origin only later."""
    made = Made(tmp_path)
    for step in range(STEPS):
        parts = [record(r, step) for r in range(2)]
        if step == 30:
            parts[1] = replace(parts[1], first_bad=bad(1, step))
        made.write(parts)
        late = step >= 28
        merged = head_merge(parts[:1] if late else parts)
        made.tell(framing.RECORD, replace(merged, missing=(1,) if late else ()))
        if step == 30:
            reduced = {"rank": None, "module": "0.weight", "kind": "grad", "phase": "step"}
            made.tell(framing.ANOMALY, replace(ANOMALY, step=30, micro=0, **reduced))
    made.tell(framing.LIFE, {"event": "finished"})
    made.close()
    if store:
        folded(made)
    run = open_run(tmp_path)
    first, second = run.anomalies()
    assert (first.step, first.rank, first.phase, first.first_cause) == (30, 1, "forward", True)
    assert (second.module, second.kind, second.first_cause) == ("0.weight", "grad", False)
    assert all(not r.missing and r.ranks == (0, 1) for r in run.records())
    series = run.series("blocks.0.mlp:output", "numel")
    assert not series.absent.any()
    assert len(series.steps) == STEPS
