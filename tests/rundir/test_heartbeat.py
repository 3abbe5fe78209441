"""A heartbeat is read whole or not at all."""

from __future__ import annotations

from pathlib import Path

from ddpprobe.rundir import heartbeat
from ddpprobe.rundir.heartbeat import STATES, HeartbeatWriter


def beat(writer: HeartbeatWriter) -> None:
    writer.beat(
        step=41, micro=1, state=STATES.index("forward"), steps=40, skipped=2, sampled=4,
        phase_seconds=(1.0, 2.0, 3.0, 4.0), probe_seconds=0.5,
    )  # fmt: skip


def test_what_was_written_is_read(tmp_path: Path) -> None:
    writer = HeartbeatWriter(tmp_path / "h" / "rank_00000")
    beat(writer)
    reading = heartbeat.read(tmp_path / "h" / "rank_00000")
    writer.close()
    assert reading is not None
    assert (reading.step, reading.state, reading.skipped) == (41, "forward", 2)
    assert reading.phase_seconds == (1.0, 2.0, 3.0, 4.0)


def test_no_beat_a_damaged_one_and_no_file_read_as_none(tmp_path: Path) -> None:
    path = tmp_path / "rank_00000"
    assert heartbeat.read(path) is None
    writer = HeartbeatWriter(path)
    assert heartbeat.read(path) is None
    beat(writer)
    writer.close()
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    assert heartbeat.read(path) is None


def test_a_beat_after_close_is_lost_and_harmless(tmp_path: Path) -> None:
    writer = HeartbeatWriter(tmp_path / "rank_00000")
    writer.close()
    beat(writer)
