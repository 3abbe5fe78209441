"""The captures' part of `verify`: every file against its manifest, every part somewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from ddpprobe.errors import PackDamaged, StoreDamaged
from ddpprobe.reader.captured_steps import CapturedStep
from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.verify.report import VerifyReport
from ddpprobe.records.events import CapturedEvent, SealedEvent
from ddpprobe.rundir import paths
from ddpprobe.store.captures.event import captures_key, group_key
from ddpprobe.store.captures.packs import attempts_with_packs, packs_of
from ddpprobe.store.captures.reader import StoredEvent, expired_steps, stored_steps
from ddpprobe.store.manifest import Lost, Manifest, manifest_path

MOST_RANKS = 32  # named in a note
LOOKS = 5  # a daemon folds, or retention takes away, while we look


def captured_events(
    run: paths.RunDir, attempts: list[int], report: VerifyReport | None = None
) -> list[tuple[int, int]]:
    """Return (attempt, step) of every captured step that has not expired."""
    found = []
    for attempt in sorted({*attempts, *attempts_with_packs(run)}):
        try:
            expired = expired_steps(run, attempt)
            steps = {*packs_of(run, attempt), *stored_steps(run, attempt)} - expired
        except StoreDamaged as error:
            if report is not None:
                report.add(Lost(f"run.zarr/{captures_key(attempt)}", None, str(error)))
            continue
        found += [(attempt, step) for step in sorted(steps)]
    return found


def check_captures(
    run: paths.RunDir, attempts: list[int], report: VerifyReport, advance: Callable[[int], None]
) -> None:
    """Check everything that was captured."""
    for log in [Manifest(manifest_path(run, captures_key(n))) for n in attempts]:
        for text in log.damage:  # it says what was taken away by retention
            report.add(Lost(f"manifest/{log.path.name}", None, text))
        _note_torn([log], report)
    for attempt in sorted({*attempts, *attempts_with_packs(run)}):
        with contextlib.suppress(StoreDamaged):  # `captured_events` says what is wrong
            for lost in _gone(run, attempt):
                report.add(lost)
    for attempt, step in captured_events(run, attempts, report):
        for look in range(LOOKS):
            found = list(_damage(run, attempt, step))
            if not found or step in expired_steps(run, attempt):
                break
            if look == LOOKS - 1 or found == list(_damage(run, attempt, step)):
                for lost in found:
                    report.add(lost)
                break
        stored = StoredEvent(run, attempt, step)
        report.files += sum(len(m.state.files) for m in stored.manifests)
        _note_torn(stored.manifests, report)
        _note_ranks(stored, packs_of(run, attempt).get(step, {}), report)
        advance(1)


def _note_ranks(stored: StoredEvent, packs: Iterable[int], report: VerifyReport) -> None:
    """Note which ranks delivered nothing, and whose packs are files beside the store."""
    known = stored.event.headers if stored.event is not None else {}
    beside = sorted({*packs} - known.keys())
    silent = sorted({*stored.event.missed} - {*beside}) if stored.event is not None else []
    if silent:
        more = f" and {len(silent) - MOST_RANKS} more" if len(silent) > MOST_RANKS else ""
        text = f"nothing came from the ranks {silent[:MOST_RANKS]}{more}"
        report.notes.append(f"run.zarr/{stored.key}: {text}")
    if beside:
        text = f"the packs of ranks {beside} are not in the store, they are read as they are"
        report.notes.append(f"run.zarr/{stored.key}: {text}")


def _gone(run: paths.RunDir, attempt: int) -> Iterator[Lost]:
    """Yield the packs that a rank says it wrote, and that are neither there nor in the store."""
    told: dict[int, set[int]] = {}
    events = MergedReader(run).events(attempt)
    # A copy from an object store has no journals: what no daemon has folded was never over there.
    sealed = {e.node for e in events if isinstance(e.what, SealedEvent)}
    for event in events if attempt in run.attempts() else (e for e in events if e.node in sealed):
        if isinstance(event.what, CapturedEvent) and event.rank is not None:
            told.setdefault(event.what.step, set()).add(event.rank)
    for step, ranks in sorted(told.items()):
        files = packs_of(run, attempt).get(step, {})
        here = CapturedStep(run, attempt, step).event
        gone = ranks - {*files, *(here.headers if here else ())}
        if gone and step not in expired_steps(run, attempt):
            why = f"the packs that ranks {sorted(gone)} wrote are neither here nor in the store"
            yield Lost(f"captures/{attempt:03d}", (step, step), why)


def _note_torn(manifests: list[Manifest], report: VerifyReport) -> None:
    torn = [(m.path.name, m.torn) for m in manifests if m.torn]
    report.notes += [
        f"manifest/{name}: {n} bytes of a line that was not finished" for name, n in torn
    ]


def _damage(run: paths.RunDir, attempt: int, step: int) -> Iterator[Lost]:
    captured = CapturedStep(run, attempt, step)
    yield from captured.lost
    stored = StoredEvent(run, attempt, step)
    for name, why in stored.check():
        yield Lost(f"run.zarr/{stored.key}/{name}", (step, step), why)
    for pack in captured.packs:
        for i in range(len(pack.tensors)):
            try:
                pack.check(i)
            except FileNotFoundError:
                break  # folded meanwhile
            except (PackDamaged, OSError) as error:
                name = str(pack.path.relative_to(run.path))
                yield Lost(name, (step, step), str(error))
    for entry in captured.event.entries if captured.event else ():
        tensor = captured.tensor(entry)
        for region in tensor.regions:
            if region.ranks and not region.delivered and set(region.ranks) <= set(tensor.ranks):
                where = f"run.zarr/{group_key(attempt, step)}/{entry.name}"
                why = f"{tensor.site}: the part of ranks {list(region.ranks)} is nowhere"
                yield Lost(where, (step, step), why)
