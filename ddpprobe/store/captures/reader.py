"""Captured tensors in the store, read back: chunk by chunk, each believed only after a look."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpprobe.errors import StoreDamaged
from ddpprobe.rundir import paths, safe_read
from ddpprobe.rundir.safe_read import open_regular
from ddpprobe.rundir.validate import MALFORMED
from ddpprobe.store import format as fmt
from ddpprobe.store.captures import dtypes
from ddpprobe.store.captures.event import (
    MAX_EVENT_BYTES,
    CaptureEvent,
    Entry,
    captures_key,
    event_from,
    group_key,
)
from ddpprobe.store.captures.places import Box
from ddpprobe.store.committed_files import LOOKS
from ddpprobe.store.manifest import (
    GROUP_JSON,
    Lost,
    Manifest,
    Version,
    manifest_path,
    read_regular,
    version_of,
    version_of_file,
)

CRC_BYTES = 4
_MANIFEST = re.compile(r"(attempt_\d{3,})\.captures\.step_(\d{10,})(?:\.(node_\d{4,}))?\.log")


class StoredEvent:
    """The captured tensors of one step, as far as they are in the store.

    Args:
        run: the run directory.
        attempt, step: which event.

    Attributes:
        event: what was captured; None where the store does not know the event, or lost it.
        lost: what is damaged.
    """

    def __init__(self, run: paths.RunDir, attempt: int, step: int) -> None:
        self.key = group_key(attempt, step)
        self.lost: list[Lost] = []
        self._step = step
        self._root = run.store / self.key
        self._own = Manifest(manifest_path(run, self.key))
        self._nodes = [Manifest(path) for path in _node_manifests(run, attempt, step)]
        for manifest in (self._own, *self._nodes):
            for why in manifest.damage:
                self.lose("", f"{manifest.path.name} is damaged: {why}")
        self.event = self._read_event()

    @property
    def size(self) -> int:
        """Bytes of its files, by the manifests."""
        manifests = (self._own, *self._nodes)
        return sum(size for m in manifests for size, _ in m.state.files.values())

    @property
    def manifests(self) -> list[Manifest]:
        """Its manifests: of the metadata, and of each node's chunks."""
        return [self._own, *self._nodes]

    def has(self, entry: Entry, part: int) -> bool:
        """Return whether a node committed all chunks of a part."""
        return all(self._versions(k) for k in chunk_keys(entry, part))

    def read(self, entry: Entry, part: int, inner: Box) -> NDArray[Any]:
        """Return the region `inner` of a part, in the coordinates of the rank's own tensor.

        Raises:
            StoreDamaged: a chunk of it is missing or damaged.
        """
        plan = entry.plan
        here = plan.parts[part]
        out = empty([b - a for a, b in inner], entry.key.dtype)
        if plan.stacked and out.size:
            flat = self._chunk(entry, (part, *[0] * (len(plan.array) - 1)))[: prod(here.shape)]
            out[...] = flat.reshape(here.shape)[_slices(inner)]
        elif out.size:
            for box, mine in here.boxes(tuple((0, n) for n in plan.space)):
                both = _shared(mine, inner)
                if both is not None:
                    moved = [a - b for (a, _), (b, _) in zip(box, mine, strict=True)]
                    whole = tuple((a + m, b + m) for (a, b), m in zip(both, moved, strict=True))
                    out[_slices(both, inner)] = self._box(entry, whole)
        return out

    def _box(self, entry: Entry, box: Box) -> NDArray[Any]:
        """Return a region of the whole, from the chunks that it touches."""
        plan = entry.plan
        out = empty([b - a for a, b in box], entry.key.dtype)
        for index, whole in plan.chunks_of(box):
            both = _shared(whole, box)
            if both is not None:
                chunk = self._chunk(entry, index).reshape(plan.chunk)
                first = [i * c - plan.origin for i, c in zip(index, plan.chunk, strict=True)]
                begins = tuple((f, f) for f in first)
                out[_slices(both, box)] = chunk[_slices(both, begins)]
        return out

    def lose(self, inside: str, why: str) -> None:
        """List something as lost, once."""
        where = "/".join(p for p in (safe_read.STORE, self.key, inside) if p)
        lost = Lost(where, (self._step, self._step), why)
        if lost not in self.lost:
            self.lost.append(lost)

    def check(self) -> Iterator[tuple[str, str]]:
        """Read every file that must be there; yield (name, what is wrong) of those that are not."""
        # Without an event its own commit was not finished: nothing of it is missed.
        for manifest in self.manifests if self.event or self.lost else self._nodes:
            for key in manifest.state.files:
                try:
                    self._compare(key)
                except StoreDamaged as error:
                    yield key, str(error)

    def _chunk(self, entry: Entry, index: Sequence[int]) -> NDArray[Any]:
        """Return the elements of one chunk, flat and unchecked against its crc32c."""
        key = chunk_key(entry, index)
        data = self._load(key)
        size = prod(entry.plan.chunk) * dtypes.item_bytes(entry.key.dtype)
        if len(data) != size + CRC_BYTES:
            raise StoreDamaged(f"{key} has {len(data)} bytes, a chunk of it has {size + CRC_BYTES}")
        return dtypes.view(np.frombuffer(data, np.uint8, size), entry.key.dtype)

    def _load(self, key: str) -> bytes:
        versions = self._versions(key)
        most = max((size for size, _ in versions), default=0)
        with _explained(key, versions):
            data = read_regular(self._root, key, most)
        _must_be_in(key, version_of(data), versions)
        return data

    def _compare(self, key: str) -> None:
        """Check a file piece by piece, however large it is."""
        versions = self._versions(key)
        with _explained(key, versions):
            fd = open_regular(self._root, key)
        with os.fdopen(fd, "rb") as file:
            there = os.fstat(fd).st_size
            if all(there != size for size, _ in versions):  # it may be endless
                raise StoreDamaged(f"{key} is damaged: {there} bytes are not what was committed")
            _must_be_in(key, version_of_file(file), versions)

    def _versions(self, key: str) -> set[Version]:
        return {v for m in self.manifests for v in m.versions(key)}

    def _read_event(self) -> CaptureEvent | None:
        # Its zarr.json is written last: without it the event's commit did not happen.
        if not self._own.exists:
            if self._nodes or (self._root / GROUP_JSON).exists():
                self.lose("", "its manifest is missing")
            return None
        own = self._own
        settled = GROUP_JSON in own.state.files and GROUP_JSON not in own.replaced
        if not settled and not self._nodes and not (self._root / GROUP_JSON).exists():
            return None
        try:
            if max((size for size, _ in self._versions(GROUP_JSON)), default=0) > MAX_EVENT_BYTES:
                raise StoreDamaged(f"{GROUP_JSON} is larger than {MAX_EVENT_BYTES} bytes")  # noqa: TRY301
            document = safe_read.parse(self._load(GROUP_JSON), MAX_EVENT_BYTES, finite=True)
            event = event_from(document)
        except (StoreDamaged, ValueError) as error:
            self.lose("", str(error))
            return None
        if group_key(event.attempt, event.step) != self.key:
            self.lose("", f"it says that it is {group_key(event.attempt, event.step)}")
            return None
        return event


