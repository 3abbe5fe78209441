"""`python -m ddpprobe.daemon`: starts the node daemon; `ddpprobe daemon` calls the same `main`."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ddpprobe.daemon import given_run, variables
from ddpprobe.daemon.bounded_log import BoundedLog
from ddpprobe.daemon.launch import TOKEN_VARIABLE
from ddpprobe.daemon.node import DaemonOptions, NodeDaemon
from ddpprobe.daemon.service import DaemonService
from ddpprobe.daemon.service_request import SERVICE_VARIABLE, socket_path
from ddpprobe.rundir import paths
from ddpprobe.rundir.held_directory import HeldDirectory
from ddpprobe.rundir.paths import DirectoryLock, RunDir
from ddpprobe.rundir.spool import bring_left, settle_others

LISTEN = "127.0.0.1:13377"
WAIT_SECONDS = 120.0
LOOK_SECONDS = 10.0
OK, WRONG_USE = 0, 2
# `paths.is_locked` takes the lock for an instant to see whether it is free.
LOCK_TRIES, LOCK_PAUSE_SECONDS = 10, 0.03
AFTER_PAUSE_SECONDS = 0.25  # a launcher that waits for the daemon's end is in no hurry


def parser(
    kind: type[argparse.ArgumentParser] = argparse.ArgumentParser,
) -> argparse.ArgumentParser:
    """Return the command line of the daemon."""
    new = kind(
        prog="ddpprobe daemon",
        description="Watch the ranks of one node: merge, detect, store, serve /metrics. On a run "
        "that is over: do what is left of it, and end.",
        epilog=f"exit codes: {OK} nothing wrong; {WRONG_USE} wrong use, or no run began. In the "
        f"environment: {TOKEN_VARIABLE}, a secret that all nodes share, instead of one for each",
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
    new.add_argument("--linger", type=_seconds, metavar="S", help="serve on so long after the end")
    new.add_argument("--wait", type=_seconds, metavar="S", help="for the first rank to appear")
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
    # Of who starts it: its number, and a descriptor of it that the daemon inherits.
    new.add_argument("--pidfd", type=_pidfd, metavar="PID:FD", help=argparse.SUPPRESS)


def _seconds(text: str) -> float:
    try:
        return variables.as_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _pidfd(text: str) -> tuple[int, int] | None:
    pid, _, fd = text.partition(":")
    try:
        os.set_inheritable(int(fd), False)  # noqa: FBT003  (nothing that this starts is to have it)
        return int(pid), int(fd)
    except (ValueError, OSError):
        return None  # a launcher has closed it: all but one exit code is known without it


def main(
    argv: Sequence[str] | None = None,
    kind: type[argparse.ArgumentParser] = argparse.ArgumentParser,
) -> int:
    """Run the daemon to its end; return the exit code (0, or 2 for wrong use)."""
    arguments = parser(kind).parse_args(argv)
    if arguments.service:
        return _be_service()
    try:
        run = given_run.run_at(arguments.dir)
        options = _options(arguments, run, given_run.node_of(run, arguments.node))
    except (ValueError, OSError) as error:
        return _refuse(error)
    lock, directory = DirectoryLock(run.daemon_file(options.node, "lock")), HeldDirectory(run.path)
    try:
        paths.make_inner(lock.path.parent)
        acquired = _acquire(lock, forever=arguments.after)
    except OSError as error:  # somebody else's, or a full disk
        return _refuse(error)
    if not acquired:
        print(f"ddpprobe daemon: one serves {options.node} of {run.path} already", file=sys.stderr)
        return OK
    try:
        run.daemon_file(options.node, "json").unlink(missing_ok=True)  # a killed predecessor's
        _log_to_stderr()
        return _serve(options)
    finally:
        if directory.is_there():
            given_run.leave_no_trace(run, options.node)
        directory.close()
        lock.release()


def _refuse(error: object) -> int:
    print(f"ddpprobe daemon: {error}", file=sys.stderr)
    return WRONG_USE


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


def _serve(options: DaemonOptions) -> int:
    try:
        daemon = NodeDaemon(options)
    except ValueError as error:
        return _refuse(error)
    told_to_end = threading.Event()
    run = options.run

    def end(*_: object) -> None:
        told_to_end.set()
        daemon.stop()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal may go, the evidence stays
    is_there = daemon.serve()
    # What a full disk refused, and takes now that the run was sealed, is read as after a kill.
    while is_there and not told_to_end.is_set() and bring_left(run, options.node):
        daemon = NodeDaemon(dataclasses.replace(options, pidfd=None))  # the first one closed it
        if told_to_end.is_set():  # meanwhile, and the one before heard of it
            daemon.stop()
        is_there = daemon.serve()
    if told_to_end.is_set() or given_run.has_begun(run) or not run.path.is_dir():
        return OK
    return _refuse(
        f"no run began in {run.path} within {options.wait:g} s: give the directory that install() "
        f"made, or start a training that has it as its run_dir= ({paths.RUN_VARIABLE})"
    )


def _options(arguments: argparse.Namespace, run: RunDir, node: str) -> DaemonOptions:
    given, wait = os.environ, arguments.wait
    listen, gather_listen = arguments.listen, arguments.gather_listen
    if listen is not None:
        variables.address("--listen", listen)
    elif given.get(variables.LISTEN):
        listen = variables.address(variables.LISTEN, given[variables.LISTEN])
    if gather_listen is not None:
        variables.address("--gather-listen", gather_listen)
    web = arguments.web_config or given.get(variables.WEB_CONFIG)
    linger = variables.seconds(variables.LINGER) if arguments.linger is None else arguments.linger
    if wait is None:
        wait = LOOK_SECONDS if run.attempts() else WAIT_SECONDS
        wait = 0.0 if arguments.after else wait  # there was one before it: nobody is to come
    return DaemonOptions(
        run=run,
        node=node,
        listen=listen or LISTEN,
        head_url=arguments.head,
        gather_listen=gather_listen,
        token=os.environ.pop(TOKEN_VARIABLE, ""),
        linger=linger,
        wait=wait,
        max_bytes=variables.quantity(variables.MAX_BYTES, arguments.max_bytes),
        max_age=variables.quantity(variables.MAX_AGE, arguments.max_age),
        web=Path(web).absolute() if web else None,
        histograms=arguments.histograms or variables.is_set(variables.HISTOGRAMS),
        pidfd=arguments.pidfd,
    )


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
    settle_others()  # after its own work, and without its lock: it may wait for a dead disk
    sys.exit(code)
