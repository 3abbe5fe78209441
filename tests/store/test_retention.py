"""Retention: the oldest goes first, the evidence last, and what went is said, not missed."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray

from ddpprobe.cli.main import main as command_line
from ddpprobe.daemon import __main__ as daemon
from ddpprobe.daemon.daemon_journal import DaemonJournal
from ddpprobe.detectors.suite import default_suite
from ddpprobe.errors import TensorError
from ddpprobe.reader.run import open_run
from ddpprobe.reader.verify.verify import verify
from ddpprobe.rundir import framing, journal
from ddpprobe.rundir.journal import segments_of
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store import retention
from ddpprobe.store.captures.reader import expired_steps
from ddpprobe.store.commit import Files
from ddpprobe.store.manifest import EXPIRED, Consumed
from ddpprobe.store.retention import Retention, RetentionLimits
from ddpprobe.store.root import Root
from ddpprobe.store.writer import StoreWriter

from .. import made_packs as made
from ..made_runs import ANOMALY, Made, bad, head_merge, record, tree

SITE = "layers.0.mlp.weight:param"
STEPS, BLOCK = 40, 8
OWN = {0: {"rank_00000", "rank_00001", "merged"}}


@pytest.fixture(scope="module")
def sealed(tmp_path_factory) -> RunDir:
    """A sealed run of 40 steps, pages at steps 3 and 20, captures at steps 2, 12, 20, 26, 30."""
    writing = Made(tmp_path_factory.mktemp("made") / "run", segment_frames=512).whole(STEPS)
    writing.tell(framing.ANOMALY, replace(ANOMALY, step=20))
    writing.tell(framing.LIFE, {"event": "pinned", "first": 32, "last": 33})
    run = writing.close()
    for step in (2, 12, 20, 26, 30):
        reason = "nonfinite" if step == 12 else "capture"
        whole = made.whole([64, 32], "float32", step)
        made.write(run, [(made.KEY, made.sharded(whole, [2], [0]))], step=step, reason=reason)
    StoreWriter(run, "node_0000", block=BLOCK, durable=False).seal()
    return run


@pytest.fixture
def run(sealed: RunDir, tmp_path: Path, monkeypatch) -> RunDir:
    monkeypatch.setattr(retention, "BEFORE", 4)
    monkeypatch.setattr(retention, "AFTER", 2)
    shutil.copytree(sealed.path, tmp_path / "run")
    return RunDir(tmp_path / "run")


def apply(run: RunDir, *, now_ns: int | None = None, **limits: float) -> int:
    keeper = Retention(run, Root(run, durable=False), RetentionLimits(**limits), durable=False)
    return keeper.apply(OWN, now_ns)


def size(run: RunDir) -> int:
    """Return what counts, after a look at what is really there."""
    said = Retention(run, Root(run, durable=False), RetentionLimits(), durable=False)._total()
    counted = ("run.zarr/", "manifest/", "journal/", "captures/")
    assert said == sum(len(d) for k, d in tree(run.path).items() if k.startswith(counted))
    return said


def captured(run: RunDir) -> list[int]:
    return [c.step for c in open_run(run.path).captures()]


def steps_of(run: RunDir, rank: int | None = None) -> set[int]:
    return {r.step // BLOCK for r in open_run(run.path).records(rank)}


def test_captures_go_first_then_blocks_and_the_evidence_of_a_page_last(run):
    assert apply(run, max_bytes=size(run)) == 0
    assert apply(run, max_bytes=size(run) - 1) == 1
    assert captured(run) == [2, 12, 20, 30]  # the oldest on which nothing depends
    assert apply(run, max_bytes=size(run) - 1) == 1
    assert captured(run) == [2, 12, 20]
    assert steps_of(run) == steps_of(run, 1) == {0, 1, 2, 3, 4}
    before = open_run(run.path).anomalies()
    gone = 0
    while steps_of(run) != {0, 2, 4}:
        assert captured(run) == [2, 12, 20]
        gone += apply(run, max_bytes=size(run) - 1)
        assert verify(open_run(run.path)).ok
        assert gone <= 6
    # Blocks 1 and 3 of three groups; 0 and 2 hold pages, 4 the pinned steps, and is the newest.
    assert steps_of(run, 0) == steps_of(run, 1) == {0, 2, 4}
    opened = open_run(run.path)
    assert [a.step for a in opened.anomalies()] == [a.step for a in before]
    series = opened.series("blocks.0.mlp", "sum")
    assert set(series.steps // BLOCK) == {0, 2, 4}
    assert np.isfinite(series.values).all()
    expired = {(x.where.rpartition("/")[2], x.steps) for x in opened.expired()}
    assert {("merged", (8, 15)), ("captures", (26, 26))} <= expired
    report = verify(opened)
    assert report.ok
    assert any("merged, steps 8 to 15: expired" in note for note in report.notes)
    with pytest.raises(TensorError, match="step 26 has expired"):
        opened.tensor(SITE, 26)
    assert opened.tensor(SITE, 20)[...].tobytes() == made.whole([64, 32], "float32", 20).tobytes()
    assert apply(run, max_bytes=1) > 2
    assert captured(run) == []
    assert steps_of(run) == {4}  # the newest block always stays
    assert verify(open_run(run.path)).ok


def test_age_takes_everything_but_the_evidence(run):
    assert apply(run, now_ns=10**18 + STEPS, max_age=1e9) == 0
    assert apply(run, now_ns=10**18 + 40 * 10**9, max_age=30) > 0
    assert captured(run) == [2, 12, 20]
    assert steps_of(run) == {0, 2, 4}


def test_who_asks_for_steps_that_have_expired_is_told_so(run, capsys):
    apply(run, now_ns=10**18 + 40 * 10**9, max_age=30)
    assert open_run(run.path).expired_steps(slice(10, 14)) == (10, 13)
    assert open_run(run.path).expired_steps(slice(None)) == (8, 31)
    assert open_run(run.path).expired_steps(slice(16, 24)) is None
    for asked in (["trace"], ["trace", "--site", "*"], ["export", "--format", "csv"]):
        assert command_line([*asked, str(run.path), "--steps", "10:14"]) == 2
        told = capsys.readouterr().err
        assert "the records of steps 10 to 13 have expired (max_bytes, max_age)" in told


def test_a_trimmed_run_goes_on_and_opens_with_stock_tools(run):
    StoreWriter(run, "node_0000", block=BLOCK, durable=False, limits=RetentionLimits(1)).seal()
    assert steps_of(run) == {4}
    group = "attempt_000/merged"
    with xarray.open_zarr(run.store, group=group) as opened:
        assert opened.sizes["step"] == STEPS
        assert (opened["order"][:8] == -1).all()
        assert (opened["order"][-1] >= 0).any()
    with xarray.open_datatree(run.store, engine="zarr") as opened:
        assert not any(name.startswith("step_") for name in opened["attempt_000/captures"])
    going_on = Made(run.path, attempt=1)
    going_on.whole(10)
    going_on.close()
    StoreWriter(run, "node_0000", block=BLOCK, durable=False).seal()
    assert verify(open_run(run.path)).ok
    assert len({r.step for r in open_run(run.path).records(attempt=1)}) == 10


@pytest.mark.parametrize("method", ["_clear", "_finish"])
def test_an_expiry_that_was_interrupted_is_finished_by_the_next_one(run, monkeypatch, method):
    class Killed(Exception):
        pass

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        if method == "_clear":
            patch.setattr(Retention, "_clear", killed)
        else:
            patch.setattr(retention.shutil, "rmtree", killed)
            patch.setattr(Retention, "_finish", lambda _: None)
        with pytest.raises(Killed):
            apply(run, max_bytes=1)
    assert expired_steps(run, 0) == {26}
    assert captured(run) == [2, 12, 20, 30]
    assert verify(open_run(run.path)).ok
    apply(run, max_bytes=10**9)
    assert not any("step_0000000026" in name for name in tree(run.path))


def test_a_removal_of_blocks_that_was_interrupted_is_finished_too(run, monkeypatch):
    class Killed(Exception):
        pass

    def killed(*_, **__):
        raise Killed

    group = "attempt_000/merged"
    files = Files(run, group, durable=False)
    some = [key for key in files.manifest.state.files if key.startswith("counts/c/1/")]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "unlink", killed)
        files.remove(some, {EXPIRED: Consumed(0, frozenset({1}))})
    assert steps_of(run) == {0, 2, 3, 4}
    assert verify(open_run(run.path)).ok
    Files(run, group, durable=False)
    assert not any((run.store / group / key).exists() for key in some)
    assert size(run)


@pytest.mark.parametrize(
    ("text", "is_bytes"), [("20GB", 20e9), ("1.5 MiB", 1.5 * 2**20), ("700", 700)]
)
def test_limits_are_numbers_with_a_unit(text, is_bytes, monkeypatch, tmp_path):
    arguments = daemon.parser().parse_args(["--dir", str(tmp_path), "--max-bytes", text])
    monkeypatch.setenv("DDPPROBE_MAX_AGE", "12h")
    options = daemon._options(arguments, RunDir(tmp_path), "node_0000")
    assert (options.max_bytes, options.max_age) == (is_bytes, 12 * 3600)


@pytest.mark.parametrize("text", ["a lot", "20 GG", "0", "-3d"])
def test_a_limit_that_makes_no_sense_is_refused_with_an_example(text, monkeypatch, tmp_path):
    monkeypatch.setenv("DDPPROBE_MAX_BYTES", text)
    arguments = daemon.parser().parse_args(["--dir", str(tmp_path)])
    with pytest.raises(ValueError, match="write a number and one of kb, .*, as in 20GB"):
        daemon._options(arguments, RunDir(tmp_path), "node_0000")


WIDE, PER_LOOK = 400, 4  # sites; steps between two looks of the daemon
MAX_BYTES = 2e6
# Of a record with 400 sites, uncompressed, and of its site table.
RECORD, TABLE = 37_000, 23_000


def disk(run: RunDir) -> int:
    return sum(p.stat().st_size for p in run.path.rglob("*") if p.is_file())


def test_a_wide_run_stays_within_its_bound_at_every_moment(tmp_path, monkeypatch):
    """`max_bytes`, an open segment of each journal, what comes between two looks, and a block."""
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 128 << 10)
    segment = max(128 << 10, journal.SEGMENT_HEADS * TABLE) + RECORD + TABLE
    journals = groups = 3  # of two ranks and the head's daemon
    block = retention_block(groups) * RECORD
    most = MAX_BYTES + journals * (segment + PER_LOOK * RECORD) + groups * block
    made = Made(tmp_path / "run", pid=os.getpid(), segment_frames=256)
    clock = [0.0]
    folding = StoreWriter(
        made.run,
        "node_0000",
        durable=False,
        limits=RetentionLimits(MAX_BYTES),
        clock=lambda: clock[0],
    )
    highest = written = 0
    for step in range(72):
        parts = [record(rank, step, WIDE) for rank in range(2)]
        made.write(parts)
        made.tell(framing.RECORD, head_merge(parts))
        highest, written = max(highest, disk(made.run)), written + 3 * RECORD
        if step % PER_LOOK == PER_LOOK - 1:
            clock[0] += 5
            folding.fold()
            highest = max(highest, disk(made.run))
        assert highest <= most, step
    assert written > 1.5 * most  # it had to give something up
    opened = open_run(made.path)
    kept = {rank: [r.step for r in opened.records(rank)] for rank in (None, 0, 1)}
    assert all(steps and steps[-1] == 71 and steps[0] > 0 for steps in kept.values()), kept
    assert verify(opened).ok
    assert not opened.lost
    made.close()


def retention_block(groups: int) -> int:
    """Return the records of a block: an eighth of `max_bytes` for all groups, but 8 at least."""
    return max(8, int(MAX_BYTES / 8 / groups / RECORD))


def test_a_daemon_goes_on_from_the_store_where_retention_took_its_journal_away(tmp_path):
    made = Made(tmp_path / "run", pid=os.getpid(), segment_frames=8)
    folding = StoreWriter(made.run, "node_0000", block=8, durable=False, limits=RetentionLimits(1))
    directory = made.run.daemon_journal(0, "node_0000")
    # One verdict that nobody finds in what is left, and one that the daemon did not live to write.
    suite, told = default_suite(), [replace(ANOMALY, step=9, values={"nan": 3})]
    for step in range(60):
        parts = [record(r, step, first_bad=bad(1, 59) if (r, step) == (1, 59) else None)
                 for r in range(2)]  # fmt: skip
        made.write(parts)
        merged = head_merge(parts)
        made.tell(framing.RECORD, merged)
        told += suite.update(merged)
        if step == 9:
            made.tell(framing.ANOMALY, told[0])
        if step == 20:
            made.tell(framing.LIFE, {"event": "order_dropped", "cause": "capture:it"})
        if step % 8 == 7:
            folding.fold()
    folding.seal()
    left = segments_of(directory)
    assert left[0] > 3
    assert verify(open_run(made.path)).ok
    made.daemon.close()
    again = DaemonJournal(directory, {"role": "daemon"}, default_suite())
    assert again.last_step == 59
    assert again.settled == {"capture:it"}
    assert again.recovered == told
    assert len(told) == 2
    again.take(head_merge([record(0, 60), record(1, 60)]))
    again.close()
    opened = open_run(made.path)
    assert opened._merged_reader.daemon_anomalies(0) == told
    assert verify(opened).ok
    made.close()


def test_a_group_of_which_most_has_expired_is_read_as_what_is_left_of_it(tmp_path):
    """Its sizes are no claim without files: the manifest counts the blocks that went."""
    made = Made(tmp_path / "run", ranks=1, segment_frames=512).whole(200, told=False)
    StoreWriter(made.close(), "node_0000", block=2, durable=False, limits=RetentionLimits(1)).seal()
    opened = open_run(made.path)
    assert [r.step for r in opened.records(0)] == [198, 199]
    assert not opened.lost
    assert verify(opened).ok
