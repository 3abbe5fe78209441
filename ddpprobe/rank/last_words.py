"""What a training process says of the exception that ends it; it changes nothing about that."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from types import CodeType, FrameType

from ddpprobe.rank.exceptions import (
    MAX_CHAIN,
    chain_of,
    frames_of,
    is_raised_by_hand,
    message_of,
    places_of,
    reasons,
)
from ddpprobe.rank.frames import is_of_the_script, module_of, stack
from ddpprobe.rank.scheduler import pool
from ddpprobe.rank.shared_failure import shared_failure
from ddpprobe.rank.signal_handlers import OF_THE_SCRIPT
from ddpprobe.records.events import ClosedEvent
from ddpprobe.records.fate import RaisedError, Reason, placed
from ddpprobe.rundir.fuse import first_line
from ddpprobe.rundir.signal_frames import signal_of

MAX_THREADS, MAX_NAME = 4, 60
# Where ranks talk to one another, and what of it raises; the name of a module, or its beginning.
_TALKING = ("torch.distributed", "torch._C._distributed_c10d")
# Where torch reads and writes files, and pipes, of any name.
_FILES = ("torch.serialization", "torch.multiprocessing", "torch.utils.data", "torch.hub")
# Schedulers announce the end of a job's time by a signal of its choice (Slurm's --signal).
_ASKS = {
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
}  # fmt: skip
_DIST_ERRORS = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
# The words of backends for a peer that is gone or does not answer.
_GONE = re.compile(
    r"connection (?:closed|reset|refused)|broken pipe|socket timeout|pair closure|wait timeout"
    r"|timed out waiting|watchdog|monitored ?barrier|remote process exited",
    re.IGNORECASE,
)
# Who says so. What they say of what a call was given is the caller's own mistake.
_BACKEND = re.compile(r"gloo|nccl|ucc\b|process ?group|collective", re.IGNORECASE)
_WRONG_CALL = re.compile(
    r"\b(?:invalid|incorrect|expect(?:s|ed)|requires?|must|should|(?:un)?support(?:s|ed)?|cannot"
    r"|not (?:been|initialized|implemented|available))\b",
    re.IGNORECASE,
)
# A port of this rank's own host.
_OWN_ADDRESS = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_PATH = re.compile(r"\S*/\S*")
_TOLD_WORKER = re.compile(r"DataLoader worker .*killed by signal: (?:Terminated|Interrupt|Hangup)")

# What a rank's own device says, wherever it is heard: a collective may be the next to ask it.
_OUT_OF_MEMORY = "OutOfMemoryError"  # of torch; a RuntimeError
_OF_THE_DEVICE = re.compile(
    r"(?:CUDA|HIP|XPU) (?:kernel )?errors?\b|(?:CUDA|HIP|XPU) out of memory|device-side assert"
    r"|unhandled cuda error|CUBLAS_STATUS|CUDNN_STATUS",
    re.IGNORECASE,
)


def goodbye(*, at_exit: bool = False, midway: bool = False) -> ClosedEvent:
    """Return the last event, but for how far the rank has come.

    At the end of the interpreter the exception that nobody caught is where Python left it for its
    debugger, whatever hook has printed it. Before that the one that is under way is told, which may
    still be caught: the process's exit code says whether it was. Of a sys.exit() nothing is left
    at the end of the interpreter.

    Args:
        at_exit: it is said at the end of the interpreter; the script itself has not said that its
            training is over.
        midway: training stands within a step.
    """
    ending = uncaught(midway=midway)
    raised = ending or _under_way()
    handlers = OF_THE_SCRIPT
    asked = handlers.left_by_an_exception or any(
        frame.f_code in handlers.codes and signal_of(frame) is not None
        for frame in stack(sys._getframe())  # noqa: SLF001  (its documented name)
    )
    ended, leaving = isinstance(raised, SystemExit), sys.exc_info()[1]
    return ClosedEvent(
        status="exception" if ending is not None else "ok",
        error=None if raised is None or ended else describe(raised),
        handles=handlers.may_have_run, at_exit=at_exit,
        asked=asked or (isinstance(leaving, SystemExit) and _is_asked([leaving])),
        pool=pool(os.environ, os.getppid()),
        threads=_threads() if at_exit and ending is not None else (),
    )  # fmt: skip


def _under_way() -> BaseException | None:
    """Return the exception that is being handled, if it may end a script.

    After the last batch of a loop by hand comes a StopIteration. Workers of
    `torch.multiprocessing.spawn` exit while they handle theirs, which says more than the exit.
    """
    raised = sys.exc_info()[1]
    if isinstance(raised, SystemExit) and raised.code and raised.__context__ is not None:
        raised = raised.__context__
    control = isinstance(raised, StopIteration | StopAsyncIteration | GeneratorExit)
    return None if control else raised


def describe(raised: BaseException) -> RaisedError:
    """Return the type, message and origin of an exception, and whose doing it was.

    It counts as communication with other ranks also if what it was raised in answer to came out of
    that. What was raised from another exception is judged by that one: torch's pipeline says so of
    whatever a stage raises. Of a group it is the first exception that is no broken communication.
    """
    told = _told(raised)
    raised = _of_group(raised)
    chain = list(chain_of(raised))
    behind = _behind(chain)
    cause, handled = (None, None) if behind else reasons(chain)
    return RaisedError(
        told.type, told.message, told.where,
        collective=any(_is_another_s(error) for error in chain if error.__cause__ is None),
        asked=_is_asked(chain), behind=behind, script=told.script, group=told.group,
        cause=_told_behind(cause), handled=_told_behind(handled),
    )  # fmt: skip


def _told(raised: BaseException) -> Reason:
    """Return what is said of one exception; of a group, of the one of it that tells most."""
    group, raised = raised, _of_group(raised)
    where, script = places_of(raised.__traceback__)
    of = "" if group is raised else _in_words(group)
    return Reason(type(raised).__name__, message_of(raised), where, script, of)


def _told_behind(raised: BaseException | None) -> Reason | None:
    """Return what is said of one behind another, whose place is told: none of a library alone."""
    if raised is None:
        return None
    told = _told(raised)
    frames = frames_of(_of_group(raised).__traceback__)
    return told if any(map(is_of_the_script, frames)) else replace(told, where="")


def _of_group(raised: BaseException) -> BaseException:
    """Return the exception of a group that tells most; of a group of groups, at some depth."""
    for _ in range(MAX_CHAIN):
        if not isinstance(raised, BaseExceptionGroup):
            break
        each = raised.exceptions
        raised = next((e for e in each if not _is_another_s(e)), each[0])
    return raised


def _behind(chain: list[BaseException]) -> str:
    """Return the first exception of a chain, if the last one was raised while that was handled.

    A script that waits for the others in a `finally` may time out there because of it.
    """
    first = chain[-1]
    told = len(chain) > 1 and not _is_another_s(first) and _is_another_s(chain[0])
    return _in_words(first) if told else ""


def _in_words(raised: BaseException) -> str:
    text, (where, script) = message_of(raised), places_of(raised.__traceback__)
    at = placed(where, script)
    return f"{type(raised).__name__}{f': {text}' if text else ''}{at}"


def _is_asked(chain: Iterable[BaseException]) -> bool:
    """Whether one of these is Python's answer to SIGINT, or out of a handler of the script's.

    Of a signal by which somebody asks a script to end: a timer of its own (SIGALRM) is none. One
    that is sent to all processes of a job ends the workers of a DataLoader, too.
    """
    handlers = OF_THE_SCRIPT.codes
    return any(
        (isinstance(error, KeyboardInterrupt) and not is_raised_by_hand(error))
        or any(_is_in_a_handler(f, handlers) for f in frames_of(error.__traceback__))
        for error in chain
    ) or (OF_THE_SCRIPT.may_have_run and any(_TOLD_WORKER.search(first_line(e)) for e in chain))


def _is_in_a_handler(frame: FrameType, handlers: frozenset[CodeType]) -> bool:
    """Whether a frame is one of a handler that a signal called; a script may call it by itself."""
    called_for = signal_of(frame)
    return called_for in _ASKS or (called_for is not None and frame.f_code in handlers)


def _threads() -> tuple[str, ...]:
    """Return the names of threads for which the interpreter waits at its end, a few of them."""
    waited = (t for t in threading.enumerate() if not (t.daemon or t is threading.main_thread()))
    return tuple(t.name[:MAX_NAME] for t in itertools.islice(waited, MAX_THREADS))


_ended: BaseException | None = None


def ended_by(error: BaseException | None) -> None:
    """Take note of the exception that a process of `multiprocessing` ends with.

    Python leaves it nowhere then. `torch.multiprocessing` has caught it, and ends with an exit
    code.
    """
    global _ended  # noqa: PLW0603  (a process ends once)
    if isinstance(error, SystemExit):
        trace = [frame.f_globals.get("__name__") for frame in frames_of(error.__traceback__)]
        caught = trace[-1:] == ["torch.multiprocessing.spawn"]
        error = error.__context__ if caught else None
    _ended = error


def uncaught(*, midway: bool = False) -> BaseException | None:
    """Return the exception that ended the script, where Python has left it; None: none has.

    In a notebook or at a prompt an exception ends no process, and the last one may be of any cell,
    also of one before the run: it counts where training stands within a step (`midway`).
    """
    if _ended is not None:
        return _ended
    if hasattr(sys, "ps1") and not midway:
        return None
    for name in ("last_exc", "last_value"):  # the first one since Python 3.12
        found = getattr(sys, name, None)
        if isinstance(found, BaseException):
            return found
    return None


def _is_another_s(error: BaseException) -> bool:
    """Whether another rank is behind an error: communication broke, or a common checkpoint failed.

    Of such a checkpoint each rank knows whether the failure was its own.
    """
    shared = shared_failure(error)
    if shared is None:
        return _is_collective(error)
    return shared.own is None or _is_collective(shared.own)


def _is_collective(error: BaseException) -> bool:
    """Whether an error came out of communication, because of another rank.

    torch's C++ raises a RuntimeError in the frame that called it: of torch's Python, or of the
    script where that waits for what it began. What is raised by a `raise` in torch.distributed is
    of its own checks, unless it says that a peer is gone.
    """
    if _is_of_the_device(error) or _OWN_ADDRESS.search(first_line(error)):
        return False
    if any(kind.__name__ in _DIST_ERRORS for kind in type(error).__mro__):
        return not is_raised_by_hand(error)  # a script may have errors that are derived from these
    modules = [module_of(frame) for frame in frames_of(error.__traceback__)]
    inner, said = modules[-1] if modules else "", first_line(error)
    # Others are a wrong call, such as without a group.
    if inner.startswith(_FILES) or not isinstance(error, RuntimeError | OSError):
        return False
    text = _PATH.sub("", said)  # a checkpoint may lie in a folder of any name
    gone, by_hand = bool(_GONE.search(text)), is_raised_by_hand(error, torch_s=True)
    if not (inner == "torch" or inner.startswith("torch.")):
        # A script has connections of its own, to which the same may happen.
        return type(error) is RuntimeError and gone and not by_hand and bool(_BACKEND.search(said))
    if gone or by_hand or _WRONG_CALL.search(text):
        return gone
    talking = isinstance(error, RuntimeError) and inner.startswith(_TALKING)
    return talking or bool(_BACKEND.search(text))


def _is_of_the_device(error: BaseException) -> bool:
    """Whether this rank's own device failed, or had no memory left.

    Kernels run behind the host, which hears of a failure at whatever it asks next; and FSDP takes
    the memory for gathered parameters within its collectives.
    """
    if any(kind.__name__ == _OUT_OF_MEMORY for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and bool(_OF_THE_DEVICE.search(first_line(error)))
