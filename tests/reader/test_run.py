"""A run reads the same live, crashed, half folded and sealed; a stranger's directory is told so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from ddpprobe.detectors.suite import default_suite
from ddpprobe.errors import RunError, UnknownSeries
from ddpprobe.reader.derived_series import NAMES
from ddpprobe.reader.run import open_run
from ddpprobe.reader.series import is_within
from ddpprobe.records.step import StepRecord, derive
from ddpprobe.rundir import framing, heartbeat, paths, safe_read
from ddpprobe.store.writer import StoreWriter

from ..made_runs import ANOMALY, NODE, Made, bad, head_merge, key, record

STEPS = 50
STATES = ("crashed", "folded", "sealed")


def bring(made: Made, state: str) -> None:
    """End a run: `crashed` before anything was folded, half way through, or sealed."""
    made.close(cleanly=state != "crashed")
    if state == "crashed":
        return
    folder = StoreWriter(made.run, NODE, block=8, durable=False)
    folder.fold()
    if state == "sealed":
        folder.seal()
    folder.close()


def parts(step: int) -> list[StepRecord]:
    return [record(r, step, 3 + (step >= 20)) for r in range(2)]


@pytest.mark.parametrize("told", [True, False], ids=["with a daemon", "without one"])
@pytest.mark.parametrize("state", STATES)
def test_records_are_the_same_in_every_state_of_a_run(
    tmp_path: Path, state: str, told: bool
) -> None:
    made = Made(tmp_path).whole(STEPS, told=told, grow_at=20)
    bring(made, state)
    run = open_run(tmp_path)
    for rank in range(2):
        assert [key(r) for r in run.records(rank)] == [key(parts(s)[rank]) for s in range(STEPS)]
    merged = [key(head_merge(parts(s))) for s in range(STEPS)]
    assert [key(r) for r in run.records()] == merged
    assert run.lost == []


@pytest.mark.parametrize("state", STATES)
def test_steps_behind_the_last_merged_one_are_merged_from_the_ranks(
    tmp_path: Path, state: str
) -> None:
    made = Made(tmp_path)
    for step in range(30):
        made.write(parts(step) if step < 25 else parts(step)[:1])  # rank 1 died at step 25
        if step < 10:
            made.tell(framing.RECORD, head_merge(parts(step)))
    bring(made, state)
    merged = list(open_run(tmp_path).records())
    assert [r.step for r in merged] == list(range(30))
    assert [key(r) for r in merged[:25]] == [key(head_merge(parts(s))) for s in range(25)]
    assert all(r.missing == (1,) and r.ranks == (0,) for r in merged[25:])


@pytest.mark.parametrize("state", STATES)
def test_a_gap_in_what_the_daemon_told_is_merged_from_the_ranks(tmp_path: Path, state: str) -> None:
    made = Made(tmp_path)
    for step in range(40):
        made.write(parts(step))
        if not 10 <= step < 20:  # its disk was full
            made.tell(framing.RECORD, head_merge(parts(step)))
    bring(made, state)
    run = open_run(tmp_path)
    assert [key(r) for r in run.records()] == [key(head_merge(parts(s))) for s in range(40)]
    assert list(run.series("blocks.0.mlp", "mean").steps) == list(range(40))
    assert list(run.scalars("loss").steps) == list(range(40))


def test_an_alarm_is_replaced_by_the_full_record_of_its_step(tmp_path: Path) -> None:
    made = Made(tmp_path, ranks=1)
    alarm = record(0, 5, 0, sampled=False, partial=True, first_bad=bad(0, 5), scalars={})
    made.write([record(0, 4), alarm, record(0, 5, first_bad=bad(0, 5)), record(0, 6)])
    made.close(cleanly=False)
    found = list(open_run(tmp_path).records(0))
    assert [r.step for r in found] == [4, 5, 6]
    assert found[1].sampled


def test_a_run_can_be_read_while_it_is_folded(tmp_path: Path) -> None:
    made = Made(tmp_path, ranks=1)
    made.write(record(0, step) for step in range(60))
    folder = StoreWriter(made.run, NODE, block=8, durable=False)
    found = []
    for one in open_run(tmp_path).records(0):
        found.append(one.step)
        if one.step in {3, 30}:
            folder.fold()  # deletes what was listed, but not yet read
    assert found == list(range(60))
    folder.close()
    made.close()


def nan_run(made: Made, *, told: bool) -> None:
    """Write a run in which rank 1 has a NaN at step 40."""
    for step in range(STEPS):
        both = parts(step)
        if step == 40:
            counts = both[1].counts.copy()
            counts[1, 1] = 3
            both[1] = replace(both[1], counts=counts, first_bad=bad(1, 40))
        made.write(both)
        if told:
            made.tell(framing.RECORD, head_merge(both))


def test_replayed_anomalies_name_the_first_cause(tmp_path: Path) -> None:
    made = Made(tmp_path)
    nan_run(made, told=False)
    made.close(cleanly=False)
    first = open_run(tmp_path).anomalies()[0]
    assert (first.detector, first.level, first.first_cause) == ("nonfinite", "page", True)
    assert (first.step, first.rank, first.module, first.phase) == (40, 1, "blocks.1.mlp", "forward")


@pytest.mark.parametrize("state", STATES)
def test_recorded_anomalies_are_taken_if_the_daemon_saw_everything(
    tmp_path: Path, state: str
) -> None:
    made = Made(tmp_path).whole(STEPS)  # a stream without a fault, and one anomaly written down
    made.tell(framing.LIFE, {"event": "finished"})
    bring(made, state)
    (found,) = open_run(tmp_path).anomalies()
    assert framing.encode_anomaly(found) == framing.encode_anomaly(ANOMALY)


def test_anomalies_are_replayed_if_the_daemon_did_not_see_the_end(tmp_path: Path) -> None:
    made = Made(tmp_path)
    nan_run(made, told=False)
    for step in range(30):
        made.tell(framing.RECORD, head_merge(parts(step)))
    made.close()
    assert [a.step for a in open_run(tmp_path).anomalies() if a.level == "page"] == [40]


def desync_run(made: Made, *, told: bool) -> None:
    """Write a run in which rank 2 has its own weights from step 30 on."""
    for step in range(STEPS):
        ranks = [record(r, step) for r in range(3)]
        if step >= 30:
            digests = {**ranks[2].digests, ("b.weight", ""): {step: 4}}
            ranks[2] = replace(ranks[2], digests=digests)
        made.write(ranks)
        if told:
            made.tell(framing.RECORD, head_merge(ranks))


@pytest.mark.parametrize("told", [True, False], ids=["with a daemon", "without one"])
@pytest.mark.parametrize("state", STATES)
def test_ranks_that_went_apart_are_found_in_every_state_of_a_run(
    tmp_path: Path, state: str, told: bool
) -> None:
    made = Made(tmp_path, ranks=3)
    desync_run(made, told=told)
    bring(made, state)
    run = open_run(tmp_path)
    assert [r.step for r in run.records() if r.digests] == list(range(30, STEPS))
    suite = default_suite()
    assert [a.detector for r in run.records() for a in suite.update(r)] == ["desync"]
    if not told or state == "crashed":  # else the daemon's own verdicts are taken: it had none
        (page,) = run.anomalies()
        assert (page.detector, page.step, page.rank) == ("desync", 30, 2)
        assert (page.module, page.level, page.first_cause) == ("b.weight", "page", True)


def death(rank: int, step: int = 12, time_ns: int = 5) -> dict[str, Any]:
    how = {"signal": "SIGKILL", "time_ns": time_ns, "step": step}
    return {"event": "death", "rank": rank, **how}


def gone(rank: int, order: int) -> dict[str, Any]:
    """Say that a process was killed, proven to be before or behind others by `order`."""
    how = {"how": "SIGKILL", "order": order, "witness": "w"}
    return {"event": "exit", "rank": rank, **how, "step": 12, "micro": 0, "state": "backward"}


@pytest.mark.parametrize("state", STATES)
def test_the_cause_is_a_page_that_names_rank_and_signal(tmp_path: Path, state: str) -> None:
    made = Made(tmp_path).whole(12, told=False)
    for n, order in ((0, 1), (1, 0)):  # which of them was noticed first does not matter
        made.tell(framing.LIFE, {**gone(n, order), "time_ns": order})
        made.tell(framing.LIFE, death(n))
    beat = heartbeat.HeartbeatWriter(made.run.heartbeat(0, NODE, 1))
    beat.beat(
        step=12, micro=1, state=heartbeat.STATES.index("backward"), steps=12, skipped=0, sampled=12,
        phase_seconds=(0, 0, 0, 0), probe_seconds=0,
    )  # fmt: skip
    beat.close()
    bring(made, state)
    run = open_run(tmp_path)
    first, second = run.anomalies()
    assert (first.detector, first.level, first.rank) == ("rank_lost", "page", 1)
    assert (first.step, first.micro, first.phase) == (12, 1, "backward")
    assert first.first_cause
    assert first.message == "rank 1 died (SIGKILL) in step 12"
    assert (second.level, second.rank, second.first_cause) == ("info", 0, False)
    assert [(d.rank, d.first) for d in run.deaths()] == [(1, True), (0, False)]
    assert run.info()["first_death"]["rank"] == 1


def test_a_death_soon_after_a_nan_follows_from_it(tmp_path: Path) -> None:
    made = Made(tmp_path)
    nan_run(made, told=False)
    made.tell(framing.LIFE, death(0, step=42))
    made.close(cleanly=False)
    found = open_run(tmp_path).anomalies()
    assert [(a.detector, a.first_cause) for a in found] == [
        ("nonfinite", True),
        ("rank_lost", False),
    ]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("rank", [None, 1])
def test_a_series_is_the_statistic_of_the_records(
    tmp_path: Path, state: str, rank: int | None
) -> None:
    made = Made(tmp_path).whole(STEPS, grow_at=20)
    bring(made, state)
    run = open_run(tmp_path)
    found = run.series("blocks.[13].mlp", "rms", rank, slice(10, 40))
    assert [s.fqn for s in found.sites] == ["blocks.1.mlp", "blocks.3.mlp"]
    assert list(found.steps) == list(range(10, 40))
    for row, step in enumerate(found.steps):
        whole = head_merge(parts(step)) if rank is None else parts(step)[rank]
        expected = derive("rms", whole.counts, whole.values)
        assert found.values[row, 0] == expected[1]
        assert np.isnan(found.values[row, 1]) == (step < 20)
        assert step < 20 or found.values[row, 1] == expected[3]


def test_what_was_not_observed_is_nan_and_never_zero(tmp_path: Path) -> None:
    made = Made(tmp_path, ranks=1)
    one = record(0, 0)
    counts = one.counts.copy()
    counts[1] = 0
    counts[1, 5] = 1  # tapped, but nothing came
    made.write([replace(one, counts=counts)])
    made.close(cleanly=False)
    run = open_run(tmp_path)
    assert np.isnan(run.series("*", "numel").values[0]).tolist() == [False, True, False]
    assert run.series("*", "tapped").values[0, 1] == 1


def test_an_unknown_statistic_is_refused_with_those_there_are(tmp_path: Path) -> None:
    made = Made(tmp_path, ranks=1).whole(1)
    made.close()
    with pytest.raises(ValueError, match="'median': choose one of mean, "):
        open_run(tmp_path).series("*", "median")


@pytest.mark.parametrize("state", STATES)
def test_a_scalar_of_every_rank_over_the_steps(tmp_path: Path, state: str) -> None:
    made = Made(tmp_path).whole(STEPS)
    bring(made, state)
    run = open_run(tmp_path)
    found = run.scalars("grad_norm_local", steps=slice(0, 20, 5))
    assert found.ranks == (0, 1)
    assert found.steps.tolist() == [0, 5, 10, 15]
    assert found.values.tolist() == [[1.0, 2.0]] * 4
    assert run.scalars("loss", rank=1).values[4, 0] == 0.2
    with pytest.raises(UnknownSeries, match="no scalar 'lost' in this run: it has loss, grad_norm"):
        run.scalars("lost")
    with pytest.raises(UnknownSeries, match="no rank 7 in this run; it has 0, 1"):
        run.scalars("loss", rank=7)
    assert [s.name for s in run.matching_scalars("grad*")] == ["grad_norm_local"]
    assert run.matching_scalars("no such thing") == []


@pytest.mark.parametrize("state", STATES)
def test_a_site_that_a_run_has_not_raises_and_names_what_comes_close(
    tmp_path: Path, state: str
) -> None:
    made = Made(tmp_path).whole(STEPS)
    bring(made, state)
    run = open_run(tmp_path)
    with pytest.raises(UnknownSeries, match=r"'blocks.1.mpl'; .*nearest: blocks.1.mlp"):
        run.series("blocks.1.mpl", "rms")
    with pytest.raises(ValueError, match=r"blocks.1.mlp has no grad, but output"):
        run.series("blocks.1.mlp:grad", "rms")
    with pytest.raises(UnknownSeries, match="no rank 7 in this run; it has 0, 1"):
        run.series("*", "rms", rank=7)
    assert not len(run.series("blocks.1.mlp", "rms", steps=slice(10**6, None)).steps)


def test_a_run_without_a_step_has_no_series_yet_and_that_is_no_error(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.writer(0)
    run = open_run(made.close().path)
    assert run.series("blocks.0.mlp", "rms").sites == ()
    assert run.scalars("loss").values.shape == (0, 0)


def test_of_a_scalar_nan_is_told_apart_from_not_given(tmp_path: Path) -> None:
    made = Made(tmp_path)
    for step, said in enumerate(({"loss": 1.0}, {"loss": float("nan")}, {})):
        made.write(record(rank, step, scalars={rank: said}) for rank in range(2))
    found = open_run(made.close().path).scalars("loss")
    assert np.isnan(found.values[:, 0]).tolist() == [False, True, True]
    assert found.given[:, 0].tolist() == [True, True, False]


def test_slices_are_over_step_numbers() -> None:
    assert [s for s in range(30) if is_within(s, slice(5, 20, 10))] == [5, 15]
    assert all(is_within(s, slice(None)) for s in range(5))


@pytest.mark.parametrize("state", STATES)
def test_xarray_gets_what_is_folded_and_what_is_not(tmp_path: Path, state: str) -> None:
    made = Made(tmp_path).whole(STEPS, grow_at=20)
    bring(made, state)
    dataset = open_run(tmp_path).to_xarray()
    assert dict(dataset.sizes) == {
        "step": STEPS, "site": 4, "count_stat": 7, "value_stat": 4, "rank": 2, "scalar": 2,
        "quantity": len(NAMES),
    }  # fmt: skip
    assert np.isnan(dataset.derived).all()  # these records hold what no formula needs
    assert "derived" not in open_run(tmp_path).to_xarray(rank=0)
    numel = dataset.counts.sel(site="blocks.2.mlp:output", count_stat="numel", step=7)
    assert numel == sum(p.counts[2, 0] for p in parts(7))


def test_without_xarray_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(tmp_path, ranks=1).whole(1)
    made.close()
    monkeypatch.setitem(sys.modules, "xarray", None)
    monkeypatch.delitem(sys.modules, "ddpprobe.reader.dataset", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'ddpprobe\[xarray\]'"):
        open_run(tmp_path).to_xarray()


@pytest.mark.parametrize("state", STATES)
def test_info_says_what_ran_and_how_complete_it_is(tmp_path: Path, state: str) -> None:
    made = Made(tmp_path, ranks=3)
    made.write(record(r, s) for s in range(20) for r in range(2) if s < 15 or r == 0)
    made.tell(framing.LIFE, death(1, step=15))
    bring(made, state)
    info = open_run(tmp_path).info()
    assert json.loads(json.dumps(info)) == info
    assert (info["name"], info["world_size"], info["wrapper"]) == ("made", 3, "ddp")
    assert info["steps"] == {"first": 0, "last": 19}
    assert (info["state"], info["sites"], info["lost"]) == ("crashed", 3, [])
    (attempt,) = info["attempts"]
    assert attempt["silent_ranks"] == [2]
    shares = [(r["rank"], r["sampled"], r["expected"]) for r in attempt["ranks"]]
    assert shares == [(0, 20, 20), (1, 15, 20)]
    ends = [r["status"] for r in attempt["ranks"]]
    assert ends == ["no last word" if state == "crashed" else "closed", "died (SIGKILL)"]
    assert info["bytes"]["total"] >= info["bytes"]["store"] + info["bytes"]["journal"]


def test_a_live_run_is_live(tmp_path: Path) -> None:
    made = Made(tmp_path, ranks=1)
    made.write([record(0, 0)])
    lock = paths.DirectoryLock(made.run.lock)
    assert lock.acquire()
    info = open_run(tmp_path).info()
    assert (info["state"], info["attempts"][0]["ranks"][0]["status"]) == ("running", "running")
    lock.release()
    assert open_run(tmp_path).info()["state"] == "unknown"  # nobody saw its end
    made.close()


def test_attempts_stay_apart(tmp_path: Path) -> None:
    for attempt, steps in ((0, range(6)), (1, range(4, 9))):
        made = Made(tmp_path, ranks=1, attempt=attempt)
        made.write(record(0, s, attempt=attempt) for s in steps)
        made.close()
    folder = StoreWriter(made.run, NODE, block=4, durable=False)
    folder.fold()
    folder.close()
    run = open_run(tmp_path)
    assert run.attempts() == [0, 1]
    assert [(r.attempt, r.step) for r in run.records()] == [
        *((0, s) for s in range(6)), *((1, s) for s in range(4, 9)),
    ]  # fmt: skip
    assert [r.step for r in run.records(0, attempt=1)] == list(range(4, 9))
    series = run.series("*", "numel")
    assert list(zip(series.attempts, series.steps, strict=True))[5:7] == [(0, 5), (1, 4)]


def test_a_run_killed_before_it_wrote_run_json_is_opened_from_its_journals(tmp_path: Path) -> None:
    made = Made(tmp_path, ranks=1).whole(5)
    made.close()
    made.run.run_json.unlink()
    assert len(list(open_run(tmp_path).records())) == 5


def strangers(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    def make(name: str, files: dict[str, str]) -> Path:
        path = tmp_path / name
        path.mkdir()
        for inner, text in files.items():
            (path / inner).parent.mkdir(parents=True, exist_ok=True)
            (path / inner).write_text(text)
        return path

    made = Made(tmp_path / "whole", ranks=1).whole(40)
    bring(made, "sealed")
    return {
        "missing": (tmp_path / "nothing", "no such directory"),
        "empty": (make("empty", {}), "an empty directory"),
        "file": (made.run.run_json, "a file; give the run directory"),
        "foreign": (make("foreign", {"a.txt": "", "b.txt": ""}), "it holds a.txt, b.txt"),
        "parent": (make("runs", {"one/run.json": "{}"}), "holds 1 runs, name one of them"),
        "store": (made.run.store, "a part of a run; give its directory"),
        "half": (make("half", {"run.json": '{"format_version": 1, "na'}), "half written"),
        "list": (make("list", {"run.json": "[1]"}), "half written or damaged"),
        "deep": (make("deep", {"run.json": "[" * 100_000}), "half written or damaged"),
        "newer": (make("newer", {"run.json": '{"format_version": 2}'}), "format_version 2, this"),
    }


def test_a_stranger_s_directory_is_named_in_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    for name, (path, says) in strangers(tmp_path).items():
        with pytest.raises(RunError) as caught:
            open_run(path)
        text = str(caught.value)
        assert says in text, name
        assert "\n" not in text
        assert str(path) in text
        assert any(word in text for word in ("give", "name one", "move it away", "pip install"))
        assert caught.value.exit_code == (3 if name in {"half", "list", "deep"} else 2)


def test_reading_needs_neither_torch_nor_for_journals_zarr(tmp_path: Path) -> None:
    made = Made(tmp_path, ranks=1).whole(3)
    made.close(cleanly=False)
    code = (
        "import sys, ddpprobe; run = ddpprobe.open(sys.argv[1]); run.info();"
        "print(len(list(run.records())), 'torch' in sys.modules, 'zarr' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["3", "False", "False"]


class Counted:
    """What `os.scandir` returns, counting what is taken from it."""

    def __init__(self, entries: Any, taken: list[str]) -> None:
        self._entries, self._taken = entries, taken

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self._entries.close()

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        """Count each entry."""
        for entry in self._entries:
            self._taken.append(entry.name)
            yield entry


# How often a directory that a stranger has filled may be listed: by whoever looks for what has a
# name of ours in it, and by whoever adds up the bytes.
LISTED = {
    "": 0, "foreign/deep": 0, "manifest": 2, "run.zarr": 2, "run.zarr/attempt_000": 2,
    "journal": 2, "captures": 2, "heartbeat": 1, "daemon": 2,
}  # fmt: skip


@pytest.mark.parametrize("place", LISTED)
def test_what_strangers_put_into_a_run_is_listed_once_at_most(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(tmp_path, ranks=1).whole(4)
    bring(made, "sealed")
    filled = tmp_path / place
    filled.mkdir(parents=True, exist_ok=True)
    for number in range(50):
        (filled / f"foreign_{number}").touch()
    taken: list[str] = []
    scandir, listdir = os.scandir, os.listdir

    def listed(*args: Any) -> list[str]:
        found = listdir(*args)
        taken.extend(found)
        return found

    monkeypatch.setattr(safe_read, "SETTLED_NS", -1)  # as if the files had been there for a while
    monkeypatch.setattr(os, "scandir", lambda *args: Counted(scandir(*args), taken))
    monkeypatch.setattr(os, "listdir", listed)
    info = open_run(tmp_path).info()
    assert info["lost"] == []
    assert taken.count("foreign_7") <= LISTED[place]
    assert len(taken) > 10  # it is counted


def test_a_directory_is_listed_anew_once_something_has_changed(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name in ("b", "a"):
        (tmp_path / "d" / name).touch()
        expected = ["b"] if name == "b" else ["a", "b"]
        assert safe_read.names(tmp_path, "d") == safe_read.names(tmp_path, "d") == expected
    (tmp_path / "d/b").unlink()
    assert safe_read.names(tmp_path, "d") == ["a"]
