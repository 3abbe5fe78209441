"""What runs the job, by the environment that it gives to its processes."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

# By the variable that holds the job's number: the scheduler's name, and who says why it ended.
_KNOWN = {
    "SLURM_JOB_ID": ("Slurm", "sacct -j {} -o State,ExitCode,Timelimit"),
    "PBS_JOBID": ("PBS", "qstat -xf {}"),
    "LSB_JOBID": ("LSF", "bhist -l {}"),
}
_END = "SLURM_JOB_END_TIME"  # Unix seconds, since Slurm 22.05
_RESTARTS = ("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT")
# By the variable that holds the process which starts the workers of a node, and ends them.
_POOLS = {"RAY_RAYLET_PID": "Ray"}
_DIGITS = 10  # of a number of restarts; more of them are none
_NUMBER = re.compile(r"[\w.\[\]-]{1,64}")


def scheduler(environment: Mapping[str, str]) -> str:
    """Name the scheduler's job, its time limit if that is known, and who says more; "" without."""
    for variable, (name, command) in _KNOWN.items():
        job = environment.get(variable, "")
        if not _NUMBER.fullmatch(job):
            continue
        end = environment.get(_END, "") if name == "Slurm" else ""
        limit = ""
        if end.isdecimal() and len(end) <= 11:
            when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(int(end)))
            limit = f", whose time was to end at {when}"
        return f"{name} job {job}{limit}: {command.format(job)}"
    return ""


def pool(environment: Mapping[str, str], parent: int) -> str:
    """Return what has started a process as a worker: "Ray", or "" if it is none.

    What such a worker starts has its environment, and is none itself: torchrun in a job of Ray.

    Args:
        environment: of the process.
        parent: its parent's number.
    """
    return next((name for key, name in _POOLS.items() if environment.get(key) == str(parent)), "")


def restarts_left(environment: Mapping[str, str]) -> int:
    """Return how often torchrun (`--max-restarts`) may still start its ranks again; 0: never."""
    limit, count = (environment.get(name, "") for name in _RESTARTS)
    if not all(text.isdecimal() and len(text) < _DIGITS for text in (limit, count)):
        return 0
    return max(int(limit) - int(count), 0)
