"""The end of the interpreter, heard in time: behind an exception it may never come.

`atexit` is called when all threads that are no daemons have ended. A script whose main thread has
raised, and that has a thread of its own which goes on, lingers there for as long as that lives.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.util import Finalize

from ddpprobe.rank.last_words import uncaught

_heard = False


def register(close: Callable[[], object]) -> None:
    """Have `close` called at the end of the interpreter, and earlier as `hear` says.

    A process of `multiprocessing` (`torch.multiprocessing.spawn`) leaves out what `atexit` calls.
    """
    atexit.register(close)
    if parent_process() is not None:
        Finalize(None, close, exitpriority=0)


def hear(close: Callable[[], object]) -> None:
    """Have `close` called as soon as an exception has ended the main thread, if that calls this.

    To be called by who trains. In another thread training may go on behind the main one's end.
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


def _close_behind_an_exception(close: Callable[[], object]) -> None:
    if uncaught() is not None:
        close()
