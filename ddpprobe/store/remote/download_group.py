"""One group of a run in an object store, brought into the copy of the run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ddpprobe.errors import RunError
from ddpprobe.rundir import paths, safe_read
from ddpprobe.store.group_names import group_of, key_of, log_of
from ddpprobe.store.manifest import (
    GROUP_JSON,
    MAX_LOG_BYTES,
    Manifest,
    State,
    Version,
    version_of,
)
from ddpprobe.store.remote.bucket import Bucket, TooLargeError
from ddpprobe.store.remote.cache import cache_home
from ddpprobe.store.remote.carry import Moved, carry
from ddpprobe.store.remote.local_group import LocalGroup, is_usual

LOOKS = 10  # at a group that its writer changes under our eyes
SPARE_BYTES = 64 << 20  # that stay free on the disk of the cache


class GroupCopy(LocalGroup):
    """A group of the copy, as a place that it is carried to.

    Args:
        bucket: where the run is.
        run: the copy of it.
        name: of the group's manifest, without `.log`.
        advance: told 1 for each file that was fetched.
    """

    def __init__(
        self, bucket: Bucket, run: paths.RunDir, name: str, advance: Callable[[int], None]
    ) -> None:
        super().__init__(run)
        self._bucket, self._name, self._advance = bucket, name, advance
        self._strict = True  # what is not of its version is being changed, and not damaged

    def sync(self) -> bool:
        """Bring it up to date; whether it is whole, so that only a commit can change it.

        Raises:
            BucketError: the object store refused, or does not answer.
            RunError: it would not fit.
            OSError: the disk refused.
        """
        name = self._name
        group, alone = group_of(name)
        before: bytes | None = None
        for look in range(LOOKS):
            data = self._manifest()
            if data is None:
                return False
            manifest = Manifest(Path(f"{name}.log"), data)
            if alone or manifest.damage:
                # Chunks come when they are asked for; of a damaged list, nothing can be.
                self.write_manifest(name, data)
                return not manifest.damage
            # Twice the same list, and yet not what it lists: that is damage, and for the reader.
            self._strict = data != before and look < LOOKS - 1
            before = data
            state = self._state(manifest, group)
            try:
                carry(self, name, group, state, self.here(name, group))
            except Moved:
                time.sleep(0.1 * look)
            else:
                return self._strict and state is manifest.state
        return False

    def fetch_listed(self) -> bool:
        """Fetch what the manifest in the copy lists; whether it was all there. Raises as `sync`."""
        files = Manifest(self._log(self._name)).state.files
        try:
            self.copy(group_of(self._name)[0], list(files.items()))
        except Moved:
            return False
        return True

    def _manifest(self) -> bytes | None:
        try:
            return self._bucket.read(log_of(self._name), MAX_LOG_BYTES)
        except TooLargeError:
            return b"\0"  # nothing that a reader would take for a list

    def _state(self, manifest: Manifest, group: str) -> State:
        """Return what a group is over there, as its zarr.json, written last, tells."""
        versions = manifest.versions(GROUP_JSON)
        most = max((size for size, _ in versions), default=0)
        try:
            data = self._bucket.read(key_of(group, GROUP_JSON), min(most, safe_read.MAX_FILE_BYTES))
        except TooLargeError:
            data = b""
        found = None if data is None else version_of(data)
        before = manifest.replaced.get(GROUP_JSON, manifest.state.files.get(GROUP_JSON))
        new = found == manifest.state.files.get(GROUP_JSON) or found != before
        return manifest.state if new else manifest.rolled_back()

    # ---- the copy as a target of `carry`

    def copy(self, group: str, files: Sequence[tuple[str, Version]]) -> None:
        """Fetch files. Raises Moved, when all are fetched, if one is not of its version."""
        known = {k for k, _ in files}
        # A chunk of records that claims more is read by nobody.
        most = 1 << 50 if "/captures/" in group else safe_read.MAX_FILE_BYTES
        usual = [(k, v) for k, v in files if is_usual(k, known) and 0 <= v[0] <= most]
        wanted = [(k, v) for k, v in usual if self.version(group, k) != v]
        must_fit(self._bucket, self.run, sum(size for _, (size, _) in wanted))
        # One byte more than it should have, so that a reader sees what is too long.
        asked = [(key_of(group, k), self.run.path / key_of(group, k), v[0] + 1) for k, v in wanted]
        found = self._bucket.fetch(asked, self._advance)
        moved = [k for (k, v), got in zip(wanted, found, strict=True) if got != v]
        if moved and self._strict:
            raise Moved(moved[0])

    def _log(self, name: str) -> Path:
        return self.run.path / log_of(name)


def put(path: Path, data: bytes) -> None:
    """Replace a file of the copy."""
    paths.replace_file(path, [data])


def must_fit(bucket: Bucket, run: paths.RunDir, size: int) -> None:
    """Raise RunError if so many bytes do not fit into the cache."""
    free = shutil.disk_usage(run.path).free
    if size > free - SPARE_BYTES:
        raise RunError(
            f"{bucket.url}: {size} bytes are to be fetched, {free} are free in "
            f"{cache_home()}; set XDG_CACHE_HOME to a larger disk"
        )
