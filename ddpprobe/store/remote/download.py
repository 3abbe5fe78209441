"""A run in an object store, read through a copy of it in a private cache directory.

What was fetched once stays: only manifests are fetched each time, and files that are new or changed
by them. Each group of the copy is what it was over there at one moment, as far as it is whole over
there. Groups that know nothing of each other are fetched side by side; what speaks of others comes
before them, as it was brought after them: what it speaks of is there by then. Names and sizes that
come from there are data: only names that this format makes are used, no file is taken beyond the
length that its manifest states, and nothing is written outside of the cache. Captured arrays, the
bulk of a run, are fetched step by step when they are asked for.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from ddpprobe.errors import RunError, RunNotFound
from ddpprobe.rundir import paths, safe_read, store_url
from ddpprobe.store.group_names import MANIFEST, ROOT, group_of, log_of
from ddpprobe.store.remote.bucket import Bucket, BucketError
from ddpprobe.store.remote.cache import MARKER, cache_home
from ddpprobe.store.remote.download_group import GroupCopy, must_fit, put
from ddpprobe.store.remote.remote_paths import size_of

LOCK = "mirror.lock"
TAGS = "mirror.tags"  # in the copy: of which content of each manifest it holds all files
LOCK_SECONDS = 600.0
GROUPS_AT_ONCE = 8
MOST_NAMES = 1 << 20  # objects that are listed of one run
_PACK = re.compile(r"captures/\d{3,9}/node_\d{4,9}/rank_\d{5,9}/step_\d{10,18}\.pack")


def mirror(url: str, advance: Callable[[int], None]) -> Path:
    """Bring the copy of a run up to date; see `copies.copy_of`, which says what is raised."""
    # The same URL means another place where the endpoint is another one.
    told = sorted(store_url.environment(url).items())
    where = [url, *(f"{k}={v}" for k, v in told if "ENDPOINT" in k)]
    digest = hashlib.sha256("\n".join(where).encode()).hexdigest()[:32]
    path = paths.make_dir(cache_home() / digest)
    if path.is_symlink() or path.lstat().st_uid != os.getuid():
        raise RunError(f"{path} belongs to somebody else; set XDG_CACHE_HOME")
    path.chmod(paths.DIR_MODE)
    with _turn(path, url) as bucket:
        _Mirror(bucket, path, advance).sync()
        paths.write_json(path / MARKER, {"url": url})
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
        with paths.DirectoryLock(path / LOCK).held(LOCK_SECONDS):
            yield Bucket(url)
    except BucketError as error:
        raise RunError(f"{url} cannot be read: {error}") from error


class _Mirror:
    """One bucket and its copy."""

    def __init__(self, bucket: Bucket, path: Path, advance: Callable[[int], None]) -> None:
        self._bucket, self._run, self._advance = bucket, paths.RunDir(path), advance
        self._tags = self._read_tags()

    def sync(self) -> None:
        """Make the copy what the run is now."""
        run_json = self._bucket.read(paths.RUN_JSON, safe_read.MAX_JSON_BYTES)
        names = dict(self._manifests())
        if run_json is None and not names:
            raise RunNotFound(
                f"{self._bucket.url}: no run lies there; give the URL that install() was given"
            )
        if run_json is None:
            self._run.run_json.unlink(missing_ok=True)
        else:
            put(self._run.run_json, run_json)
        whole = {name: tag for name, tag in names.items() if tag and self._tags.get(name) == tag}
        changed = sorted(names.keys() - whole.keys(), key=_turn_of)
        for _, equals in groupby(changed, _turn_of):
            side_by_side = list(equals)
            jobs = [self._group(name).sync for name in side_by_side]
            found = self._bucket.together(jobs, GROUPS_AT_ONCE)
            whole |= {n: names[n] for n, ok in zip(side_by_side, found, strict=True) if ok}
        paths.write_json(self._run.path / TAGS, whole)
        self._forget(set(names))
        self._sync_packs()

    def check(self) -> None:
        """Hold every file of the copy against its manifest, and fetch those anew that are wrong."""
        self._tags = {}
        self.sync()

    def fetch_captured(self, step: int | None) -> None:
        """Fetch the chunks that the nodes' manifests name, of one captured step or of all."""
        if not self._fetch_captured(step):
            self.sync()  # some are not there any more: what has expired is said over there
            self._fetch_captured(step)

    def _fetch_captured(self, step: int | None) -> bool:
        whole = True
        for file in self._run.manifest_names():
            name = file.removesuffix(".log")
            match = MANIFEST.fullmatch(name)
            if match and match[5] and step in {None, int(match[4])}:
                whole &= self._group(name).fetch_listed()
        return whole

    def _group(self, name: str) -> GroupCopy:
        return GroupCopy(self._bucket, self._run, name, self._advance)

    def _manifests(self) -> Iterator[tuple[str, str]]:
        for count, (key, _, tag) in enumerate(self._bucket.names(safe_read.MANIFESTS)):
            if count > MOST_NAMES:
                raise RunError(f"{self._bucket.url}: more than {MOST_NAMES} manifests")
            name = key.removeprefix("manifest/").removesuffix(".log")
            if key == log_of(name) and (name == ROOT or MANIFEST.fullmatch(name)):
                yield name, tag

    def _forget(self, names: set[str]) -> None:
        """Take out of the copy what is gone over there: expired, or lost."""
        for file in self._run.manifest_names():
            name = file.removesuffix(".log")
            if file.endswith(".log") and name not in names:
                self._log(name).unlink(missing_ok=True)
                match = MANIFEST.fullmatch(name)
                if match and match[4] and not match[5]:
                    shutil.rmtree(self._run.store / group_of(name)[0], ignore_errors=True)

    def _sync_packs(self) -> None:
        there = [(k, n) for k, n, _ in self._bucket.names("captures") if _PACK.fullmatch(k)]
        wanted = [(k, self._run.path / k, n) for k, n in there if size_of(self._run.path / k) != n]
        must_fit(self._bucket, self._run, sum(n for _, _, n in wanted))
        self._bucket.fetch(wanted, self._advance)

    def _read_tags(self) -> dict[str, str]:
        try:
            found = safe_read.parse(safe_read.read_regular(self._run.path, TAGS))
        except (OSError, ValueError):
            return {}
        return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}

    def _log(self, name: str) -> Path:
        return self._run.path / log_of(name)


def _turn_of(name: str) -> int:
    """Return when a group is fetched: the later it is brought, the earlier."""
    match = MANIFEST.fullmatch(name)
    if match is None:
        return 6  # the root
    node, step, chunks = match.group(3, 4, 5)
    if step:
        return 5 if chunks else 4
    if node:
        return 1
    return {"anomalies": 0, "captures": 3}.get(name.rpartition(".")[2], 2)  # 2: records
