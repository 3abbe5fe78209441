"""Where a run lies by default: inside the directory in which the framework keeps its own output."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

FOLDER = "ddpprobe"  # below the framework's directory


def run_directory(base: str | os.PathLike[str], first_step: int, job: str = "") -> Path:
    """Return a new directory below `base`, or that of the newest run there if training resumes.

    A job that the framework begins again by itself has the directory that it had.

    What rank 0 gives counts for all ranks, so nothing is exchanged here.

    Args:
        base: directory of the framework's output.
        first_step: optimizer steps that earlier jobs have taken; 0 is a new training.
        job: letters and digits by which the framework knows this job, if it has such.
    """
    folder = Path(base).absolute() / FOLDER
    found = _newest(folder, f"*-{job}") if job else None
    if found is None and first_step:
        found = _newest(folder, "*")
    if found is not None:
        return found
    stamp = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    return folder / f"{stamp}-{job or os.urandom(3).hex()}"


def _newest(folder: Path, names: str) -> Path | None:
    """Return the newest directory of a run whose name is as a pattern says; None without one."""
    # Names begin with the time.
    return max((path.parent for path in folder.glob(f"{names}/run.json")), default=None)
