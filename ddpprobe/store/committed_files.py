"""Files of one group, each of them what its manifest says, also while a writer goes on.

A manifest is read before the files that it lists. By the time a file is opened its writer may have
replaced it, or retention may have taken it away: then a newer manifest says so. So nothing is
called lost before a manifest that was read after the file, and that did not change since, says
that the file should have been there. What a commit replaced counts until the commit is finished.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ddpprobe.errors import StoreDamaged
from ddpprobe.rundir import safe_read
from ddpprobe.store.manifest import EXPIRED, Consumed, Manifest, Version, read_regular, version_of

LOOKS = 50  # at a file that changes under our eyes: a commit takes longer than a look
Found = tuple[int, int | None]  # length, and checksum where the content was looked at


class ExpiredError(StoreDamaged):
    """Retention took the file away since the group was opened."""


class CommittedFiles:
    """Reads the files of one group.

    Args:
        root: directory of the group.
        manifest: as of when the group was opened.
        settled: its last commit was finished then.

    Attributes:
        newest: the manifest that was read last.
    """

    def __init__(self, root: Path, manifest: Manifest, *, settled: bool) -> None:
        self.newest = manifest
        self._settled = settled and not manifest.damage
        self._root, self._opened_with = root, manifest

    def has_expired(self, block: int) -> bool:
        """Return whether retention took a block of steps away, as far as was seen."""
        return self.newest.state.consumed.get(EXPIRED, Consumed()).has(block)

    def load(self, key: str) -> bytes | None:
        """Return the content of a file; None for a chunk that never was (its sites came later).

        Raises:
            ExpiredError: retention took it away meanwhile.
            StoreDamaged: it is missing or damaged.
        """
        data = None

        def look() -> Found:
            nonlocal data
            data = read_regular(self._root, key)
            return version_of(data)

        return data if self._is_there(key, look) else None

    def open(self, key: str) -> int | None:
        """Open a file of which only parts will be read: it has the length it must have.

        Returns and raises as `load`.
        """
        fd = -1

        def look() -> Found:
            nonlocal fd
            if fd >= 0:
                os.close(fd)
                fd = -1
            fd = safe_read.open_regular(self._root, key)
            return os.fstat(fd).st_size, None

        there = False
        try:
            there = self._is_there(key, look)
        finally:
            if not there and fd >= 0:
                os.close(fd)
        return fd if there else None

    def _is_there(self, key: str, look: Callable[[], Found]) -> bool:
        """Look at a file until it is what a manifest says, or until it plainly is not."""
        manifest, why = self._opened_with, ""
        for _ in range(LOOKS):
            try:
                found: Found | None = look()
            except FileNotFoundError:
                found = None
            except OSError as error:
                why = f"{key} is no regular file ({error.strerror or error})"
                raise StoreDamaged(why) from error
            why = _wrong(manifest, key, found, self._versions(manifest, key))
            if not why:
                return self._known(key, found)
            # The writer may have gone on since the manifest was read.
            before, manifest = manifest, Manifest(manifest.path)
            self.newest = manifest
            listed = bool(self._opened_with.versions(key))
            why = _wrong(manifest, key, found, self._versions(manifest, key), listed=listed)
            if not why:
                return self._known(key, found)
            if manifest.exists == before.exists and _said(manifest, key) == _said(before, key):
                break
        raise StoreDamaged(why)

    def _versions(self, manifest: Manifest, key: str) -> set[Version]:
        """Return what the file may be: one version, unless a commit of it is under way."""
        version = manifest.state.files.get(key)
        committed = self._settled and not manifest.undone
        if committed and version and version == self._opened_with.state.files.get(key):
            return {version}
        return manifest.versions(key)

    def _known(self, key: str, found: Found | None) -> bool:
        if found is None and key in self._opened_with.state.files:
            raise ExpiredError(f"{key} has expired")
        return found is not None


def _wrong(
    manifest: Manifest, key: str, found: Found | None, versions: set[Version], *,
    listed: bool = False,
) -> str:  # fmt: skip
    """Say what is wrong with a file that is `found`, or not there; "" if it is one of `versions`.

    A damaged manifest may have lost the line of a file, unless it was `listed` before.
    """
    if found is None:
        if manifest.state.files.get(key) or manifest.damage:
            return f"{key} is missing"
        return "" if manifest.exists else f"{key} is missing, and so is the manifest"
    unknown = not manifest.exists or (manifest.damage and not versions and not listed)
    if unknown or _is_one_of(found, versions):
        return ""
    return f"{key} is damaged: it is not what was committed"


def _said(manifest: Manifest, key: str) -> tuple[set[Version], bool]:
    return manifest.versions(key), key in manifest.state.files


def _is_one_of(found: Found, versions: set[Version]) -> bool:
    size, crc = found
    return found in versions if crc is not None else any(size == n for n, _ in versions)
