"""What training writes waits for no disk, is seen at once, and leaves nothing in memory."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpprobe.daemon.spool_carrier import STUCK_SECONDS, SpoolCarrier
from ddpprobe.rank import head
from ddpprobe.rundir import heartbeat, paths, slot_file, spool, tmpfs
from ddpprobe.rundir.heartbeat import STATES, HeartbeatWriter
from ddpprobe.rundir.orders import Order, OrderBoard, OrderReader
from ddpprobe.rundir.paths import RunDir

NODE = "node_0000"


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    """A node's directory of heartbeats; nothing of it is in memory afterwards."""
    path = RunDir(tmp_path / "run").heartbeat(0, NODE, 0).parent
    yield path
    place = tmpfs.beside(path)
    if place is not None:
        shutil.rmtree(place)


def beat(writer: HeartbeatWriter, step: int, state: str = "forward") -> None:
    writer.beat(
        step=step, micro=0, state=STATES.index(state), steps=step, skipped=0, sampled=0,
        phase_seconds=(0.0, 0.0, 0.0, 0.0), probe_seconds=0.0,
    )  # fmt: skip


def test_a_beat_in_memory_is_read_at_once_and_carried_when_told(own: Path) -> None:
    place = tmpfs.make(own, tmpfs.token())
    writer = HeartbeatWriter(own / "rank_00000", place)
    on_disk = (own / "rank_00000").read_bytes()
    for step in (1, 2, 3):
        beat(writer, step)
        found = heartbeat.read(own / "rank_00000")
        assert found is not None
        assert found.step == step
    assert (own / "rank_00000").read_bytes() == on_disk
    heartbeat.carry(own / "rank_00000")
    carried = heartbeat.read_bytes((own / "rank_00000").read_bytes())
    assert carried is not None
    assert carried.step == 3
    writer.close()


def test_the_last_beat_is_in_the_run_directory_and_nothing_in_memory(own: Path) -> None:
    place = tmpfs.make(own, tmpfs.token())
    writer = HeartbeatWriter(own / "rank_00000", place)
    beat(writer, 9, "closed")
    writer.close()
    heartbeat.finish(own / "rank_00000", place)
    tmpfs.leave(own, place)
    assert not place.exists()
    assert sorted(os.listdir(own)) == ["rank_00000"]
    found = heartbeat.read(own / "rank_00000")
    assert found is not None
    assert (found.step, found.state) == (9, "closed")


def test_a_late_copy_never_takes_the_place_of_the_last_beat(own: Path, monkeypatch) -> None:
    """The daemon has opened the file and read an older beat when the rank says its last word."""
    place = tmpfs.make(own, tmpfs.token())
    writer = HeartbeatWriter(own / "rank_00000", place)
    beat(writer, 8)
    read = heartbeat._in_memory

    def overtaken(place: Path | None, name: str) -> bytes | None:
        said = read(place, name)
        monkeypatch.setattr(heartbeat, "_in_memory", read)
        beat(writer, 9, "closed")
        heartbeat.finish(own / name, place)
        return said

    monkeypatch.setattr(heartbeat, "_in_memory", overtaken)
    heartbeat.carry(own / "rank_00000")
    writer.close()
    found = heartbeat.read(own / "rank_00000")
    assert found is not None
    assert (found.step, found.state) == (9, "closed")


def test_a_beat_that_a_kill_tears_leaves_the_one_before(own: Path) -> None:
    place = tmpfs.make(own, tmpfs.token())
    writer = HeartbeatWriter(own / "rank_00000", place)
    beat(writer, 4)
    beat(writer, 5)
    writer.close()
    path = place / "rank_00000"
    data = bytearray(path.read_bytes())
    half = len(data) // 2
    data[5] ^= 1  # the second beat is in the first half
    path.write_bytes(data)
    found = heartbeat.read(own / "rank_00000")
    assert found is not None
    assert found.step == 4
    data[half + 5] ^= 1
    path.write_bytes(data)
    assert slot_file.newest(bytes(data), half - 12) is None


