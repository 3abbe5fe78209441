"""The disk thread: it waits for the disk, and so training does not.

It carries the journal to the disk, writes packs, and looks after the daemon. Nothing waits for it
but the end of a run, and that for two seconds at most, or as long as captured tensors may take.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import final

from ddpprobe.rundir.fuse import Fuse

CHORE_SECONDS = 1.0
CLOSE_SECONDS = 2.0  # that the end of a run waits for a disk
FORK_SECONDS = 0.1
SLOWEST = 100 << 20  # bytes per second of a disk that the end of a run waits for
ERRORS_ALLOWED = 100

Task = Callable[[], object]


@final
class DiskThread:
    """Does tasks one after the other, on a thread of its own that ends no process late.

    It is not there while the process forks, if the disk lets it go: a child would inherit its
    locks, and Python warns of that.

    Attributes:
        cpu_seconds: of a core, that its thread took up to the end of its last task.
        tell_cpu: called with them, on the thread.
    """

    def __init__(self) -> None:
        self.cpu_seconds = 0.0
        self.tell_cpu: Callable[[float], object] = lambda _: None
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._chores: list[Task] = []
        self._chores_at = 0.0
        self._fuse = Fuse("disk thread", ERRORS_ALLOWED)
        self._thread: threading.Thread | None = None
        self._open = True
        self._resting = False

    def start(self, *chores: Task) -> None:
        """Begin.

        Args:
            chores: done about once a second.

        Raises:
            RuntimeError: there is no thread to be had.
        """
        self._chores = [self._fuse.guard(chore) for chore in chores]
        if self._thread is None:  # what was asked for before has begun it
            self._begin()

    def do(self, task: Task) -> None:
        """Have something done, after everything before it."""
        self._tasks.put(task)
        if self._thread is None and self._open:
            self._fuse.guard(self._begin)()

    def wait(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Wait until everything is done; False if that takes longer."""
        done = threading.Event()
        self.do(done.set)
        if self._thread is None:  # an interpreter that ends starts no threads
            self._drain()
        return done.wait(seconds)

    def close(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Do what is left, end the thread; False if that takes longer: it goes on meanwhile."""
        done = self.wait(seconds)
        self._open = False
        thread = self._thread
        self._tasks.put(None)
        if done and thread is not None:
            thread.join(seconds)
        return done

    def rest(self) -> None:
        """Before a fork: end the thread if it is idle; the next task begins another one."""
        thread = self._thread
        if thread is not None:
            self._resting = True
            self._tasks.put(None)
            thread.join(FORK_SECONDS)
            self._resting = False

    def abandon(self) -> None:
        """In a forked child, where there is no thread: do nothing any more."""
        self._open = False
        self._thread, self._tasks = None, SimpleQueue()

    def _begin(self) -> None:
        thread = threading.Thread(target=self._run, name="ddpprobe disk", daemon=True)
        thread.start()
        self._thread = thread

    def _run(self) -> None:
        before = self.cpu_seconds - time.thread_time()  # another thread's, before a fork
        while True:
            try:
                task = self._tasks.get(timeout=CHORE_SECONDS)
            except Empty:
                pass
            else:
                if task is None:
                    if self._ends():
                        return
                    continue
                self._fuse.guard(task)()
            now = time.monotonic()
            if now >= self._chores_at:
                self._chores_at = now + CHORE_SECONDS
                for chore in self._chores:
                    chore()
            self.cpu_seconds = before + time.thread_time()
            self.tell_cpu(self.cpu_seconds)

    def _ends(self) -> bool:
        """Whether the thread ends here; what was asked for meanwhile is done first."""
        if not (self._resting or not self._open):  # it was busy for too long to rest
            return False
        thread, self._thread = self._thread, None
        if self._tasks.empty():
            return True
        self._thread = thread
        self._tasks.put(None)
        return False

    def _drain(self) -> None:
        while not self._tasks.empty():
            task = self._tasks.get()
            if task is not None:
                self._fuse.guard(task)()
