"""Where a collection goes: checked, locked, written one whole file at a time."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ddpprobe.errors import RunError
from ddpprobe.reader.under_way import has_daemon, is_live
from ddpprobe.rundir import framing, paths, safe_read
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store import segments
from ddpprobe.store.manifest import GROUP_JSON

MARKER = "collected.json"  # in a directory that `collect` made: of which run
LOCK, PARTIAL = "collect.lock", "collect.partial"
_NEW = "give a new directory"


def check(dest: Path, sources: Sequence[Path]) -> str:
    """Make sure that the sources are one ended run, and that it may go there; return its run_id.

    Raises:
        RunError: something is wrong; the text says what to do.
    """
    here = dest.resolve()
    for source in sources:
        there = source.resolve()
        if here == there or here in there.parents or there in here.parents:
            raise RunError(f"{dest} and {source} lie in one another; {_NEW} beside it")
        run = RunDir(source)
        if is_live(run) or has_daemon(run):
            raise RunError(f"{source}: still written to; collect it when its job and daemon ended")
        if why := _version_of(run):
            raise RunError(f"{source}: {why}")
    ids = {source: run_id_of(RunDir(source)) for source in sources}
    for source, run_id in ids.items():
        if not run_id:
            raise RunError(
                f"{source}: nothing in it says which run it is of (run.json is missing or damaged)"
                "; copy run.json from the directory of another of its nodes"
            )
    first, run_id = next(iter(ids.items()))
    for source, other in ids.items():
        if other != run_id:
            raise RunError(
                f"{source} is of run {other!r:.60}, {first} of run {run_id!r:.60}: collect the "
                "directories of one run at a time"
            )
    _check_dest(dest, run_id)
    return run_id


def _check_dest(dest: Path, run_id: str) -> None:
    if dest.exists() and not dest.is_dir():
        raise RunError(f"{dest}: a file; {_NEW}")
    names = {p.name for p in dest.iterdir()} - {LOCK, PARTIAL} if dest.exists() else set()
    if not names:
        return
    try:
        before = safe_read.parse(safe_read.read_regular(dest, MARKER, 4096))["run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        raise RunError(f"{dest}: not empty, and not made by collect; {_NEW}") from None
    if before != run_id:
        raise RunError(f"{dest} holds run {before!r:.60}, this is run {run_id!r:.60}; {_NEW}")


def _version_of(run: RunDir) -> str:
    """Say why a source cannot be read; "" if it can, or if its run.json is damaged."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        told = safe_read.parse(safe_read.read_regular(run.path, paths.RUN_JSON))
        return paths.unreadable(told["format_version"])
    return ""


def run_id_of(run: RunDir) -> str:
    """Return which run a directory is of: by run.json, else by its store, else by its journals."""
    for path, key in ((run.path, paths.RUN_JSON), (run.path, f"{safe_read.STORE}/{GROUP_JSON}")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            identity = safe_read.parse(safe_read.read_regular(path, key, safe_read.MAX_JSON_BYTES))
            identity = identity if key == paths.RUN_JSON else identity["attributes"]["ddpprobe"]
            return str(identity["run_id"])
    for attempt in run.attempts():
        for source in segments.sources_of(run, attempt):
            for number in segments.segments_of(source):
                with contextlib.suppress(OSError, KeyError, framing.FrameError):
                    return str(segments.read_segment(source.directory, number).meta["run_id"])
    return ""


class Place:
    """The directory that a collection goes to.

    Args:
        path: of it, checked.
        wrote: told the size of each file.
    """

    def __init__(self, path: Path, wrote: Callable[[int], None]) -> None:
        self.run = RunDir(path)
        self._wrote = wrote

    @classmethod
    @contextlib.contextmanager
    def held(cls, path: Path, run_id: str, wrote: Callable[[int], None]) -> Iterator[Place]:
        """Hold the directory, so that nobody else collects into it.

        Raises:
            RunError: somebody does.
        """
        paths.make_dir(path)
        lock = paths.DirectoryLock(path / LOCK)
        if not lock.acquire():
            raise RunError(f"{path}: somebody else is collecting into it; wait for that to end")
        try:
            (path / PARTIAL).unlink(missing_ok=True)
            place = cls(path, wrote)
            place.keep(path / MARKER, json.dumps({"run_id": run_id}).encode())
            yield place
        finally:
            lock.release()

    def keep(self, path: Path, data: bytes) -> None:
        """Make a file hold this: nothing happens where it does already."""
        with contextlib.suppress(OSError):
            if path.read_bytes() == data:
                return
        # One temporary name for all: what a killed collection leaves is one file at most.
        paths.replace_file(path, [data], made=self.run.path / PARTIAL)
        self._wrote(len(data))

    def clear(self, *names: str) -> None:
        """Take away directories at the top."""
        for name in names:
            shutil.rmtree(self.run.path / name, ignore_errors=True)
