"""In a run directory that is somebody else's, nothing is written to what they point at."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpprobe.daemon import launch
from ddpprobe.daemon.__main__ import main as daemon
from ddpprobe.rundir import framing, heartbeat, paths
from ddpprobe.rundir.heartbeat import HeartbeatWriter
from ddpprobe.rundir.journal import JournalWriter
from ddpprobe.rundir.orders import OrderReader
from ddpprobe.rundir.paths import DirectoryLock, RunDir
from ddpprobe.rundir.roster import keep_secret
from ddpprobe.rundir.spool import SpooledJournal
from ddpprobe.rundir.tensor_pack import write as write_pack
from ddpprobe.store.manifest import Manifest, State, manifest_path

NODE = "node_0000"
MINE = b"a file of the victim's"


def _store(run: RunDir) -> None:
    chunk = run.store / "attempt_000/merged/zarr.json"
    paths.replace_file(chunk, [b"x"], made=chunk.with_name(".made"))


Writer = Callable[[RunDir], object]
# What is written in a run, the file that it ends up in, and who writes it.
WRITERS: dict[str, tuple[str, Writer]] = {
    "lock of the run": ("run.lock", lambda r: DirectoryLock(r.lock).acquire()),
    "run.json": ("run.json", lambda r: paths.write_json(r.run_json, {})),
    "log": (f"daemon/{NODE}.log", lambda r: launch.start_daemon(r, NODE)),
    "lock of the daemon": (
        f"daemon/{NODE}.lock", lambda r: DirectoryLock(r.daemon_file(NODE, "lock")).acquire()
    ),
    "secret": (f"daemon/{NODE}.secret", lambda r: keep_secret(r.daemon_file(NODE, "secret"), "x")),
    "request": (
        "daemon/requests/1.json", lambda r: paths.write_json(r.requests / "1.json", {})
    ),
    "pushed": (
        f"daemon/{NODE}.inbox/000/node_0001/00000000.block",
        lambda r: paths.replace_file(
            r.daemon_file(NODE, "inbox") / "000/node_0001/00000000.block", [memoryview(b"x")]
        ),
    ),
    "journal": (
        f"journal/000/{NODE}/rank_00000/00000000.wal",
        lambda r: JournalWriter(r.rank_journal(0, NODE, 0), {}),
    ),
    "daemon's journal": (
        f"journal/000/{NODE}/daemon/00000000.wal",
        lambda r: JournalWriter(r.daemon_journal(0, NODE), {}),
    ),
    "claim": ("journal/000/claim.json", lambda r: paths.write_json(r.claim(0), {})),
    "heartbeat": (
        f"heartbeat/000/{NODE}/rank_00000", lambda r: HeartbeatWriter(r.heartbeat(0, NODE, 0))
    ),
    "carried beat": (
        f"heartbeat/000/{NODE}/rank_00000",
        lambda r: heartbeat.carry(r.heartbeat(0, NODE, 0), b"x" * 100),
    ),
    "carried journal": (
        f"journal/000/{NODE}/rank_00000/00000000.wal",
        lambda r: SpooledJournal(
            r.path.with_name(os.urandom(4).hex()), r.rank_journal(0, NODE, 0), {}, 1 << 20
        ),
    ),
    "orders": (f"heartbeat/000/{NODE}/orders", lambda r: OrderReader(r.orders(0, NODE))),
    "pack": (
        f"captures/000/{NODE}/rank_00000/step_0000000007.pack",
        lambda r: write_pack(
            r.pack(0, NODE, 0, 7), {"attempt": 0, "step": 7, "rank": 0, "world_size": 1}, []
        ),
    ),
    "manifest": (
        "manifest/attempt_000.merged.log",
        lambda r: Manifest(manifest_path(r, "attempt_000/merged")).append(
            State(), {}, durable=False
        ),
    ),
    "store": ("run.zarr/attempt_000/merged/zarr.json", _store),
}  # fmt: skip
# What lies in the place of these is replaced as a whole, be it a link: nobody follows it.
REPLACED = {"run.json", "secret", "request", "pushed", "claim", "pack", "store"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(launch.subprocess, "run", lambda *_, **__: None)  # type: ignore[attr-defined]
    return RunDir(paths.make_dir(tmp_path / "run"))


@pytest.mark.parametrize("what", WRITERS)
def test_a_link_in_the_place_of_a_file_is_not_followed(
    run: RunDir, tmp_path: Path, what: str
) -> None:
    name, write = WRITERS[what]
    victim, place = tmp_path / "victim", run.path / name
    victim.write_bytes(MINE)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(victim)
    if what in REPLACED:
        write(run)
        assert not place.is_symlink()
    else:
        with pytest.raises(OSError, match="link|exists"):
            write(run)
    assert victim.read_bytes() == MINE


@pytest.mark.parametrize("what", WRITERS)
def test_a_link_in_the_place_of_a_directory_is_not_followed(
    run: RunDir, tmp_path: Path, what: str
) -> None:
    name, write = WRITERS[what]
    parents = [p for p in Path(name).parents if p != Path()]
    for number, inner in enumerate(parents):
        target, at = tmp_path / f"target{number}", run.path / inner
        (target / Path(name).relative_to(inner)).parent.mkdir(parents=True, exist_ok=True)
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(target)
        with pytest.raises(OSError, match="link"):
            write(run)
        assert [p for p in target.rglob("*") if not p.is_dir()] == []
        shutil.rmtree(run.path)
        paths.make_dir(run.path)
    (run.path / name).parent.mkdir(parents=True, exist_ok=True)
    write(run)  # and without a link it is written
    assert (run.path / name).is_file()


@pytest.mark.parametrize(
    "what", sorted(WRITERS.keys() - REPLACED - {"journal", "carried journal", "daemon's journal"})
)
def test_a_file_of_somebody_else_s_is_not_written_to(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    name, write = WRITERS[what]
    place = run.path / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(MINE)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with monkeypatch.context() as patch:
        patch.setattr(paths, "_owner_of_new", lambda _: 4242)
        with pytest.raises(PermissionError, match="belongs to"):
            write(run)
    assert place.read_bytes() == MINE
    write(run)  # where a file system makes all files somebody's (root_squash), they are ours
    assert list(place.parent.glob("*.owner")) == []


def test_the_path_to_a_run_may_have_links(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "journal").symlink_to(tmp_path / "scratch")
    run = RunDir(paths.make_dir(tmp_path / "journal/daemon/run"))
    journal = JournalWriter(run.rank_journal(0, NODE, 0), {})
    journal.append_json(framing.LIFE, {"event": "closed"})
    journal.close()
    assert DirectoryLock(run.lock).acquire()


def test_a_daemon_says_that_its_lock_is_no_file_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(paths.make_dir(tmp_path / "run"))
    lock = run.daemon_file(NODE, "lock")
    lock.parent.mkdir()
    lock.symlink_to(tmp_path / "victim")
    assert daemon(["--dir", str(run.path), "--node", NODE]) == 2
    said = capsys.readouterr().err
    assert str(lock) in said
    assert "link" in said
    assert not (tmp_path / "victim").exists()
