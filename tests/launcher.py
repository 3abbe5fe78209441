"""torchrun in a process forked from one that has imported torch, and with it, mostly, its ranks.

Importing torch, and what an optimizer and FSDP import after it, is most of what a short job on
real ranks takes: three seconds of every rank, two of the launcher; ddpprobe takes a third of one,
half of what is left. Here one process of each test worker does it once. All else is torchrun's own:
its agent and its store, the environment of a rank, the exit code. A forked rank has no environment
of its own in /proc, and its interpreter is not taken down at its end: what is about that, or about
how a process starts, asks for fresh ones. The launcher's command line in /proc is torchrun's own,
by which a daemon knows it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import math
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from .nursery import be_called, fork_daemons, nursery
from .waiting import deadline

# What the jobs of this suite import: of torch, and of ddpprobe all that `install` does.
_IMPORTED = (
    "ddpprobe.probe",
    "torch.distributed.run",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "numpy.ma",
    "numpy.typing",
)
FORKED = ("--run-path", "--start-method=fork")  # torchrun's own words for it
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_ENDS = Path(__file__).with_name("forked_rank.py")
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload([*_IMPORTED, "tests.older_torch", __name__])
# Two threads that ask for one exit code would take it from each other, and so would one that starts
# a process from one that waits.
_alone = threading.Lock()


class Launcher:
    """One launch, with what `subprocess.Popen` has of it as far as the tests ask.

    Args:
        options: torchrun's own; None is the script alone, in one process without torchrun.
        script: the path of the script, and its arguments.
        cwd, env: where it runs, and its whole environment.
        out, err: files for what it and its ranks print; they may be one.
        fresh: whether each rank is an interpreter of its own.
        enter: what is called in its process before all else.
        forks_daemons: whether the daemons of forked ranks are forked as well (`nursery`).
    """

    def __init__(
        self, options: Sequence[object] | None, script: Sequence[object], *, cwd: Path,
        env: Mapping[str, str], out: Path, err: Path, fresh: bool,
        enter: Callable[[], None] | None = None, forks_daemons: bool = True,
    ) -> None:  # fmt: skip
        ends = [] if fresh else [_ENDS]
        words = [*ends, *script]
        if options is not None:
            alone = [] if "--nnodes" in options else ["--standalone"]
            words = [*alone, *([] if fresh else FORKED), *options, *words]
        self._words = [*map(str, words)]
        for file in (out, err):
            file.write_bytes(b"")
        # After `enter` it is on another host, where the nursery is not.
        bell = nursery().bell if forks_daemons and not fresh and enter is None else None
        given = (self._words, enter, bell, str(cwd), dict(env), str(out), str(err))
        begun = _torchrun if options is not None else _script
        self._process = _server.Process(target=begun, args=given)
        with _alone:
            self._process.start()
        self.pid = int(self._process.pid or 0)

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        with _alone:
            return self._process.exitcode

    def wait(self, timeout: float = math.inf) -> int:
        """Return the exit code; raises `subprocess.TimeoutExpired`, on a busy machine later."""
        late = deadline(timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > late:
                raise subprocess.TimeoutExpired(self._words, timeout)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        """End it, and not its ranks."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _torchrun(words: list[str], *where: Any) -> None:
    """Be torchrun, in the forked process."""
    _move(*where)
    be_called(sys.executable, "-m", "torch.distributed.run", *words)
    _run(words)


def _run(words: Sequence[str]) -> None:
    """Run torchrun's own main.

    A forked rank that is through waits for a word, which torchrun says when all are through. If it
    ends them before, it would never say it, and kill such a rank half a minute later.

    For its own log torchrun asks eighteen times for the name of the method that it is in, by way of
    all modules that there are, which is half of what it takes: here one frame is looked at.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    closes = MultiprocessContext._close

    def close(context: MultiprocessContext, **how: Any) -> None:
        context._worker_finished_event.set()
        closes(context, **how)

    MultiprocessContext._close = close  # type: ignore[method-assign]
    name_of = lambda depth=2: sys._getframe(depth).f_code.co_name  # noqa: E731
    dynamic_rendezvous.get_method_name = name_of  # type: ignore[assignment]
    run.main(words)


def _script(words: list[str], *where: Any) -> None:
    """Be `python SCRIPT ...`, in the forked process: the first word is `forked_rank`."""
    _move(*where)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def _move(
    enter: Callable[[], None] | None, bell: str | None, cwd: str, env: dict[str, str], out: str,
    err: str,
) -> None:  # fmt: skip
    """Take on the directory, the environment and the output of a launch."""
    # A thread of the parent is none here, and would leave its locks as they were.
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread"
    # The server ends when nobody holds this any more: with the tests, however they end. The launch
    # ends with the server, and torchrun, which is told by SIGTERM, ends its ranks.
    os.close(forkserver._forkserver._forkserver_alive_fd)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.setsid()
    if enter is not None:
        enter()
    if bell is not None:
        fork_daemons(bell)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for path, number in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    faulthandler.enable()
    gc.freeze()  # what is collected and searched in a rank is what it has made


def main(words: Sequence[str]) -> None:
    """Be torchrun with forked ranks in a process of its own, for one that is started elsewhere."""
    for name in _IMPORTED:
        importlib.import_module(name)
    _run([*FORKED, *words])


if __name__ == "__main__":
    main(sys.argv[1:])
