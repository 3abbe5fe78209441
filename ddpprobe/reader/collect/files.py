"""What of a run is no group of the store: run.json, journals, heartbeats, what daemons said."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddpprobe.reader.collect.place import Place
from ddpprobe.reader.collect.report import Collected
from ddpprobe.rundir import heartbeat, journal, paths, safe_read
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store import segments
from ddpprobe.store.manifest import Consumed, Manifest, manifest_path
from ddpprobe.store.segments import JournalSource, Segment

_NODE, _BEAT = re.compile(r"node_\d{4,}"), re.compile(r"rank_\d{5,}|pace|orders")
_SAID = re.compile(rf"node_\d{{4,}}\.(?:log|{paths.UPLOAD})")


def bring_identity(place: Place, sources: Sequence[RunDir], report: Collected) -> None:
    """Write the run.json of the whole: what the sources' say, but for whose disk it was."""
    different: list[str] = []
    problems: list[str] = []
    for run in (place.run, *sources):
        try:
            told = safe_read.parse(safe_read.read_regular(run.path, paths.RUN_JSON))
            public = {k: v for k, v in dict(told).items() if k != paths.OWN_DISK}
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError):
            if run is not place.run:
                problems.append(f"{run.run_json}: half written or damaged")
            continue
        different.append(json.dumps(public, indent=1))
    if not different and not problems:
        problems.append(f"{paths.RUN_JSON}: no source has one")
    report.say(problems, found=bool(different))
    if different:
        place.keep(place.run.run_json, min(different).encode())


def bring_journals(place: Place, sources: Sequence[RunDir], report: Collected) -> None:
    """Bring what of the journals is not in the result's store, and where it was written."""
    segments_ = _Segments(place, sources, report)
    for attempt in sorted({n for run in sources for n in run.attempts()}):
        paths.make_dir(place.run.attempt_dir(attempt))
        claims = [d for run in sources if (d := _read(run, str(_below(run, run.claim(attempt)))))]
        if claims:
            place.keep(place.run.claim(attempt), min(claims))
        found = {(s.node, s.name): s for run in sources for s in segments.sources_of(run, attempt)}
        for source in found.values():
            segments_.bring(source)


class _Segments:
    def __init__(self, place: Place, sources: Sequence[RunDir], report: Collected) -> None:
        self._place, self._sources, self._report = place, sources, report

    def bring(self, source: JournalSource) -> None:
        """Bring one writer's segments."""
        there = place_of(self._place.run, source)
        paths.make_dir(there)
        copies = [place_of(run, source) for run in self._sources]
        numbers = {n for directory in copies for n in journal.segments_of(directory)}
        for number in sorted(numbers):
            self._report.advance(1)
            holders = [c for c in copies if number in journal.segments_of(c)]
            self._bring(source, there, holders, number)
        for number in journal.segments_of(there):
            # What came at an earlier call, and whose daemon has gone on since then.
            if self._is_stored(source, segments.read_segment(there, number)):
                segments.segment_path(there, number).unlink()

    def _bring(self, source: JournalSource, there: Path, copies: list[Path], number: int) -> None:
        found: list[tuple[bool, int, bytes, Path, Segment]] = []
        problems = []
        for directory in copies:
            path = segments.segment_path(directory, number)
            try:
                segment = segments.read_segment(directory, number)
                data = safe_read.read_regular(directory, path.name)
            except OSError as error:
                problems.append(f"{path}: {error.strerror or error}")
                continue
            if segment.damage:
                problems.append(f"{path}: {segment.damage}")
            found.append((not segment.damage, segment.end, data, path, segment))
        best = max(found, key=lambda f: f[:3], default=None)
        self._report.say(problems, found=best is not None and best[0])
        if best is None or self._is_stored(source, best[4]):
            return
        target = segments.segment_path(there, number)
        # An older copy of it is its beginning.
        if not (target.exists() and segments.read_segment(there, number).end > best[1]):
            self._place.keep(target, best[2])

    def _is_stored(self, source: JournalSource, segment: Segment) -> bool:
        """Whether the result's store holds all of it, so that its daemon would delete it."""
        if segment.damage or not segment.frames:
            return False
        records = source.record_group if source.rank is not None else None
        for key in filter(None, (records, source.node_group)):
            consumed = Manifest(manifest_path(self._place.run, key)).state.consumed
            if consumed.get(source.name, Consumed()).through < segment.end:
                return False
        merged = Manifest(manifest_path(self._place.run, source.record_group)).state
        return (
            source.rank is not None
            or not merged.files
            or (merged.consumed.get(source.name, Consumed()).through >= segment.end)
        )


def bring_signs(place: Place, sources: Sequence[RunDir]) -> None:
    """Bring heartbeats, orders, and what the daemons said: of several copies the newest."""
    for path in sorted({p for run in sources for p in _signs(run)}):
        found = [d for run in sources if (d := _read(run, path)) is not None]
        if found:
            best = max(found, key=lambda data: (*_age(data), len(data), data))
            place.keep(place.run.path / path, best)


def place_of(run: RunDir, source: JournalSource) -> Path:
    """Return the directory of a journal in another directory of the run."""
    return run.attempt_dir(source.attempt) / source.node / source.name


def unsealed(run: RunDir) -> list[str]:
    """Return the nodes of whose ranks there are journals that no daemon has put into the store."""
    left = (s for n in run.attempts() for s in segments.sources_of(run, n) if s.rank is not None)
    return sorted({s.node for s in left if segments.segments_of(s)})


def _signs(run: RunDir) -> Iterator[str]:
    for attempt in safe_read.directories(run.path, "heartbeat"):
        top = f"heartbeat/{attempt}"
        for node in safe_read.directories(run.path, top) if attempt.isdecimal() else ():
            if _NODE.fullmatch(node):
                names = safe_read.names(run.path, f"{top}/{node}")
                yield from (f"{top}/{node}/{n}" for n in names if _BEAT.fullmatch(n))
    yield from (f"daemon/{n}" for n in safe_read.names(run.path, "daemon") if _SAID.fullmatch(n))


def _age(data: bytes) -> tuple[int]:
    beat = heartbeat.read_bytes(data)
    return (beat.time_ns if beat is not None else 0,)


def _read(run: RunDir, path: str) -> bytes | None:
    try:
        return safe_read.read_regular(run.path, path)
    except OSError:
        return None


def _below(run: RunDir, path: Path) -> Path:
    return path.relative_to(run.path)