def test_without_the_memory_of_its_machine_a_reader_has_the_copy(own: Path) -> None:
    """A restart of the machine, or another machine: the pointer leads nowhere."""
    place = tmpfs.make(own, tmpfs.token())
    writer = HeartbeatWriter(own / "rank_00000", place)
    beat(writer, 6)
    heartbeat.carry(own / "rank_00000")
    beat(writer, 7)
    writer.close()
    shutil.rmtree(place)
    found = heartbeat.read(own / "rank_00000")
    assert found is not None
    assert found.step == 6


@pytest.mark.parametrize(
    "name", ["../etc", "/etc", "", "ddpprobe-0.000.node_0000", "x" * 1000, "\x00"]
)
def test_a_pointer_leads_to_nothing_but_such_a_directory(own: Path, name: str) -> None:
    own.mkdir(parents=True)
    (own / tmpfs.POINTER).write_text(name)
    assert tmpfs.beside(own) is None


def test_two_ranks_share_a_directory_and_the_last_one_takes_it_away(own: Path) -> None:
    unique = tmpfs.token()
    places = [tmpfs.make(own, unique) for _ in range(2)]
    assert places[0] == places[1]
    writers = [HeartbeatWriter(own / f"rank_0000{n}", places[0]) for n in range(2)]
    for number, writer in enumerate(writers):
        writer.close()
        heartbeat.finish(own / f"rank_0000{number}", places[number])
        tmpfs.leave(own, places[0])
        assert places[0].exists() == (number == 0)


def test_only_what_belongs_to_no_run_and_no_process_may_be_deleted(
    own: Path, tmp_path: Path
) -> None:
    place = tmpfs.make(own, tmpfs.token())
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        HeartbeatWriter(own / "rank_00000", place)
        os.write(writing, b"x")
        signal.pause()
        os._exit(0)
    os.read(reading, 1)
    try:
        os.utime(place, (0, 0))
        assert place not in tmpfs.origins()
        shutil.rmtree(tmp_path / "run")
        spool.clear_away(RunDir(tmp_path / "another"), NODE)
        assert place.exists(), "its rank lives"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
    os.utime(place)
    spool.clear_away(RunDir(tmp_path / "another"), NODE)
    assert place.exists(), "a rank may begin there whose run directory is not seen from here"
    os.utime(place, (0, 0))
    spool.clear_away(RunDir(tmp_path / "another"), NODE)
    assert not place.exists()


def test_of_a_run_that_may_live_nothing_is_opened(own: Path, monkeypatch) -> None:
    """Each start of a rank looks at all runs of its host, and there may be hundreds."""
    place = tmpfs.make(own, tmpfs.token())
    opened: list[Path] = []

    def read(base: Path, *_: object, **__: object) -> bytes:
        opened.append(base)
        return b"nowhere"

    monkeypatch.setattr(tmpfs.safe_read, "read_regular", read)
    tmpfs.origins()
    assert place not in opened


def test_a_beat_is_never_there_without_its_lock(own: Path, monkeypatch) -> None:
    """Another rank's start looks for dead ranks meanwhile, and would take it for one."""
    place, seen = tmpfs.make(own, tmpfs.token()), []
    allocate = os.posix_fallocate

    def looked_at(*where: int) -> None:
        seen.append((place / "rank_00000").exists())
        allocate(*where)

    monkeypatch.setattr(os, "posix_fallocate", looked_at)
    writer = HeartbeatWriter(own / "rank_00000", place)
    assert set(seen) == {False}
    assert paths.is_locked(place / "rank_00000")
    writer.close()


def test_a_rank_that_was_killed_with_its_daemon_is_settled_by_another_runs(
    own: Path, tmp_path: Path
) -> None:
    """Of a run that nobody continues; not within an hour of its start."""
    place = tmpfs.make(own, tmpfs.token())
    source, target = spool.directory_of(place, "rank_00000"), tmp_path / f"run/journal/000/{NODE}"
    spool.SpooledJournal(source, target / "rank_00000", {"rank": 0}, 1 << 20).append(3, b"x" * 99)
    beat(writer := HeartbeatWriter(own / "rank_00000", place), 5)
    writer.close()
    written = (source / "00000000.wal").read_bytes()
    spool.settle_others()
    assert place.exists()
    os.utime(place, (0, 0))
    spool.settle_others()
    assert not place.exists()
    assert (target / "rank_00000" / "00000000.wal").read_bytes() == written
    found = heartbeat.read(own / "rank_00000")
    assert found is not None
    assert found.step == 5


