"""The directories of several nodes of a run, merged into one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ddpprobe.errors import StoreDamaged
from ddpprobe.reader.collect.captures import READY, attempts_in, bring_captures, settle, steps_in
from ddpprobe.reader.collect.files import bring_identity, bring_journals, bring_signs, unsealed
from ddpprobe.reader.collect.groups import bring, bring_root, names_in, state_of
from ddpprobe.reader.collect.place import Place, check
from ddpprobe.reader.collect.report import Collected
from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store.group_names import attempts_of
from ddpprobe.store.root import Root


def collect(
    dest: Path, sources: Sequence[Path], advance: Callable[[int], None] = lambda _: None
) -> Collected:
    """Merge directories of one run into what one directory would hold, had the nodes shared it.

    The result is a function of what the directories hold: once or in several calls, in whatever
    order, interrupted or not, the same bytes. What is there already stays as it is.

    Args:
        dest: a new directory, or one that was made by this.
        sources: directories of the nodes; they are read only.
        advance: told 1 for each file or captured step that was looked at.

    Returns:
        What was done; `damage` lists what no source holds intact.

    Raises:
        RunError: they are not directories of one ended run, or the result may not go there.
        OSError: a disk refused; what was written stays, and the next call goes on from there.
    """
    run_id = check(dest, sources)
    runs = [RunDir(path) for path in sources]
    report = Collected(advance)
    with Place.held(dest, run_id, report.wrote) as place:
        settle(place)
        bring_identity(place, runs, report)
        for name in names_in([place.run, *runs]):
            bring(place, runs, name, report)
        bring_journals(place, runs, report)
        for attempt in attempts_in([place.run, *runs]):
            bring_captures(place, runs, attempt, report)
        bring_signs(place, runs)
        _bring_root(place)
        place.clear(READY)
        os.sync()  # who reads that it is there may delete the sources
    _describe(place.run, report)
    return report


def work(dest: Path, sources: Sequence[Path]) -> int:
    """Return about how often `collect` says that it has looked at something."""
    runs = [RunDir(path) for path in sources]
    known = names_in([RunDir(dest)]) if dest.is_dir() else []
    files = 0
    for name in set(names_in(runs)) - set(known):
        for run in runs:
            try:
                state = state_of(run, name)
            except StoreDamaged:
                continue
            if state is not None:
                files += len(state.files)
                break
    return files + sum(len(steps_in(runs, n)) for n in attempts_in(runs))


def _bring_root(place: Place) -> None:
    """Write the root: all attempts, and all metadata together, as nobody writes here any more."""
    attempts = sorted({*attempts_of(place.run)})
    if attempts:
        bring_root(place, Root(place.run, durable=False).files(attempts, consolidated=True))


def _describe(run: RunDir, report: Collected) -> None:
    merged_reader = MergedReader(run)
    newest = merged_reader.attempts()[-1:]
    for attempt in newest:
        report.ranks = merged_reader.ranks(attempt)
        report.world_size = merged_reader.world_size(attempt)
    report.unsealed = unsealed(run)
