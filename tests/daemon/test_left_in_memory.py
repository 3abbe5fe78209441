"""What a full disk refused until a run was sealed is brought as soon as there is room."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpprobe.daemon.__main__ import main
from ddpprobe.daemon.node import NodeDaemon
from ddpprobe.reader.run import open_run
from ddpprobe.rundir import paths, spool, tmpfs
from ddpprobe.rundir.heartbeat import HeartbeatWriter

from ..made_runs import Made

NODE, STEPS = paths.node_name(0), 10


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], paths.RunDir]:
    """Serve a run whose last records are in memory; the disk has room after its seal, or never."""

    def serve(room: bool) -> paths.RunDir:
        run = Made(tmp_path / "run").whole(STEPS, told=False).close()
        paths.make_dir(run.path / "daemon")
        own = run.heartbeat(0, NODE, 0).parent
        paths.make_inner(own)
        place = tmpfs.make(own, tmpfs.token())
        for journal in sorted((run.attempt_dir(0) / NODE).glob("rank_*")):
            HeartbeatWriter(own / journal.name, place).close()
            source = spool.directory_of(place, journal.name)
            shutil.copytree(journal, source)
            segment = max(journal.glob("*.wal"))
            segment.write_bytes(segment.read_bytes()[: segment.stat().st_size // 2])
        carry, to_end = spool.Carrier.carry, NodeDaemon.serve
        daemons = []

        def end(daemon: NodeDaemon) -> bool:
            is_there = to_end(daemon)
            daemons.append(daemon)
            return is_there

        def refused(carrier: spool.Carrier, *args: bool) -> bool:
            return room and bool(daemons) and carry(carrier, *args)

        monkeypatch.setattr(NodeDaemon, "serve", end)
        monkeypatch.setattr(spool.Carrier, "carry", refused)
        options = ("--listen", "127.0.0.1:0", "--linger", "0", "--wait", "1")
        assert main(["--dir", str(run.path), "--node", NODE, *options]) == 0
        assert len(daemons) == 1 + room
        return run

    return serve


def test_records_that_the_disk_takes_after_the_seal_are_in_the_run(served, caplog) -> None:
    run = served(True)
    assert open_run(run.path).completeness().held == STEPS
    assert tmpfs.beside(run.heartbeat(0, NODE, 0).parent) is None
    assert "no room" not in caplog.text


def test_records_for_which_there_is_no_room_stay_in_memory_and_the_log_says_so(
    served, caplog
) -> None:
    run = served(False)
    place = tmpfs.beside(run.heartbeat(0, NODE, 0).parent)
    assert place is not None
    assert sorted(path.name for path in place.glob("rank_*"))
    assert "no room for the last records of ranks 0-1" in caplog.text
    assert f"ddpprobe daemon --dir {run.path} --node {NODE}" in caplog.text
    shutil.rmtree(place)
