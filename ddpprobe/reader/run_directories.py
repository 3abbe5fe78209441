"""The runs below a directory, the newest first, by what is cheap to look at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ddpprobe.errors import RunNotFound
from ddpprobe.rundir import safe_read, store_url
from ddpprobe.rundir.not_a_run import as_directory
from ddpprobe.rundir.paths import JOURNAL, RUN_JSON, RUN_VARIABLE, RUNS, RunDir
from ddpprobe.rundir.validate import MALFORMED

DEEPEST = 3  # directories below the given one: runs are not kept deeper, and checkpoints are
_LATEST_NS = 2**63


def default_directory() -> Path:
    """Return where runs are looked for: `$DDPPROBE_DIR`, else `ddpprobe-runs` here.

    The variable names one run's directory. A run that it sends to an object store is at work in
    `ddpprobe-runs`.
    """
    said = os.environ.get(RUN_VARIABLE, "")
    return Path(said) if said and not store_url.is_url(said) else RUNS


def run_directories(directory: str | Path) -> list[Path]:
    """Return the runs below a directory, or the directory itself if it is one; newest first.

    Newest is whose newest attempt began last. Neither what is inside of a run is looked at, nor a
    directory whose name begins with a dot; a run to which several names lead is named once.

    Raises:
        RunNotFound: there is no such directory.
        OSError: it cannot be read.
    """
    top = as_directory(directory, f"give a directory that holds runs, by default {RUNS} here")
    if store_url.is_url(str(directory)):
        raise RunNotFound(f"{directory}: an object store is not listed; give the URL of a run")
    if not top.is_dir():
        what = "no directory" if top.exists() else "no such directory"
        raise RunNotFound(f"{top}: {what}; give one that holds runs, by default {RUNS} here")
    os.listdir(top)  # what is below may be anybody's; not to see this one is an error
    found = [(began_ns(path), str(path), path) for path in _runs(top, DEEPEST, set())]
    return [path for *_, path in sorted(found, reverse=True)]


def newest() -> Path:
    """Return the newest run of `default_directory`.

    Raises:
        RunNotFound: there is none; the text says what to give.
    """
    where = default_directory()
    said = f" (${RUN_VARIABLE})" if where != RUNS else ""
    found = run_directories(where) if where.is_dir() else []
    if not found:
        raise RunNotFound(
            f"no run below {where}{said}: give a run directory, the one install() made; "
            "`ddpprobe ls DIR` lists those below DIR"
        )
    return found[0]


def began_ns(path: Path) -> int:
    """Return when the newest attempt of a run began, in Unix ns; 0: not known."""
    run = RunDir(path)
    attempts = run.attempts()
    created = _created_ns(path)
    if created and attempts[-1:] <= [0]:
        return created
    # A run that was started again says when only in its records; its directory was made then.
    looked_at = run.attempt_dir(attempts[-1]) if attempts else path
    try:
        return max(created, looked_at.stat().st_mtime_ns)
    except OSError:
        return created


def _created_ns(path: Path) -> int:
    try:
        created = safe_read.parse(safe_read.read_regular(path, RUN_JSON))["created_ns"]
    except (OSError, *MALFORMED):
        return 0
    return created if type(created) is int and 0 < created < _LATEST_NS else 0


def _runs(path: Path, depth: int, seen: set[tuple[int, int]]) -> Iterator[Path]:
    try:
        found = path.stat()
        with os.scandir(path) as entries:
            inside = {entry.name: entry.is_dir() for entry in entries}
    except OSError:  # it is gone, or not ours to see
        return
    if (found.st_dev, found.st_ino) in seen:
        return
    seen.add((found.st_dev, found.st_ino))
    if RUN_JSON in inside or ({JOURNAL, safe_read.MANIFESTS} & {*inside} and holds_records(path)):
        yield path
    elif depth:
        for name in sorted(name for name, is_directory in inside.items() if is_directory):
            if not name.startswith("."):
                yield from _runs(path / name, depth - 1, seen)


def holds_records(path: Path) -> bool:
    """Return whether a directory without a run.json is what is left of a run."""
    run = RunDir(path)
    return bool(run.attempts()) or run.manifests.is_dir()
