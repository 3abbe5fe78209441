"""Runs in a list: each by its newest attempt, as far as its daemon has judged it.

What went wrong in the attempts before is counted.

Records are not judged again here, which takes as long as a run has steps: `Run.anomalies` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ddpprobe.detectors.suite import order_of_cause
from ddpprobe.ends.anomalies import is_end
from ddpprobe.ends.end import RUNNING, UNDECIDED
from ddpprobe.errors import Error
from ddpprobe.reader.completeness import NOTHING_SAMPLED, steps_taken, took_none
from ddpprobe.reader.endings import Ending, ending_of
from ddpprobe.reader.identity import RunIdentity, identity_of
from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.rank_facts import Event
from ddpprobe.reader.rank_losses import rank_losses
from ddpprobe.reader.run_directories import began_ns, default_directory, run_directories
from ddpprobe.reader.verdicts import is_told
from ddpprobe.records.events import FinishedEvent
from ddpprobe.records.step import Anomaly
from ddpprobe.rundir.paths import RunDir
from ddpprobe.rundir.validate import MALFORMED

NO_ATTEMPT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """A run as a line of a list, by its newest attempt.

    Attributes:
        path: its directory.
        name, run_id: its own; "" if that is not known.
        began_ns: when the attempt began, Unix ns; 0: not known.
        attempt: its number; -1: the run has none yet.
        state: one of `ends.end.STATES`.
        ranks: how many; 0: not known.
        step: the newest that was begun; None: not known, or none was.
        anomaly: the first in order of cause of the worst level; None: none is known. It is called
            a first cause only where the daemon saw all that is held.
        pages, warnings, infos: how many there are in all attempts.
        earlier: level -> how many of these are in the attempts before.
        judged, sampled: sampled steps of all ranks that the daemon judged, and that were taken, as
            far as known.
        whole: all of it was judged, of a run under way so far.
        empty: it is over and took no sampled step, so there is nothing to judge.
        damage: what could not be read; "" if nothing was met with.
    """

    path: Path
    name: str = ""
    run_id: str = ""
    began_ns: int = 0
    attempt: int = NO_ATTEMPT
    state: str = UNDECIDED
    ranks: int = 0
    step: int | None = None
    anomaly: Anomaly | None = None
    pages: int = 0
    warnings: int = 0
    infos: int = 0
    earlier: Mapping[str, int] = field(default_factory=Counter, hash=False)
    judged: int = 0
    sampled: int = 0
    whole: bool = False
    empty: bool = False
    damage: str = ""

    @property
    def verdict(self) -> str:
        """The first cause in one line, or that nothing was found, and in how much."""
        which = f"attempt {self.attempt}{self._earlier()}: " if self.attempt > 0 else ""
        parts = [_in_a_line(self.anomaly) if self.anomaly else self._nothing()]
        if self.judged and not self.whole:
            parts.append(f"judged: {self._judged()}")
        if self.damage:
            parts.append(f"damaged: {self.damage}")
        return which + "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values; null is not known."""
        return {
            "path": str(self.path), "name": self.name, "run_id": self.run_id,
            "began_ns": self.began_ns or None,
            "attempt": None if self.attempt == NO_ATTEMPT else self.attempt,
            "state": self.state, "ranks": self.ranks or None, "step": self.step,
            "verdict": self.verdict, "anomaly": self.anomaly and asdict(self.anomaly),
            "anomalies": {"page": self.pages, "warn": self.warnings, "info": self.infos},
            "earlier": {level: self.earlier[level] for level in ("page", "warn", "info")},
            "judged": {"complete": self.whole, "held": self.judged, "sampled": self.sampled},
            "damage": self.damage or None,
        }  # fmt: skip

    def _earlier(self) -> str:
        """What was wrong before stands first, where no narrow terminal cuts it off."""
        counts = (self.earlier["page"], "page"), (self.earlier["warn"], "warning")
        told = [f"{count} {what}{'s' * (count > 1)}" for count, what in counts if count]
        return f" (before it: {', '.join(told)})" if told else ""

    def _nothing(self) -> str:
        infos = self.infos - self.earlier["info"]
        below = f" at level warn or above ({infos} below)" if infos else ""
        if self.whole and (self.judged or self.state == RUNNING):
            so_far = " so far" if self.state == RUNNING else ""
            return f"no anomalies{below}{so_far} in {_steps(self.judged)}"
        if self.judged:
            return f"nothing found{below}"
        if self.empty:
            return NOTHING_SAMPLED
        return f"not judged ({_steps(self.sampled)})" if self.sampled else "not judged"

    def _judged(self) -> str:
        if self.sampled > self.judged:
            return f"{self.judged} of {_steps(self.sampled)}"
        return f"{_steps(self.judged)}, not all that is held"


