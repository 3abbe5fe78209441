"""Retention: a run keeps within `max_bytes` and `max_age`, the oldest whole things going first.

First what of the daemon's journal is in the store as well, then the captured steps, then blocks of
records; what an anomaly is judged by comes last of all, and age alone never takes it away. How
large a thing is the manifests know; the tree is not walked.
What went is said: the manifest of a group counts the expired blocks as done with, and the group of
the captures lists the expired steps, so that a reader says `expired` and `verify` finds no damage.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ddpprobe.records.events import PinnedEvent
from ddpprobe.rundir import paths, validate
from ddpprobe.store import format as fmt
from ddpprobe.store.captures.commit import expire_event, turn
from ddpprobe.store.captures.event import group_key
from ddpprobe.store.captures.packs import attempts_with_packs, packs_of
from ddpprobe.store.captures.reader import StoredEvent, expired_steps, stored_steps
from ddpprobe.store.commit import Files
from ddpprobe.store.group_names import attempts_of, groups_of
from ddpprobe.store.manifest import EXPIRED, Consumed, Manifest
from ddpprobe.store.reader import StoredGroup
from ddpprobe.store.root import Root
from ddpprobe.store.verified_files import GroupArrays

# Steps around a page whose records and captures are its evidence: what led to it, what followed.
BEFORE, AFTER = 256, 32
USER = "capture"  # the reason of a capture that the user asked for beforehand

Spans = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """What a run may keep.

    Attributes:
        max_bytes: of the store, its manifests, the journals, and packs not folded yet.
        max_age: seconds since the end of a step.
    """

    max_bytes: float | None = None
    max_age: float | None = None


@dataclass(frozen=True, slots=True)
class _Thing:
    """What goes as a whole: a captured step (`order` 0) or a group's block of records (1)."""

    evidence: bool
    order: int
    attempt: int
    step: int
    name: str
    size: int
    time_ns: int
    remove: Callable[[], None]

    @property
    def key(self) -> tuple[bool, int, int, int, bool, str]:
        # Of a block the ranks' own records first: most questions are answered by the merged ones.
        merged = self.name == "merged"
        return self.evidence, self.order, self.attempt, self.step, merged, self.name


