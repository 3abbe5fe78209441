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
