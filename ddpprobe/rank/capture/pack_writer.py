"""From step captures to packs on the disk. Nothing waits for a device, and no error gets out.

A pack is written by the disk thread (`disk_thread`), or, where there is none, by the thread that
trains. What it says of it, it says from there: a journal has one writer.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import final

from ddpprobe.errors import PackDamaged
from ddpprobe.rank.capture.headroom import Headroom
from ddpprobe.rank.capture.host_copy import MAX_BYTES, HostCopier
from ddpprobe.rank.capture.staging import Staging
from ddpprobe.rank.capture.step_capture import StepCapture
from ddpprobe.rank.disk_thread import CLOSE_SECONDS, SLOWEST, DiskThread
from ddpprobe.rank.stats.crc32 import crc32
from ddpprobe.records.events import CapturedEvent, DroppedEvent, Event
from ddpprobe.rundir import tensor_pack
from ddpprobe.rundir.journal import BACK_OFF_SECONDS, JournalWriter

Write = Callable[[], int]


@final
class PackWriter:
    """Writes what one rank keeps.

    Args:
        path: gives the file of a step's pack.
        who: JSON that every header begins with: attempt, rank, world_size.
        journal: hears of every pack, and of what was lost.
        disk_thread: writes the packs; None: they are written at once.
    """

    def __init__(
        self, path: Callable[[int], Path], who: Mapping[str, int], journal: JournalWriter,
        disk_thread: DiskThread | None = None,
    ) -> None:  # fmt: skip
        self._path, self._who, self._journal, self._disk_thread = path, who, journal, disk_thread
        self._waiting: deque[StepCapture] = deque()
        self._writing: deque[StepCapture] = deque()  # by the disk thread, the oldest first
        self._written: deque[int | OSError | PackDamaged] = deque()  # what became of these
        self._retry_at = 0.0
        self._staging, self._headroom = Staging(), Headroom()

    def step_capture(self, step: int, reason: str, *, whole: bool = False) -> StepCapture:
        """Return an empty step capture for the step under way."""
        self._headroom.begin()
        keeper = HostCopier(self.room(), self._staging, self._headroom)
        return StepCapture(step, reason, keeper, whole=whole)

    def room(self) -> int:
        """Bytes that the next capture may take; 0 for a moment after the disk has refused one."""
        if time.monotonic() < self._retry_at:
            return 0
        return MAX_BYTES - _taken(self._waiting) - _taken(self._writing)

    def push(self, step_capture: StepCapture) -> None:
        """Take a step capture that is complete; `write` writes it when its copies are there."""
        self._waiting.append(step_capture)

    def write(self, *, wait: bool = False) -> None:
        """Write the captures whose copies have arrived; waits for the others only at the end."""
        while self._waiting and (wait or self._waiting[0].keeper.ready()):
            step_capture = self._waiting.popleft()
            if wait:
                step_capture.keeper.wait()
            self._write(step_capture)
        if wait:
            self._wait()
            self._staging.release()
        self._report()

    def abandon(self) -> None:
        """Let go of the captures whose copies have not arrived, and say so."""
        while self._waiting:
            lost = len(self._waiting.popleft())
            self.tell(DroppedEvent(reason="capture: no word from the device", count=lost))

    def _write(self, step_capture: StepCapture) -> None:
        header = {**self._who, **step_capture.header()}
        write = partial(
            tensor_pack.write, self._path(step_capture.step), header, step_capture.tensors(), crc32
        )
        self._writing.append(step_capture)
        if self._disk_thread is None:
            self._try(write)
        else:
            self._disk_thread.do(partial(self._try, write))

    def _try(self, write: Write) -> None:
        try:
            self._written.append(write())
        except (OSError, PackDamaged) as error:
            self._written.append(error)

    def _wait(self) -> None:
        """Wait for the disk thread, as long as a slow disk may take, and for no other."""
        if self._writing and self._disk_thread is not None:
            self._disk_thread.wait(CLOSE_SECONDS + _taken(self._writing) / SLOWEST)
            self._report()
            for step_capture in self._writing:
                self.tell(DroppedEvent(reason="capture: slow disk", count=len(step_capture)))

    def _report(self) -> None:
        """Say what became of packs."""
        while self._written:
            self._said(self._writing.popleft(), self._written.popleft())

    def _said(self, step_capture: StepCapture, size: int | OSError | PackDamaged) -> None:
        if not isinstance(size, int):
            self._retry_at = time.monotonic() + BACK_OFF_SECONDS
            why = errno.errorcode.get(getattr(size, "errno", None) or 0, "too large")
            self.tell(DroppedEvent(reason=f"capture: {why}", count=len(step_capture)))
            return
        self.tell(CapturedEvent(step=step_capture.step, bytes=size, reason=step_capture.reason))
        if step_capture.keeper.starved:
            why = "capture: no device memory"
            self.tell(DroppedEvent(reason=why, count=step_capture.keeper.starved))
        if step_capture.keeper.refused:
            self.tell(DroppedEvent(reason="capture: no room", count=step_capture.keeper.refused))

    def pump(self) -> None:
        """Move on what has arrived of the copies, so that more of them can cross."""
        self._staging.pump()

    def tell(self, event: Event) -> None:
        """Write that something happened to this rank."""
        self._journal.append_event(event)


def _taken(bundles: deque[StepCapture]) -> int:
    return sum(step_capture.keeper.taken for step_capture in bundles)
