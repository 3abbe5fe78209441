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
    again = sorted(path.parent for path in folder.glob(f"*-{job}/run.json")) if job else []
    if again:
        return again[-1]
    # Names begin with the time, so the last one is the newest.
    known = sorted(path.parent for path in folder.glob("*/run.json")) if first_step else []
    if known:
        return known[-1]
    stamp = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    return folder / f"{stamp}-{job or os.urandom(3).hex()}"
