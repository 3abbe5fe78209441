"""Is everything there that was written down, and is it what was written?

Every committed file against the manifest, every chunk decoded, every journal frame against its
checksum, and journal against store: what was deleted from the one must be in the other. The torn
end of a writer that was killed is no damage: nobody was told that it was written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

from ddpprobe.errors import StoreDamaged
from ddpprobe.reader.run import Run
from ddpprobe.reader.verify.captures import captured_events, check_captures
from ddpprobe.reader.verify.report import VerifyReport
from ddpprobe.rundir import framing, paths, safe_read, validate
from ddpprobe.store import segments
from ddpprobe.store.group_names import attempts_of, groups_of
from ddpprobe.store.manifest import (
    GROUP_JSON,
    Consumed,
    Lost,
    Manifest,
    is_settled,
    manifest_path,
    read_regular,
    version_of,
)
from ddpprobe.store.remote.cached_run import fetch_captured

Advance = Callable[[int], None]
LOOKS = 50  # a live run changes under our eyes: a file is damaged if it stays so


def _unheard(_: int) -> None:
    """Nobody wants to know how far it is."""


def verify(run: Run, advance: Advance = _unheard) -> VerifyReport:
    """Check a run from end to end; reads every byte of it.

    Args:
        run: live, sealed, or crashed.
        advance: told how many more units of `work` are done.
    """
    directory, report = paths.RunDir(run.path), VerifyReport()
    fetch_captured(run.path)
    if run.identity_lost:  # it is written before the first journal
        why = run.identity_lost.removeprefix(f"{paths.RUN_JSON} is ")
        report.add(Lost(paths.RUN_JSON, None, why))
    # Journals first: what is folded while we look is in the store afterwards.
    firsts = list(_check_journals(directory, report, advance))
    keys = list(_groups(directory))
    if directory.has_store:
        _check_files(directory, "", report)
    for key in keys:
        _check_files(directory, key, report)
        _check_chunks(directory, key, report, advance)
        if key.rpartition("/")[2].startswith("node_"):
            _check_events(directory, key, report)
    check_captures(directory, run.attempts(), report, advance)
    report.notes += [str(gone) for gone in run.expired()]
    for source, first in firsts:
        _check_overlap(directory, source, first, report)
    return report


def work(run: Run) -> int:
    """Return how many units of work `verify` has: journal segments, reads of arrays, captures."""
    directory = paths.RunDir(run.path)
    sources = (s for n in directory.attempts() for s in segments.sources_of(directory, n))
    total = sum(len(segments.segments_of(source)) for source in sources)
    for key in _groups(directory):
        from ddpprobe.store.verified_files import GroupArrays  # noqa: PLC0415

        with contextlib.suppress(StoreDamaged):  # what is wrong with it is for `verify` to say
            total += GroupArrays(directory, key).pieces
    return total + len(captured_events(directory, run.attempts()))


def _groups(run: paths.RunDir) -> Iterator[str]:
    for attempt in attempts_of(run):
        yield from groups_of(run, attempt)


def _check_files(run: paths.RunDir, key: str, report: VerifyReport) -> None:
    """Compare the files of one group with its manifest."""
    root = run.store / key if key else run.store
    where = "/".join(p for p in (safe_read.STORE, key) if p)
    here = set(_walk(root, deep=bool(key)))  # first: what is committed stands in the manifest then
    manifest = Manifest(manifest_path(run, key))
    if not manifest.exists:
        if GROUP_JSON in here:
            report.add(Lost(where, None, "its manifest is missing"))
        elif here:
            report.notes.append(f"{where}: {len(here)} files of a fold that was interrupted")
        return
    name = str(manifest.path.relative_to(run.path))
    for text in manifest.damage:
        report.add(Lost(name, None, text))
    if manifest.torn:
        report.notes.append(f"{name}: {manifest.torn} bytes of a line that was not finished")
    first, wrong = manifest, _wrong_files(root, manifest)
    for _ in range(LOOKS):
        again = Manifest(manifest.path)
        if not wrong or _says_the_same(again, manifest):
            break
        # Only these: a look at everything would take longer than the writer's next commit.
        manifest, wrong = again, _wrong_files(root, again, wrong.keys())
    for file, why in wrong.items():
        report.add(Lost(f"{where}/{file}", None, why))
    report.files += len(first.state.files)
    extra = here - set(first.state.files) - set(first.replaced)
    extra = _still_unknown(root, manifest.path, extra) if extra else extra
    if extra and not manifest.damage:
        report.notes.append(f"{where}: {len(extra)} files that were never committed")


def _still_unknown(root: Path, path: Path, extra: set[str]) -> set[str]:
    """Return those files that were not committed, or taken away, since they were listed."""
    again = Manifest(path)
    return {f for f in extra - {*again.state.files, *again.replaced} if (root / f).exists()}


def _says_the_same(one: Manifest, other: Manifest) -> bool:
    return (one.lines, one.undone, one.state.files) == (
        other.lines, other.undone, other.state.files,
    )  # fmt: skip


def _wrong_files(
    root: Path, manifest: Manifest, only: Collection[str] | None = None
) -> dict[str, str]:
    """Return what is wrong with the files that must be there (or `only` of these), by name."""
    wrong: dict[str, str] = {}
    try:
        settled = is_settled(root, manifest)
    except (StoreDamaged, OSError) as error:
        wrong[GROUP_JSON] = str(error)
        settled = True
    state = manifest.state if settled else manifest.rolled_back()
    exact = settled and not manifest.undone
    for key, version in state.files.items():
        if only is not None and key not in only:
            continue
        try:
            found = version_of(read_regular(root, key))
        except FileNotFoundError:
            wrong.setdefault(key, "missing")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else None
            wrong.setdefault(key, f"no regular file ({why or error})")
        else:
            allowed = {version} if exact else manifest.versions(key)
            if found not in allowed:
                text = f"{found[0]} bytes where {version[0]} were committed"
                same = found[0] == version[0]
                wrong.setdefault(key, "other bytes than were committed" if same else text)
    return wrong


def _check_chunks(run: paths.RunDir, key: str, report: VerifyReport, advance: Advance) -> None:
    from ddpprobe.store.verified_files import GroupArrays  # noqa: PLC0415

    try:
        arrays = GroupArrays(run, key)
    except StoreDamaged as error:
        report.add(Lost(f"run.zarr/{key}", None, str(error)))
        return
    if arrays.exists:
        arrays.check(advance)
    for lost in arrays.lost:
        report.add(lost)


def _check_journals(
    run: paths.RunDir, report: VerifyReport, advance: Advance
) -> Iterator[tuple[segments.JournalSource, int]]:
    """Check every journal; yield each with the sequence number of its first frame."""
    for attempt in run.attempts():
        for source in segments.sources_of(run, attempt):
            first = _check_journal(run, source, report, advance)
            if first is not None:
                yield source, first


def _check_journal(
    run: paths.RunDir, source: segments.JournalSource, report: VerifyReport, advance: Advance
) -> int | None:
    first = due = None
    tables = framing.NameTables()
    for number in segments.segments_of(source):
        path = segments.segment_path(source.directory, number)
        name = str(path.relative_to(run.path))
        advance(1)
        try:
            segment = segments.read_segment(source.directory, number)
        except FileNotFoundError:
            first = due = None  # folded meanwhile, and all before it
            continue
        except OSError as error:
            report.add(Lost(name, None, f"no regular file ({error.strerror or error})"))
            due = None
            continue
        for _ in segments.records_of(segment, tables, Consumed()):
            pass  # decoding is the check
        seqs = [frame.seq for frame in segment.frames]
        report.frames += len(seqs)
        _check_sense(segment, name, report)
        if segment.damage:
            report.add(Lost(name, None, segment.damage))
        if segment.torn:
            report.notes.append(f"{name}: {segment.torn} bytes of a frame that was not finished")
        if seqs and due is not None and seqs[0] != due:
            report.add(Lost(name, None, f"starts with frame {seqs[0]}, {due} was due"))
        gaps = [b for a, b in pairwise(seqs) if b != a + 1]
        if gaps:
            report.add(Lost(name, None, f"frames before {gaps[0]} are missing"))
        if seqs and first is None:
            first = seqs[0]
        due = None if segment.damage else segment.end if seqs else due
    return first


def _check_sense(segment: segments.Segment, name: str, report: VerifyReport) -> None:
    for frame in segment.frames:
        if fault := fault_of_frame(frame):
            report.add(Lost(name, None, f"frame {frame.seq} makes no sense: {fault}"))


def fault_of_frame(frame: framing.Frame) -> str:
    """Say what an intact frame, other than a record or a table, holds that makes no sense."""
    if frame.type == framing.ANOMALY:
        return _fault(lambda: framing.decode_anomaly(frame.payload))
    if frame.type not in {framing.META, framing.LIFE, framing.SAMPLE}:
        return ""
    if fault := _fault(frame.json):
        return fault
    if frame.type == framing.LIFE:
        return _fault(frame.event)
    when = frame.json().get("time_ns")
    if frame.type == framing.SAMPLE and type(when) is not int:
        return f"'time_ns' of a reading is {when!r:.40}"
    return ""


def _fault(read: Callable[[], object]) -> str:
    try:
        read()
    except ValueError as error:
        return str(error)
    return ""


def _check_events(run: paths.RunDir, key: str, report: VerifyReport) -> None:
    """List the events in the store that make no sense: they were folded as they were written."""
    from ddpprobe.store.reader import StoredGroup  # noqa: PLC0415

    with contextlib.suppress(StoreDamaged):  # what is wrong with the group is said already
        group = StoredGroup(run, key)
        for source, seq, event in group.events() if group.exists else ():
            if fault := _fault(partial(validate.event, event)):
                why = f"frame {seq} of {source} makes no sense: {fault}"
                report.add(Lost(f"run.zarr/{key}", None, why))


def _check_overlap(
    run: paths.RunDir, source: segments.JournalSource, first: int, report: VerifyReport
) -> None:
    """Check that what was deleted from the front of a journal is in the store."""
    if first == 0:
        return
    key = source.record_group if source.rank is not None else source.node_group
    manifest = Manifest(manifest_path(run, key))
    through = manifest.state.consumed.get(source.name, Consumed()).through
    if first > through:
        name = str(source.directory.relative_to(run.path))
        why = f"frames {through} to {first - 1} are neither here nor in run.zarr/{key}"
        report.add(Lost(name, None, why))


def _walk(root: Path, *, deep: bool) -> Iterator[str]:
    """Yield the files below a group, as keys; of the root only its own and the attempts' own."""
    # A link in the place of the group would lead out of the run.
    for top, directories, names in os.walk(root) if root.resolve() == root.absolute() else ():
        inner = Path(top).relative_to(root).as_posix()
        if not deep:
            directories[:] = [d for d in directories if inner == "." and d.startswith("attempt_")]
        for name in names:
            yield name if inner == "." else f"{inner}/{name}"