def runs(directory: str | Path | None = None) -> list[ListedRun]:
    """Return the runs below a directory, newest first.

    What is damaged in one of them is its own `damage`, and never an error.

    Args:
        directory: looked through, or a run itself; by default `$DDPPROBE_DIR`, else `ddpprobe-runs`
            here.

    Raises:
        RunNotFound: there is no such directory.
        OSError: it cannot be read.
    """
    where = default_directory() if directory is None else directory
    return [listed(path) for path in run_directories(where)]


def listed(path: Path) -> ListedRun:
    """Return one run as a line of a list, whatever is wrong with it."""
    began = began_ns(path)
    try:
        identity = identity_of(path)
        return _listed(path, identity, began)
    except (Error, OSError, *MALFORMED) as error:
        return ListedRun(path=path, began_ns=began, damage=str(error))


class _Moment(MergedReader):
    """A run at one moment: its events are read once."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(run)
        self._events: dict[int, list[Event]] = {}

    def events(self, attempt: int) -> list[Event]:
        """Return the events of an attempt, as they were when they were first asked for."""
        if attempt not in self._events:
            self._events[attempt] = super().events(attempt)
        return self._events[attempt]


def _listed(path: Path, identity: RunIdentity, began: int) -> ListedRun:
    reader, told = _Moment(RunDir(path)), identity.told
    line = ListedRun(
        path=path, began_ns=began, name=str(told.get("name") or ""),
        run_id=str(told.get("run_id") or ""), damage=identity.lost,
    )  # fmt: skip
    attempts = reader.attempts()
    if not attempts:
        return line
    attempt = attempts[-1]
    ending = ending_of(reader, attempt)
    found = _found(reader, ending)
    # A step that never came to its end is none that was judged, as `completeness` counts them.
    steps, judged_steps = reader.told_steps(attempt, whole=True)
    judged = int(judged_steps.sum())
    by_rank = steps_taken(reader, attempt, judged)
    taken = max(by_rank.values(), default=0)
    if ending.end.state != RUNNING:  # else a rank may come late
        judged -= len(_lacking(reader, attempt, {*steps[judged_steps].tolist()}, by_rank))
    told_all = _is_told(reader, attempt, all_sampled=judged >= taken) and not reader.lost
    earlier = _levels(a for n in attempts[:-1] for a in _found(reader, ending_of(reader, n)))
    levels = earlier + _levels(found)
    clocks = [fate.clock.step for fate in ending.case.fates if fate.clock and fate.clock.begun]
    return replace(
        line,
        attempt=attempt,
        state=ending.end.state,
        ranks=reader.world_size(attempt),
        step=max([*clocks, *steps[-1:].tolist()], default=None),
        anomaly=_leading(found, told_all=told_all),
        pages=levels["page"],
        warnings=levels["warn"],
        infos=levels["info"],
        earlier=earlier,
        judged=judged,
        sampled=max(taken, judged),
        whole=told_all and (ending.end.state == RUNNING or 0 < judged >= taken),
        empty=ending.end.state != RUNNING and not judged and took_none(reader, attempt),
        damage=str(reader.lost[0]) if reader.lost else identity.lost,
    )


def _found(reader: MergedReader, ending: Ending) -> list[Anomaly]:
    """Return what the daemon found in an attempt, and its end."""
    judgements = [a for a in reader.daemon_anomalies(ending.attempt) if not is_end(a)]
    return judgements + rank_losses(ending, judgements)


def _levels(found: Iterable[Anomaly]) -> Counter[str]:
    return Counter(a.level for a in found)


def _lacking(
    reader: MergedReader, attempt: int, judged: set[int], taken: Mapping[int, int]
) -> set[int]:
    """Return the judged steps that lack a rank which took more of them than were heard of.

    One that has fewer batches than the others lacks nothing.
    """
    lacking: set[int] = set()
    for rank, steps in reader.lacking_steps(attempt).items():
        if len(judged - steps) < taken.get(rank, 0):
            lacking |= judged & steps
    return lacking


def _is_told(reader: MergedReader, attempt: int, *, all_sampled: bool) -> bool:
    """As `is_told`, which reads every rank's steps: needless if none can be missing."""
    finished = any(isinstance(e.what, FinishedEvent) for e in reader.events(attempt))
    if finished and all_sampled and not reader.lacking_steps(attempt):
        return True
    return is_told(reader, attempt)


def _leading(found: Sequence[Anomaly], *, told_all: bool) -> Anomaly | None:
    """Return what to tell first; None if there is neither a page nor a warning."""
    bad = [a for a in order_of_cause(found) if a.level != "info"]
    pages = [a for a in bad if a.level == "page"]
    first = next(iter(pages or bad), None)
    return first if first is None or told_all else replace(first, first_cause=False)


def _in_a_line(found: Anomaly) -> str:
    whose = "" if found.rank is None else f" rank {found.rank}"
    place = "" if found.module is None else f" {found.place}"
    cause = " (first cause)" if found.first_cause else ""
    where = f"{found.level.upper()} step {found.step}{whose}{place}"
    return f"{where} {found.detector}: {found.message}{cause}"


def _steps(number: int) -> str:
    return f"{number} sampled step{'' if number == 1 else 's'}"
