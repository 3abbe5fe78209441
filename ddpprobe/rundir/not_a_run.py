"""A directory that is no run: what it is instead, and what to type."""

from __future__ import annotations

import os
from pathlib import Path

from ddpprobe.errors import RunNotFound
from ddpprobe.rundir import paths, safe_read

LISTED = 5
WHERE = "by default ddpprobe-runs/<name>"
GIVE = f"give the directory that install() made, {WHERE}"


def as_directory(place: object, what: str) -> Path:
    """Return the path that somebody was given.

    Args:
        place: as it was given.
        what: what to give, for the error.

    Raises:
        RunNotFound: it is no path, or one that the system refuses to look at.
    """
    path = os.fspath(place) if isinstance(place, str | os.PathLike) else None
    if not isinstance(path, str) or not path:  # "": a variable that is not set, not this place
        raise RunNotFound(f"{place!r:.80} is no path: {what}")
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # who asks says so in words of its own
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RunNotFound(f"{path!r:.80}: cannot be looked at ({why}): {what}") from error
    return Path(path)


def what_is_there(directory: Path) -> str:
    """Say what a directory holds instead of a run, and what to give."""
    names = sorted(p.name for p in directory.iterdir())
    whole = whole_of(directory)
    if whole is not None:
        return f"{directory}: a part of a run; give its directory: {whole}"
    if not names:
        return f"{directory}: an empty directory, no run; give the one install() made, {WHERE}"
    runs = [n for n in names if (directory / n / paths.RUN_JSON).is_file()]
    if runs:
        shown = ", ".join(str(directory / n) for n in runs[:LISTED])
        more = f" and {len(runs) - LISTED} more" if len(runs) > LISTED else ""
        return f"{directory}: holds {len(runs)} runs, name one of them: {shown}{more}"
    shown = ", ".join(names[:LISTED]) + (", ..." if len(names) > LISTED else "")
    return f"{directory}: not a ddpprobe run (no run.json; it holds {shown}); {GIVE}"


def whole_of(directory: Path) -> Path | None:
    """Return the run that a directory is a part of, None where it is no part of one."""
    here = directory.resolve()
    for part, above in zip((here, *here.parents), here.parents, strict=False):
        inside = part == here or part.name in paths.PARTS
        if inside and (above / paths.RUN_JSON).is_file():
            return above
    return here.parent if here.name == safe_read.STORE else None


def may_become_one(directory: Path) -> bool:
    """Return whether a directory is new: nothing is in it but what a run begins with."""
    own = {*paths.PARTS, paths.RUN_JSON, paths.RUN_LOCK}
    return all(
        entry.name in own or entry.name.startswith(f".{paths.RUN_JSON}.")  # is being written
        for entry in directory.iterdir()
    )
