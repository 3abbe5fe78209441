"""A directory that is no run: what it is instead, and what to type."""

from __future__ import annotations

from pathlib import Path

from ddpprobe.rundir import paths, safe_read

LISTED = 5
WHERE = "by default ddpprobe-runs/<name>"
GIVE = f"give the directory that install() made, {WHERE}"


def what_is_there(directory: Path) -> str:
    """Say what a directory holds instead of a run, and what to give."""
    names = sorted(p.name for p in directory.iterdir())
    if not names:
        return f"{directory}: an empty directory, no run; give the one install() made, {WHERE}"
    if directory.name == safe_read.STORE or (directory.parent / paths.RUN_JSON).is_file():
        return f"{directory}: a part of a run; give its directory: {directory.parent}"
    runs = [n for n in names if (directory / n / paths.RUN_JSON).is_file()]
    if runs:
        shown = ", ".join(str(directory / n) for n in runs[:LISTED])
        more = f" and {len(runs) - LISTED} more" if len(runs) > LISTED else ""
        return f"{directory}: holds {len(runs)} runs, name one of them: {shown}{more}"
    shown = ", ".join(names[:LISTED]) + (", ..." if len(names) > LISTED else "")
    return f"{directory}: not a ddpprobe run (no run.json; it holds {shown}); {GIVE}"
