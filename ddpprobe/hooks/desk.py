"""From bundles to packs on the disk. Nothing waits for a device, and no error gets out.

A pack is written by the disk thread (`scribe`), or, where there is none, by the thread that trains.
What it says of it, it says from there: a journal has one writer.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, final

from ddpprobe import codec, packs
from ddpprobe.hooks.bundle import Bundle
from ddpprobe.hooks.headroom import Headroom
from ddpprobe.hooks.keeping import MAX_BYTES, Keeper
from ddpprobe.hooks.staging import Staging
from ddpprobe.journal import BACK_OFF_SECONDS, JournalWriter
from ddpprobe.scribe import CLOSE_SECONDS, SLOWEST, Scribe
from ddpprobe.stats.crc32 import crc32

Write = Callable[[], int]


@final
class Desk:
    """Writes what one rank keeps.

    Args:
        path: gives the file of a step's pack.
        who: JSON that every header begins with: attempt, rank, world_size.
        journal: hears of every pack, and of what was lost.
        scribe: writes the packs; None: they are written at once.
    """

    def __init__(
        self, path: Callable[[int], Path], who: Mapping[str, int], journal: JournalWriter,
        scribe: Scribe | None = None,
    ) -> None:  # fmt: skip
        self._path, self._who, self._journal, self._scribe = path, who, journal, scribe
        self._waiting: deque[Bundle] = deque()
        self._writing: deque[Bundle] = deque()  # by the disk thread, the oldest first
        self._written: deque[int | OSError | packs.PackError] = deque()  # what became of these
        self._retry_at = 0.0
        self._staging, self._headroom = Staging(), Headroom()

    def bundle(self, step: int, reason: str, *, whole: bool = False) -> Bundle:
        """Return an empty bundle for the step under way."""
        self._headroom.begin()
        keeper = Keeper(self.room(), self._staging, self._headroom)
        return Bundle(step, reason, keeper, whole=whole)

    def room(self) -> int:
        """Bytes that the next bundle may take; 0 for a moment after the disk has refused one."""
        if time.monotonic() < self._retry_at:
            return 0
        return MAX_BYTES - _taken(self._waiting) - _taken(self._writing)

    def push(self, bundle: Bundle) -> None:
        """Take a bundle that is complete; `write` writes it when its copies are there."""
        self._waiting.append(bundle)

    def write(self, *, wait: bool = False) -> None:
        """Write the bundles whose copies have arrived; waits for the others only at the end."""
        while self._waiting and (wait or self._waiting[0].keeper.ready()):
            bundle = self._waiting.popleft()
            if wait:
                bundle.keeper.wait()
            self._write(bundle)
        if wait:
            self._wait()
            self._staging.release()
        self._report()

    def _write(self, bundle: Bundle) -> None:
        header = {**self._who, **bundle.header()}
        write = partial(packs.write, self._path(bundle.step), header, bundle.tensors(), crc32)
        self._writing.append(bundle)
        if self._scribe is None:
            self._try(write)
        else:
            self._scribe.do(partial(self._try, write))

    def _try(self, write: Write) -> None:
        try:
            self._written.append(write())
        except (OSError, packs.PackError) as error:
            self._written.append(error)

    def _wait(self) -> None:
        """Wait for the disk thread, as long as a slow disk may take, and for no other."""
        if self._writing and self._scribe is not None:
            self._scribe.wait(CLOSE_SECONDS + _taken(self._writing) / SLOWEST)
            self._report()
            for bundle in self._writing:
                self.tell("dropped", reason="capture: slow disk", count=len(bundle))

    def _report(self) -> None:
        """Say what became of packs."""
        while self._written:
            self._said(self._writing.popleft(), self._written.popleft())

    def _said(self, bundle: Bundle, size: int | OSError | packs.PackError) -> None:
        if not isinstance(size, int):
            self._retry_at = time.monotonic() + BACK_OFF_SECONDS
            why = errno.errorcode.get(getattr(size, "errno", None) or 0, "too large")
            self.tell("dropped", reason=f"capture: {why}", count=len(bundle))
            return
        self.tell("captured", step=bundle.step, bytes=size, reason=bundle.reason)
        if bundle.keeper.starved:
            why = "capture: no device memory"
            self.tell("dropped", reason=why, count=bundle.keeper.starved)
        if bundle.keeper.refused:
            self.tell("dropped", reason="capture: no room", count=bundle.keeper.refused)

    def pump(self) -> None:
        """Move on what has arrived of the copies, so that more of them can cross."""
        self._staging.pump()

    def tell(self, event: str, **facts: Any) -> None:  # noqa: ANN401  (JSON)
        """Write that something happened to this rank."""
        self._journal.append_json(codec.LIFE, {"event": event, **facts})


def _taken(bundles: deque[Bundle]) -> int:
    return sum(bundle.keeper.taken for bundle in bundles)
