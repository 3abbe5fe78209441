"""The fold of captures: the ranks' packs become global arrays of the store, and are deleted.

An event is planned once, under a lock, by the first daemon that sees the packs of all ranks, or
whose patience is over: what the arrays are is a function of all packs, and one commit says it. Then
each node writes the chunks of its own ranks, and its own manifest line says that they are there.
A pack is deleted when everything in it is in the store, by whichever node sees it first: replicas
are written by one node, perhaps after the others have ended. Killed anywhere, the same is done
again, to the same bytes.

Nodes that share no directory each see their own packs only: each plans for itself, and what the
others hold is missing there, which a reader is told.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddpprobe.errors import PackDamaged, StoreDamaged
from ddpprobe.rundir import paths
from ddpprobe.rundir.tensor_pack import Pack
from ddpprobe.store.captures import dtypes
from ddpprobe.store.captures.commit import NodeChunks, commit_event, turn
from ddpprobe.store.captures.event import CaptureEvent, Entry, event_of, group_key
from ddpprobe.store.captures.packs import open_packs, packs_of
from ddpprobe.store.captures.places import Box, HeldPart
from ddpprobe.store.captures.reader import StoredEvent, chunk_key, chunk_keys, expired_steps
from ddpprobe.store.root import Root

# So long the plan waits for the other ranks' packs; what comes later stays a pack.
PATIENCE_SECONDS = 60.0


class CaptureFold:
    """Folds one node's packs.

    Args:
        run: the run directory.
        root: the hierarchy's root.
        node: this node's directory name.
        durable: as for `GroupWriter`.
        patience: seconds that a plan waits for the packs of other ranks.

    Attributes:
        damaged: what cannot be folded, and why; it stays where it is.
    """

    def __init__(
        self,
        run: paths.RunDir,
        root: Root,
        node: str,
        *,
        durable: bool,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self._run, self._root, self._node = run, root, node
        self._durable, self._patience = durable, patience
        self._kept: dict[tuple[int, int], set[Path]] = {}
        self.damaged: dict[str, str] = {}

    def fold(self, attempt: int, *, final: bool) -> int:
        """Fold what is complete, or with `final` everything; return the number of tensors.

        Raises:
            OSError: the disk is full or failing; what it would take is folded, nothing is lost,
                call again later.
        """
        mine = packs_of(self._run, attempt, self._node)
        done = 0
        refused: list[OSError] = []
        for step, pack_paths in mine.items():
            if self._kept.get((attempt, step)) == set(pack_paths.values()):
                continue
            try:
                with remembering(refused):
                    done += self._fold_step(attempt, step, pack_paths, final=final)
            except StoreDamaged as error:
                self.damaged[group_key(attempt, step)] = str(error)
                self._kept[attempt, step] = set(pack_paths.values())
            if refused and isinstance(refused[-1], TimeoutError):
                break  # whoever holds the lock would be waited for at every step
        if refused:
            raise refused[0]
        return done

    def _fold_step(self, attempt: int, step: int, mine: dict[int, Path], *, final: bool) -> int:
        if step in expired_steps(self._run, attempt):
            _delete(mine.values())
            return 0
        stored = StoredEvent(self._run, attempt, step)
        if stored.event is None and not stored.lost:
            if not self._plan(attempt, step, final=final):
                return 0
            stored = StoredEvent(self._run, attempt, step)
        if stored.event is None or stored.lost:
            raise StoreDamaged("; ".join(str(x) for x in stored.lost))
        packs, lost = open_packs(self._run, attempt, step, mine.items())
        written = self._write(stored.event, packs)
        # Of all nodes: the last one to write deletes what the others had to leave.
        there = packs_of(self._run, attempt).get(step, {})
        packs, _ = open_packs(self._run, attempt, step, there.items())
        covered = self._covered(StoredEvent(self._run, attempt, step), packs)
        _delete(packs[rank].path for rank in covered)
        left = {p for rank, p in mine.items() if rank not in covered}
        if left and (final or not self._may_come(mine)):
            # Damaged, or too late for the plan: readers take what they can from the packs.
            self._kept[attempt, step] = left
        if lost:
            self.damaged[group_key(attempt, step)] = "; ".join(map(str, lost))
        return written

    def _plan(self, attempt: int, step: int, *, final: bool) -> bool:
        """Commit what the event's arrays are; False while packs may still come."""
        pack_paths = packs_of(self._run, attempt).get(step, {})
        packs, _ = open_packs(self._run, attempt, step, pack_paths.items())
        if not packs:
            if pack_paths:
                raise StoreDamaged("none of its packs is whole")
            return False
        world = max(int(p.header["world_size"]) for p in packs.values())
        if not final and len(pack_paths) < world and self._may_come(pack_paths):
            return False
        self._root.prepare(attempt)
        event = event_of(attempt, step, packs)
        with turn(self._run):
            commit_event(self._run, event, durable=self._durable)
        return True

    def _may_come(self, pack_paths: dict[int, Path]) -> bool:
        newest = 0.0
        for path in pack_paths.values():
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest, path.stat().st_mtime)
        return time.time() - newest < self._patience

    def _write(self, event: CaptureEvent, packs: dict[int, Pack]) -> int:
        """Write the chunks of this node's parts that are not in yet: one commit."""
        chunks = NodeChunks(self._run, group_key(event.attempt, event.step), self._node)
        places = {r: {t.key: i for i, t in enumerate(p.tensors)} for r, p in packs.items()}
        tensors = 0
        for entry in event.entries:
            for number, part in enumerate(entry.plan.parts):
                rank = part.ranks[0]  # its node writes it, for all that hold the same bytes
                at = places.get(rank, {}).get(entry.key)
                keys = chunk_keys(entry, number)
                if at is None or all(k in chunks.files for k in keys):
                    continue
                pack = packs[rank]
                if _held(pack, at, rank) not in entry.held:
                    continue  # another pack than the one that was planned with
                try:
                    raw = pack.raw(at)
                except (PackDamaged, FileNotFoundError) as error:
                    self.damaged[group_key(event.attempt, event.step)] = str(error)
                    continue
                crc = pack.tensors[at].crc
                for index, data, crc32 in chunks_of_part(entry, number, raw, crc):
                    chunks.put(chunk_key(entry, index), data, crc32)
                tensors += 1
        chunks.commit(durable=self._durable)
        return tensors

    def _covered(self, stored: StoredEvent, packs: dict[int, Pack]) -> set[int]:
        """Return the ranks whose packs hold nothing any more that is not in the store."""
        if stored.event is None:
            return set()
        in_store = set()
        for entry in stored.event.entries:
            by_rank = {h.rank: h for h in entry.held}
            for number, part in enumerate(entry.plan.parts):
                if stored.has(entry, number):
                    in_store |= {(entry.key, _content(by_rank[r])) for r in part.ranks}
        return {
            rank
            for rank, pack in packs.items()
            if rank in stored.event.headers
            and all(
                (t.key, _content(_held(pack, i, rank))) in in_store
                for i, t in enumerate(pack.tensors)
            )
        }


