"""The fold loses nothing, changes nothing, and can be killed at any instant."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddpprobe.records.step import (
    COUNTS,
    KINDS,
    PHASES,
    PLACEMENTS,
    VALUES,
    FirstBad,
    Site,
    StepRecord,
)
from ddpprobe.rundir import framing, paths
from ddpprobe.rundir.journal import JournalTail
from ddpprobe.store import commit, manifest
from ddpprobe.store.captures.fold import CaptureFold
from ddpprobe.store.reader import StoredGroup
from ddpprobe.store.root import Root
from ddpprobe.store.segments import segments_of, sources_of
from ddpprobe.store.writer import StoreWriter

from ..made_runs import ANOMALY, DEAD_PID, NODE, Made, bad, key, record, tree

KILLS = int(os.environ.get("DDPPROBE_TEST_KILLS", "8"))  # a longer search by hand
RANK_0 = "attempt_000/rank_00000"


def writer(made: Made, block: int = 4) -> StoreWriter:
    return StoreWriter(made.run, NODE, block=block, durable=False)


def sealed(made: Made, block: int = 4) -> StoreWriter:
    folder = writer(made, block)
    folder.seal()
    folder.close()
    assert folder.damaged == {}
    return folder


def stored(made: Made, name: str = RANK_0) -> list[StepRecord]:
    group = StoredGroup(made.run, name)
    records = list(group.records(made.attempt))
    assert group.lost == []
    return records


names = st.text(max_size=6)  # any text: NUL, backslashes, and with surrogates also what no UTF-8 is
odd_names = st.text(st.characters(exclude_categories=()), max_size=4)
any_site = st.builds(
    Site, names | odd_names, st.sampled_from(KINDS), names, st.sampled_from(PLACEMENTS),
    st.booleans(), st.sampled_from(["float32", "bfloat16", ""]),
)  # fmt: skip
counts = st.integers(0, 2**62)
checksums = st.integers(-(2**63), 2**63 - 1)
digests = st.dictionaries(st.tuples(odd_names, names), checksums, max_size=3)
first_bads = st.builds(
    FirstBad,
    *(counts, counts, st.sampled_from(PHASES), counts, st.integers(0, 9)),
    *(st.none() | odd_names, st.none() | st.sampled_from(KINDS), names),
    *(counts, counts, counts, counts),
)


@st.composite
def any_records(draw: st.DrawFn, rank: int) -> list[StepRecord]:
    tables = draw(st.lists(st.lists(any_site, max_size=4).map(tuple), min_size=1, max_size=3))
    steps = draw(st.lists(st.integers(0, 40), min_size=1, max_size=14, unique=True))
    out = []
    for step in sorted(steps):
        table = draw(st.sampled_from(tables))
        seed = np.random.default_rng(draw(st.integers(0, 9)))
        values = seed.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 1e300], (len(table), len(VALUES)))
        scalars = draw(st.dictionaries(names, st.floats(), max_size=3))
        made = StepRecord(
            attempt=0, step=step, ranks=(rank,), wall_time_ns=draw(counts),
            sampled=draw(st.booleans()), sites=table,
            counts=seed.integers(0, 2**62, (len(table), len(COUNTS))), values=values,
            scalars={rank: scalars} if scalars else {},
            first_bad=draw(st.none() | first_bads),
            skipped=draw(st.booleans()), partial=draw(st.booleans()),
            digests={k: {c: 1 << rank} for k, c in sorted(draw(digests).items())},
        )  # fmt: skip
        if draw(st.booleans()):  # an alarm ahead of it, which it replaces
            out.append(
                record(rank, step, 0, sampled=False, partial=True, first_bad=bad(rank, step))
            )
        out.append(made)
    return out


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(records=any_records(rank=0), tear=st.integers(0, 200), early=st.booleans())
def test_what_a_torn_journal_still_holds_comes_back_bit_for_bit(
    records: list[StepRecord], tear: int, early: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        made = Made(Path(directory) / "run", ranks=1, segment_frames=5)
        made.write(records)
        made.close(cleanly=False)
        source = sources_of(made.run, 0)[0]
        newest = source.directory / f"{segments_of(source)[-1]:08d}.wal"
        os.truncate(newest, max(0, newest.stat().st_size - tear))
        kept = {r.step: r for r in journaled(made)}
        folder = writer(made, block=3)
        if early:
            folder.fold()
        folder.seal()
        folder.close()
        assert [key(r) for r in stored(made)] == [key(kept[s]) for s in sorted(kept)]
        assert segments_of(source) == []


def journaled(made: Made, rank: int = 0) -> list[StepRecord]:
    tail = JournalTail(made.run.rank_journal(0, NODE, rank))
    frames = [f for f in tail.poll() if f.type == framing.RECORD]
    found = [framing.decode_record(f.payload, tail.tables) for f in frames]
    tail.close()
    return found


KILLED = """
import os, signal, sys
from pathlib import Path
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store import commit
from ddpprobe.store.writer import StoreWriter  # imports zarr, but uses it only in the children

