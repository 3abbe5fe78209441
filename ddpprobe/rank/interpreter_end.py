"""The end of the interpreter, heard in time: after an exception it may never come.

`atexit` is called when all threads that are no daemons have ended. A script whose main thread has
raised, and that has a thread of its own which goes on, lingers there for as long as that lives.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.util import Finalize

from ddpprobe.rank.last_words import ended_by, uncaught

_heard = False
_registered_in = 0
_finalizer: Finalize | None = None


def register(close: Callable[[], object]) -> None:
    """Have `close` called at the end of the interpreter, and earlier as `hear` says.

    To be called when the module is imported, so that it comes after what a script registers later,
    and again by who trains: a process of `multiprocessing` leaves out what `atexit` calls, and
    forgets, when it is forked or has imported the script, which finalizers there were.
    """
    global _finalizer, _registered_in  # noqa: PLW0603  (a process is one)
    if _registered_in != os.getpid():
        _registered_in = os.getpid()
        atexit.register(close)
    if parent_process() is not None and (_finalizer is None or not _finalizer.still_active()):
        _finalizer = Finalize(None, _close_process, (close,), exitpriority=0)


def hear(close: Callable[[], object]) -> None:
    """Have `close` called as soon as an exception has ended the main thread, if that calls this.

    To be called by who trains. In another thread training may go on after the main one's end.
    Degradation: without the private function of `threading` that concurrent.futures uses as well,
    it is called with those of `atexit`.
    """
    global _heard  # noqa: PLW0603  (there is one interpreter)
    early = getattr(threading, "_register_atexit", None)
    if _heard or early is None or threading.current_thread() is not threading.main_thread():
        return
    with contextlib.suppress(RuntimeError):  # the interpreter ends already
        early(_close_behind_an_exception, close)
        _heard = True


def _close_process(close: Callable[[], object]) -> None:
    ended_by(sys.exc_info()[1])
    close()


def _close_behind_an_exception(close: Callable[[], object]) -> None:
    if uncaught() is not None:
        close()