@contextlib.contextmanager
def _explained(key: str, versions: set[Version]) -> Iterator[None]:
    if not versions:
        raise StoreDamaged(f"{key} was never committed")
    try:
        yield
    except FileNotFoundError:
        raise StoreDamaged(f"{key} is missing") from None
    except MemoryError:
        raise StoreDamaged(f"{key} does not fit into the memory") from None
    except OSError as error:
        raise StoreDamaged(f"{key} cannot be read ({error.strerror or error})") from error


def _must_be_in(key: str, found: Version, versions: set[Version]) -> None:
    if found not in versions:
        raise StoreDamaged(f"{key} is damaged: it is not what was committed")


def empty(shape: Sequence[int], dtype: str) -> NDArray[Any]:
    """Return an array for elements of a torch dtype. Raises StoreDamaged for an absurd shape."""
    try:
        return np.empty(shape, dtypes.dtype_of(dtype))
    except (ValueError, MemoryError, OverflowError) as error:
        raise StoreDamaged(f"a tensor of shape {list(shape)}: {error}") from error


def chunk_keys(entry: Entry, part: int) -> list[str]:
    """Return the store keys of the chunks that hold a part."""
    return [chunk_key(entry, index) for index, _ in entry.plan.chunks(part)]


def chunk_key(entry: Entry, index: Sequence[int]) -> str:
    """Return the store key of one chunk, below the event's group."""
    return "/".join((entry.name, "value", "c", *map(str, index)))


def stored_steps(run: paths.RunDir, attempt: int) -> list[int]:
    """Steps of the events that a manifest tells of, ascending."""
    found = set()
    for path in run.manifest_names():
        match = _MANIFEST.fullmatch(path)
        if match and match[1] == fmt.attempt_key(attempt):
            found.add(int(match[2]))
    return sorted(found)


def expired_steps(run: paths.RunDir, attempt: int) -> set[int]:
    """Steps whose events retention took away. Raises StoreDamaged if what says so is damaged."""
    before: set[Version] | None = None
    for _ in range(LOOKS):
        manifest = Manifest(manifest_path(run, captures_key(attempt)))
        try:
            return _expired_steps(run, attempt, manifest)
        except StoreDamaged:
            # One more may have expired between the looks at the manifest and at what it lists.
            said = manifest.versions(GROUP_JSON)
            if said == before:
                raise
            before = said
    raise StoreDamaged(f"{captures_key(attempt)}/{GROUP_JSON} changes all the time")


def _expired_steps(run: paths.RunDir, attempt: int, manifest: Manifest) -> set[int]:
    key = captures_key(attempt)
    if not manifest.exists:
        if GROUP_JSON in safe_read.names(run.path, f"{safe_read.STORE}/{key}"):
            raise StoreDamaged(f"{key}: its manifest is missing")
        return set()
    try:
        data = read_regular(run.store / key, GROUP_JSON)
    except OSError:
        first = not {GROUP_JSON} & manifest.state.files.keys() & manifest.rolled_back().files.keys()
        if first and not stored_steps(run, attempt):
            return set()  # its first commit is under way, or was never finished
        data = b""
    if version_of(data) not in manifest.versions(GROUP_JSON):
        raise StoreDamaged(f"{key}/{GROUP_JSON} is damaged or missing")
    try:
        return {int(s) for s in safe_read.parse(data)["attributes"]["ddpprobe"]["expired"]}
    except MALFORMED:
        raise StoreDamaged(f"{key}/{GROUP_JSON} does not say what has expired") from None


def _node_manifests(run: paths.RunDir, attempt: int, step: int) -> list[Path]:
    own = manifest_path(run, group_key(attempt, step)).stem
    matches = (_MANIFEST.fullmatch(name) for name in sorted(run.manifest_names()))
    return [run.manifests / m[0] for m in matches if m and m[3] and m[0].startswith(f"{own}.")]


def _slices(box: Box, within: Box | None = None) -> tuple[slice, ...]:
    """Return a box as slices, counted from where `within` begins."""
    starts = [a for a, _ in within] if within is not None else [0] * len(box)
    return tuple(slice(a - s, b - s) for (a, b), s in zip(box, starts, strict=True))


def _shared(one: Box, other: Box) -> Box | None:
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(a < b for a, b in both) else None
