"""The journal loses at most the frame being written, whatever kills its writer."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpprobe.records import events
from ddpprobe.records.step import Site, StepRecord, empty_rows
from ddpprobe.rundir import framing, journal
from ddpprobe.rundir.journal import JournalTail, JournalWriter


def record(step: int, sites: tuple[Site, ...]) -> StepRecord:
    counts, values = empty_rows(len(sites))
    counts[:, 0] = step
    return StepRecord(0, step, (0,), step, True, sites, counts, values)


def read(tail: JournalTail) -> list[StepRecord]:
    return [
        framing.decode_record(f.payload, tail.tables)
        for f in tail.poll()
        if f.type == framing.RECORD
    ]


SITES = (Site("a", "output"), Site("b", "output"))


def test_a_tail_sees_every_record_once_and_in_order_while_it_is_written(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "j", {"rank": 0}, segment_frames=8)
    tail, seen = JournalTail(tmp_path / "j"), []
    for step in range(60):
        assert writer.append_record(record(step, SITES if step < 30 else (*SITES, SITES[0])))
        if step % 7 == 0:
            seen += read(tail)
    seen += read(tail)
    assert [r.step for r in seen] == list(range(60))
    assert all((r.counts[:, 0] == r.step).all() for r in seen)
    assert len(seen[-1].sites) == 3
    writer.close()
    tail.close()
    assert tail.damage == {}


def test_each_segment_can_be_read_alone(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "j", {"rank": 0}, segment_frames=8)
    for step in range(40):
        writer.append_record(record(step, SITES))
    writer.close()
    last = journal.segments_of(tmp_path / "j")[-1]
    tail = JournalTail(tmp_path / "j", first_segment=last)
    frames = list(tail.poll())
    assert [f.type for f in frames[:3]] == [framing.META, framing.SITES, framing.RECORD]
    tail.close()


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(1, 400))
def test_a_torn_tail_costs_the_torn_frames_only(tmp_path_factory, cut: int) -> None:
    directory = tmp_path_factory.mktemp("j") / "j"
    writer, path = JournalWriter(directory, {}), directory / "00000000.wal"
    ends = []
    for step in range(20):
        writer.append_record(record(step, SITES))
        ends.append(path.stat().st_size)
    writer.close()
    size = ends[-1] - min(cut, ends[-1])
    os.truncate(path, size)
    tail = JournalTail(directory)
    assert [r.step for r in read(tail)] == [s for s in range(20) if ends[s] <= size]
    tail.close()
    assert tail.damage == {}


def test_a_flipped_byte_is_reported_and_reading_goes_on_behind_it(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "j", {}, segment_frames=8)
    for step in range(40):
        writer.append_record(record(step, SITES))
    writer.close()
    path = tmp_path / "j" / "00000001.wal"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    tail = JournalTail(tmp_path / "j")
    steps = [r.step for r in read(tail)]
    tail.close()
    ((name, why),) = tail.damage.items()
    assert (name, why.rstrip("0123456789")) == ("00000001.wal", "checksum mismatch at byte ")
    assert steps[-1] == 39
    assert steps == sorted(set(steps))
    assert len(steps) < 40


def test_a_segment_that_is_gone_is_said_and_is_none_where_reading_begins(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "j", {}, segment_frames=8)
    tail, folded = JournalTail(tmp_path / "j"), []
    for step in range(40):
        writer.append_record(record(step, SITES))
        if step == 5:
            folded = [r.step for r in read(tail)]
    writer.close()
    first, second = journal.segments_of(tmp_path / "j")[:2]
    gone = tmp_path / "j" / f"{second:08d}.wal"
    gone.unlink()
    steps = folded + [r.step for r in read(tail)]
    tail.close()
    ((place, why),) = tail.damage.items()
    assert place == f"before {second + 1:08d}.wal"
    assert why.endswith("frames are missing")
    assert int(why.split()[0]) == 8
    assert len(steps) < 40
    (tmp_path / "j" / f"{first:08d}.wal").unlink()
    later = JournalTail(tmp_path / "j")
    assert read(later)
    later.close()
    assert later.damage == {}


class FullDisk:
    """`os.pwrite` on a disk with room for so many bytes, which writes short before it refuses."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._pwrite = os.pwrite

    def __call__(self, fd: int, data: bytes, offset: int) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._pwrite(fd, data[: self.room], offset)
        self.room -= written
        return written


