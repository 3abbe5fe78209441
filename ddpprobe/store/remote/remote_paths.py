"""A bucket as a target of `carry`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ddpprobe.rundir import safe_read
from ddpprobe.store.group_names import key_of, log_of
from ddpprobe.store.manifest import MAX_LOG_BYTES, Version, version_of
from ddpprobe.store.remote.bucket import Bucket


class BucketTarget:
    """A bucket as a place that groups are carried to."""

    def __init__(
        self, bucket: Bucket, advance: Callable[[], None],
        content: Callable[[str, str, Version], bytes | Path | None], brought: dict[str, Version],
    ) -> None:  # fmt: skip
        self._bucket, self._advance, self._content = bucket, advance, content
        self._brought = brought

    def read_manifest(self, name: str) -> bytes | None:
        """Return the manifest that is there."""
        return self._bucket.read(log_of(name), MAX_LOG_BYTES)

    def write_manifest(self, name: str, data: bytes) -> None:
        """Replace it, all at once."""
        self._bucket.write(log_of(name), data)
        self._advance()

    def version(self, group: str, key: str) -> Version | None:
        """Return what a file there is; None if there is none."""
        found = self._bucket.read(key_of(group, key), safe_read.MAX_FILE_BYTES)
        return None if found is None else version_of(found)

    def copy(self, group: str, files: Sequence[tuple[str, Version]]) -> None:
        """Bring files there, but for those that were brought before."""
        left = {key_of(group, key): (key, v) for key, v in files if self._brought.get(key) != v}
        loads = [(name, partial(self._content, group, *file)) for name, file in left.items()]

        def arrived(name: str) -> None:
            self._brought.update([left[name]])
            self._advance()

        self._bucket.write_files(loads, arrived)

    def delete(self, group: str, keys: Sequence[str]) -> None:
        """Take files away."""
        self._bucket.delete([key_of(group, key) for key in keys])


def size_of(path: Path) -> int:
    """Return how long a file is; -1 if there is none."""
    try:
        return path.lstat().st_size
    except OSError:
        return -1
