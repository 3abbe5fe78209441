"""Captured steps of several nodes, planned anew with the parts of all of them.

A node that sees no other's packs stores an array of its own ranks' parts, in chunks that fit these.
The arrays of the whole are others, often under the same names: nothing of them can be copied. So
what each rank kept is read back, and goes through the plan and the writer that a fold uses where
all nodes share a directory: the same input, and the same bytes.

A step is written beside the result and then takes the place of what was there: killed anywhere,
the next collection finds the one or the other, and all of it.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpprobe.errors import PackDamaged, StoreDamaged
from ddpprobe.reader.captured_steps import CapturedStep, captured_attempts
from ddpprobe.reader.collect.groups import CollectedGroup
from ddpprobe.reader.collect.place import Place
from ddpprobe.reader.collect.report import Collected
from ddpprobe.rundir import safe_read
from ddpprobe.rundir.paths import RunDir, make_dir
from ddpprobe.rundir.tensor_pack import TensorKey
from ddpprobe.store.captures.commit import NodeChunks, captures_document, commit_event
from ddpprobe.store.captures.event import (
    CaptureEvent,
    Entry,
    captures_key,
    documents_of,
    group_key,
    planned,
)
from ddpprobe.store.captures.fold import chunks_of_part
from ddpprobe.store.captures.packs import packs_of
from ddpprobe.store.captures.places import HeldPart
from ddpprobe.store.captures.reader import StoredEvent, chunk_key, expired_steps, stored_steps
from ddpprobe.store.commit import encode
from ddpprobe.store.group_names import MANIFEST, group_of, groups_of, log_of
from ddpprobe.store.manifest import GROUP_JSON, State, manifest_path, version_of
from ddpprobe.store.reader import StoredGroup
from ddpprobe.store.segments import sources_of

# In the result, and gone when it is done: a step that is being written, and one that is whole.
STAGE, READY = "collect.stage", "collect.ready"
_NODE, _RANK = re.compile(r"node_\d{4,}"), re.compile(r"/rank_(\d{5,})/")


def settle(place: Place) -> None:
    """Go on where a killed collection stopped."""
    place.clear(STAGE)
    ready = RunDir(place.run.path / READY)
    names = [n.removesuffix(".log") for n in ready.manifest_names()]
    # A node's list of chunks before the event's own: without that there is no event yet.
    for name in sorted(names, key=lambda n: (not group_of(n)[1], n)):
        match = MANIFEST.fullmatch(name)
        if match and match[4]:
            _move(place, ready, name)
    place.clear(READY)


def _move(place: Place, ready: RunDir, name: str) -> None:
    group, _ = group_of(name)
    staged, there = ready.store / group, place.run.store / group
    if staged.exists():
        top = group.replace("/", ".")
        for file in place.run.manifest_names():
            if file == f"{top}.log" or file.startswith(f"{top}.node_"):
                (place.run.manifests / file).unlink()
        shutil.rmtree(there, ignore_errors=True)
        make_dir(there.parent)
        staged.rename(there)
    make_dir(place.run.manifests)
    (ready.path / log_of(name)).rename(place.run.path / log_of(name))


def steps_in(runs: Sequence[RunDir], attempt: int) -> list[int]:
    """Return the steps of which any of these still holds something, ascending."""
    return sorted({step for run in runs for step in _held(run, attempt)})


def attempts_in(runs: Sequence[RunDir]) -> list[int]:
    """Return the attempts that may have captured something."""
    return sorted({n for run in runs for n in captured_attempts(run, _attempts(run))})


def bring_captures(
    place: Place, sources: Sequence[RunDir], attempt: int, report: Collected
) -> None:
    """Make the result hold what was captured in an attempt.

    Args:
        place: where to; its groups and journals are there already.
        sources: of what is not there yet.
        attempt: which.
        report: told what is damaged.
    """
    runs = (place.run, *sources)
    held = [(run, _held(run, attempt)) for run in runs]
    steps = sorted({step for _, found in held for step in found})
    expired = _expired_in_all(place, runs, attempt, report) - {*steps}
    if not steps and not expired:
        return
    staged = encode(captures_document(attempt, sorted(expired)))
    target = CollectedGroup(place, lambda *_: staged)
    name = captures_key(attempt).replace("/", ".")
    target.become(name, State(files={GROUP_JSON: version_of(staged)}))
    nodes = _nodes_of(runs, attempt)
    for step in steps:
        holders = [run for run, found in held if step in found]
        _Step(place, holders, attempt, step, report).bring(nodes)
        report.advance(1)


class _Step:
    """One captured step, in all directories that hold something of it."""

    def __init__(
        self, place: Place, holders: Sequence[RunDir], attempt: int, step: int, report: Collected
    ) -> None:
        self._place, self._attempt, self._number, self._report = place, attempt, step, report
        self._found = [(run, CapturedStep(run, attempt, step)) for run in holders]

    def bring(self, nodes: Mapping[int, str]) -> None:
        """Put its parts together and keep them, if that is anything new."""
        event = self._event()
        for run, one in self._found:
            for lost in one.lost if run != self._place.run else ():
                rank = _RANK.search(lost.where)
                silent = event.silent if event is not None else [-1]
                found = int(rank[1]) not in silent if rank else not silent
                self._report.say([f"{run.path}/{lost}"], found=found)
        if event is None:
            return
        try:
            self._keep(event, nodes)
        except StoreDamaged as error:  # too many parts for one group
            key = group_key(self._attempt, self._number)
            where = self._place.run.path / safe_read.STORE / key
            self._report.say([f"{where}: {error}"], found=False)

    def _event(self) -> CaptureEvent | None:
        """Return what all of them make together."""
        world, headers = 0, dict[int, Mapping[str, Any]]()
        held: dict[TensorKey, dict[int, HeldPart]] = {}
        for _, one in self._found:
            if one.event is None:
                continue
            world = max(world, one.event.world)
            headers |= {r: h for r, h in one.event.headers.items() if r not in headers}
            for entry in one.event.entries:
                ranks = held.setdefault(entry.key, {})
                ranks |= {h.rank: h for h in entry.held if h.rank not in ranks}
        if not headers:
            return None
        parts = {key: [ranks[r] for r in sorted(ranks)] for key, ranks in held.items()}
        return planned(self._attempt, self._number, world, dict(sorted(headers.items())), parts)

    def _keep(self, event: CaptureEvent, nodes: Mapping[int, str]) -> None:
        if self._is_kept(event):
            return
        stage = RunDir(make_dir(self._place.run.path / STAGE))
        commit_event(stage, event, durable=False)
        key = group_key(event.attempt, event.step)
        chunks: dict[str, NodeChunks] = {}
        for entry, number in _parts(event):
            raw = self._raw(entry, number)
            if raw is None:
                continue
            held = entry.plan.parts[number].ranks
            node = nodes.get(held[0], "node_0000")
            writer = chunks.setdefault(node, NodeChunks(stage, key, node))
            crc = next(h.crc for h in entry.held if h.rank == held[0])
            for index, data, crc32 in chunks_of_part(entry, number, raw, crc):
                writer.put(chunk_key(entry, index), data, crc32)
            self._report.wrote(raw.nbytes)
        for writer in chunks.values():
            writer.commit(durable=False)
        stage.path.rename(self._place.run.path / READY)
        settle(self._place)

    def _is_kept(self, event: CaptureEvent) -> bool:
        """Whether the result has this event, and every part of it that is to be had."""
        stored = StoredEvent(self._place.run, event.attempt, event.step)
        if stored.event is None or documents_of(stored.event)[""] != documents_of(event)[""]:
            return False
        if next(stored.check(), None) is not None:
            return False
        left = [(e, n) for e, n in _parts(event) if not stored.has(e, n)]
        return all(self._raw(entry, number) is None for entry, number in left)

    def _raw(self, entry: Entry, number: int) -> NDArray[np.uint8] | None:
        """Return the bytes of a part, from whoever holds them intact; None if nobody does."""
        ranks = entry.plan.parts[number].ranks
        wrong: list[str] = []
        for held in (h for h in entry.held if h.rank in ranks):
            for run, one in self._found:
                try:
                    raw = one.bytes_of(entry.key, held)
                except (StoreDamaged, PackDamaged, OSError) as error:
                    if run != self._place.run:
                        key = group_key(self._attempt, self._number)
                        wrong.append(f"{run.path / safe_read.STORE / key}: {error}")
                    continue
                if raw is not None:
                    self._report.say(wrong, found=True)
                    return raw
        self._report.say(wrong, found=False)
        return None


def _parts(event: CaptureEvent) -> list[tuple[Entry, int]]:
    return [(entry, n) for entry in event.entries for n in range(len(entry.plan.parts))]


def _attempts(run: RunDir) -> list[int]:
    names = [n for n in run.manifest_names() if n.startswith("attempt_")]
    numbers = {n.partition(".")[0].removeprefix("attempt_") for n in names}
    return sorted(int(n) for n in numbers if n.isdecimal())


def _held(run: RunDir, attempt: int) -> set[int]:
    try:
        expired = expired_steps(run, attempt)
    except StoreDamaged:
        expired = set()
    return {*packs_of(run, attempt), *stored_steps(run, attempt)} - expired


def _expired_in_all(
    place: Place, runs: Sequence[RunDir], attempt: int, report: Collected
) -> set[int]:
    """Return the steps that retention took away anywhere."""
    found: list[set[int]] = []
    problems = []
    for run in runs:
        try:
            if manifest_path(run, captures_key(attempt)).exists():
                found.append(expired_steps(run, attempt))
        except StoreDamaged as error:
            if run is not place.run:
                problems.append(f"{run.path / safe_read.STORE}/{error}")
    report.say(problems, found=bool(found))
    return set().union(*found)


def _nodes_of(runs: Sequence[RunDir], attempt: int) -> dict[int, str]:
    """Return the node of each rank, by whoever says so."""
    nodes: dict[int, str] = {}
    for run in runs:
        nodes |= {s.rank: s.node for s in sources_of(run, attempt) if s.rank is not None}
        for ranks in packs_of(run, attempt).values():
            nodes |= {rank: path.parent.parent.name for rank, path in ranks.items()}
        for key in groups_of(run, attempt):
            name = key.rpartition("/")[2]
            if name.startswith("rank_") and int(name[5:]) not in nodes:
                with contextlib.suppress(StoreDamaged):  # whoever reads the group says so
                    node = str(StoredGroup(run, key).meta.get("node", ""))
                    nodes |= {int(name[5:]): node} if _NODE.fullmatch(node) else {}
    return nodes