def test_a_full_disk_drops_whole_frames_counts_them_and_recovers(tmp_path, monkeypatch) -> None:
    writer = JournalWriter(tmp_path / "j", {})
    disk = FullDisk(1000)
    monkeypatch.setattr(journal.os, "pwrite", disk)
    monkeypatch.setattr(journal, "BACK_OFF_SECONDS", 0.0)
    kept = [step for step in range(20) if writer.append_record(record(step, SITES))]
    assert 0 < len(kept) < 20
    assert writer.dropped["ENOSPC"] == 20 - len(kept)
    disk.room = 1 << 20
    assert writer.append_record(record(99, SITES))
    writer.close()
    tail = JournalTail(tmp_path / "j")
    assert [r.step for r in read(tail)] == [*kept, 99]
    tail.close()
    assert tail.damage == {}


def test_a_segment_that_could_not_be_headed_is_not_left_behind(tmp_path, monkeypatch) -> None:
    writer = JournalWriter(tmp_path / "j", {"rank": 3}, segment_frames=3)
    writer.append_record(record(0, SITES))  # META, SITES, RECORD: the next one opens a segment
    disk = FullDisk(0)
    monkeypatch.setattr(journal.os, "pwrite", disk)
    monkeypatch.setattr(journal, "BACK_OFF_SECONDS", 0.0)
    assert not writer.append_record(record(1, SITES))
    assert journal.segments_of(tmp_path / "j") == [0]
    disk.room = 1 << 20
    assert writer.append_record(record(2, SITES))
    writer.close()
    tail = JournalTail(tmp_path / "j")
    frames = list(tail.poll())
    tail.close()
    assert [f.type for f in frames].count(framing.META) == len(journal.segments_of(tmp_path / "j"))
    assert tail.damage == {}


def test_after_a_failure_the_disk_is_left_alone_for_a_while(tmp_path, monkeypatch) -> None:
    writer = JournalWriter(tmp_path / "j", {})
    disk = FullDisk(0)
    monkeypatch.setattr(journal.os, "pwrite", disk)
    for step in range(5):
        assert not writer.append_record(record(step, SITES))
    assert writer.dropped == {"ENOSPC": 1, "back_off": 4}
    writer.close()


def test_a_journal_never_continues_that_of_another_writer(tmp_path: Path) -> None:
    JournalWriter(tmp_path / "j", {}).close()
    with pytest.raises(FileExistsError):
        JournalWriter(tmp_path / "j", {})


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        JournalWriter(tmp_path / "a" / "j", {}).close()
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a" / "j" / "00000000.wal").stat().st_mode & 0o777 == 0o600


WRITER = """
import sys
from pathlib import Path
from ddpprobe.rundir.journal import JournalWriter
from ddpprobe.records.step import Site, StepRecord, empty_rows
writer = JournalWriter(Path(sys.argv[1]), {}, segment_frames=16)
sites = tuple(Site(str(i), "output") for i in range(200))
step = 0
while True:
    counts, values = empty_rows(len(sites))
    counts[:, 0] = step
    writer.append_record(StepRecord(0, step, (0,), 0, True, sites, counts, values))
    print(step, flush=True)
    step += 1
"""


@pytest.mark.parametrize("draw", range(5))
def test_no_acknowledged_record_is_lost_to_kill_9(tmp_path: Path, draw: int) -> None:
    random = np.random.default_rng(draw)
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "j")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout as out:
        out.readline()
        time.sleep(float(random.uniform(0.02, 0.2)))
        process.send_signal(signal.SIGKILL)
        acknowledged = [int(line) for line in out.read().split()]
    process.wait()
    tail = JournalTail(tmp_path / "j")
    steps = [r.step for r in read(tail)]
    tail.close()
    assert steps == list(range(len(steps)))
    assert len(steps) > max(acknowledged, default=0)
    assert tail.damage == {}