def test_a_disk_that_takes_no_pointer_leaves_nothing_in_memory(own: Path) -> None:
    own.parent.parent.mkdir(parents=True)
    own.parent.write_bytes(b"in the way")
    unique = tmpfs.token()
    with pytest.raises(OSError, match="Not a directory|File exists"):
        tmpfs.make(own, unique)
    assert [name for name in os.listdir(tmpfs.ROOT) if unique in name] == []


def test_a_journal_is_on_its_way_until_it_is_there_or_stuck_before_the_disk(own: Path) -> None:
    """While it is, a dead rank's last words may come, and nothing of a living one is missing."""
    run = RunDir(own.parents[2])
    place, target = tmpfs.make(own, tmpfs.token()), run.rank_journal(0, NODE, 0)
    journal = spool.SpooledJournal(spool.directory_of(place, "rank_00000"), target, {}, 1 << 20)
    spool_carrier, stuck = SpoolCarrier(run, 0, NODE), STUCK_SECONDS
    assert not spool_carrier.lags(0, 0.0)
    journal.append(3, b"x")
    assert spool_carrier.lags(0, 1.0)
    assert spool_carrier.lags(0, stuck)
    assert not spool_carrier.lags(0, 1.0 + stuck)
    assert journal.carry()
    assert not spool_carrier.lags(0, 2.0 + stuck)
    journal.append(3, b"y")
    assert spool_carrier.lags(0, 3.0 + stuck), "it moves again"
    journal.close()
    assert journal.finish()
    assert not spool_carrier.lags(0, 4.0 + stuck)


def test_one_rank_of_each_memory_hears_for_those_that_see_the_same() -> None:
    """Containers of a machine may have one each: rank 0 speaks into its own only."""
    machines = ("a 0:23", "a 0:23", "a 0:40", "a 0:40", "a ")
    heard = [{"node_index": 0, "machine": machine} for machine in machines]
    assert head._relays(heard) == [0, 2, 4]
    assert head._relays(heard[:2]) == []


def test_an_order_that_finds_no_room_in_memory_is_on_no_board(own: Path, monkeypatch) -> None:
    """Ranks would miss what the board in the run directory shows; it is posted again."""
    place = tmpfs.make(own, tmpfs.token())
    board, readers = OrderBoard(own / "orders"), [OrderReader(at / "orders") for at in (own, place)]
    pwrite = os.pwrite

    def full(fd: int, data: bytes, at: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(place)):
            raise OSError(28, "No space left on device")
        return pwrite(fd, data, at)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        assert not board.post(Order(0, "capture", 10, 12))
    assert [reader.look() for reader in readers] == [None, None]
    later = Order(0, "capture", 20, 22)
    assert board.post(later)
    assert [reader.look() for reader in readers] == [later, later]
    for one in (board, *readers):
        one.close()


def test_memory_is_where_a_tmpfs_takes_what_is_written(monkeypatch, tmp_path: Path) -> None:
    here = tmpfs.look()
    assert (here == tmpfs.look(), here.refused) == (True, "")
    assert here.identity
    with monkeypatch.context() as patched:
        patched.setattr(tmpfs, "LEAST_ROOM", 1 << 60)
        assert tmpfs.look().refused.endswith("MiB left")
    for root, why in ((Path("/proc"), "is no tmpfs"), (tmp_path / "missing", "No such file")):
        monkeypatch.setattr(tmpfs, "ROOT", root)
        found = tmpfs.look()
        assert not found.identity
        assert why in found.refused


def test_an_order_reaches_ranks_by_memory_and_stays_in_the_run_directory(own: Path) -> None:
    place = tmpfs.make(own, tmpfs.token())
    reader, board = OrderReader(place / "orders"), OrderBoard(own / "orders")
    first, second = (Order(n, "capture", 10, 12) for n in range(2))
    assert board.post(first)
    assert reader.look() == first
    board.close()
    (place / "orders").write_bytes(b"")  # a predecessor that was killed between the two
    again = OrderBoard(own / "orders")
    assert again.post(second)
    assert OrderReader(place / "orders").look() == first
    assert OrderReader(own / "orders").look() == first
    for one in (again, reader):
        one.close()
