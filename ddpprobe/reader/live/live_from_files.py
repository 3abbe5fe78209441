"""Watching a run directory: heartbeats, and the end of what its daemons write down.

Only files are read, nothing is asked of the training process. Of a journal only the last segments
are read: what is older is in the store, and only verdicts and deaths are wanted from there.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ddpprobe.detectors.suite import order_of_cause
from ddpprobe.ends.anomalies import is_end
from ddpprobe.ends.end import HUNG, RUNNING, UNDECIDED, End
from ddpprobe.ends.evidence import UNKNOWN, Evidence
from ddpprobe.ends.judge import judge
from ddpprobe.ends.rank_ends import ABSENT, LEFT, SILENT, RankEnds
from ddpprobe.ends.stalls import is_late, is_still
from ddpprobe.ends.words import closed_within, how_of
from ddpprobe.reader.endings import Ending, ending_of
from ddpprobe.reader.last_beats import last_beats
from ddpprobe.reader.live.live_view import (
    LiveView,
    RankNow,
    Rates,
    SiteNow,
    pace,
    worst_ranks,
    worst_sites,
)
from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.rank_losses import rank_losses
from ddpprobe.reader.run import Run
from ddpprobe.reader.under_way import has_daemon, is_here, is_live, meta_of
from ddpprobe.records.events import DeathEvent, EndEvent, Event, FinishedEvent
from ddpprobe.records.fate import Fate
from ddpprobe.records.rank_names import ranks_text
from ddpprobe.records.site_stats import global_grad_norm
from ddpprobe.records.step import STEP_PHASES, Anomaly, StepRecord, derive
from ddpprobe.rundir import framing, heartbeat, validate
from ddpprobe.rundir.heartbeat import Heartbeat
from ddpprobe.rundir.journal import JournalTail, segments_of
from ddpprobe.rundir.paths import RunDir
from ddpprobe.rundir.validate import MALFORMED
from ddpprobe.store import segments
from ddpprobe.store.manifest import Lost

if TYPE_CHECKING:
    from ddpprobe.store.reader import StoredGroup

LAST_READINGS = 2  # of a node, which make a rate
LAST_SEGMENTS = 4  # of a daemon's journal: what came before is in the store, or outdated by these
ELSEWHERE = "on another node"
NO_DAEMON = "no daemon wrote anything down: losses, modules and anomalies are not known"


@final
class RunWatch:
    """Looks at a run again and again; holds the journals of its daemons open.

    Args:
        run: of which the newest attempt is watched.
    """

    _ending: Ending | None  # how the newest attempt stands, if it does not just train,
    _known: tuple[int, End] | None  # and what was known when that was judged

    def __init__(self, run: Run) -> None:
        self._run, self._directory = run, RunDir(run.path)
        self._lost: list[Lost] = []
        self._attempt = -1
        self._begin(-1)

    @property
    def lost(self) -> list[Lost]:
        """What of the store turned out to be damaged."""
        return self._lost

    def unknown(self) -> list[str]:
        """Return what is not held of the run, and so not shown; reads through it once."""
        return self._run.completeness().unknown()

    def look(self) -> LiveView:
        """Return what is known now."""
        attempts = self._run.attempts()
        if attempts and attempts[-1] != self._attempt:
            self._begin(attempts[-1])
        self._read_daemons()
        live = self._is_under_way()
        beats = {
            rank: self._by_our_clock(rank, node, beat)
            for rank, (node, beat) in last_beats(self._directory, self._attempt).items()
        }
        ending = self._judge(beats, live=live)
        found = list(self._anomalies.values())
        found = order_of_cause(found + (rank_losses(ending, found) if ending else []))
        pages = Counter(a.rank for a in found if a.level == "page")
        ended = None if live or ending is None else RankEnds(ending.case)
        merged = self._merged
        is_told = bool(self._tails or merged)  # a daemon wrote something down
        numbers = self._numbers(beats)
        blamed = {n: pages[n] if is_told or pages[n] else None for n in numbers}
        ranks = [self._rank(n, beats.get(n), blamed[n], ended) for n in numbers]
        return LiveView(
            name=self._run.name,
            state=ending.end.state if ending else RUNNING if live else UNDECIDED,
            source=str(self._run.path),
            world_size=self._world_size,
            ranks=worst_ranks(ranks),
            sites=worst_sites(self._sites(), [a.place for a in found if a.first_cause and a.place]),
            anomalies=tuple(map(describe, found)),
            host=self._host,
            sampled=merged is not None if is_told else None,
            sampled_step=merged.step if merged else None,
            grad_norm=global_grad_norm(merged) if merged else None,
            notes=(
                *_stuck(ending, live=live),
                *(() if is_told else (NO_DAEMON,)),
                *self._others(beats),
            ),
        )

    def _is_under_way(self) -> bool:
        """As `under_way.is_under_way`, by what was read here already."""
        followed = self._attempt >= 0 and not self._finished and has_daemon(self._directory)
        return is_live(self._directory) or followed

    def _judge(self, beats: Mapping[int, Heartbeat], *, live: bool) -> Ending | None:
        """Return how the newest attempt stands, as `ddpprobe anomalies` says it; None: it trains.

        What the ranks said last is not read at each look, but when something else is known than
        before, and once of a run that is over: nothing of it changes.
        """
        for rank, beat in beats.items():
            self._evidence.take_beat(rank, "", beat)
        whole = live and not self._deaths and len(beats) == self._world_size
        still = whole and is_still(list(beats.values()), time.time_ns())
        end = judge(self._evidence.case(self._world_size, live=live, stalled=still))
        # Whom one that has closed leaves waiting is told by where they stand, in their journals.
        left = still and any(beat.state == heartbeat.CLOSED for beat in beats.values())
        if self._attempt < 0 or (live and end.state == RUNNING and not left):
            return None
        known = (self._said_ends, end) if live else None
        if self._ending is None or known != self._known:
            self._known = known
            self._ending = ending_of(MergedReader(self._directory), self._attempt)
        return self._ending

    def close(self) -> None:
        """Close the journals."""
        for tail in self._tails.values():
            tail.close()

    def _begin(self, attempt: int) -> None:
        """Start anew with another attempt."""
        if self._attempt >= 0:
            self.close()
        self._attempt = attempt
        self._tails: dict[str, JournalTail] = {}
        self._anomalies: dict[tuple[object, ...], Anomaly] = {}
        self._deaths: dict[int, str] = {}
        self._scalars: dict[int, Mapping[str, float]] = {}
        self._devices: dict[int, str] = {}
        self._memory: dict[int, float | None] = {}
        self._host: Mapping[str, float] = {}
        self._merged: StepRecord | None = None
        self._nodes: dict[str, bool] = {}  # whether its ranks live on this machine
        # Of a rank that does not: what it said last, when that was met with here, by our clock,
        # and whether it was said just then.
        self._met: dict[int, tuple[int, int, bool]] = {}
        self._here: set[int] = set()  # ranks that write to this directory
        self._told: dict[int, StepRecord] = {}  # rank -> the newest merged record that has it
        self._last: StepRecord | None = None
        self._gap = 0.0  # seconds between the newest two merged records
        # Of each site: the first sampled step at which it was not all zero, and abs_max there.
        self._base: dict[tuple[str, str, str], tuple[int, float]] = {}
        self._steps, self._cpus = Rates(), Rates()
        self._world_size = 0
        self._evidence = Evidence()
        self._ending = self._known = None
        self._said_ends = 0  # by daemons
        self._finished = False
        if attempt >= 0:
            self._read_store(attempt)

    def _read_store(self, attempt: int) -> None:
        merged_reader = MergedReader(self._directory)
        self._world_size = merged_reader.world_size(attempt)
        self._here = set(merged_reader.ranks(attempt))
        verdicts = merged_reader.group(attempt, "anomalies")
        for anomaly in verdicts.anomalies() if verdicts else ():
            self._take_anomaly(anomaly)
        for name in merged_reader.groups(attempt):
            group = merged_reader.group(attempt, name) if name.startswith("node_") else None
            for _, _, said in group.events() if group else ():
                self._take_event(validate.known_event(said))
            for reading in group.samples()[-LAST_READINGS:] if group else ():
                self._take_reading(reading)
            merged_reader.note(group)
        self._read_last_record(merged_reader.group(attempt, "merged"), merged_reader)
        merged_reader.note(verdicts)
        self._lost = merged_reader.lost

    def _read_last_record(self, group: StoredGroup | None, merged_reader: MergedReader) -> None:
        """Take the newest sampled step of the store: of a run that ended there is no journal."""
        steps = [step for step, sampled in group.steps() if sampled] if group else []
        for record in group.records(self._attempt, max(steps) - 1) if group and steps else ():
            self._take_record(record)
        merged_reader.note(group)

    def _read_daemons(self) -> None:
        for source in segments.sources_of(self._directory, self._attempt):
            key = f"{source.node}/{source.name}"
            if source.rank is not None:
                self._here.add(source.rank)
                if source.rank not in self._devices:
                    self._devices[source.rank] = str(meta_of(source.directory).get("device", ""))
            elif key not in self._tails:
                last = segments_of(source.directory)[-LAST_SEGMENTS:]
                self._tails[key] = JournalTail(source.directory, last[0] if last else 0)
        for tail in self._tails.values():
            # What cannot be read now may be readable at the next look; `verify` tells of damage.
            with contextlib.suppress(OSError):
                for frame in tail.poll():
                    with contextlib.suppress(*MALFORMED):
                        self._take(frame, tail.tables)

    def _take(self, frame: framing.Frame, tables: framing.NameTables) -> None:
        if frame.type == framing.RECORD:
            self._take_record(framing.decode_record(frame.payload, tables))
        elif frame.type == framing.ANOMALY:
            self._take_anomaly(framing.decode_anomaly(frame.payload))
        elif frame.type == framing.LIFE:
            self._take_event(frame.event())
        elif frame.type == framing.SAMPLE:
            self._take_reading(frame.json())

    def _take_record(self, record: StepRecord) -> None:
        for rank, scalars in record.scalars.items():  # the last one may have the loss alone
            self._scalars[rank] = {**self._scalars.get(rank, {}), **scalars}
        self._told |= dict.fromkeys(record.ranks, record)
        if self._last is not None and record.step > self._last.step:
            self._gap = (record.wall_time_ns - self._last.wall_time_ns) / 1e9
        self._last = record
        if record.sampled:
            self._merged = record
            self._keep_base(record)

    def _take_anomaly(self, a: Anomaly) -> None:
        if is_end(a):
            return  # the end is judged anew: it was told again, or is none any more
        self._anomalies[a.detector, a.step, a.micro, a.rank, a.module, a.kind, a.message] = a

    def _take_event(self, event: Event | None) -> None:
        if event is not None:
            self._evidence.take_event(event, None)
        if isinstance(event, DeathEvent):
            self._deaths[event.rank] = event.signal
        self._said_ends += isinstance(event, EndEvent)
        self._finished = self._finished or isinstance(event, FinishedEvent)

    def _take_reading(self, reading: Mapping[str, Any]) -> None:
        self._host = {k: float(v) for k, v in reading["host"].items()}
        for rank, numbers in reading["ranks"].items():
            # A process that has ended, and that nobody has waited for yet, has none.
            self._memory[int(rank)] = float(numbers["resident_bytes"]) or None
            busy = {"cpu": float(numbers["cpu_seconds"])}
            self._cpus.add(int(rank), reading["time_ns"] / 1e9, busy)

    def _keep_base(self, record: StepRecord) -> None:
        peaks = derive("abs_max", record.counts, record.values)
        for site, peak in zip(record.sites, peaks.tolist(), strict=True):
            if peak > 0:
                self._base.setdefault(site.key, (record.step, peak))

    def _by_our_clock(self, number: int, node: str, beat: Heartbeat) -> Heartbeat:
        """Return a beat with the time of this machine at which it came, as far as it is known.

        Of another machine's rank that is when it was met with here first: it is older then, and how
        much nobody can say until another one comes.
        """
        if not self._nodes.get(node):  # it may not have said yet where it is
            self._nodes[node] = is_here(self._directory, self._attempt, node)
        if self._nodes[node]:
            return beat
        said, met, known = self._met.get(number, (0, 0, False))
        if said != beat.time_ns:
            said, met, known = beat.time_ns, time.time_ns(), number in self._met
            self._met[number] = said, met, known
        return replace(beat, time_ns=met)

    def _numbers(self, beats: Mapping[int, Heartbeat]) -> list[int]:
        known = beats.keys() | self._deaths.keys() | self._scalars.keys()
        whole = {*range(self._world_size)}
        return sorted(known | whole if whole - self._here else known or whole)

    def _others(self, beats: Mapping[int, Heartbeat]) -> Iterator[str]:
        """Say which ranks write to another disk than this."""
        numbers = [n for n in self._numbers(beats) if self._is_elsewhere(n, beats.get(n))]
        if numbers:
            named = ranks_text(numbers)
            yield f"{ELSEWHERE}, and known by the steps that were merged here: {named}"

    def _is_elsewhere(self, number: int, beat: Heartbeat | None) -> bool:
        return beat is None and number not in self._here and bool(self._here)

    def _rank(
        self,
        number: int,
        beat: Heartbeat | None,
        pages: int | None,
        ended: RankEnds | None,
    ) -> RankNow:
        """Return what is known of a rank; `ended`: how all of them ended, None while it trains."""
        scalars = self._scalars.get(number, {})
        seconds, busy = self._cpus.grown(number)
        known = RankNow(
            number, "starting",
            loss=scalars.get("loss"), grad_norm=scalars.get("grad_norm_local"),
            resident_bytes=self._memory.get(number),
            cpus=busy["cpu"] / seconds if seconds > 0 else None,
            device=self._devices.get(number, ""), pages=pages,
        )  # fmt: skip
        if beat is not None:
            known = self._with_beat(known, beat)
        fates = () if ended is None else ended.case.fates
        fate = next((f for f in fates if f.rank == number), None)
        if ended is not None and fate is not None and ended.part(fate) != ABSENT:
            return self._ended(known, fate, ended.part(fate))
        if self._is_elsewhere(number, beat) and number not in self._deaths:
            return self._of_another_node(known, live=ended is None)
        death = self._deaths.get(number)
        return known if death is None else replace(known, state="dead", why=death)

    def _ended(self, known: RankNow, fate: Fate, part: str) -> RankNow:
        """Say how a rank of a run that is over ended, and how far it came."""
        told = self._told.get(known.rank)
        steps = [known.step, fate.clock.step if fate.clock else None, told.step if told else None]
        step = max((step for step in steps if step is not None), default=None)
        if part in {LEFT, SILENT}:
            return replace(known, state="closed", why=closed_within(fate), step=step)
        how = how_of(fate)
        why = "no last word" if how in {"", UNKNOWN} else how
        return replace(known, state="dead", why=why, step=step)

    def _of_another_node(self, known: RankNow, *, live: bool) -> RankNow:
        """Say what the merged steps tell of a rank whose heartbeat nobody sees here."""
        told, last = self._told.get(known.rank), self._last
        if told is None or last is None:
            return replace(known, state="unknown", why=ELSEWHERE)
        seen = max(0.0, time.time() - told.wall_time_ns / 1e9)
        state, why = ("up", "") if live else ("unknown", ELSEWHERE)
        if live and known.rank in last.missing:
            state, why = "late", "missing in the last merged step"
        elif live and is_late(seen, self._gap or None):
            state, why = "late", "no step merged"
        return replace(known, state=state, why=why, step=told.step, seen=seen)

    def _with_beat(self, known: RankNow, beat: Heartbeat) -> RankNow:
        phases = dict(zip(STEP_PHASES, beat.phase_seconds, strict=True))
        counters = {"steps": float(beat.steps), **phases}
        self._steps.add(known.rank, time.monotonic(), counters)
        rate, phase = pace(beat.steps, phases, self._steps.grown(known.rank))
        seen = max(0.0, (time.time_ns() - beat.time_ns) / 1e9)
        *_, is_known = self._met.get(known.rank, (0, 0, True))
        state = {"start": "starting", "paused": "paused", "closed": "closed"}.get(beat.state, "up")
        usual = sum(beat.phase_seconds) / beat.steps if beat.steps else None
        if state == "up" and is_late(seen, usual):
            state = "late"
        return replace(
            known, state=state, why=beat.state if state == "late" else "", step=beat.step,
            rate=rate, phase=phase, seen=seen if is_known else None,
        )  # fmt: skip

    def _sites(self) -> Iterator[SiteNow]:
        record = self._merged
        if record is None:
            return
        columns = [
            derive(name, record.counts, record.values).tolist()
            for name in ("abs_max", "rms", "nonfinite", "observed")
        ]
        for site, peak, rms, bad, observed in zip(record.sites, *columns, strict=True):
            if observed:
                since, base = self._base.get(site.key, (record.step, 0.0))
                known = since != record.step and np.isfinite(peak)
                growth = peak / base if known else None
                yield SiteNow(str(site), peak, rms, int(bad), growth)


def _stuck(ending: Ending | None, *, live: bool) -> Iterator[str]:
    """Say whom the others wait for, while it lasts."""
    if live and ending is not None and ending.end.state == HUNG:
        yield f"{HUNG}: {ending.end.message}"


def describe(anomaly: Anomaly) -> str:
    """Say what an anomaly says in one line."""
    who = "" if anomaly.rank is None else f" rank {anomaly.rank}"
    where = f" {anomaly.place}" if anomaly.place else ""
    what = f"{anomaly.detector}: {anomaly.message}"
    return f"{anomaly.level.upper()} step {anomaly.step}{who}{where} {what}"
