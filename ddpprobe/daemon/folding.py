"""The daemon's way into the store: what a full or failing disk refuses is tried again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from ddpprobe.daemon.uploader import identity_of, stays_packed
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.paths import RunDir

if TYPE_CHECKING:
    from ddpprobe.store.writer import StoreWriter

ERRORS_ALLOWED = 100
# The last of all seals, of a daemon that was told to end as well: a disk may be full for a moment.
LAST_TRIES, PAUSE_SECONDS = 4, 1.0

logger = logging.getLogger("ddpprobe")


class Folding:
    """Puts one node's journals and packs into the store.

    Args:
        run: the run directory.
        node: this node's name.
        max_bytes, max_age: what the run may keep (bytes, seconds); None: everything.

    Attributes:
        fuse: contains what is wrong with ourselves.
        damaged: groups that cannot be written any more, and why.
    """

    def __init__(
        self, run: RunDir, node: str, max_bytes: float | None, max_age: float | None
    ) -> None:
        self.fuse = Fuse("store", ERRORS_ALLOWED)
        self.damaged: dict[str, str] = {}
        self._run, self._node = run, node
        self._limits = max_bytes, max_age
        self._store: StoreWriter | None = None
        self._refused = False
        self._write = self.fuse.guard(self._despite_the_disk)

    def fold(self, reading: Mapping[tuple[int, int], int] = MappingProxyType({})) -> None:
        """Fold what is complete, and has been read; see `StoreWriter.fold`."""
        self._write(lambda store: store.fold(reading))

    def seal(
        self, tries: int = 1, unread: Mapping[tuple[int, int], int] = MappingProxyType({})
    ) -> bool:
        """Put everything that is left into the store.

        Args:
            tries: how often a disk that refuses is asked, `PAUSE_SECONDS` apart.
            unread: see `StoreWriter.seal`.

        Returns:
            Whether it is there; otherwise it is where it was, for a later call or daemon.
        """
        for number in range(tries):
            if number:
                time.sleep(PAUSE_SECONDS)
            if self._write(lambda store: store.seal(unread)):
                return True
        return False

    def close(self) -> None:
        """Close the files."""
        if self._store is not None:
            self._store.close()

    def _despite_the_disk(self, write: Callable[[StoreWriter], object]) -> bool:
        """Write to the store; a full or failing disk is no fault of ours, and may recover."""
        store, taken = self._open(), True
        try:
            write(store)
        except OSError as error:
            if not self._refused:
                logger.warning("ddpprobe: the store cannot be written, retrying: %s", error)
            self._refused, taken = True, False
        for group, why in store.damaged.items():
            if self.damaged.get(group) != why:
                logger.warning("ddpprobe: %s is damaged: %s", group or "the store's root", why)
                self.damaged[group] = why
        return taken

    def _open(self) -> StoreWriter:
        if self._store is None:
            # Not at the top: zarr takes half a second, which the first reading should not wait for.
            from ddpprobe.store.retention import RetentionLimits  # noqa: PLC0415
            from ddpprobe.store.writer import StoreWriter  # noqa: PLC0415

            packed = stays_packed(identity_of(self._run))
            self._store = StoreWriter(
                self._run, self._node, limits=RetentionLimits(*self._limits), captures=not packed
            )
        return self._store
