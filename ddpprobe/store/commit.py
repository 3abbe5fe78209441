"""One group of the store, written by one process: everything staged, then committed in one rename.

Zarr only encodes chunks. The files are ours: 0600 in 0700 directories, each written
beside the hierarchy and renamed into it, in an order that lets a reader, or a restart after SIGKILL
at any instant, see a whole prefix: new chunks; the manifest's line; the replaced chunks; the
arrays' zarr.json; last the group's, whose consolidated metadata is what a stock reader opens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpprobe.errors import StoreDamaged
from ddpprobe.rundir import paths
from ddpprobe.store import format as fmt
from ddpprobe.store.chunk_decoding import numbers, strings
from ddpprobe.store.encoding import encode_region
from ddpprobe.store.manifest import (
    GROUP_JSON,
    Consumed,
    Manifest,
    State,
    in_two_lines,
    is_settled,
    manifest_path,
    read_regular,
    version_of,
)

LINES = 32  # of a manifest's log, before it is written anew


class Files:
    """Atomic writes below one directory of the store, with their manifest.

    Raises:
        StoreDamaged: the manifest is damaged, so that what is committed cannot be told any more.
    """

    def __init__(self, run: paths.RunDir, key: str, *, durable: bool) -> None:
        self.root = run.store / key if key else run.store
        self.manifest = Manifest(manifest_path(run, key))
        if self.manifest.damage:
            msg = f"{self.manifest.path.name} is damaged: {self.manifest.damage[0]}"
            raise StoreDamaged(msg)
        self._durable = durable
        self._recover()

    def read(self, key: str) -> bytes:
        """Read a committed file back.

        Raises:
            StoreDamaged: it is gone, or not what was committed.
        """
        try:
            data = read_regular(self.root, key)
        except FileNotFoundError:
            data = None
        if data is None or version_of(data) not in self.manifest.versions(key):
            msg = f"{self.root.name}/{key} is {'missing' if data is None else 'damaged'}"
            raise StoreDamaged(msg)
        return data

    def commit(self, state: State, staged: Mapping[str, bytes]) -> None:
        """Write what changed: new files, the manifest, then replacements, metadata last."""
        if self.manifest.lines >= LINES and not self.manifest.undone:
            self._shorten()
        known = dict(self.manifest.state.files)  # a copy: the manifest updates its own
        versions = {k: version_of(data) for k, data in staged.items()}
        changed = {k: v for k, v in versions.items() if known.get(k) != v}
        fresh = sorted(k for k in changed if k not in known and not k.endswith(GROUP_JSON))
        self._write_new(fresh, staged)  # nobody looks at them before the manifest's line
        self.manifest.append(state, changed, durable=self._durable)
        # Metadata that is new hides behind the zarr.json written last.
        new = sorted(k for k in changed if k not in known and k.endswith(f"/{GROUP_JSON}"))
        self._write_new(new, staged)
        rest = sorted(set(changed) - set(fresh) - set(new), key=metadata_last)
        for key in rest:
            self.write(key, staged[key])
        if self._durable:
            sync_directories({(self.root / key).parent for key in rest})
        if GROUP_JSON in changed and GROUP_JSON not in known:
            # A line more: else to lose the file would look like a first commit that was cut off.
            self.manifest.append(state, {}, durable=self._durable)

    def write(self, key: str, data: bytes) -> None:
        """Replace one file atomically."""
        path, made = self.root / key, self.manifest.partial
        paths.replace_file(path, [data], made=made, durable=self._durable)

    def remove(self, keys: Sequence[str], consumed: Mapping[str, Consumed]) -> None:
        """Delete files for good, and say in the manifest that they are not missed.

        Args:
            keys: committed files; the group's metadata is not among them.
            consumed: what to add to the state's.

        Raises:
            StoreDamaged: the last commit was undone; first the next one has to be made.
        """
        if self.manifest.undone:
            raise StoreDamaged(f"{self.root.name}: its last commit was not finished")
        state = self.manifest.state
        after = State(dict(state.sizes), {**state.consumed, **consumed})
        self.manifest.append(after, dict.fromkeys(keys), durable=self._durable)
        for key in keys:
            (self.root / key).unlink(missing_ok=True)

    def _shorten(self) -> None:
        """Say in two lines what the log says in many, each of which a reader takes apart."""
        state, path, made = self.manifest.state, self.manifest.path, self.manifest.partial
        data = in_two_lines(state, state)
        paths.replace_file(path, [data], made=made, durable=self._durable)
        self.manifest = Manifest(path, data)

    def _recover(self) -> None:
        """Take up where the last writer ended, undoing a commit that it did not finish.

        The directory's own zarr.json is written last, so it tells whether the last line happened.
        """
        manifest = self.manifest
        if manifest.exists and not is_settled(self.root, manifest):
            manifest.undo(durable=self._durable)
        elif not manifest.undone:
            for key in manifest.replaced.keys() - manifest.state.files.keys():
                (self.root / key).unlink(missing_ok=True)  # `remove` was interrupted

    def _write_new(self, keys: Sequence[str], staged: Mapping[str, bytes]) -> None:
        """Write files that take no other's place; they reach the disk together."""
        for key in keys:
            paths.replace_file(self.root / key, [staged[key]], made=self.manifest.partial)
        if self._durable:
            sync_files(self.root / key for key in keys)


