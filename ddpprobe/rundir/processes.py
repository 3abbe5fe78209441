"""Whether a process is there, and since when; also where /proc is not mounted (some sandboxes)."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import psutil

MAX_PID = 1 << 22  # of Linux, see proc(5)
# psutil derives the start from the boot time, which a stepped clock moves: two readings in two
# processes may differ a little, while a reused pid starts much later.
SAME_START_SECONDS = 2.0
_TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")
_PROC = Path("/proc/self")
_NAMESPACE = Path("/proc/self/ns/pid")
# What a container starts a job by, and what ends when that does.
_STARTERS = {"sh", "bash", "dash", "ash", "zsh", "busybox", "tini", "dumb-init", "docker-init"}
_INITIAL_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel: no container's


def own_start() -> float | None:
    """Return the Unix time at which this process started; None if nobody can tell."""
    try:
        return psutil.Process().create_time()
    except (psutil.Error, OSError):
        return None


def exists(pid: object) -> bool:
    """Return whether there is a process of this number, be it a zombie."""
    if type(pid) is not int or not 0 < pid <= MAX_PID:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def is_told(*words: str) -> bool:
    """Return whether a process has these words in its command line, one after the other."""
    try:
        lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    except (psutil.Error, OSError):
        return False
    told = [*words]
    return any(told == line[i : i + len(told)] for line in lines for i in range(len(line)))


def is_process(pid: int, started: float | None) -> bool:
    """Return whether `pid` is (or was, as a zombie) the process started at Unix time `started`.

    Without a start, or without /proc, the number alone has to do.
    """
    try:
        created = psutil.Process(pid).create_time()
    except (psutil.Error, OSError):
        return exists(pid) and not _PROC.exists()
    return started is None or abs(created - started) <= SAME_START_SECONDS


def torchrun_of(pid: int) -> int | None:
    """Return the number of the torchrun that started a process; None if its parent is none."""
    try:
        parent = psutil.Process(pid).parent()
        words = parent.cmdline()[1:4] if parent is not None else []
    except (psutil.Error, OSError):
        return None
    known = {"torchrun", *_TORCHRUN} & {os.path.basename(word) for word in words}  # noqa: PTH119
    return parent.pid if parent is not None and known else None


def memory_limit() -> str:
    """Say in parentheses how much memory a process may address here, "" if that is not limited."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return ""
    return f" (RLIMIT_AS, `ulimit -v`, is {limit / 2**20:.0f} MiB here)"


def namespace_trouble() -> str:
    """Say what this process's PID namespace means for one that is to outlive it; "" if nothing.

    In the namespace of a container all processes are killed when the first one ends.
    """
    try:
        if str(_PROC.readlink()) != str(os.getpid()):
            return (
                "/proc is of another PID namespace than this process (mount it anew: unshare "
                "--mount-proc), so that it may take other processes for the ranks"
            )
        if _NAMESPACE.readlink().name == _INITIAL_NAMESPACE:
            return ""
        if not (_is_of_job(1) or _has_started_job(1)):
            return ""
    except (OSError, psutil.Error):  # no /proc, or it hides others' processes
        return ""
    return (
        "process 1 of this PID namespace (a container?) is of the job, and takes all others with "
        "it when it ends"
    )


def _has_started_job(pid: int) -> bool:
    """Return whether a process is a script of the shell, or the like, that has started this job.

    A shell without a script is somebody's at a terminal, and stays.
    """
    line = [psutil.Process(), *psutil.Process().parents()]
    if len(line) < 2 or line[-1].pid != pid:
        return False
    name, *words = line[-1].cmdline() or [""]
    scripted = any(not word.startswith("-") for word in words)
    return scripted and os.path.basename(name) in _STARTERS and _is_of_job(line[-2].pid)  # noqa: PTH119


def _is_of_job(pid: int) -> bool:
    """Return whether a process is this one, or runs the same interpreter."""
    return (
        pid == os.getpid()
        or Path(f"/proc/{pid}/exe").readlink() == Path("/proc/self/exe").readlink()
    )
