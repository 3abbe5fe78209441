"""Processes forked from one that has imported torch and ddpprobe: a rank for a tenth of a second.

A `Zygote` imports once. Each `call` forks a child in a session of its own, which may fork ranks in
turn by `start_rank`. A child has the environment of the zygote, and no thread but its own.

Run as a module it is the zygote itself: it says when it is ready; then one JSON line `[function,
arguments]` on stdin, one line with the exit code on stdout.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

HOME = Path(__file__).parent.parent.parent
LIMIT_SECONDS = 240  # for any forked process: nothing here may stay behind
READY_SECONDS = 300  # for what it imports, on a machine that does much else
READY = "ready"
_IMPORTED = ("torch.distributed.fsdp", "torch.nn.parallel", "torch._dynamo")


class Zygote:
    """The process to fork from; `close` ends it. One call at a time.

    Args:
        switches: variables to set in its environment, and so in that of all its children.
    """

    def __init__(self, **switches: str) -> None:
        own = {k: v for k, v in os.environ.items() if k != "DDPPROBE_STRICT"}
        env = {**own, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HOME), **switches}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote"], cwd=HOME, env=env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._is_ready = False

    def call(self, function: str, *arguments: object) -> int:
        """Call `module:name` with arguments that JSON can hold, in a child; return its exit code.

        Raises:
            RuntimeError: the zygote is gone or does not answer.
        """
        assert self._process.stdin is not None
        if not self._is_ready:  # its imports take none of a call's time
            self._answer(READY_SECONDS, "did not become ready")
            self._is_ready = True
        self._process.stdin.write(json.dumps([function, arguments]) + "\n")
        self._process.stdin.flush()
        return int(self._answer(LIMIT_SECONDS + 60, f"gave no answer to {function}{arguments}"))

    def _answer(self, seconds: float, otherwise: str) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise RuntimeError(f"the zygote {otherwise}")
        return line

    def close(self) -> None:
        """End it; children that still run end by their own limit."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=5)  # the end of its stdin
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_rank(body: Callable[[], object], errors: Path, teardown: float = 0.0) -> int:
    """Fork; the child runs `body` and ends as `python SCRIPT` would. Returns its process id.

    Args:
        body: what the rank does.
        errors: a file for what it prints.
        teardown: seconds between its last word and its end, if it failed: so long an interpreter
            with torch takes (0.6 s, measured), or one with more to put away.
    """
    pid = os.fork()
    if pid == 0:
        try:
            _redirect(errors)
            _end_as_python(body, teardown)
        finally:
            os._exit(70)  # not reached, unless what ends a process fails itself
    return pid


def _end_as_python(body: Callable[[], object], teardown: float) -> None:
    code, interrupted = 0, False
    try:
        body()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001  (whatever it is, Python prints it)
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.last_exc = error  # type: ignore[attr-defined]  # since Python 3.12
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
        try:
            sys.excepthook(*sys.exc_info())
        except SystemExit as end:  # of a handler, to a signal that came before this
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    # These call the handlers of signals still, and find them as the script has left them.
    atexit._run_exitfuncs()
    _defer_handlers()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        time.sleep(teardown)
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _defer_handlers() -> None:
    """An interpreter that ends calls no handler any more; what has none still kills it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        if callable(signal.getsignal(number)):
            signal.signal(number, lambda *_: None)


def _redirect(errors: Path) -> None:
    signal.alarm(LIMIT_SECONDS)
    file = os.open(errors, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def main() -> None:
    """Import, then fork for each line until there are no more."""
    for name in _IMPORTED:
        importlib.import_module(name)
    atexit._clear()  # what torch has registered is the zygote's; what ddpprobe does, a rank's, too
    from ddpprobe.rank.stats import native

    importlib.import_module("ddpprobe.probe")
    native.prepare()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A shell that starts this in the background ignores it for all of them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(READY, flush=True)
    for line in sys.stdin:
        print(_forked(*json.loads(line)), flush=True)
    os._exit(0)  # not the zygote's are the functions that atexit holds


def _forked(function: str, arguments: list[Any]) -> int:
    # A thread would be none in the child, and leave its locks as they were.
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            signal.alarm(LIMIT_SECONDS)
            os.dup2(2, 1)  # the answers are the zygote's
            gc.freeze()  # what is collected and searched in a rank is what it has made
            module, _, name = function.partition(":")
            getattr(importlib.import_module(module), name)(*arguments)
            code = 0
        except BaseException:  # noqa: BLE001  (printed, and told by the exit code)
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # ranks that were left over
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
