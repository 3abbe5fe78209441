"""Files of one group, believed only after a look: metadata, manifest, chunks.

Metadata must be what the format would have written, files must be regular, and each must have the
length and checksum that the manifest says. Where only a few columns of a block of statistics are
asked for, only these are read: then the file's length is the manifest's, and the shard's index and
every inner chunk are held against their own checksums.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

from numpy.typing import NDArray

from ddpprobe.errors import StoreDamaged
from ddpprobe.rundir import paths, safe_read
from ddpprobe.rundir.validate import MALFORMED
from ddpprobe.store import chunk_decoding, regions
from ddpprobe.store import format as fmt
from ddpprobe.store.committed_files import CommittedFiles, ExpiredError
from ddpprobe.store.manifest import (
    EXPIRED,
    GROUP_JSON,
    Consumed,
    Lost,
    Manifest,
    State,
    is_settled,
    manifest_path,
)
from ddpprobe.store.regions import Index, Shard

RETRIES = 50
RETRY_SECONDS = 0.02
# Entries along an axis: more than anybody has, and few enough to be held in memory.
MAX_ROWS, MAX_LABELS = 1 << 22, 1 << 17
MOST = {"step": MAX_ROWS, "sample": 1 << 20}
MAX_TEXT_BYTES = 64 << 20  # of one column, at once
MOST_LOST = 1000  # listed of a group
_DECODE_ERRORS = (ValueError, RuntimeError, OverflowError, MemoryError)


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

    def __init__(self, run: paths.RunDir, key: str) -> None:
        self.key = key
        self.lost: list[Lost] = []
        self.attrs: dict[str, Any] = {}
        self._run = run
        self._root = run.store / key
        self.columns = {c.name: c for c in fmt.SCHEMAS[fmt.kind_of_group(key) or "rank"]}
        self.chunks: dict[str, dict[str, int]] = {}
        self.manifest, settled = self._settle()
        there = (self._root / GROUP_JSON).exists()
        if there and not self.manifest.state.files:
            # The line of the first commit, which is on disk before this file, came in between.
            self.manifest, settled = self._settle()
        self._files = CommittedFiles(self._root, self.manifest, settled=settled)
        state = self.manifest.state if settled else self.manifest.rolled_back()
        self.consumed: dict[str, Consumed] = state.consumed
        self.sizes = dict(state.sizes)
        self.exists = bool(state.files) or there
        if self.exists:
            self._open(state)

    def has_expired(self, block: int) -> bool:
        """Return whether retention took a block of steps away."""
        return self._files.has_expired(block)

    @property
    def rows(self) -> int:
        """Committed records."""
        return self.sizes.get("step", 0)

    def read(
        self, name: str, start: int = 0, stop: int | None = None, inner: tuple[Index, ...] = (),
        only: Sequence[int] | None = None,
    ) -> NDArray[Any]:  # fmt: skip
        """Read rows [start, stop) of an array.

        Args:
            name: of the array.
            start: first row.
            stop: after the last one; None: all that are left.
            inner: selects in its other dimensions.
            only: of the last dimension of `counts` or `values`, read these; the others hold `fill`.

        Raises:
            StoreDamaged: a chunk of it is missing or damaged, or it is too large to be read at
                once.
        """
        column, chunks = self.columns[name], self.chunks.get(name)
        if chunks is None:
            raise StoreDamaged("its metadata is lost")
        shape = [self.sizes[d] for d in column.dims]
        asked = (slice(start, stop), *inner, *[slice(None)] * (len(shape) - 1 - len(inner)))
        where = [regions.span(at, n) for at, n in zip(asked, shape, strict=True)]
        out = regions.empty(column, [b - a for a, b in where])
        grid = [fmt.COLUMN_CHUNK] if column.rewritten else [chunks[d] for d in column.dims]
        touched = [range(a // n, -(-b // n)) for (a, b), n in zip(where, grid, strict=True)]
        text = 0
        for place in product(*touched) if out.size else ():
            key = "/".join((name, "c", *map(str, place)))
            origin = [i * n for i, n in zip(place, grid, strict=True)]
            try:
                if column.split:
                    self._copy_parts(column, key, grid, origin, where, out, only)
                elif (data := self._files.load(key)) is not None:
                    part = regions.decode(column, data, grid)
                    # Not all of a chunk, which has room for thousands of labels.
                    copied = regions.place(out, where, origin, part)
                    text += sum(map(len, copied.flat)) if column.dtype == "string" else 0
            except _DECODE_ERRORS as error:
                raise StoreDamaged(f"{key} cannot be decoded: {error}") from error
            if text > MAX_TEXT_BYTES:
                raise StoreDamaged(f"more than {MAX_TEXT_BYTES} characters are not read at once")
        return out[tuple(0 if isinstance(at, int) else slice(None) for at in asked)]

    def _copy_parts(
        self, column: fmt.ArraySpec, key: str, grid: Sequence[int], origin: Sequence[int],
        where: Sequence[tuple[int, int]], out: NDArray[Any], only: Sequence[int] | None,
    ) -> None:  # fmt: skip
        """Copy the inner chunks of one file into the region `where`."""
        shape = [self.sizes[d] for d in column.dims]
        whole = only is None and regions.covers(where, origin, grid, shape)
        source = self._files.load(key) if whole else self._files.open(key)
        if source is None:
            return
        part = fmt.part_of(grid)
        with Shard(source, prod(grid) // prod(part)) as shard:
            wanted = regions.parts_within(grid, origin, where, only)
            self._must_be_fill([p.origin for p in wanted if not shard.has(p.number)], part)
            for number, at in wanted:
                if shard.has(number):
                    data = chunk_decoding.numbers(shard.part(number), column.dtype, part)
                    regions.place(out, where, at, data)

    def _must_be_fill(self, origins: Sequence[Sequence[int]], part: Sequence[int]) -> None:
        """Refuse inner chunks that were not written, if they belong to sites that had rows.

        Zarr writes none beyond an array's shape, and a block of steps is not written again when the
        shape grows. Sites that came later have no rows in it, and `order` says so.

        Raises:
            ValueError: one of them is missing.
            StoreDamaged: `order` is lost, so that nobody can tell.
        """
        if origins:
            steps, sites, _ = zip(*origins, strict=True)
            beyond = slice(min(sites), max(sites) + part[1])
            order = self.read("order", steps[0], steps[0] + part[0], (beyond,))
            if (order >= 0).any():
                raise ValueError("an inner chunk is missing")

    def labels(self, name: str) -> list[Any]:
        """Read a one-dimensional array as a list; [] (and listed as lost) if it is damaged."""
        found = self.attempt(name, None)
        return [] if found is None else list(found.tolist())

    def check(self, advance: Callable[[int], None] | None = None) -> None:
        """Decode every chunk of every array; what cannot be is in `lost` afterwards.

        Args:
            advance: told 1 after each of the `pieces`.
        """
        for column, start, stop, inner in self._pieces():
            self.attempt(column.name, self._steps_at(column, start), start, stop, inner)
            if advance:
                advance(1)

    @property
    def pieces(self) -> int:
        """Number of reads that `check` makes."""
        return sum(1 for _ in self._pieces())

    def _pieces(self) -> Iterator[tuple[fmt.ArraySpec, int, int, tuple[slice, ...]]]:
        for name, chunks in self.chunks.items():
            column = self.columns[name]
            widths = regions.widths(column, self.sizes, chunks)
            size, chunk = self.sizes.get(column.dims[0], 0), chunks[column.dims[0]]
            for start, inner in product(range(0, size, chunk), widths):
                yield column, start, min(start + chunk, size), inner

    def _steps_at(self, column: fmt.ArraySpec, start: int) -> tuple[int, int] | None:
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
        inner: tuple[Index, ...] = (),
        only: Sequence[int] | None = None,
    ) -> NDArray[Any] | None:
        """Read as `read` does; None, and listed as lost with its steps, if it is damaged.

        None, too, of what retention took away meanwhile: that is not lost.
        """
        try:
            return self.read(name, start, stop, inner, only)
        except ExpiredError:
            return None
        except StoreDamaged as error:
            self.lose(name, steps, str(error))
            return None

    def lose(self, array: str, steps: tuple[int, int] | None, why: str) -> None:
        """List something as lost, once."""
        where = "/".join(p for p in (safe_read.STORE, self.key, array) if p)
        lost = Lost(where, steps, why)
        if len(self.lost) < MOST_LOST and lost not in self.lost:
            self.lost.append(lost)

    def _settle(self) -> tuple[Manifest, bool]:
        """Return a manifest that fits the metadata on disk: a live writer may be in between."""
        path = manifest_path(self._run, self.key)
        manifest = Manifest(path)
        for _ in range(RETRIES):
            if not manifest.exists:
                return manifest, False
            try:
                return manifest, is_settled(self._root, manifest)
            except (StoreDamaged, OSError):
                time.sleep(RETRY_SECONDS)
                again = Manifest(path)
                if again.state.files == manifest.state.files and again.lines == manifest.lines:
                    return manifest, True
                manifest = again
        return manifest, True

    def _open(self, state: State) -> None:
        for text in self.manifest.damage:
            self.lose("", None, f"its manifest is damaged: {text}")
        if not self.manifest.exists:
            self.lose("", None, "its manifest is missing")
        documents = self._consolidated()
        for name, column in self.columns.items():
            if column.optional and not {name, f"{name}/{GROUP_JSON}"} & {*documents, *state.files}:
                continue
            try:
                own = documents.get(name) or self._document(f"{name}/{GROUP_JSON}")
                sizes, self.chunks[name] = fmt.check_document(column, own)
            except (StoreDamaged, ValueError) as error:
                self.lose(name, None, str(error))
                continue
            if not state.sizes:
                self.sizes |= {d: n for d, n in sizes.items() if n <= self.sizes.get(d, n)}
        self._bound(state)

    def _bound(self, state: State) -> None:
        """Refuse sizes for which there are no files: nobody loops over, or allocates, a claim."""
        files = len(state.files) if self.manifest.exists and not self.manifest.damage else MAX_ROWS
        dims = {d for c in self.columns.values() for d in c.dims}
        most = {d: min(MOST.get(d, MAX_LABELS), fmt.COLUMN_CHUNK * files) for d in dims}
        absurd = [f"{d} {n}" for d, n in self.sizes.items() if not 0 <= n <= most.get(d, 0)]
        block = min((c.get("step", MAX_ROWS) for c in self.chunks.values()), default=MAX_ROWS)
        gone = state.consumed.get(EXPIRED, Consumed())  # blocks that left no file
        blocks = files + gone.through + len(gone.ahead)
        if absurd or self.sizes.keys() != dims or self.rows > block * blocks:
            told = ", ".join(absurd) or f"{len(self.sizes)} of {len(dims)}, {self.rows} rows"
            self.lose("", None, f"sizes that make no sense ({told})")
            self.sizes, self.chunks = dict.fromkeys(dims, 0), {}

    def _consolidated(self) -> dict[str, Any]:
        try:
            document = self._document(GROUP_JSON)
            attrs = dict(document["attributes"]["ddpprobe"])
            arrays = dict(document["consolidated_metadata"]["metadata"])
            version = int(attrs["format_version"])
        except (StoreDamaged, *MALFORMED) as error:
            why = str(error) if isinstance(error, StoreDamaged) else f"{GROUP_JSON} is no group's"
            self.lose("", None, why)
            return {}
        if why := paths.unreadable(version):
            raise StoreDamaged(why)
        self.attrs = attrs
        return arrays

    def _document(self, key: str) -> dict[str, Any]:
        try:
            data = self._files.load(key)
            found = safe_read.parse(data or b"null")
        except ValueError as error:
            raise StoreDamaged(f"{key} is not JSON") from error
        if not isinstance(found, dict):
            raise StoreDamaged(f"{key} is missing")
        return found


def span_of(steps: NDArray[Any]) -> tuple[int, int]:
    """Return the first and the last step of a non-empty array."""
    return int(steps.min()), int(steps.max())