@contextlib.contextmanager
def remembering(refused: list[OSError]) -> Iterator[None]:
    """Go on with other things when the disk refuses this one; the caller raises it at the end."""
    try:
        yield
    except OSError as error:
        refused.append(error)


def chunks_of_part(
    entry: Entry, part: int, raw: NDArray[np.uint8], crc: int
) -> Iterator[tuple[tuple[int, ...], NDArray[np.uint8], int]]:
    """Yield (index, bytes, their crc32) of the chunks of a part; what no rank holds is zero."""
    plan, size = entry.plan, dtypes.item_bytes(entry.key.dtype)
    whole = prod(plan.chunk) * size
    here = plan.parts[part]
    for index, box in plan.chunks(part):
        if raw.nbytes == whole:  # the part is the chunk
            yield index, raw, crc
            continue
        chunk = np.zeros((*plan.chunk, size), np.uint8)
        if plan.stacked:
            chunk.reshape(-1)[: raw.nbytes] = raw
        else:
            local = raw.reshape(*here.shape, size)
            _copy(chunk, local, plan.origin, index, plan.chunk, here.boxes(box))
        flat = chunk.reshape(-1)
        yield index, flat, zlib.crc32(flat.data)


def _copy(
    chunk: NDArray[np.uint8],
    local: NDArray[np.uint8],
    origin: int,
    index: tuple[int, ...],
    shape: tuple[int, ...],
    boxes: Iterator[tuple[Box, Box]],
) -> None:
    first = [i * c - origin for i, c in zip(index, shape, strict=True)]
    for box, inner in boxes:
        into = tuple(slice(a - f, b - f) for (a, b), f in zip(box, first, strict=True))
        chunk[into] = local[tuple(slice(a, b) for a, b in inner)]


def _held(pack: Pack, at: int, rank: int) -> HeldPart:
    t = pack.tensors[at]
    return HeldPart(rank, t.shape, t.layout, t.crc)


def _content(held: HeldPart) -> tuple[int, tuple[int, ...], int]:
    return held.rank, held.shape, held.crc


def _delete(pack_paths: Iterable[Path]) -> None:
    for path in pack_paths:
        path.unlink(missing_ok=True)
