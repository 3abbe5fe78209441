"""Files of one group, believed only after a look: metadata, manifest, chunks.

Metadata must be what the format would have written, files must be regular, and each must have the
length and checksum that the manifest says before Zarr is given its bytes.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.storage import MemoryStore

from ddpprobe import layout
from ddpprobe.store import format as fmt
from ddpprobe.store.commit import encode
from ddpprobe.store.manifest import (
    GROUP_JSON,
    Consumed,
    Lost,
    Manifest,
    State,
    StoreError,
    is_settled,
    manifest_path,
    read_regular,
    version_of,
)

RETRIES = 50
RETRY_SECONDS = 0.02
_DECODE_ERRORS = (ValueError, RuntimeError, KeyError, IndexError, TypeError, OSError)


class GroupArrays:
    """The arrays of one group, as of its last finished commit.

    Attributes:
        exists: False if nothing was ever committed to it.
        attrs: the group's own attributes (`ddpprobe`), {} if they are lost.
        sizes: length of every dimension.
        consumed: how far each journal is in here.
        columns, chunks: its arrays, and the chunks of those that are intact.
        manifest: as of when the group was opened.
        lost: what turned out to be unreadable so far; grows as arrays are read.
    """

    def __init__(self, run: layout.RunDir, key: str) -> None:
        self.key = key
        self.lost: list[Lost] = []
        self.attrs: dict[str, Any] = {}
        self._run = run
        self._root = run.store / key
        self.columns = {c.name: c for c in fmt.SCHEMAS[fmt.kind_of_group(key) or "rank"]}
        self.chunks: dict[str, dict[str, int]] = {}
        self.manifest, settled = self._settle()
        state = self.manifest.state if settled else self.manifest.rolled_back()
        self.consumed: dict[str, Consumed] = state.consumed
        self.sizes = dict(state.sizes)
        self.exists = bool(state.files) or self._has_metadata()
        if self.exists:
            self._open(state)

    @property
    def rows(self) -> int:
        """Committed records."""
        return self.sizes.get("step", 0)

    def read(
        self, name: str, start: int = 0, stop: int | None = None, inner: tuple[Any, ...] = ()
    ) -> NDArray[Any]:
        """Read rows [start, stop) of an array; `inner` selects in its other dimensions.

        Raises:
            StoreError: a chunk of it is missing or damaged.
        """
        column, chunks = self.columns[name], self.chunks.get(name)
        if chunks is None:
            msg = "its metadata is lost"
            raise StoreError(msg)
        sizes = {d: self.sizes[d] for d in column.dims}
        stop = sizes[column.dims[0]] if stop is None else stop
        document = fmt.array_document(column, sizes, chunks)
        shape = [stop - start, *(sizes[d] for d in column.dims[1:])]
        where = (start, *[0] * (len(shape) - 1))
        memory: dict[str, Buffer] = {}
        if min(shape) > 0:
            for key in fmt.chunk_keys(name, fmt.grid_of(document), where, shape):
                data = self._load(key)
                if data is not None:
                    memory[key] = _buffer(data)
        memory[f"{name}/{GROUP_JSON}"] = _buffer(encode(document))
        try:
            array = zarr.open_array(MemoryStore(memory), path=name, mode="r", zarr_format=3)
            return np.asarray(array[(slice(start, stop), *inner)])
        except _DECODE_ERRORS as error:
            msg = f"cannot be decoded: {error}"
            raise StoreError(msg) from error

    def labels(self, name: str) -> list[Any]:
        """Read a one-dimensional array as a list; [] (and listed as lost) if it is damaged."""
        found = self.attempt(name, None)
        return [] if found is None else list(found.tolist())

    def check(self) -> None:
        """Decode every chunk of every array; what cannot be is in `lost` afterwards."""
        for name, column in self.columns.items():
            size = self.sizes.get(column.dims[0], 0)
            chunk = self.chunks.get(name, {}).get(column.dims[0], 1)
            if name in self.chunks:
                for start in range(0, size, chunk):
                    self.attempt(
                        name, self._steps_at(column, start), start, min(start + chunk, size)
                    )

    def _steps_at(self, column: fmt.Column, start: int) -> tuple[int, int] | None:
        if column.dims[0] != "step" or column.rewritten:
            return None
        stop = min(start + self.chunks[column.name]["step"], self.rows)
        steps = self.attempt("step", None, start, stop)
        return None if steps is None else span_of(steps)

    def attempt(
        self,
        name: str,
        steps: tuple[int, int] | None = None,
        start: int = 0,
        stop: int | None = None,
        inner: tuple[Any, ...] = (),
    ) -> NDArray[Any] | None:
        """Read as `read` does; None, and listed as lost with its steps, if it is damaged."""
        try:
            return self.read(name, start, stop, inner)
        except StoreError as error:
            self.lose(name, steps, str(error))
            return None

    def lose(self, array: str, steps: tuple[int, int] | None, why: str) -> None:
        """List something as lost, once."""
        where = "/".join(p for p in ("run.zarr", self.key, array) if p)
        lost = Lost(where, steps, why)
        if lost not in self.lost:
            self.lost.append(lost)

    def _load(self, key: str) -> bytes | None:
        """Return a verified file; None for a chunk that never was (its sites came later)."""
        try:
            data = read_regular(self._root, key)
        except FileNotFoundError:
            if self.manifest.state.files.get(key) or self.manifest.damage:
                raise StoreError(f"{key} is missing") from None
            if not self.manifest.exists:
                raise StoreError(f"{key} is missing, and so is the manifest") from None
            return None
        except OSError as error:
            raise StoreError(f"{key} is no regular file ({error.strerror or error})") from error
        found = version_of(data)
        if self.manifest.exists and found not in self.manifest.versions(key):
            # The writer may have replaced it since the manifest was read.
            now = Manifest(manifest_path(self._run, self.key))
            listed = self.manifest.versions(key) | now.versions(key)
            if found not in now.versions(key) and (listed or not now.damage):
                raise StoreError(f"{key} is damaged: it is not what was committed")
        return data

    def _settle(self) -> tuple[Manifest, bool]:
        """Return a manifest that fits the metadata on disk: a live writer may be in between."""
        path = manifest_path(self._run, self.key)
        manifest = Manifest(path)
        for _ in range(RETRIES):
            if not manifest.exists:
                return manifest, False
            try:
                return manifest, is_settled(self._root, manifest)
            except (StoreError, OSError):
                time.sleep(RETRY_SECONDS)
                again = Manifest(path)
                if again.state.files == manifest.state.files and again.lines == manifest.lines:
                    return manifest, True
                manifest = again
        return manifest, True

    def _has_metadata(self) -> bool:
        return (self._root / GROUP_JSON).exists()

    def _open(self, state: State) -> None:
        for text in self.manifest.damage:
            self.lose("", None, f"its manifest is damaged: {text}")
        if not self.manifest.exists:
            self.lose("", None, "its manifest is missing")
        documents = self._consolidated()
        for name, column in self.columns.items():
            try:
                own = documents.get(name) or self._document(f"{name}/{GROUP_JSON}")
                sizes, self.chunks[name] = fmt.check_document(column, own)
            except (StoreError, ValueError) as error:
                self.lose(name, None, str(error))
                continue
            if not state.sizes:
                self.sizes |= {d: n for d, n in sizes.items() if n <= self.sizes.get(d, n)}

    def _consolidated(self) -> dict[str, Any]:
        try:
            document = self._document(GROUP_JSON)
            attrs = document["attributes"]["ddpprobe"]
            arrays = document["consolidated_metadata"]["metadata"]
        except (StoreError, KeyError, TypeError) as error:
            why = str(error) if isinstance(error, StoreError) else f"{GROUP_JSON} is no group's"
            self.lose("", None, why)
            return {}
        if attrs.get("format_version", 0) > fmt.FORMAT_VERSION:
            msg = f"written by a newer ddpprobe (format_version {attrs['format_version']})"
            raise StoreError(msg)
        self.attrs = attrs
        return dict(arrays)

    def _document(self, key: str) -> dict[str, Any]:
        try:
            data = self._load(key)
            found = json.loads(data or b"null")
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{key} is not JSON") from error
        if not isinstance(found, dict):
            raise StoreError(f"{key} is missing")
        return found


def span_of(steps: NDArray[Any]) -> tuple[int, int]:
    """Return the first and the last step of a non-empty array."""
    return int(steps.min()), int(steps.max())


def _buffer(data: bytes) -> Buffer:
    return default_buffer_prototype().buffer.from_bytes(data)
