"""Starting the node daemon from a training process, so that nothing ties the two together.

The daemon is exec'ed (never forked: the parent may hold CUDA contexts, threads and sockets), lives
in a session of its own, where torchrun's signals to its children do not reach it, has init for a
parent, so that it leaves no zombie, and inherits one file descriptor: a pidfd of who starts it. A
script may be over before the daemon is there, and how it ended can be asked only by that.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import site
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

from ddpprobe.daemon import service_request, variables
from ddpprobe.rundir import paths, pidfds, processes, safe_read, store_url
from ddpprobe.rundir.paths import RunDir

TOKEN_VARIABLE = "DDPPROBE_TOKEN"  # noqa: S105  (the name of a variable)
POLL_SECONDS = 0.02
START_SECONDS = 10.0
ASK_SECONDS = 10.0  # for an object store to say what it holds; training waits for it, once
WAIT_SECONDS = 120.0  # for the first journal: ranks write it right after they started us
# What starting a process can fail with: no process, descriptor or memory to be had, no shell.
START_ERRORS = (OSError, MemoryError, subprocess.SubprocessError)
CHECK_SECONDS = 5.0  # between looks at whether the daemon lives
STEADY_SECONDS = 60.0  # one that dies sooner after its start would die at the next start as well
MOST_CHECK_SECONDS = 600.0
QUICK_DEATHS = 3  # after which it is said that the daemon cannot stay
NOTICES = ("listen", "push")  # in `daemon/<node>.json`: open to all, and not let in by the head
MAX_NOTICE = 600  # characters
LOG_BYTES = 4096  # of the end of its log: why it died
# What a Python process needs to start and to find its files. Everything else (cloud keys, tracking
# tokens) stays where it is: a daemon that outlives the job must not carry it around.
_INHERITED = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR",
    "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE",
    "PYTHONPYCACHEPREFIX", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD",
)  # fmt: skip
_OURS = (
    "DDPPROBE_STRICT", variables.LINGER, variables.LISTEN, variables.MAX_BYTES, variables.MAX_AGE,
    variables.HISTOGRAMS,
)  # fmt: skip
_GONE = (
    "ddpprobe: the run directory %s is gone, training goes on. If it was deleted, nothing is "
    "recorded any more; if it was moved, it still is, but no daemon watches the run: `ddpprobe "
    "daemon --dir` finishes it where it is now"
)
_SELDOM = "it is started anew, ever more seldom, and the journals keep the records meanwhile"
# What Python, the loader and NumPy's OpenBLAS say where there is no memory. A thread may be refused
# for other reasons, too, unless what a process may address is limited.
_NO_MEMORY = (
    "MemoryError", "Cannot allocate memory", "failed to map segment",
    "Memory allocation still failed",
)  # fmt: skip
_NO_THREAD = "can't start new thread"
_MEMORY = f"ddpprobe: the node daemon ran out of memory%s; {_SELDOM} (%s)"
_QUICK = (
    f"ddpprobe: the node daemon ends soon after each start; {_SELDOM}. Its log %s ends with: %s"
)

logger = logging.getLogger("ddpprobe")


@final
class DaemonKeeper:
    """Starts the daemon of a node anew if it died, ever more seldom if it dies at its start.

    One that is still starting is given a minute.

    What is wrong is said once in the log of the training. `look` is for one thread at a time.

    Args:
        run: the run directory; if that is deleted, nothing is started any more.
        node: the node's name.
        restart: starts the daemon.
        told: it is known already that the daemon cannot be started.
        found: there was one already, which nobody has started for this attempt. It may be about to
            end, as the attempt before is over.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        run: RunDir,
        node: str,
        restart: Callable[[], None],
        *,
        told: bool = False,
        found: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._node, self._restart, self._clock = run, node, restart, clock
        self._told = {"start"} if told else set[str]()
        self._quick = 0  # deaths soon after a start, in a row; refused starts are some
        self._ran = not told  # the last start was none that was refused: it left last words
        self._started = clock() - (STEADY_SECONDS if found else 0)
        self._next = self._started + CHECK_SECONDS
        self._over = False

    def look(self, *, last: bool = False) -> None:
        """Start the daemon if it died and it is time; raises nothing that a start can fail with.

        Args:
            last: nobody looks after this one; it is time, unless a start may still be under way.
        """
        now = self._clock()
        if self._over or now < (self._started + CHECK_SECONDS if last else self._next):
            return
        self._next = now + CHECK_SECONDS
        if daemon_alive(self._run, self._node):
            self._told.discard("start")
            self._pass_on()
            if now - self._started > STEADY_SECONDS:
                self._quick = 0
        elif not self._run.path.is_dir():
            self._over = True
            self._say("gone", _GONE, self._run.path)
        elif now - self._started > STEADY_SECONDS or not _is_starting(self._run, self._node):
            self._start_anew(now)

    def _pass_on(self) -> None:
        """Say what the daemon wants a reader of the training's log to know."""
        said = _read_json(self._run.daemon_file(self._node, "json"), "notices")
        notices = said["notices"] if said is not None else None
        for what in NOTICES:
            text = notices.get(what) if isinstance(notices, dict) else None
            if isinstance(text, str):
                self._say(what, "%s", _printable(text)[:MAX_NOTICE])

    def _start_anew(self, now: float) -> None:
        self._quick = self._quick + 1 if now - self._started <= STEADY_SECONDS else 1
        pause = min(CHECK_SECONDS * 2 ** (self._quick - 1), MOST_CHECK_SECONDS)
        self._next = now + pause
        if self._ran:
            self._say_why()
        try:
            self._restart()
            self._ran = True
        except START_ERRORS as error:
            # No process to be had, or a full disk: the journals hold it all, and later may do.
            self._ran = False
            self._say("start", "ddpprobe: the node daemon cannot be started anew: %s", error)
        # What counts is how long it lives, and not how long it was waited for.
        self._started = self._next - CHECK_SECONDS

    def _say_why(self) -> None:
        log = self._run.daemon_file(self._node, "log")
        last = last_words(log)
        limit = processes.memory_limit()
        if any(word in last for word in (*_NO_MEMORY, *([_NO_THREAD] if limit else []))):
            self._say("memory", _MEMORY, limit, last)
        elif self._quick >= QUICK_DEATHS:
            self._say("quick", _QUICK, log, last)

    def _say(self, what: str, text: str, *facts: object) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.warning(text, *facts)


