"""What a run's run.json says, whatever became of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddpprobe.errors import RunError, RunNotFound
from ddpprobe.reader.not_a_run import what_is_there
from ddpprobe.reader.run_directories import holds_records
from ddpprobe.rundir import paths, safe_read
from ddpprobe.rundir.paths import RunDir


def identity_of(directory: Path) -> dict[str, Any]:
    """Return what the run.json in a run's directory says; {} if it is lost, and records are left.

    Raises:
        RunNotFound: it is no run directory.
        RunError: the file is damaged, or of a version that is not read.
    """
    run = RunDir(directory)
    try:
        data = safe_read.read_regular(directory, paths.RUN_JSON)
    except FileNotFoundError:
        if not holds_records(directory):
            raise RunNotFound(what_is_there(directory)) from None
        return {}  # it was killed while it started, or run.json was lost: the rest is still there
    except OSError as error:
        raise RunError(f"{run.run_json}: cannot be read ({error.strerror})") from error
    try:
        identity = safe_read.parse(data)
    except ValueError:
        identity = None
    version = identity.get("format_version") if isinstance(identity, dict) else None
    if not isinstance(identity, dict) or type(version) is not int:
        raise RunError(
            f"{run.run_json}: half written or damaged ({len(data)} bytes, format_version "
            f"{version!r:.40}); move it away to open what the journals and the store still hold",
            exit_code=3,
        )
    if why := paths.unreadable(version):
        raise RunError(f"{directory}: {why}")
    return identity
