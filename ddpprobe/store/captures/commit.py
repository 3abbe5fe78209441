"""Commits of captures: the metadata of an event once, its chunks by each node."""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterator

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from ddpprobe.errors import StoreDamaged
from ddpprobe.rundir import paths
from ddpprobe.store.captures.event import (
    MAX_EVENT_BYTES,
    CaptureEvent,
    captures_key,
    documents_of,
    group_key,
)
from ddpprobe.store.captures.reader import expired_steps
from ddpprobe.store.commit import Files, encode, sync_files
from ddpprobe.store.format import FORMAT_VERSION, Document, group_document
from ddpprobe.store.manifest import GROUP_JSON, Manifest, State, Version, manifest_path


class NodeChunks:
    """The chunks of one event that one node's daemon writes, and their manifest."""

    def __init__(self, run: paths.RunDir, key: str, node: str) -> None:
        self._root = run.store / key
        self._manifest = Manifest(manifest_path(run, f"{key}.{node}"))
        if self._manifest.damage:
            raise StoreDamaged(f"{self._manifest.path.name} is damaged: {self._manifest.damage[0]}")
        self._changed: dict[str, Version] = {}

    @property
    def files(self) -> dict[str, Version]:
        """What is committed."""
        return self._manifest.state.files

    def put(self, key: str, data: NDArray[np.uint8], crc32: int) -> None:
        """Write a chunk: its bytes, then their crc32c, as Zarr's codec of that name does."""
        tail = struct.pack("<I", google_crc32c.value(data))
        paths.replace_file(self._root / key, [data.data, tail], made=self._manifest.partial)
        self._changed[key] = data.nbytes + len(tail), zlib.crc32(tail, crc32)

    def commit(self, *, durable: bool) -> None:
        """Say that all of it is there."""
        if not self._changed:
            return
        if durable:
            sync_files(self._root / key for key in self._changed)
        self._manifest.append(State(), self._changed, durable=durable)
        self._changed = {}


def commit_event(run: paths.RunDir, event: CaptureEvent, *, durable: bool) -> None:
    """Commit what the arrays of an event are, if nobody has yet; to be called in `turn`."""
    above = Files(run, captures_key(event.attempt), durable=durable)
    if GROUP_JSON not in above.manifest.state.files:
        above.commit(State(), {GROUP_JSON: encode(captures_document(event.attempt, []))})
    files = Files(run, group_key(event.attempt, event.step), durable=durable)
    if GROUP_JSON not in files.manifest.state.files:  # else another node's daemon was faster
        documents = documents_of(event).items()
        staged = {"/".join(filter(None, (k, GROUP_JSON))): encode(d) for k, d in documents}
        if len(staged[GROUP_JSON]) > MAX_EVENT_BYTES:
            raise StoreDamaged(
                f"its metadata takes {len(staged[GROUP_JSON])} bytes: it stays packs"
            )
        files.commit(State(), staged)


def expire_event(run: paths.RunDir, attempt: int, step: int, *, durable: bool) -> None:
    """Say that an event is not to be missed; to be called in `turn`."""
    above = Files(run, captures_key(attempt), durable=durable)
    expired = {*expired_steps(run, attempt), step}
    document = captures_document(attempt, sorted(expired))
    above.commit(State(), {GROUP_JSON: encode(document)})


def captures_document(attempt: int, expired: list[int]) -> Document:
    """Return the metadata of the group above the events."""
    attrs = {
        "format_version": FORMAT_VERSION, "kind": "captures", "attempt": attempt,
        "expired": expired,
    }  # fmt: skip
    return group_document({"ddpprobe": attrs}, None)


@contextlib.contextmanager
def turn(run: paths.RunDir) -> Iterator[None]:
    """Hold the lock under which events are planned and expire, whichever node does it.

    Raises:
        TimeoutError: another node's daemon held it for too long.
    """
    lock = paths.DirectoryLock(paths.make_inner(run.manifests) / "captures.lock")
    # Nodes end together: who did not wait here would leave its packs to the run's next start.
    with lock.held(paths.LOCK_SECONDS):
        yield
