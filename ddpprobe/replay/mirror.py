"""A run in an object store, read through a copy of it in a private cache directory.

What was fetched once stays: only manifests are fetched each time, and files that are new or changed
by them. The copy is always what the store over there was at one moment, as far as it is whole over
there. Names and sizes that come from there are data: only names that this format makes are used,
no file is taken beyond the length that its manifest states, and nothing is written outside of the
cache. Captured arrays, the bulk of a run, are fetched step by step when they are asked for.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ddpprobe import destination, inside, layout
from ddpprobe.bucket import Bucket, BucketError, TooLargeError
from ddpprobe.replay.cache import MARKER, CopyError, cache_home
from ddpprobe.store.carry import Moved, carry
from ddpprobe.store.manifest import (
    GROUP_JSON,
    MAX_LOG_BYTES,
    Manifest,
    State,
    Version,
    version_of,
    version_of_file,
)
from ddpprobe.store.there import MANIFEST, ROOT, group_of, key_of, log_of, size_of

LOCK = "mirror.lock"
TAGS = "mirror.tags"  # in the copy: of which content of each manifest it holds all files
LOCK_SECONDS = 600.0
LOOKS = 10  # at a group that its writer changes under our eyes
SPARE_BYTES = 64 << 20  # that stay free on the disk of the cache
MOST_NAMES = 1 << 20  # objects that are listed of one run
LONGEST_PART, LONGEST_KEY = 200, 1000
_PACK = re.compile(r"captures/\d{3,9}/node_\d{4,9}/rank_\d{5,9}/step_\d{10,18}\.pack")
_PART = re.compile(rf"[A-Za-z0-9_](?:[A-Za-z0-9_.]{{0,{LONGEST_PART}}})")


def mirror(url: str, advance: Callable[[int], None]) -> Path:
    """Bring the copy of a run up to date; see `copies.copy_of`, which says what is raised."""
    # The same URL means another place where the endpoint is another one.
    told = sorted(destination.environment(url).items())
    where = [url, *(f"{k}={v}" for k, v in told if "ENDPOINT" in k)]
    digest = hashlib.sha256("\n".join(where).encode()).hexdigest()[:32]
    path = layout.make_dir(cache_home() / digest)
    if path.is_symlink() or path.lstat().st_uid != os.getuid():
        raise CopyError(f"{path} belongs to somebody else; set XDG_CACHE_HOME")
    path.chmod(layout.DIR_MODE)
    with _turn(path, url) as bucket:
        _Mirror(bucket, path, advance).sync()
        layout.write_json(path / MARKER, {"url": url})
    return path


def fetch_captured(url: str, path: Path, step: int | None, advance: Callable[[int], None]) -> None:
    """Fetch captured arrays of a run into its copy; see `copies.fetch_captured`."""
    with _turn(path, url) as bucket:
        copy = _Mirror(bucket, path, advance)
        if step is None:
            copy.check()
        copy.fetch_captured(step)


@contextmanager
def _turn(path: Path, url: str) -> Iterator[Bucket]:
    """Hold the copy for as long as it changes."""
    try:
        with layout.DirectoryLock(path / LOCK).held(LOCK_SECONDS):
            yield Bucket(url)
    except BucketError as error:
        raise CopyError(f"{url} cannot be read: {error}") from error


class _Mirror:
    """One bucket and its copy, as a place that groups are carried to."""

    def __init__(self, bucket: Bucket, path: Path, advance: Callable[[int], None]) -> None:
        self._bucket, self._run, self._advance = bucket, layout.RunDir(path), advance
        self._strict = True  # what is not of its version is being changed, and not damaged
        self._tags = self._read_tags()

    def sync(self) -> None:
        """Make the copy what the run is now."""
        run_json = self._bucket.read(layout.RUN_JSON, inside.MAX_JSON_BYTES)
        names = dict(self._manifests())
        if run_json is None and not names:
            raise CopyError(
                f"{self._bucket.url}: no run lies there; give the URL that install() was given"
            )
        self._write(self._run.run_json, run_json)
        whole = {name: tag for name, tag in names.items() if tag and self._tags.get(name) == tag}
        for name in sorted(names.keys() - whole.keys()):
            if self._sync_group(name):
                whole[name] = names[name]
        layout.write_json(self._run.path / TAGS, whole)
        self._forget(set(names))
        self._sync_packs()

    def check(self) -> None:
        """Hold every file of the copy against its manifest, and fetch those anew that are wrong."""
        self._tags = {}
        self.sync()

    def fetch_captured(self, step: int | None) -> None:
        """Fetch the chunks that the nodes' manifests name, of one captured step or of all."""
        self._strict = False
        for file in inside.names(self._run.path, "manifest"):
            name = file.removesuffix(".log")
            match = MANIFEST.fullmatch(name)
            if match and match[5] and step in {None, int(match[4])}:
                files = Manifest(self._log(name)).state.files
                self.copy(group_of(name)[0], list(files.items()))

    # ---- one group

    def _sync_group(self, name: str) -> bool:
        """Bring one group up to date; whether it is whole, so that only a commit can change it."""
        group, alone = group_of(name)
        self._strict = True
        before: bytes | None = None
        for look in range(LOOKS):
            data = self._manifest(name)
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
                carry(self, name, group, state, self._here(name, group))
            except Moved:
                time.sleep(0.1 * look)
            else:
                return self._strict and state is manifest.state
        return False

    def _manifest(self, name: str) -> bytes | None:
        try:
            return self._bucket.read(log_of(name), MAX_LOG_BYTES)
        except TooLargeError:
            return b"\0"  # nothing that a reader would take for a list

    def _state(self, manifest: Manifest, group: str) -> State:
        """Return what a group is over there, as its zarr.json, written last, tells."""
        versions = manifest.versions(GROUP_JSON)
        most = max((size for size, _ in versions), default=0)
        try:
            data = self._bucket.read(key_of(group, GROUP_JSON), min(most, inside.MAX_FILE_BYTES))
        except TooLargeError:
            data = b""
        found = None if data is None else version_of(data)
        before = manifest.replaced.get(GROUP_JSON, manifest.state.files.get(GROUP_JSON))
        new = found == manifest.state.files.get(GROUP_JSON) or found != before
        return manifest.state if new else manifest.rolled_back()

    def _here(self, name: str, group: str) -> State:
        """Return what the copy holds of a group: files that are what its manifest says."""
        known = Manifest(self._log(name))
        if known.damage:
            return State()
        state = known.state
        files = {k: v for k, v in state.files.items() if self.version(group, k) == v}
        return State(state.sizes, state.consumed, files)

    # ---- the copy as a target of `carry`

    def read_manifest(self, name: str) -> bytes | None:
        """Return the manifest in the copy."""
        try:
            return inside.read_regular(self._run.path, log_of(name), MAX_LOG_BYTES)
        except OSError:
            return None

    def write_manifest(self, name: str, data: bytes) -> None:
        """Replace the manifest in the copy."""
        self._write(self._log(name), data)

    def version(self, group: str, key: str) -> Version | None:
        """Return what a file in the copy is; None if there is none."""
        try:
            fd = inside.open_regular(self._run.store / group, key)
        except (OSError, ValueError):
            return None
        with os.fdopen(fd, "rb") as file:
            return version_of_file(file)

    def copy(self, group: str, files: Sequence[tuple[str, Version]]) -> None:
        """Fetch files. Raises Moved, when all are fetched, if one is not of its version."""
        known = {k for k, _ in files}
        # A chunk of records that claims more is read by nobody.
        most = 1 << 50 if "/captures/" in group else inside.MAX_FILE_BYTES
        usual = [(k, v) for k, v in files if _is_usual(k, known) and 0 <= v[0] <= most]
        wanted = [(k, v) for k, v in usual if self.version(group, k) != v]
        self._must_fit(sum(size for _, (size, _) in wanted))
        # One byte more than it should have, so that a reader sees what is too long.
        asked = [(key_of(group, k), self._run.path / key_of(group, k), v[0] + 1) for k, v in wanted]
        found = self._bucket.fetch(asked, self._advance)
        moved = [k for (k, v), got in zip(wanted, found, strict=True) if got != v]
        if moved and self._strict:
            raise Moved(moved[0])

    def delete(self, group: str, keys: Sequence[str]) -> None:
        """Take files out of the copy."""
        for key in keys:
            if _is_usual(key, set()):
                (self._run.store / group / key).unlink(missing_ok=True)

    # ---- the rest

    def _manifests(self) -> Iterator[tuple[str, str]]:
        for count, (key, _, tag) in enumerate(self._bucket.names("manifest")):
            if count > MOST_NAMES:
                raise CopyError(f"{self._bucket.url}: more than {MOST_NAMES} manifests")
            name = key.removeprefix("manifest/").removesuffix(".log")
            if key == log_of(name) and (name == ROOT or MANIFEST.fullmatch(name)):
                yield name, tag

    def _forget(self, names: set[str]) -> None:
        """Take out of the copy what is gone over there: expired, or lost."""
        for file in inside.names(self._run.path, "manifest"):
            name = file.removesuffix(".log")
            if file.endswith(".log") and name not in names:
                self._log(name).unlink(missing_ok=True)
                match = MANIFEST.fullmatch(name)
                if match and match[4] and not match[5]:
                    shutil.rmtree(self._run.store / group_of(name)[0], ignore_errors=True)

    def _sync_packs(self) -> None:
        there = [(k, n) for k, n, _ in self._bucket.names("captures") if _PACK.fullmatch(k)]
        wanted = [(k, self._run.path / k, n) for k, n in there if size_of(self._run.path / k) != n]
        self._must_fit(sum(n for _, _, n in wanted))
        self._bucket.fetch(wanted, self._advance)

    def _must_fit(self, size: int) -> None:
        free = shutil.disk_usage(self._run.path).free
        if size > free - SPARE_BYTES:
            raise CopyError(
                f"{self._bucket.url}: {size} bytes are to be fetched, {free} are free in "
                f"{cache_home()}; set XDG_CACHE_HOME to a larger disk"
            )

    def _read_tags(self) -> dict[str, str]:
        try:
            found = inside.parse(inside.read_regular(self._run.path, TAGS))
        except (OSError, ValueError):
            return {}
        return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}

    def _log(self, name: str) -> Path:
        return self._run.path / log_of(name)

    def _write(self, path: Path, data: bytes | None) -> None:
        if data is None:
            path.unlink(missing_ok=True)
        else:
            layout.replace_file(path, [memoryview(data)] if data else [])


def _is_usual(key: str, others: set[str]) -> bool:
    """Whether this format makes such a name: no way out of the copy, no file where others lie."""
    parts = key.split("/")
    above = {"/".join(parts[:n]) for n in range(1, len(parts))}
    return len(key) <= LONGEST_KEY and all(map(_PART.fullmatch, parts)) and not above & others
