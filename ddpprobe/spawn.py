"""Starting the node daemon from a training process, so that nothing ties the two together.

The daemon is exec'ed (never forked: the parent may hold CUDA contexts, threads and sockets), lives
in a session of its own, where torchrun's signals to its children do not reach it, has init for a
parent, so that it leaves no zombie, and inherits no file descriptor.
"""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpprobe import destination, inside, layout, processes
from ddpprobe.layout import RunDir

TOKEN_VARIABLE = "DDPPROBE_TOKEN"  # noqa: S105  (the name of a variable)
POLL_SECONDS = 0.02
START_SECONDS = 10.0
ASK_SECONDS = 10.0  # for an object store to say what it holds; training waits for it, once
WAIT_SECONDS = 120.0  # for the first journal: ranks write it right after they started us
# What starting a process can fail with: no process, descriptor or memory to be had, no shell.
START_ERRORS = (OSError, MemoryError, subprocess.SubprocessError)
# What a Python process needs to start and to find its files. Everything else (cloud keys, tracking
# tokens) stays where it is: a daemon that outlives the job must not carry it around.
_INHERITED = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR",
    "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE",
    "PYTHONPYCACHEPREFIX", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD",
)  # fmt: skip
_OURS = (
    "DDPPROBE_STRICT", "DDPPROBE_LINGER", "DDPPROBE_LISTEN", "DDPPROBE_MAX_BYTES",
    "DDPPROBE_MAX_AGE",
)  # fmt: skip


def start_daemon(
    run: RunDir,
    node: str,
    *,
    head_url: str | None = None,
    listen: str | None = None,
    gather_listen: str | None = None,
    linger: float | None = None,
    token: str | None = None,
) -> None:
    """Start the daemon of `node` and return at once; harmless if one is running already.

    Args:
        run: the run directory; `run.path/daemon` is created if missing, `run.path` is there.
        node: the node's name, see `layout.node_name`.
        head_url: where the head's daemon takes merged blocks; None on the head.
        listen: `ADDRESS:PORT` of `/metrics`; None for the default.
        gather_listen: `ADDRESS:PORT` on which the head takes other nodes' blocks.
        linger: seconds to go on serving after the run was sealed; None for the default.
        token: what a node shows to the head; handed over in the environment, never as an argument.

    Raises:
        OSError: the log file cannot be created, or is not this user's, or `/bin/sh` cannot be run.
        subprocess.SubprocessError: the shell failed or took longer than 10 s.
    """
    log = run.daemon_file(node, "log")
    layout.make_inner(log.parent)
    options = {
        "--dir": run.path.absolute(),
        "--node": node,
        "--head": head_url,
        "--listen": listen,
        "--gather-listen": gather_listen,
        "--linger": linger,
        "--wait": WAIT_SECONDS,
    }
    # -P: a file `queue.py` in the user's working directory is not our standard library.
    command = [sys.executable, "-P", "-m", "ddpprobe.daemon"]
    command += [str(x) for pair in options.items() if pair[1] is not None for x in pair]
    out = layout.open_own(log, os.O_WRONLY | os.O_APPEND)
    try:
        subprocess.run(  # noqa: S603  (our own interpreter and module)
            # The shell puts the daemon into the background and ends: init adopts and reaps it.
            ["/bin/sh", "-c", '"$@" &', "sh", *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd="/",  # keeps no directory of the user's busy
            env=_environment(token) | _for_upload(run),
            close_fds=True,
            start_new_session=True,
            check=True,
            timeout=START_SECONDS,
        )
    finally:
        os.close(out)


def ask_store(url: str, question: Mapping[str, Any]) -> dict[str, Any]:
    """Ask an object store, in a process of its own, which attempt of which run this job is.

    Args:
        url: of the run.
        question: arguments of `ddpprobe.store.claims.claim_next`, as JSON can hold them.

    Returns:
        What it returns; or `refused`: why what lies there cannot be continued; or `unknown`: why
        there is no answer, at the latest after ten seconds.
    """
    command = [sys.executable, "-P", "-m", "ddpprobe.store.claims", url]
    try:
        done = subprocess.run(  # noqa: S603  (our own interpreter and module)
            command,
            input=json.dumps(question),
            capture_output=True,
            text=True,
            errors="replace",
            cwd="/",
            env=_environment(None) | destination.environment(url),
            check=False,
            timeout=ASK_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"unknown": f"no answer within {ASK_SECONDS:.0f} s"}
    except OSError as error:
        return {"unknown": str(error)}
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        return {"unknown": (done.stderr.strip().splitlines() or ["no answer"])[-1]}


def daemon_alive(run: RunDir, node: str) -> bool:
    """Return whether a daemon holds the lock of this node."""
    return layout.is_locked(run.daemon_file(node, "lock"))


def wait_for_daemon(run: RunDir, node: str, timeout: float) -> dict[str, Any] | None:
    """Return what a live daemon says of itself (`daemon/<node>.json`); None after `timeout` s."""
    deadline = time.monotonic() + timeout
    while True:
        said = _read_json(run.daemon_file(node, "json"))
        # A daemon killed with -9 leaves its file behind; the next one replaces it.
        if said is not None and processes.exists(said["pid"]) and daemon_alive(run, node):
            return said
        if time.monotonic() >= deadline:
            return None
        time.sleep(POLL_SECONDS)


def _environment(token: str | None) -> dict[str, str]:
    names = (*_INHERITED, *_OURS, *(n for n in os.environ if n.startswith("LC_")))
    env = {n: os.environ[n] for n in names if n in os.environ}
    # NumPy's thread pools would take cores from the training for sums of a thousand rows.
    env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    env["PYTHONUNBUFFERED"] = "1"
    # Blocks of the store come and go: without it malloc keeps 75 MiB more of them (measured).
    env["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    token = token or os.environ.get(TOKEN_VARIABLE)
    if token:
        env[TOKEN_VARIABLE] = token
    home = str(Path(__file__).parent.parent)
    if home not in {*site.getsitepackages(), site.getusersitepackages()}:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (home, env.get("PYTHONPATH"))))
    return env


def _for_upload(run: RunDir) -> dict[str, str]:
    """Return what the daemon of a run that is uploaded must carry around after all."""
    url = (_read_json(run.run_json, "run_id") or {}).get("destination")
    return destination.environment(url) if isinstance(url, str) else {}


def _read_json(path: Path, key: str = "pid") -> dict[str, Any] | None:
    try:
        value = inside.parse(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and key in value else None