class Retention:
    """Keeps a run within its limits; one per daemon, which trims its own node's groups.

    Args:
        run: the run directory.
        root: the hierarchy's root.
        limits: what may stay.
        durable: as for `GroupWriter`.
    """

    def __init__(
        self, run: paths.RunDir, root: Root, limits: RetentionLimits, *, durable: bool
    ) -> None:
        self._run, self._root, self._limits, self._durable = run, root, limits, durable
        self._sizes: dict[Path, tuple[tuple[int, int], int]] = {}

    def apply(
        self, own: dict[int, set[str]], now_ns: int | None = None,
        spare: Callable[[], Iterable[Path]] = tuple,
    ) -> int:  # fmt: skip
        """Take away what is too much or too old; return how many things went.

        Args:
            own: attempt -> names of the record groups that this daemon writes.
            now_ns: the time, ns since 1970.
            spare: returns journal segments of which everything is in the store, oldest first.

        Raises:
            OSError: the disk refused; what went is gone, the rest comes later.
        """
        now = time.time_ns() if now_ns is None else now_ns
        self._finish()
        total, limits = self._total(), self._limits
        most = float("inf") if limits.max_bytes is None else limits.max_bytes
        gone = 0
        for path in spare() if total > most else ():  # one by one: to look at them takes a while
            if total <= most:
                break
            total, gone = total - _size(path), gone + 1
            path.unlink(missing_ok=True)
        if total <= most and limits.max_age is None:
            return gone
        for thing in sorted(self._things(own), key=lambda t: t.key):
            age = (now - thing.time_ns) / 1e9
            too_old = limits.max_age is not None and age > limits.max_age and not thing.evidence
            if total > most or too_old:
                thing.remove()
                total, gone = total - thing.size, gone + 1
        return gone

    def _things(self, own: dict[int, set[str]]) -> Iterator[_Thing]:
        for attempt in sorted({*attempts_of(self._run), *attempts_with_packs(self._run)}):
            pages = evidence_of(self._run, attempt)
            yield from self._events(attempt, pages)
            for name in sorted(own.get(attempt, ())):
                yield from self._blocks(attempt, name, pages)

    def _events(self, attempt: int, pages: Spans) -> Iterator[_Thing]:
        packs = packs_of(self._run, attempt)
        stored = sorted({*stored_steps(self._run, attempt)} - expired_steps(self._run, attempt))
        # A step that is still being packed or folded stays.
        for step in stored:
            event = StoredEvent(self._run, attempt, step)
            if event.event is None:
                continue
            headers = event.event.headers.values()
            times = [t for h in headers if isinstance(t := h.get("wall_time_ns"), int)]
            asked = all(h.get("reason") == USER for h in headers)
            sizes = [path.stat().st_size for path in packs.get(step, {}).values()]
            yield _Thing(
                not asked or _touches(pages, step, step),
                0, attempt, step, event.key, event.size + sum(sizes), max(times, default=0),
                partial(self._expire, attempt, step),
            )  # fmt: skip

    def _expire(self, attempt: int, step: int) -> None:
        self._root.prepare(attempt)
        with turn(self._run):
            expire_event(self._run, attempt, step, durable=self._durable)
        self._clear(attempt, step)

    def _clear(self, attempt: int, step: int) -> None:
        """Delete what is left of an expired step: first what says that it must be there."""
        stored = StoredEvent(self._run, attempt, step)
        for path in packs_of(self._run, attempt).get(step, {}).values():
            path.unlink(missing_ok=True)
        for manifest in reversed(stored.manifests):
            manifest.path.unlink(missing_ok=True)
        directory = self._run.store / group_key(attempt, step)
        if directory.exists():
            trash = paths.make_dir(self._run.path / "trash") / f"{attempt}_{step}"
            directory.rename(trash)
            shutil.rmtree(trash)

    def _finish(self) -> None:
        """Go on where a killed daemon stopped."""
        shutil.rmtree(self._run.path / "trash", ignore_errors=True)
        for attempt in attempts_of(self._run):
            left = {p.name for p in (self._run.store / group_key(attempt, 0)).parent.glob("step_*")}
            for step in expired_steps(self._run, attempt) if left else ():
                if f"step_{step:010d}" in left:
                    self._clear(attempt, step)

    def _blocks(self, attempt: int, name: str, pages: Spans) -> Iterator[_Thing]:
        key = f"{fmt.attempt_key(attempt)}/{name}"
        arrays = GroupArrays(self._run, key)
        block = arrays.chunks.get("counts", {}).get("step", 0)
        if arrays.lost or not block:
            return  # nothing goes of what cannot be judged
        files: dict[int, list[str]] = {}
        for file in arrays.manifest.state.files:
            column, _, index = file.partition("/c/")
            if index and _is_of_steps(arrays.columns[column]):
                files.setdefault(int(index.partition("/")[0]), []).append(file)
        newest = (arrays.rows - 1) // block
        for number in sorted(n for n in files if n < newest):
            start, stop = number * block, (number + 1) * block
            steps = arrays.attempt("step", None, start, stop)
            times = arrays.attempt("wall_time", None, start, stop)
            if steps is None or times is None:
                return
            first, last = int(steps.min()), int(steps.max())
            yield _Thing(
                _touches(pages, first, last), 1, attempt, first, name,
                sum(arrays.manifest.state.files[f][0] for f in files[number]), int(times.max()),
                partial(self._forget, key, number, files[number]),
            )  # fmt: skip

    def _forget(self, key: str, number: int, files: list[str]) -> None:
        group = Files(self._run, key, durable=self._durable)
        consumed = group.manifest.state.consumed
        before = consumed.get(EXPIRED, Consumed())
        ahead = {*before.ahead, number}
        through = before.through
        while through in ahead:
            through += 1
        after = Consumed(through, frozenset(n for n in ahead if n > through))
        group.remove(sorted(files), {EXPIRED: after})

    def _total(self) -> int:
        """Return the bytes of the store, by the manifests, of these, of journals and packs."""
        total = sum(_size(path) for path in self._run.path.glob("journal/*/*/*/*.wal"))
        for path in sorted(self._run.manifests.glob("*.log")):
            stat = path.stat()
            stamp = stat.st_mtime_ns, stat.st_size
            if self._sizes.get(path, ((0, 0), 0))[0] != stamp:
                files = Manifest(path).state.files.values()
                self._sizes[path] = stamp, stat.st_size + sum(size for size, _ in files)
            total += self._sizes[path][1]
        for attempt in attempts_with_packs(self._run):
            for ranks in packs_of(self._run, attempt).values():
                total += sum(map(_size, ranks.values()))
        return total


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0  # folded meanwhile


def evidence_of(run: paths.RunDir, attempt: int) -> Spans:
    """Return the spans of steps that are the evidence of an anomaly: pinned, or around a page."""
    spans: Spans = []
    for key in groups_of(run, attempt):
        kind = fmt.kind_of_group(key)
        if kind == "anomalies":
            pages = [a.step for a in StoredGroup(run, key).anomalies() if a.level == "page"]
            spans += [(step - BEFORE, step + AFTER) for step in pages]
        elif kind == "node":
            for _, _, said in StoredGroup(run, key).events():
                event = validate.known_event(said)
                if isinstance(event, PinnedEvent):
                    spans.append((event.first, event.last))
    return spans


def _touches(spans: Spans, first: int, last: int) -> bool:
    return any(a <= last and first <= b for a, b in spans)


def _is_of_steps(column: fmt.ArraySpec) -> bool:
    return column.dims[0] == "step" and not column.rewritten