class GroupWriter:
    """Appends rows to the arrays of one group.

    Nothing is visible before `commit`, and an instance that raised is to be thrown away: a new one
    starts from what is committed.

    Args:
        run: the run directory.
        key: path of the group inside the hierarchy; decides its schema.
        durable: reach the disk, not only the page cache, before going on.

    Raises:
        StoreDamaged: what is there is damaged, or of no known kind.
    """

    def __init__(self, run: paths.RunDir, key: str, *, durable: bool = True) -> None:
        kind = fmt.kind_of_group(key)
        if kind is None:
            msg = f"{key!r} is no group of the store"
            raise StoreDamaged(msg)
        self.key = key
        self.columns = {c.name: c for c in fmt.SCHEMAS[kind]}
        self._files = Files(run, key, durable=durable)
        self._staged: dict[str, bytes] = {}
        self.attrs: dict[str, Any] = {}
        self.chunks: dict[str, int] = {}
        self._load()
        state = self._files.manifest.state
        self.sizes = dict(state.sizes)
        self.consumed = dict(state.consumed)

    @property
    def exists(self) -> bool:
        """Whether the group has been defined (it is on disk after the next commit)."""
        return bool(self.attrs)

    def define(self, attrs: Mapping[str, Any], chunks: Mapping[str, int]) -> None:
        """Create the group: its attributes, and the chunks of its multi-dimensional arrays."""
        self.attrs = {
            "Conventions": fmt.CONVENTIONS,
            "ddpprobe": {"format_version": fmt.FORMAT_VERSION, **attrs},
        }
        self.chunks = dict(chunks)
        for column in self.columns.values():
            for dim in column.dims:
                self.sizes.setdefault(dim, 0)
        for dim, labels in fmt.FIXED_LABELS.items():
            if dim in self.columns:
                self.append(dim, {dim: labels})

    def append(self, dim: str, data: Mapping[str, Sequence[Any] | NDArray[Any]]) -> None:
        """Append entries to the one-dimensional arrays of a dimension."""
        start = self.sizes[dim]
        for name, values in data.items():
            self.put(name, (start,), np.asarray(values, self._dtype(name)))
            self.sizes[dim] = max(self.sizes[dim], start + len(values))

    def put(self, name: str, start: Sequence[int], data: NDArray[Any]) -> None:
        """Stage a region that begins at `start`; a one-dimensional array grows to hold it."""
        if data.size == 0:
            return
        column = self.columns[name]
        end = [a + n for a, n in zip(start, data.shape, strict=True)]
        sizes = {d: max(self.sizes[d], e) for d, e in zip(column.dims, end, strict=True)}
        document = fmt.array_document(column, sizes, self.chunks)
        touched = fmt.chunk_keys(name, fmt.grid_of(document), start, data.shape)
        files = self._files.manifest.state.files
        held = [
            self._staged.get(key) or (self._files.read(key) if key in files else None)
            for key in touched
        ]
        self._staged |= zip(touched, encode_region(document, start, data, held), strict=True)

    def commit(self, consumed: Mapping[str, Consumed] | None = None) -> None:
        """Make everything staged visible at once, with the progress in the journals.

        Raises:
            OSError: the disk is full or failing; what was committed before is untouched.
        """
        documents = {
            name: fmt.array_document(column, self.sizes, self.chunks)
            for name, column in self.columns.items()
            if not column.optional or self._has(name)
        }
        for name, document in documents.items():
            self._staged[f"{name}/{GROUP_JSON}"] = encode(document)
        self._staged[GROUP_JSON] = encode(fmt.group_document(self.attrs, documents))
        self.consumed.update(consumed or {})
        state = State(dict(self.sizes), dict(self.consumed))
        self._files.commit(state, self._staged)
        self._staged = {}

    def labels(self, name: str) -> list[Any]:
        """Read a committed one-dimensional array back."""
        column, size = self.columns[name], self.sizes[self.columns[name].dims[0]]
        document = fmt.array_document(column, self.sizes, self.chunks)
        grid, found = fmt.grid_of(document), []
        for key in fmt.chunk_keys(name, grid, (0,), (size,)):
            data = self._files.read(key)
            is_text = column.dtype == "string"
            found += [strings(data, *grid) if is_text else numbers(data, column.dtype, grid)]
        return [value for chunk in found for value in chunk.tolist()][:size]

    def _has(self, name: str) -> bool:
        """Whether anything of an optional array is written, or about to be."""
        metadata = f"{name}/{GROUP_JSON}" in self._files.manifest.state.files
        return metadata or any(key.startswith(f"{name}/") for key in self._staged)

    def _dtype(self, name: str) -> Any:  # noqa: ANN401  (a NumPy dtype or `object`)
        return fmt.NUMPY.get(self.columns[name].dtype, object)

    def _load(self) -> None:
        if GROUP_JSON not in self._files.manifest.state.files:
            return
        document = json.loads(self._files.read(GROUP_JSON))
        self.attrs = document["attributes"]
        arrays = document["consolidated_metadata"]["metadata"]
        for name, column in self.columns.items():
            if len(column.dims) > 1:
                _, chunks = fmt.check_document(column, arrays[name])
                self.chunks |= chunks


def sync_files(files: Iterable[Path]) -> None:
    """Make files that were written without waiting, and their names, reach the disk together."""
    directories = set()
    for path in files:
        directories.add(path.parent)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
    sync_directories(directories)


def sync_directories(directories: Iterable[Path]) -> None:
    """Make renames in these directories reach the disk."""
    for directory in directories:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def encode(document: Mapping[str, Any]) -> bytes:
    """Encode metadata; non-ASCII is escaped, so any name survives.

    In one line: with an indent Python's own encoder would take 10 times as long.
    """
    return json.dumps(document).encode()


def metadata_last(key: str) -> tuple[int, int, str]:
    """Order the files of a group: metadata after all else, the group's own after the arrays'."""
    return (key.endswith(GROUP_JSON), -key.count("/") if key.endswith(GROUP_JSON) else 0, key)