def test_a_long_frame_torn_by_a_full_disk_leaves_nothing_behind_a_shorter_one(
    tmp_path, monkeypatch
) -> None:
    """What is written next is shorter: bytes of the torn frame after it would be damage."""
    writer = JournalWriter(tmp_path / "j", {})
    assert writer.append_json(framing.SAMPLE, {"step": 0})
    disk = FullDisk(4000)
    monkeypatch.setattr(journal.os, "pwrite", disk)
    monkeypatch.setattr(journal, "BACK_OFF_SECONDS", 0.0)
    assert not writer.append(framing.SAMPLE, b"x" * 5000)
    disk.room = 1 << 20
    assert writer.append_json(framing.SAMPLE, {"step": 1})
    assert writer.append_record(record(2, SITES))
    writer.close()
    tail = JournalTail(tmp_path / "j")
    frames = list(tail.poll())
    tail.close()
    assert tail.damage == {}
    assert [f.seq for f in frames] == [0, 1, 2, 3, 4]
    assert [f.payload for f in frames[1:3]] == [b'{"step":0}', b'{"step":1}']


def test_a_segment_grows_with_all_the_tables_that_it_repeats(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "j", {}, segment_frames=10**6, segment_bytes=1)
    large = tuple(Site(f"{'x' * 80}.{i}", "output") for i in range(40))
    assert writer.append_record(record(0, large))
    head = framing.tables_of(record(0, large))[0].payload
    step = 1
    while writer.segment == 0:
        assert writer.append_record(record(step, SITES))
        step += 1
    writer.close()
    size = (tmp_path / "j" / "00000000.wal").stat().st_size
    assert size >= journal.SEGMENT_HEADS * len(head)


def test_a_segment_is_closed_at_the_size_that_was_given(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "j", {}, segment_bytes=10_000)
    for _ in range(8):
        assert writer.append(framing.LIFE, b"x" * 2_000)
    writer.close()
    assert writer.segment == 1