def last_words(log: Path) -> str:
    """Return the last line of a daemon's log, "nothing" without one; control characters are out."""
    try:
        fd = safe_read.open_regular(log.parent, log.name)
    except OSError:
        return "nothing"
    try:
        size = os.fstat(fd).st_size
        data = os.pread(fd, LOG_BYTES, max(0, size - LOG_BYTES))
    except OSError:
        return "nothing"
    finally:
        os.close(fd)
    lines = data.decode(errors="replace").strip().splitlines() or ["nothing"]
    return _printable(lines[-1])[:400]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


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

    This user's service starts it if there is one, so that it outlives a launcher that ends all
    processes of a job; else this process does.

    Args:
        run: the run directory; `run.path/daemon` is created if missing, `run.path` is there.
        node: the node's name, see `paths.node_name`.
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
    paths.make_inner(log.parent)
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
    environment = _environment(token) | _for_upload(run)
    out = paths.open_own(log, os.O_WRONLY | os.O_APPEND)
    try:
        if not service_request.ask(command, environment, log.absolute()):
            _start(command, environment, out)
    finally:
        os.close(out)


def _start(command: list[str], environment: Mapping[str, str], out: int) -> None:
    with pidfd_of(os.getpid()) as (words, fds):
        subprocess.run(  # noqa: S603  (our own interpreter and module)
            # The shell puts the daemon into the background and ends: init adopts and reaps it.
            ["/bin/sh", "-c", '"$@" &', "sh", *command, *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd="/",  # keeps no directory of the user's busy
            env=environment,
            close_fds=True,
            pass_fds=fds,
            start_new_session=True,
            check=True,
            timeout=START_SECONDS,
        )


@contextlib.contextmanager
def pidfd_of(pid: int | None) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    """Hold a pidfd of a process for a daemon that is started meanwhile.

    Yields the arguments by which it is told, and the descriptors that it is to inherit; none of
    either without a process, or where the kernel has no pidfds.
    """
    fd = None if pid is None else pidfds.open_pidfd(pid)
    if fd is None:
        yield [], ()
        return
    try:
        yield ["--pidfd", f"{pid}:{fd}"], (fd,)
    finally:
        os.close(fd)


def ask_store(url: str, question: Mapping[str, Any]) -> dict[str, Any]:
    """Ask an object store, in a process of its own, which attempt of which run this job is.

    Args:
        url: of the run.
        question: arguments of `ddpprobe.store.remote.claims.claim_next`, as JSON can hold them.

    Returns:
        What it returns; or `refused`: why what lies there cannot be continued; or `unknown`: why
        there is no answer, at the latest after ten seconds.
    """
    command = [sys.executable, "-P", "-m", "ddpprobe.store.remote.claims", url]
    try:
        done = subprocess.run(  # noqa: S603  (our own interpreter and module)
            command,
            input=json.dumps(question),
            capture_output=True,
            text=True,
            errors="replace",
            cwd="/",
            env=_environment(None) | store_url.environment(url),
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
    return paths.is_locked(run.daemon_file(node, "lock"))


def _is_starting(run: RunDir, node: str) -> bool:
    """Return whether a process is there that is to be this daemon, whoever started it.

    On a starved machine it takes Python many seconds to come as far as the lock.
    """
    return processes.is_told("--dir", str(run.path.absolute()), "--node", node)


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
    if (targets := os.environ.get(paths.SD_VARIABLE)) is not None:
        # The daemon has another working directory.
        env[paths.SD_VARIABLE] = str(Path(targets).absolute()) if targets else ""
    if web := os.environ.get(variables.WEB_CONFIG):
        env[variables.WEB_CONFIG] = str(Path(web).absolute())
    # Blocks of the store come and go: without it malloc keeps 75 MiB more of them (measured).
    env["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    token = token or os.environ.get(TOKEN_VARIABLE)
    if token:
        env[TOKEN_VARIABLE] = token
    home = str(Path(__file__).parents[2])
    if home not in {*site.getsitepackages(), site.getusersitepackages()}:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (home, env.get("PYTHONPATH"))))
    return env


def _for_upload(run: RunDir) -> dict[str, str]:
    """Return what the daemon of a run that is uploaded must carry around after all."""
    url = (_read_json(run.run_json, "run_id") or {}).get("destination")
    return store_url.environment(url) if isinstance(url, str) else {}


def _read_json(path: Path, key: str = "pid") -> dict[str, Any] | None:
    try:
        value = safe_read.parse(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and key in value else None
