"""`python -m ddpprobe.daemon`: starts the node daemon; `ddpprobe daemon` calls the same `main`."""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddpprobe.daemon.bounded_log import BoundedLog
from ddpprobe.daemon.launch import TOKEN_VARIABLE, WEB_VARIABLE
from ddpprobe.daemon.node import DaemonOptions, NodeDaemon
from ddpprobe.daemon.service import DaemonService
from ddpprobe.daemon.service_request import SERVICE_VARIABLE, socket_path
from ddpprobe.rundir import paths
from ddpprobe.rundir.paths import DirectoryLock, RunDir
from ddpprobe.rundir.spool import settle_others

LISTEN = "127.0.0.1:13377"
WAIT_SECONDS = 120.0
LOOK_SECONDS = 10.0
OK, WRONG_USE = 0, 2
_BYTES = {"": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
          "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}  # fmt: skip
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
# `paths.is_locked` takes the lock for an instant to see whether it is free.
LOCK_TRIES, LOCK_PAUSE_SECONDS = 10, 0.03
AFTER_PAUSE_SECONDS = 0.25  # a launcher that waits for the daemon's end is in no hurry


def parser() -> argparse.ArgumentParser:
    """Return the command line of the daemon."""
    new = argparse.ArgumentParser(
        prog="ddpprobe daemon",
        description="Watch the ranks of one node: merge, detect, store, serve /metrics. On a run "
        "that is over: do what is left of it, and end.",
        epilog=f"exit codes: {OK} nothing wrong; {WRONG_USE} wrong use",
    )
    add_arguments(new)
    return new


def add_arguments(new: argparse.ArgumentParser) -> None:
    """Declare the arguments of the daemon."""
    what = new.add_mutually_exclusive_group(required=True)
    what.add_argument("--dir", type=Path, metavar="RUN", help="run directory")
    what.add_argument(
        "--service",
        action="store_true",
        help="start the daemons of all your runs on this machine, when training asks for them",
    )
    new.add_argument("--node", metavar="NAME", help="this node (default: the only or first one)")
    new.add_argument("--head", metavar="URL", help="where the head's daemon takes merged records")
    new.add_argument("--listen", metavar="A:P", help=f"for /metrics (default {LISTEN}, or above)")
    new.add_argument("--gather-listen", metavar="A:P", help="for other nodes' records, on the head")
    new.add_argument("--linger", type=float, metavar="S", help="serve on so long after the end")
    new.add_argument("--wait", type=float, metavar="S", help="for the first rank to appear")
    new.add_argument(
        "--after",
        action="store_true",
        help="where one serves this node already: wait for its end, then do what it left",
    )
    new.add_argument(
        "--web-config", metavar="FILE", help="TLS and passwords of /metrics (a how-to)"
    )
    new.add_argument("--max-bytes", metavar="N", help="what the store may take, e.g. 20GB")
    new.add_argument(
        "--histograms", action="store_true", help="show those of install(histograms=) in /metrics"
    )
    new.add_argument("--max-age", metavar="T", help="how old it may be, e.g. 14d, 12h")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the daemon to its end; return the exit code (0, or 2 for wrong use)."""
    arguments = parser().parse_args(argv)
    if arguments.service:
        return _be_service()
    run = RunDir(arguments.dir.absolute())
    if not run.path.is_dir():
        print(f"ddpprobe daemon: {arguments.dir} is no directory: give the run's", file=sys.stderr)
        return WRONG_USE
    node = arguments.node or _first_node(run)
    lock = DirectoryLock(run.daemon_file(node, "lock"))
    try:
        paths.make_inner(lock.path.parent)
        acquired = _acquire(lock, forever=arguments.after)
    except OSError as error:  # somebody else's, or a full disk
        print(f"ddpprobe daemon: {error}", file=sys.stderr)
        return WRONG_USE
    if not acquired:
        print(f"ddpprobe daemon: one serves {node} of {run.path} already", file=sys.stderr)
        return OK
    try:
        run.daemon_file(node, "json").unlink(missing_ok=True)  # a killed predecessor's
        _log_to_stderr()
        return _serve(_options(arguments, run, node))
    except WrongUseError as error:
        print(f"ddpprobe daemon: {error}", file=sys.stderr)
        return WRONG_USE
    finally:
        lock.release()


def _log_to_stderr() -> None:
    said = logging.StreamHandler()
    said.addFilter(BoundedLog())  # on ours alone: who serves within a process has handlers there
    form = "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(format=form, level=logging.INFO, handlers=[said])


def _be_service() -> int:
    path = socket_path()
    if path is None:
        print(f"ddpprobe daemon: {SERVICE_VARIABLE} is empty: unset it", file=sys.stderr)
        return WRONG_USE
    _log_to_stderr()
    try:
        service = DaemonService(path)
        if not service.open():
            print(f"ddpprobe daemon: a service listens at {path} already", file=sys.stderr)
            return OK
    except OSError as error:
        print(f"ddpprobe daemon: no service at {path}: {error}", file=sys.stderr)
        return WRONG_USE
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    service.serve()
    return OK


class WrongUseError(Exception):
    """An argument or an environment variable that makes no sense."""


def _serve(options: DaemonOptions) -> int:
    try:
        daemon = NodeDaemon(options)
    except ValueError as error:
        raise WrongUseError(str(error)) from error
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: daemon.stop())
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal may go, the evidence stays
    daemon.serve()
    return OK


def _options(arguments: argparse.Namespace, run: RunDir, node: str) -> DaemonOptions:
    linger, wait = arguments.linger, arguments.wait
    web = arguments.web_config or os.environ.get(WEB_VARIABLE)
    if linger is None:
        linger = _seconds("DDPPROBE_LINGER")
    if wait is None:
        wait = LOOK_SECONDS if run.attempts() else WAIT_SECONDS
        wait = 0.0 if arguments.after else wait  # there was one before it: nobody is to come
    return DaemonOptions(
        run=run,
        node=node,
        listen=arguments.listen or os.environ.get("DDPPROBE_LISTEN") or LISTEN,
        head_url=arguments.head,
        gather_listen=arguments.gather_listen,
        token=os.environ.pop(TOKEN_VARIABLE, ""),
        linger=linger,
        wait=wait,
        max_bytes=_quantity(arguments.max_bytes, "max-bytes", _BYTES, "20GB"),
        max_age=_quantity(arguments.max_age, "max-age", _SECONDS, "14d"),
        web=Path(web).absolute() if web else None,
        histograms=arguments.histograms or os.environ.get("DDPPROBE_HISTOGRAMS") == "1",
    )


def _quantity(
    given: str | None, option: str, units: Mapping[str, float], example: str
) -> float | None:
    """Read a number with a unit from the command line, else from the environment."""
    variable = f"DDPPROBE_{option.upper().replace('-', '_')}"
    said = f"--{option} {given}" if given else f"{variable}={os.environ.get(variable)}"
    text = given or os.environ.get(variable)
    if not text:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].lower() not in units or not float(match[1]):
        known = ", ".join(unit for unit in units if unit)
        raise WrongUseError(f"{said}: write a number and one of {known}, as in {example}")
    return float(match[1]) * units[match[2].lower()]


def _seconds(variable: str) -> float | None:
    given = os.environ.get(variable)
    try:
        return None if given is None else float(given)
    except ValueError as error:
        msg = f"{variable}={given!r} is no number of seconds: write {variable}=20"
        raise WrongUseError(msg) from error


def _first_node(run: RunDir) -> str:
    names = {p.name for a in run.attempts() for p in run.attempt_dir(a).glob("node_*")}
    return min(names, default=paths.node_name(0))


def _acquire(lock: DirectoryLock, *, forever: bool) -> bool:
    for _ in range(LOCK_TRIES):
        if lock.acquire():
            return True
        time.sleep(LOCK_PAUSE_SECONDS)
    while forever:
        if lock.acquire():
            return True
        time.sleep(AFTER_PAUSE_SECONDS)
    return False


if __name__ == "__main__":
    code = main()
    settle_others()  # behind its own work, and without its lock: it may wait for a dead disk
    sys.exit(code)
