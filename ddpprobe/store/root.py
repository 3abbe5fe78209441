"""The root of the hierarchy and its attempt groups: the only part that several nodes write.

They take turns under a lock. Consolidated metadata at the root makes opening the whole tree fast,
but a stale copy would hide what is committed later, so it is there only while the run is sealed:
whoever commits next takes it away first. Of more ranks than a few hundred it would be a file that
no reader takes apart: then there is none, and the root says that the run is sealed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

from ddpprobe.errors import StoreDamaged
from ddpprobe.rundir import paths, safe_read
from ddpprobe.rundir.validate import MALFORMED
from ddpprobe.store import format as fmt
from ddpprobe.store.commit import Files, encode
from ddpprobe.store.manifest import GROUP_JSON, State, read_regular
from ddpprobe.store.repeated_identity import repeated_identity

ATTEMPT = re.compile(rf"attempt_(\d{{3,}})/{re.escape(GROUP_JSON)}")
SEALED = "sealed"  # said in the root of a run that is, if its metadata is too much for one file


class Root:
    """Creates what must stand above a group, and consolidates it at the end.

    Args:
        run: the run directory.
        durable: as for `GroupWriter`.
    """

    def __init__(self, run: paths.RunDir, *, durable: bool = True) -> None:
        self._run, self._durable = run, durable
        self._stamp: tuple[int, ...] = ()
        self._sealed: tuple[int, ...] = ()
        self._attempts: frozenset[int] = frozenset()

    def prepare(self, attempt: int) -> None:
        """Make the root and the attempt's group exist, and hide nothing.

        Raises:
            OSError: the disk refused, or another node holds the lock for too long.
            StoreDamaged: the root is damaged.
        """
        if attempt in self._attempts and self._stamp == self._stat():
            return
        with self._locked() as files:
            found = _attempts_of(files)
            self._write(files, sorted({*found, attempt}), consolidated=False)
            self._attempts = frozenset({*found, attempt})
            self._stamp = self._stat()

    def seal(self) -> None:
        """Consolidate the metadata of everything committed. Raises as `prepare`."""
        if self._stat() != self._sealed:  # else nobody has committed anything since
            with self._locked() as files:
                self._write(files, _attempts_of(files), consolidated=True)
                self._sealed = self._stat()

    def files(self, attempts: list[int], *, consolidated: bool) -> dict[str, bytes]:
        """Return the files of the root.

        Args:
            attempts: that it lists.
            consolidated: with the metadata of all that is committed, as while a run is sealed.
        """
        found = {
            f"{fmt.attempt_key(n)}/{GROUP_JSON}": encode(fmt.group_document({}, None))
            for n in attempts
        }
        attrs: dict[str, Any] = {
            "Conventions": fmt.CONVENTIONS,
            "ddpprobe": {
                "format_version": fmt.FORMAT_VERSION, **_identity(self._run), "attempts": attempts,
            },
        }  # fmt: skip
        attrs["ddpprobe"].pop(SEALED, None)  # if all that is known of the run is what a root said
        arrays = self._collect(attempts) if consolidated else None
        whole = encode(fmt.group_document(attrs, arrays))
        if consolidated and (arrays is None or len(whole) > safe_read.MAX_JSON_BYTES):
            attrs["ddpprobe"][SEALED] = True
            whole = encode(fmt.group_document(attrs, None))
        return found | {GROUP_JSON: whole}

    def _write(self, files: Files, attempts: list[int], *, consolidated: bool) -> None:
        files.commit(State(), self.files(attempts, consolidated=consolidated))

    def _collect(self, attempts: list[int]) -> dict[str, fmt.Document] | None:
        """Return the metadata of all groups, by path; None if they are too many for one file."""
        out: dict[str, fmt.Document] = {}
        left = safe_read.MAX_JSON_BYTES
        for attempt in attempts:
            out[fmt.attempt_key(attempt)] = fmt.group_document({}, {})
            for key in self._keys(fmt.attempt_key(attempt)):
                try:
                    data = read_regular(self._run.store, f"{key}/{GROUP_JSON}")
                except FileNotFoundError:  # its first commit is under way
                    continue
                left -= len(data)
                if left < 0:
                    return None
                out |= _group(key, data)
        return out

    def _keys(self, top: str) -> Iterator[str]:
        """Yield the paths of an attempt's groups."""
        for name in sorted(os.listdir(self._run.store / top)):
            if fmt.kind_of_group(f"{top}/{name}") is not None or name == "captures":
                yield f"{top}/{name}"
            if name == "captures":
                for event in sorted(os.listdir(self._run.store / top / name)):
                    if event != GROUP_JSON:
                        yield f"{top}/{name}/{event}"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Files]:
        lock = paths.DirectoryLock(paths.make_inner(self._run.manifests) / "root.lock")
        with lock.held(paths.LOCK_SECONDS):
            yield Files(self._run, "", durable=self._durable)

    def _stat(self) -> tuple[int, ...]:
        try:
            status = (self._run.store / GROUP_JSON).lstat()
        except FileNotFoundError:
            return ()
        return status.st_ino, status.st_size, status.st_mtime_ns


def _group(key: str, data: bytes) -> dict[str, fmt.Document]:
    """Return the metadata of a group and what is in it, by path."""
    try:
        document = safe_read.parse(data)
        out = {key: fmt.group_document(document["attributes"], {})}
        arrays = document.get("consolidated_metadata", {}).get("metadata", {})
        return out | {f"{key}/{path}": inner for path, inner in arrays.items()}
    except MALFORMED as error:
        raise StoreDamaged(f"{key}/{GROUP_JSON} is no group's: {error!r}") from error


def _attempts_of(files: Files) -> list[int]:
    """Return the attempts whose groups the root has, by its list of files, however large it is."""
    matches = map(ATTEMPT.fullmatch, files.manifest.state.files)
    return sorted(int(match[1]) for match in matches if match)


def _identity(run: paths.RunDir) -> dict[str, Any]:
    try:
        found = safe_read.parse(run.run_json.read_bytes())
    except FileNotFoundError:
        return repeated_identity(run)
    except (OSError, ValueError):
        return {}  # the reader says so; folding must not wait for it
    return dict(found) if isinstance(found, dict) else {}
