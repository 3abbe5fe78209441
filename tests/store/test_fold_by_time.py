"""What fills no block of the store goes in after a minute: who loses the machine lost no more."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddpprobe.reader.run import open_run
from ddpprobe.reader.verify.verify import verify
from ddpprobe.records.step import Anomaly
from ddpprobe.rundir import framing, paths
from ddpprobe.store import record_fold, writer
from ddpprobe.store.manifest import Manifest, manifest_path
from ddpprobe.store.reader import StoredGroup
from ddpprobe.store.segments import read_segment, segment_path
from ddpprobe.store.writer import REST_SECONDS, StoreWriter

from ..clouds import Cloud, serving, upload, url_of
from ..made_runs import ANOMALY, NODE, Made, bad, head_merge, key, record, tree

GROUPS = ("rank_00000", "rank_00001", "merged")


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Made]:
    """A run whose ranks, this process, are alive."""
    made = Made(tmp_path / "run", pid=os.getpid(), segment_frames=64)
    yield made
    made.close()


def folder(made: Made, clock: Clock, block: int = 8) -> StoreWriter:
    return StoreWriter(made.run, NODE, block=block, durable=False, clock=clock)


def go_on(made: Made, start: int, stop: int) -> None:
    for step in range(start, stop):
        parts = [record(rank, step) for rank in range(made.ranks)]
        made.write(parts)
        made.tell(framing.RECORD, head_merge(parts))


def rows(made: Made) -> list[int]:
    return [StoredGroup(made.run, f"attempt_000/{name}").rows for name in GROUPS]


def test_what_fills_no_block_goes_into_the_store_after_a_minute(live, clock):
    folding = folder(live, clock)
    go_on(live, 0, 5)
    segments = [live.writer(rank).segment for rank in range(2)]
    assert folding.fold() == 0
    clock.now += REST_SECONDS - 1
    assert folding.fold() == 0
    assert rows(live) == [0, 0, 0]
    clock.now += 1
    assert folding.fold() >= 15
    assert rows(live) == [5, 5, 5]
    # The ranks write on to the segments that they had.
    assert [live.writer(rank).segment for rank in range(2)] == segments
    go_on(live, 5, 6)
    clock.now += REST_SECONDS / 2
    folding.fold()
    assert rows(live) == [5, 5, 5]
    opened = open_run(live.path)
    for rank in (None, 0, 1):
        assert [r.step for r in opened.records(rank)] == list(range(6))
    assert verify(opened).ok


def test_what_comes_later_fills_the_same_blocks_to_the_same_bytes(tmp_path, clock):
    stores = []
    for by_time in (True, False):
        made = Made(tmp_path / f"run-{by_time}", pid=os.getpid(), segment_frames=7)
        folding = folder(made, clock)
        go_on(made, 0, 1)
        folding.fold()
        step = 1
        for many in (2, 1, 4, 0, 9, 2, 5, 1):
            go_on(made, step, step + many)
            step += many
            clock.now += REST_SECONDS * by_time
            folding.fold()
            if by_time:
                assert rows(made) == [step] * 3
                assert [r.step for r in open_run(made.path).records()] == list(range(step))
        folding.seal()
        made.close()
        folder(made, clock).seal()
        assert verify(open_run(made.path)).ok
        stores.append(
            {k: v for k, v in tree(made.run.store).items() if "rank_" in k or "merged" in k}
        )
        assert len(live_segments(made)) == made.ranks  # the newest ones: this process is alive
    one, other = stores
    assert one.keys() == other.keys()
    assert [k for k in one if "/c/" in k and one[k] != other[k]] == []


def live_segments(made: Made) -> list[Path]:
    return [p for r in range(2) for p in made.run.rank_journal(0, NODE, r).glob("*.wal")]


def test_an_alarm_that_was_folded_is_replaced_by_the_full_record_of_its_step(live, clock):
    folding = folder(live, clock)
    live.write([record(0, 0), record(0, 1)])
    folding.fold()
    alarm = replace(record(0, 2, 0), first_bad=bad(0, 2), partial=True, scalars={}, digests={})
    live.write([alarm])
    clock.now += REST_SECONDS
    folding.fold()
    assert [key(r) for r in open_run(live.path).records(0)][-1] == key(alarm)
    full = record(0, 2, first_bad=bad(0, 2))
    live.write([full, record(0, 3)])
    clock.now += REST_SECONDS
    folding.fold()
    opened = open_run(live.path)
    found = list(opened.records(0))
    assert [r.step for r in found] == [0, 1, 2, 3]
    assert key(found[2]) == key(full)
    series = opened.series("blocks.0.mlp", "sum", rank=0)
    assert series.steps.tolist() == [0, 1, 2, 3]
    assert verify(opened).ok


def test_a_group_waits_for_its_first_sites_because_its_chunks_are_chosen_by_them(live, clock):
    folding = folder(live, clock)
    live.write(
        [replace(record(0, 0, 0), first_bad=bad(0, 0), partial=True, scalars={}, digests={})]
    )
    folding.fold()
    clock.now += REST_SECONDS
    folding.fold()
    assert rows(live)[0] == 0
    live.write([record(0, 1, 200)])
    clock.now += REST_SECONDS
    folding.fold()
    assert rows(live)[0] == 2
    document = json.loads((live.run.store / "attempt_000/rank_00000/counts/zarr.json").read_text())
    assert document["chunk_grid"]["configuration"]["chunk_shape"][:2] == [8, 256]


def test_nothing_new_is_nothing_written(live, clock):
    folding = folder(live, clock)
    go_on(live, 0, 5)
    folding.fold()
    for _ in range(2):
        clock.now += REST_SECONDS
        folding.fold()
    before = {k: os.stat(live.path / k).st_mtime_ns for k in tree(live.path)}
    clock.now += REST_SECONDS
    assert folding.fold() == 0
    assert {k: os.stat(live.path / k).st_mtime_ns for k in tree(live.path)} == before


def test_slow_groups_are_written_one_at_a_time_and_take_a_share_of_the_time(
    live, clock, monkeypatch
):
    folding = folder(live, clock)
    go_on(live, 0, 3)
    real = record_fold.RecordFold.fold

    def slow(self, *args, **options):
        clock.now += 1.0
        return real(self, *args, **options)

    monkeypatch.setattr(writer.RecordFold, "fold", slow)
    folding.fold()
    clock.now += REST_SECONDS
    written = []
    for _ in range(3):
        folding.fold()
        written.append(sum(n > 0 for n in rows(live)))
        folding.fold()
        assert sum(n > 0 for n in rows(live)) == written[-1]  # it rests
        clock.now += 1.0 / writer.SHARE
    assert written == [1, 2, 3]


def test_a_table_whose_record_the_disk_refused_is_not_counted_as_folded(live, clock):
    """Its number is given to the next frame, as the writer takes it back."""
    go_on(live, 0, 2)
    path = segment_path(live.run.rank_journal(0, NODE, 0), 0)
    end = read_segment(path.parent, 0).end
    table = framing.encode_frame(framing.tables_of(record(0, 2, 5))[0].type, end, b"half")
    with path.open("ab") as file:
        file.write(table)
    folding = folder(live, clock)
    folding.fold()
    clock.now += REST_SECONDS
    folding.fold()
    state = Manifest(manifest_path(live.run, "attempt_000/rank_00000")).state
    assert state.consumed["rank_00000"].through == end
    os.truncate(path, path.stat().st_size - len(table))
    go_on(live, 2, 3)
    clock.now += REST_SECONDS
    folding.fold()
    assert [r.step for r in StoredGroup(live.run, "attempt_000/rank_00000").records(0)] == [0, 1, 2]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Cloud]:
    with serving(tmp_path_factory.mktemp("cloud")) as cloud:
        yield cloud


def test_a_machine_that_is_lost_has_left_its_numbers_and_anomalies_at_the_url(
    server, request, live, clock, tmp_path, monkeypatch
):
    """No segment was closed, no block is full, and nobody had the time to seal."""
    url = url_of(request)
    with server.given(tmp_path, monkeypatch):
        identity = json.loads(live.run.run_json.read_text())
        paths.write_json(live.run.run_json, {**identity, "destination": url})
        bringing, folding = upload(live.run, url), folder(live, clock, block=256)
        go_on(live, 0, 4)
        live.tell(framing.ANOMALY, ANOMALY)
        folding.fold()
        bringing.bring()
        clock.now += REST_SECONDS
        folding.fold()
        bringing.bring()
        assert bringing.missing == []
        go_on(live, 4, 6)  # less than a minute before the end: these are lost
        shutil.rmtree(live.path)
        opened = open_run(url)
        for rank in (0, 1):
            found = [key(r) for r in opened.records(rank)]
            assert found == [key(record(rank, step)) for step in range(4)]
        assert [r.step for r in opened.records()] == list(range(4))
        assert opened.series("blocks.1.mlp", "rms").steps.tolist() == list(range(4))
        told: list[Anomaly] = opened._merged_reader.daemon_anomalies(0)
        assert [(a.detector, a.step) for a in told] == [("nonfinite", 3)]
        assert verify(opened).ok