commit.LINES = 2  # every log is written anew, too
EVENTS = {"open", "os.rename", "os.remove", "os.truncate", "os.mkdir"}

def fold(path, kill_at):
    seen = 0
    def hook(event, args):
        nonlocal seen
        if event in EVENTS and str(args[0]).startswith((path, "zarr", ".", "attempt", "c", "0")):
            seen += 1
            if seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    folder = StoreWriter(RunDir(Path(path)), "node_0000", block=4, durable=False)
    folder.fold()
    folder.seal()
    print(seen, flush=True)

for line in sys.stdin:
    path, kill_at = line.rsplit(" ", 1)
    child = os.fork()
    if child == 0:
        fold(path, int(kill_at))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print("killed" if os.WIFSIGNALED(status) else "done", flush=True)
"""


def test_a_fold_killed_at_any_file_operation_is_repeated_to_the_same_bytes(tmp_path: Path) -> None:
    made = Made(tmp_path / "made", ranks=1).whole(10, grow_at=6)
    made.close()
    rng = random.Random(0)
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], stdin=-1, stdout=-1, text=True
    ) as process:

        def fold(path: Path, kill_at: int) -> tuple[str, str]:
            assert process.stdin
            assert process.stdout
            process.stdin.write(f"{path} {kill_at}\n")
            process.stdin.flush()
            said = process.stdout.readline().strip()
            return (said, process.stdout.readline().strip()) if said.isdecimal() else ("", said)

        whole = tmp_path / "whole"
        shutil.copytree(made.path, whole)
        operations = int(fold(whole, 0)[0])
        expected = tree(whole / "run.zarr")
        assert operations > 200
        for kill_at in sorted(rng.sample(range(1, operations), KILLS)):
            path = tmp_path / f"killed_{kill_at}"
            shutil.copytree(made.path, path)
            assert fold(path, kill_at) == ("", "killed")
            fold(path, rng.randrange(1, operations))  # its successor may be killed as well
            assert fold(path, 0)[1] == "done"
            assert tree(path / "run.zarr") == expected, kill_at
            shutil.rmtree(path)
        assert process.stdin
        process.stdin.close()


def test_a_disk_that_refuses_at_any_write_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Made(tmp_path / "whole", ranks=1).whole(10)
    whole.close()
    made = Made(tmp_path / "made", ranks=1).whole(10)
    made.close()
    sealed(whole)
    allowed, refuses = 0, (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)

    def write(fd: int, parts: list[bytes], real: object = paths.write_all) -> None:
        nonlocal allowed
        allowed -= 1
        if allowed < 0:
            os.write(fd, parts[0][: len(parts[0]) // 2])
            raise OSError(refuses[allowed % len(refuses)], "as a disk says it")
        real(fd, parts)  # type: ignore[operator]

    monkeypatch.setattr(paths, "write_all", write)
    monkeypatch.setattr(commit, "LINES", 2)
    folder, refusals = writer(made), 0
    for step in range(200):
        allowed = 5 + 9 * step
        refuses = (*refuses[1:], refuses[0])
        try:
            folder.seal()
        except OSError as error:
            refusals += error.errno in refuses
        else:
            break
    folder.close()
    assert refusals > 5
    assert tree(made.run.store) == tree(whole.run.store)


def test_the_log_of_a_long_run_stays_short_and_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    for lines in (4, 10_000):
        monkeypatch.setattr(commit, "LINES", lines)
        made = Made(tmp_path / str(lines), ranks=1, segment_frames=4)
        folder = writer(made)
        for step in range(80):
            made.write([record(0, step)])
            if step % 8 == 7:
                folder.fold()
        folder.close()
        made.close()
        sealed(made)
        said.append(manifest.Manifest(manifest.manifest_path(made.run, RANK_0)))
        assert [key(r) for r in stored(made)] == [key(record(0, step)) for step in range(80)]
    short, long = said
    assert short.lines <= 5
    assert long.lines > 10
    assert short.state == long.state


def test_what_a_disk_refuses_of_one_attempt_keeps_no_other_from_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attempt in (0, 1):
        made = Made(tmp_path, ranks=1, attempt=attempt).whole(10)
        made.close()
    run, refused, prepare = made.run, {"captures", "records"}, Root.prepare

    def captures(_: object, attempt: int, *, final: bool) -> None:
        if attempt == 0 and "captures" in refused:
            raise OSError(errno.ENOSPC, "No space left on device")

    def prepared(root: Root, attempt: int) -> None:
        if attempt == 0 and "records" in refused:
            raise OSError(errno.EIO, "Input/output error")
        prepare(root, attempt)

    monkeypatch.setattr(CaptureFold, "fold", captures)
    monkeypatch.setattr(Root, "prepare", prepared)
    folder = writer(made)
    with pytest.raises(OSError, match="Input/output error"):
        folder.seal()
    assert [key(r) for r in stored(made, "attempt_001/rank_00000")] == [
        key(record(0, step, attempt=1)) for step in range(10)
    ]
    assert {s.rank for s in sources_of(run, 0) if segments_of(s)} == {None, 0}
    refused.remove("records")
    with pytest.raises(OSError, match="No space left"):
        folder.seal()
    assert len(list(StoredGroup(run, RANK_0).records(0))) == 10
    # A later daemon sees by them that there is something to seal.
    assert {s.rank for s in sources_of(run, 0) if segments_of(s)} == {None, 0}
    refused.clear()
    folder.seal()
    folder.close()
    assert not [s for n in (0, 1) for s in sources_of(run, n) if segments_of(s)]
    group = StoredGroup(run, RANK_0)
    assert [key(r) for r in group.records(0)] == [key(record(0, step)) for step in range(10)]


def test_new_sites_extend_the_axis_and_rewrite_no_block(tmp_path: Path) -> None:
    made = Made(tmp_path, ranks=1)
    made.write(record(0, step) for step in range(40))
    folder = writer(made)
    folder.fold()
    blocks = {k: v for k, v in tree(made.run.store).items() if "/counts/c/" in k}
    assert len(blocks) >= 4
    made.write(record(0, step, n=200) for step in range(40, 60))
    made.close()
    folder.seal()
    folder.close()
    after = tree(made.run.store)
    assert {k: after[k] for k in blocks} == blocks
    expected = [record(0, s, n=3 if s < 40 else 200) for s in range(60)]
    assert [key(r) for r in stored(made)] == [key(r) for r in expected]


def test_an_anomaly_is_in_the_store_after_the_next_fold(tmp_path: Path) -> None:
    made = Made(tmp_path, ranks=1)
    made.tell(framing.ANOMALY, ANOMALY)
    folder = writer(made)
    assert folder.fold() == 1
    group = StoredGroup(made.run, "attempt_000/anomalies")
    (found,) = group.anomalies()
    assert framing.encode_anomaly(found) == framing.encode_anomaly(ANOMALY)
    assert folder.fold() == 0
    folder.close()
    made.close()


def test_no_segment_goes_that_a_daemon_which_lags_has_still_to_read(tmp_path: Path) -> None:
    """It was the only one who would have merged and judged its records."""
    made = Made(tmp_path, ranks=1, segment_frames=8)
    made.write(record(0, step) for step in range(80))
    (source,) = [s for s in sources_of(made.run, 0) if s.rank == 0]
    every = segments_of(source)
    assert len(every) > 6
    folder = writer(made)
    for reading in (-1, 2, 2, 5):
        folder.fold({(0, 0): reading})
        assert set(every[max(reading, 0) :]) <= set(segments_of(source))
    assert every[0] not in segments_of(source)
    assert {r.step for r in stored(made)} <= set(range(5 * 8))
    folder.fold({(0, 0): every[-1]})
    assert len(segments_of(source)) < len(every) / 2
    made.close()
    folder.seal()
    folder.close()
    assert [key(r) for r in stored(made)] == [key(record(0, step)) for step in range(80)]


def test_a_segment_goes_only_when_its_records_are_committed(tmp_path: Path) -> None:
    made = Made(tmp_path, ranks=1, segment_frames=8)
    made.write(record(0, step) for step in range(60))
    folder = writer(made, block=16)
    folder.fold()
    committed = {r.step for r in stored(made)}
    left = {r.step for r in journaled(made)}
    assert committed
    assert committed | left == set(range(60))
    assert len(committed) % 16 == 0
    folder.close()
    made.close()


def test_the_newest_segment_of_a_living_writer_stays(tmp_path: Path) -> None:
    made = Made(tmp_path, ranks=1, pid=os.getpid())
    made.write(record(0, step) for step in range(20))
    folder = writer(made)
    folder.seal()
    assert len(segments_of(sources_of(made.run, 0)[0])) == 1
    made.write(record(0, step) for step in range(20, 30))  # it was not dead
    made.close()
    folder.seal()
    folder.close()
    assert [r.step for r in stored(made)] == list(range(30))


def test_a_daemon_s_journal_stays_as_long_as_a_rank_may_need_its_successor(tmp_path: Path) -> None:
    made = Made(tmp_path, ranks=1).whole(60)
    folder = writer(made)
    folder.fold()
    daemon = next(s for s in sources_of(made.run, 0) if s.rank is None)
    assert segments_of(daemon)[0] == 0
    made.close()
    folder.seal()
    folder.close()
    assert segments_of(daemon) == []


def test_a_rank_that_died_before_its_first_record_is_in_the_store(tmp_path: Path) -> None:
    made = Made(tmp_path, ranks=1)
    made.writer(0).append_json(framing.LIFE, {"event": "fuse", "component": "hooks"})
    made.close(cleanly=False)
    sealed(made)
    group = StoredGroup(made.run, RANK_0)
    assert group.rows == 0
    assert group.meta["pid"] == DEAD_PID
    events = StoredGroup(made.run, f"attempt_000/{NODE}").events()
    assert [what["event"] for _, _, what in events] == ["fuse"]


def test_a_damaged_group_is_left_alone_and_the_others_go_on(tmp_path: Path) -> None:
    made = Made(tmp_path, ranks=2)
    made.write(record(r, s) for s in range(40) for r in range(2))
    folder = writer(made)
    folder.fold()
    path = made.run.path / "manifest" / "attempt_000.rank_00000.log"
    path.write_bytes(path.read_bytes()[:50] + b"\xff" + path.read_bytes()[51:])
    made.write(record(r, s) for s in range(40, 80) for r in range(2))
    made.close()
    folder.seal()
    folder.close()
    assert set(folder.damaged) == {RANK_0}
    assert segments_of(sources_of(made.run, 0)[0])  # its journal is kept
    assert len(stored(made, "attempt_000/rank_00001")) == 80


def test_files_are_nobody_else_s_whatever_the_umask(tmp_path: Path) -> None:
    made = Made(tmp_path / "run", ranks=1).whole(8)
    made.close()
    old = os.umask(0)
    try:
        sealed(made)
    finally:
        os.umask(old)
    for path in (p for d in (made.run.store, tmp_path / "run/manifest") for p in d.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_the_fold_of_a_new_attempt_is_not_hidden_by_the_seal_of_the_old_one(
    tmp_path: Path,
) -> None:
    import zarr

    first = Made(tmp_path, ranks=1)
    first.write([record(0, 0)])
    first.close()
    sealed(first)
    second = Made(tmp_path, ranks=1, attempt=1)
    second.write(record(0, step, attempt=1) for step in range(40))
    folder = writer(second)
    folder.fold()
    root = zarr.open_group(second.run.store, mode="r")
    assert root["attempt_001/rank_00000/step"].shape[0] > 0
    folder.close()
    second.close()
    sealed(second)
    root = zarr.open_group(second.run.store, mode="r")
    assert root["attempt_001/rank_00000/step"].shape == (40,)
    assert root.metadata.consolidated_metadata is not None


def test_when_the_first_rank_journal_goes_all_that_was_merged_is_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a rank's journal tells a daemon that follows a killed one that there is work left."""
    made = Made(tmp_path, ranks=2).whole(10)
    made.close()

    def killed(*_: object, **__: object) -> None:
        raise SystemExit

    monkeypatch.setattr(StoreWriter, "_delete", killed)
    with pytest.raises(SystemExit):
        writer(made).seal()
    assert [step for step, _ in StoredGroup(made.run, "attempt_000/merged").steps()] == [*range(10)]
    assert len(StoredGroup(made.run, "attempt_000/anomalies").anomalies()) == 1
