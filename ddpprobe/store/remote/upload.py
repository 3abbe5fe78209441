"""What a node's daemon has committed, brought to an object store: group by group, in one pass.

Each daemon brings what it writes itself: its ranks' groups and its node's, and of captured steps
the chunks of its own ranks; the head's also what is merged, the verdicts, the root and run.json. So
nodes that share no directory fill one store, and no two of them write the same object. (What the
arrays of a captured step are, all nodes of a shared directory bring: the same bytes.)
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ddpprobe.errors import StoreDamaged
from ddpprobe.rundir import paths, safe_read
from ddpprobe.rundir.paths import OWN_DISK
from ddpprobe.rundir.validate import MALFORMED
from ddpprobe.store import format as fmt
from ddpprobe.store.captures.packs import attempts_with_packs, packs_of
from ddpprobe.store.captures.reader import expired_steps
from ddpprobe.store.group_names import MANIFEST, ROOT, group_of, log_of
from ddpprobe.store.manifest import (
    Manifest,
    State,
    Version,
    is_settled,
    read_regular,
    version_of,
    version_of_file,
)
from ddpprobe.store.reader import StoredGroup
from ddpprobe.store.remote import claims
from ddpprobe.store.remote.bucket import Bucket
from ddpprobe.store.remote.carry import Moved, carry
from ddpprobe.store.remote.remote_paths import BucketTarget, size_of
from ddpprobe.store.remote.upload_root import RootUpload, is_sealed
from ddpprobe.store.segments import sources_of

IN_MEMORY = 8 << 20  # a larger file is brought in parts, from the disk
PATIENCE = 3  # looks at a file that is not what was committed, before it is called damaged


class Conflict(Exception):
    """Another job's is what lies where this one's should go."""


class AnotherRun(Conflict):
    """Another run lies where this one should go, and all of it."""


class Waiting(Exception):
    """The head has not made the place yet."""


class Upload:
    """Brings one node's part of a run to a bucket.

    Args:
        run: the run directory.
        node: this node's directory name.
        bucket: where it goes.
        advance: told of each object that has arrived.

    Attributes:
        missing: names of manifests whose groups are not over there as they are here.
        damaged: files that are not what was committed: they are left out, and missed over there.
    """

    def __init__(
        self, run: paths.RunDir, node: str, bucket: Bucket, advance: Callable[[], None]
    ) -> None:
        self.missing: list[str] = []
        self.damaged: dict[str, str] = {}
        self._run, self._node, self._bucket, self._advance = run, node, bucket, advance
        self._agreed = False
        self._ours: set[int] = set()  # attempts
        self._root = RootUpload(run, bucket, advance)
        self._heads: dict[int, bool] = {}
        self._there: set[str] = set()  # names of the manifests over there
        self._packs: set[str] = set()
        # Of groups that are only half there: a store that fails now and then is still filled.
        self._brought: dict[str, dict[str, Version]] = {}
        self._known: dict[str, State] = {}
        self._stamps: dict[str, tuple[int, ...]] = {}
        self._tries: Counter[str] = Counter()

    def bring(self) -> None:
        """Bring what is new since the last time; what changes meanwhile is `missing`.

        Raises:
            BucketError: the object store refused, or does not answer. Nothing is half there.
            Conflict: another run lies there, or another job's attempt of this one.
            Waiting: the head's daemon has not been there yet.
            OSError: the disk refused.
        """
        identity = self._identity()
        names = list(self._names())
        changed = [n for n in names if self._stamps.get(n) != _stamp(self._run, n)]
        self.missing = changed
        head = any(map(self._is_head, self._run.attempts()[-1:]))
        self._agree(identity, head=head)
        root = self._root.document()
        whole = root if head else None
        if changed and whole:
            self._bring_root(whole, consolidated=False)
        # What is captured before a word of it: a reader may ask where it is.
        self._bring_packs(everything=OWN_DISK in identity or is_sealed(root))
        self.missing = [n for n in changed if not self._bring(n)]
        if head:
            self._expire()
        if whole and not self.missing:
            self._bring_root(whole, consolidated=identity.get("nodes") == 1)

    # ---- what is whose

    def _identity(self) -> dict[str, Any]:
        found = safe_read.parse(safe_read.read_regular(self._run.path, paths.RUN_JSON))
        return dict(found) if isinstance(found, dict) else {}

    def _names(self) -> Iterator[str]:
        """Yield the names of the manifests that this node answers for, captured steps first."""
        found = []
        heads: dict[str, bool] = {}
        ranks: dict[str, set[str]] = {}
        for file in self._run.manifest_names():
            name = file.removesuffix(".log")
            match = MANIFEST.fullmatch(name) if file.endswith(".log") else None
            if match is None:
                continue
            top, rank, node, step, writer = match.groups()
            if top not in heads:
                attempt = int(top.removeprefix("attempt_"))
                heads[top] = self._is_head(attempt)
                own = sources_of(self._run, attempt, self._node)
                ranks[top] = {paths.rank_name(s.rank) for s in own if s.rank is not None}
            event = step is not None
            mine = (
                rank in ranks[top] if rank else node == self._node if node
                else writer in {None, self._node} if event else heads[top]
            )  # fmt: skip
            if mine:
                # What is captured comes before the node's words of it, the verdicts come last.
                late = name.endswith("anomalies"), bool(node), not event
                found.append((late, not name.endswith("captures"), name))
        yield from (name for *_, name in sorted(found))

    def _is_head(self, attempt: int) -> bool:
        if attempt not in self._heads:
            meta = StoredGroup(self._run, f"{fmt.attempt_key(attempt)}/{self._node}").meta
            if "head" not in meta:  # nothing of the node is committed yet
                return self._node == paths.node_name(0)
            self._heads[attempt] = bool(meta["head"])
        return self._heads[attempt]

    def _agree(self, identity: dict[str, Any], *, head: bool) -> None:
        """Make sure that what lies there is this run, and that its attempts are this job's."""
        if not self._agreed:
            self._agree_on_run(identity, head=head)
            self._look_around()
            self._agreed = True
        for attempt in self._run.attempts():
            token = "" if attempt in self._ours else claims.token_of(self._run, attempt)
            if token and not self._is_ours(attempt, token, head=head):
                raise Conflict(f"attempt {attempt} there is another job's")
            if token:
                self._ours.add(attempt)

    def _agree_on_run(self, identity: dict[str, Any], *, head: bool) -> None:
        public = {k: v for k, v in identity.items() if k != OWN_DISK}
        own, most = json.dumps(public, indent=1).encode(), safe_read.MAX_JSON_BYTES
        if head:
            there = self._bucket.create(paths.RUN_JSON, own, most)
        else:
            found = self._bucket.read(paths.RUN_JSON, most)
            there = _not_yet() if found is None else found
        try:
            other = safe_read.parse(there)["run_id"]
        except MALFORMED:
            other = "unknown"
        if other != identity.get("run_id"):
            raise AnotherRun(f"another run lies there ({str(other)[:60]!r})")

    def _is_ours(self, attempt: int, token: str, *, head: bool) -> bool:
        if head:
            return claims.claim(self._bucket, attempt, token)
        found = claims.is_claimed(self._bucket, attempt, token)
        return _not_yet() if found is None else found

    def _look_around(self) -> None:
        self._there = {
            key.removeprefix("manifest/").removesuffix(".log")
            for key, _, _ in self._bucket.names(safe_read.MANIFESTS)
        }
        packs = self._bucket.names("captures")
        self._packs = {key for key, size, _ in packs if size_of(self._run.path / key) == size}

    # ---- bringing

    def _bring(self, name: str) -> bool:
        """Bring one group; False if it has to be looked at again."""
        stamp = _stamp(self._run, name)
        try:
            manifest = Manifest(self._run.path / log_of(name))
            group, alone = group_of(name)
            root = self._run.store / group
            if manifest.damage or (not alone and not is_settled(root, manifest)):
                self.damaged.update((name, why) for why in manifest.damage[:1])
                return False
            if manifest.undone:
                return False
            patient = self._tries[name] < PATIENCE
            content = partial(self._content, patient=patient)
            brought = self._brought.setdefault(name, {})
            target = BucketTarget(self._bucket, self._advance, content, brought)
            carry(target, name, group, manifest.state, self._before(name))
        except (Moved, FileNotFoundError):
            self._tries[name] += 1
            return False
        except StoreDamaged as error:
            self.damaged[name] = str(error)
            return False
        self._known[name], self._stamps[name] = manifest.state, stamp
        self._tries.pop(name, None)
        self._brought.pop(name, None)
        return True

    def _before(self, name: str) -> State | None:
        """Return what is there of a group that is about to change; None: it has to be asked for."""
        new = name not in self._there
        self._there.add(name)
        return self._known.pop(name, State() if new else None)

    def _content(
        self, group: str, key: str, version: Version, *, patient: bool
    ) -> bytes | Path | None:
        """Return what is to be brought of a file; None if it is damaged and stays what it is.

        Raises:
            Moved: it is not what was committed, as far as one look can tell.
        """
        root = self._run.store / group
        try:
            if version[0] <= IN_MEMORY:
                data = read_regular(root, key, IN_MEMORY)
                if version_of(data) == version:
                    return data
            else:
                with os.fdopen(safe_read.open_regular(root, key), "rb") as file:
                    if version_of_file(file) == version:
                        return root / key
        except OSError:
            pass
        if patient:
            raise Moved(key)
        self.damaged[f"{safe_read.STORE}/{group}/{key}"] = "it is not what was committed"
        return None

    def _bring_root(self, files: dict[str, bytes], *, consolidated: bool) -> None:
        try:
            self._root.bring(files, consolidated=consolidated)
        except StoreDamaged as error:
            self.damaged[ROOT] = str(error)
            self.missing = [*self.missing, ROOT]

    def _bring_packs(self, *, everything: bool) -> None:
        """Bring packs that stay what they are: damaged, too late, or of a node on its own disk."""
        if not everything:
            return
        files: list[tuple[str, Callable[[], Path]]] = []
        for attempt in attempts_with_packs(self._run):
            gone = expired_steps(self._run, attempt)
            for step, ranks in packs_of(self._run, attempt, self._node).items():
                for path in ranks.values() if step not in gone else ():
                    key = path.relative_to(self._run.path).as_posix()
                    if key not in self._packs:
                        files.append((key, partial(Path, path)))
        self._bucket.write_files(files, lambda _: self._advance())
        self._packs |= {key for key, _ in files}

    def _expire(self) -> None:
        """Take away what retention took away here, once the group above the events says so."""
        for name in sorted(self._there, reverse=True):  # the nodes' manifests before the event's
            match = MANIFEST.fullmatch(name)
            if match is None or match[4] is None or name in self.missing:
                continue
            attempt = int(match[1].removeprefix("attempt_"))
            told = f"{match[1]}.captures" not in self.missing
            if told and int(match[4]) in expired_steps(self._run, attempt):
                self._bucket.delete([log_of(name)])
                if match[5] is None:
                    below = f"{safe_read.STORE}/{group_of(name)[0]}"
                    self._bucket.delete([key for key, _, _ in self._bucket.names(below)])
                self._there.discard(name)
                self._known.pop(name, None)


def _stamp(run: paths.RunDir, name: str) -> tuple[int, ...]:
    try:
        status = (run.path / log_of(name)).lstat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _not_yet() -> NoReturn:
    raise Waiting("the head's daemon has not been there yet")