def test_frames_beyond_what_is_read_at_once_are_read_from_closed_segments_too(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(journal, "READ_BYTES", 64)  # less than one frame
    writer = JournalWriter(tmp_path / "j", {}, segment_frames=20)
    for step in range(50):
        assert writer.append_record(record(step, SITES))
    writer.close()
    tail = JournalTail(tmp_path / "j")
    assert [r.step for r in read(tail)] == list(range(50))
    tail.close()
    assert tail.damage == {}


def test_an_event_comes_back_as_it_was_written(tmp_path: Path) -> None:
    said = events.PausedEvent(reason="evaluation", time_ns=7)
    writer = JournalWriter(tmp_path / "j", {})
    assert writer.append_event(said)
    writer.close()
    tail = JournalTail(tmp_path / "j")
    (life,) = [f.json() for f in tail.poll() if f.type == framing.LIFE]
    tail.close()
    assert life == events.to_json(said)
    assert life["reason"] == "evaluation"


def test_a_table_of_no_sense_costs_no_other_frame(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "j", {})
    assert writer.append(framing.SITES, b"no table")
    assert writer.append_record(record(1, SITES))
    writer.close()
    tail = JournalTail(tmp_path / "j")
    assert [r.step for r in read(tail)] == [1]
    tail.close()
    assert tail.damage == {}


def test_an_error_without_a_number_is_counted_by_a_word(tmp_path: Path, monkeypatch) -> None:
    writer = JournalWriter(tmp_path / "j", {})

    def refuse(*_: object) -> int:
        raise OSError("no number")

    monkeypatch.setattr(journal.os, "pwrite", refuse)
    assert not writer.append_record(record(0, SITES))
    assert writer.dropped == {"io": 1}
    writer.close()


def test_other_files_are_no_segments(tmp_path: Path) -> None:
    for name in ("00000002.wal", "00000001.wal", "00000003.tmp.wal", "lost.wal", "00000004"):
        (tmp_path / name).touch()
    assert journal.segments_of(tmp_path) == [1, 2]


def test_what_another_thread_appends_in_the_middle_of_an_append_comes_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = JournalWriter(tmp_path / "j", {})
    other = threading.Thread(target=writer.append_event, args=(events.PausedEvent(reason="other"),))
    write = os.pwrite

    def interrupted(fd: int, data: bytes, at: int) -> int:
        if other.ident is None:
            other.start()
            other.join(0.2)  # it waits, or has done it
        return write(fd, data, at)

    monkeypatch.setattr(journal.os, "pwrite", interrupted)
    assert writer.append_record(record(1, SITES))
    other.join()
    writer.close()
    tail = JournalTail(tmp_path / "j")
    frames = list(tail.poll())
    tail.close()
    assert [f.seq for f in frames] == list(range(len(frames)))
    kinds = [f.type for f in frames]
    assert kinds[-2:] == [framing.RECORD, framing.LIFE]


def frames_of(directory: Path, first_segment: int = 0) -> list[framing.Frame]:
    tail = JournalTail(directory, first_segment)
    found = list(tail.poll())
    tail.close()
    assert tail.damage == {}
    return found


def test_a_successor_goes_on_where_the_dead_writer_ended(tmp_path: Path) -> None:
    first = JournalWriter(tmp_path / "j", {"rank": 0})
    assert first.append_record(record(0, SITES))
    first.close()
    seqs = [f.seq for f in frames_of(tmp_path / "j")]
    after = JournalWriter(tmp_path / "j", {"rank": 0}, first_segment=3, first_seq=seqs[-1] + 1)
    assert (after.segment, after.directory, after.place) == (3, tmp_path / "j", tmp_path / "j")
    assert after.append_record(record(1, SITES))
    after.close()
    assert journal.segments_of(tmp_path / "j") == [0, 3]
    frames = frames_of(tmp_path / "j")
    assert [f.seq for f in frames] == list(range(6))
    assert [f.type for f in frames] == [framing.META, framing.SITES, framing.RECORD] * 2
    assert len(frames_of(tmp_path / "j", first_segment=1)) == 3


@pytest.mark.parametrize(("frames", "first"), [(1, 1), (2, 2), (5, 5)])
def test_a_segment_has_no_more_frames_than_it_may(tmp_path: Path, frames: int, first: int) -> None:
    writer = JournalWriter(tmp_path / "j", {}, segment_frames=frames)
    for _ in range(12):
        assert writer.append(framing.LIFE, b"{}")
    writer.close()
    sizes = [
        len(list(framing.iter_frames(p.read_bytes()))) for p in sorted((tmp_path / "j").iterdir())
    ]
    assert max(sizes) <= max(frames, 2)  # the head, and what it was opened for
    assert (sum(sizes) - len(sizes), sizes[0]) == (12, first)


def test_a_segment_is_no_larger_than_a_reader_takes_in_whatever_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_SEGMENT_BYTES", 4_000)
    writer = JournalWriter(tmp_path / "j", {"long": "x" * 1_000}, segment_bytes=1 << 30)
    for _ in range(8):
        assert writer.append(framing.LIFE, b"x" * 1_000)
    writer.close()
    sizes = [len(list(framing.iter_frames(p.read_bytes()))) for p in sorted(writer.place.iterdir())]
    assert sizes == [4, 4, 3]  # with the head of each


def test_when_the_disk_has_been_left_alone_for_long_enough_it_is_written_to_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, now = JournalWriter(tmp_path / "j", {}), [100.0]
    monkeypatch.setattr(journal.time, "monotonic", lambda: now[0])
    disk = FullDisk(0)
    monkeypatch.setattr(journal.os, "pwrite", disk)
    assert not writer.append(framing.LIFE, b"{}")
    disk.room = 1 << 20
    now[0] += journal.BACK_OFF_SECONDS * 0.99
    assert not writer.append(framing.LIFE, b"{}")
    now[0] += journal.BACK_OFF_SECONDS * 0.02
    assert writer.append(framing.LIFE, b"{}")
    writer.close()
    assert writer.dropped == {"ENOSPC": 1, "back_off": 1}
    assert [f.seq for f in frames_of(tmp_path / "j")] == [0, 1]


def test_a_handler_of_a_signal_may_append_in_the_middle_of_an_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, write, calls = JournalWriter(tmp_path / "j", {}), os.pwrite, []

    def interrupted(fd: int, data: bytes, at: int) -> int:
        done = write(fd, data, at)
        if not calls:
            calls.append(1)
            writer.append(framing.SAMPLE, b"{}")  # deadlocks if another thread's lock were taken
        return done

    monkeypatch.setattr(journal.os, "pwrite", interrupted)
    for append in (
        lambda: writer.append(framing.LIFE, b"{}"),
        lambda: writer.append_record(record(1, SITES)),
    ):
        calls.clear()
        append()
    writer.close()


def test_how_far_a_journal_is_written_and_how_far_decoded(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "j", {}, segment_frames=2)
    tail = JournalTail(tmp_path / "j")
    path = tmp_path / "j" / "00000000.wal"
    assert tail.read_to == (0, 0)
    assert tail.written_to == (0, path.stat().st_size)
    assert [f.type for f in tail.poll()] == [framing.META]
    assert tail.read_to == tail.written_to
    whole = path.stat().st_size
    assert writer.append(framing.LIFE, b"{}")
    assert tail.written_to == (0, path.stat().st_size)
    frame = path.read_bytes()[whole:]
    os.truncate(path, whole + 5)  # torn: it stays undecoded
    assert list(tail.poll()) == []
    assert (tail.read_to, tail.written_to) == ((0, whole), (0, whole + 5))
    os.truncate(path, whole)  # and is taken back
    assert tail.read_to == tail.written_to
    with path.open("ab") as file:
        file.write(frame)
    for _ in range(4):
        assert writer.append(framing.LIFE, b"{}")
    last = max(journal.segments_of(tmp_path / "j"))
    assert last > 0
    size = (tmp_path / "j" / f"{last:08d}.wal").stat().st_size
    assert tail.written_to == (last, size) > tail.read_to
    assert list(tail.poll())
    assert tail.read_to == (last, size)
    with (tmp_path / "j" / f"{last:08d}.wal").open("ab") as file:
        file.write(b"?" * 64)
    assert list(tail.poll()) == []
    assert tail.damage
    assert tail.written_to == tail.read_to  # nobody reads on there
    tail.close()
    writer.close()


def test_a_tail_goes_on_with_the_next_segment_there_is_when_some_are_gone(tmp_path: Path) -> None:
    directory = tmp_path / "j"
    tail = JournalTail(directory)
    assert list(tail.poll()) == []  # nobody has begun
    writer = JournalWriter(directory, {}, segment_frames=3)
    for step in range(2):
        assert writer.append_record(record(step, SITES))
    assert [r.step for r in read(tail)] == [0, 1]
    assert tail.segment == 1
    for step in range(2, 6):
        assert writer.append_record(record(step, SITES))
    for n in (2, 3):
        (directory / f"{n:08d}.wal").unlink()
    assert [r.step for r in read(tail)] == [4, 5]
    assert tail.segment == writer.segment == 5
    writer.close()
    tail.close()


def test_a_frame_that_is_larger_than_any_file_may_be_is_damage_and_the_next_segment_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "READ_BYTES", 64)
    monkeypatch.setattr(journal.safe_read, "MAX_FILE_BYTES", 512)
    writer = JournalWriter(tmp_path / "j", {}, segment_frames=2)
    for payload in (b"x" * 400, b"x" * 600, b"{}"):
        assert writer.append(framing.LIFE, payload)
    writer.close()
    tail = JournalTail(tmp_path / "j")
    assert [len(f.payload) for f in tail.poll() if f.type == framing.LIFE] == [400, 2]
    tail.close()
    assert tail.damage == {"00000001.wal": "no frame in 512 bytes"}
