"""What the daemon of each node could have served at each step, made again from what is stored.

The same `NodeView` that the daemon renders: a rank's records pass the same `JournalFacts` as
they did in its daemon. What a daemon knows from elsewhere is told from the records:

- `steps_total` counts step numbers from the first record on, and the seconds of each phase are
  those of the sampled steps, each standing for the steps since the sampled one before it.
- `overhead_ratio` is the probe's time in a sampled step over all the steps it stands for.
- A hang is told when the daemon noticed it, if the attempt ended by it: of one that passed nobody
  wrote down who it was that the others waited for.
- The first view of an attempt lies a second before its first record, so that counters start at 0;
  each death has one, and the last one a second after everything says how the ranks ended. What is
  of one sampled step (loss, norms, sites) stands in the view of that step only.
- A blown fuse and lost records have no time: they show from the rank's last record on, and in the
  last view.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from ddpprobe.ends.anomalies import TITLES, first_cause_of
from ddpprobe.ends.end import HUNG, RUNNING, by_state
from ddpprobe.ends.judge import stuck_of
from ddpprobe.reader.endings import Death, deaths_of, ending_of
from ddpprobe.reader.export.replayed_rank import ReplayedRank, whole
from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.rank_facts import Event
from ddpprobe.reader.readings import NodeReading, read_readings
from ddpprobe.reader.selection import Selection
from ddpprobe.records.derived import NoiseScale
from ddpprobe.records.events import FirstCauseEvent, OrderEvent, StalledEvent, SuspendedEvent
from ddpprobe.records.node_view import FirstFailure, NodeView, RankView
from ddpprobe.records.past_counts import PastCounts
from ddpprobe.records.site_memory import Magnitudes, Outliers, UpdateRatios
from ddpprobe.records.step import Anomaly, StepRecord
from ddpprobe.rundir import paths

SECOND = 10**9


def views(
    merged_reader: MergedReader,
    part: Selection,
    anomalies: Sequence[Anomaly],
    *,
    where: str = "",
    live: bool = False,
    advance: Callable[[int], object] = lambda _: None,
) -> Iterator[NodeView]:
    """Yield the views of all nodes, ascending in time as far as the ranks' clocks are.

    Args:
        merged_reader: of the run.
        part: of it; a rank is that rank's series beside those of the whole job.
        anomalies: what the detectors found.
        where: what to type to open the run.
        live: the run is under way, so the newest attempt has no last view.
        advance: told the number of records that were read.
    """
    newest = max(merged_reader.attempts(), default=-1)
    restarts = Counter[str]()
    past: defaultdict[str, PastCounts] = defaultdict(PastCounts)  # by node
    for attempt in part.attempts(merged_reader):
        here = [a for a in anomalies if a.attempt == attempt and a.step > part.after]
        ends = not (live and attempt == newest)
        told = _Attempt(merged_reader, attempt, part, here, restarts, where=where, ends=ends)
        last: dict[str, NodeView] = {}
        for view in told.views(advance):
            last[view.node] = view
            yield past[view.node].over(view)
        for node, view in last.items():
            past[node].take(view)
        restarts[told.end.state] += 1


@dataclass(slots=True)
class _Node:
    """One node: its ranks, and the readings of its daemon that are still to come.

    `is_head`: its daemon merged all the others'.
    """

    name: str
    is_head: bool = False
    ranks: list[ReplayedRank] = field(default_factory=list)
    readings: list[NodeReading] = field(default_factory=list)
    reading: NodeReading | None = None
    first_failure: FirstFailure | None = None

    def read(self, until_ns: int) -> None:
        """Take the readings up to a time; `readings` is kept with the earliest one last."""
        while self.readings and self.readings[-1].time_ns <= until_ns:
            self.reading = self.readings.pop()


class _Attempt:
    """The views of one attempt."""

    def __init__(
        self,
        merged_reader: MergedReader,
        attempt: int,
        part: Selection,
        anomalies: Sequence[Anomaly],
        restarts: Mapping[str, int],
        *,
        where: str,
        ends: bool,
    ) -> None:
        self._restarts = by_state(restarts)
        self._merged_reader, self._number, self._part = merged_reader, attempt, part
        self._where = where
        self._ends = ends and part.open_ended
        events = merged_reader.events(attempt)
        ending = ending_of(merged_reader, attempt)
        self.end = ending.end
        self._stuck = stuck_of(ending.end, ending.case)
        self._hung_ns = _hung_since(events) if self._stuck and part.open_ended else 0
        self._deaths = self._within(deaths_of(ending))
        self._anomalies = sorted(anomalies, key=lambda a: a.step, reverse=True)
        self._outliers, self._ratios = Outliers(), UpdateRatios()
        self._magnitudes, self._noise_scale = Magnitudes(), NoiseScale()
        said = (event.what for event in events)
        self._orders = [e for e in said if isinstance(e, OrderEvent) and e.cause is not None]
        self._step = -1
        self._died: dict[int, str] = {}  # what of, by rank
        self._found: Counter[tuple[str, str]] = Counter()
        self._cause: FirstCauseEvent | None = None
        self._blamed: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._shown = set(part.ranks(merged_reader, attempt))
        self._nodes = self._make_nodes(events)

    def views(self, advance: Callable[[int], object]) -> Iterator[NodeView]:
        """Yield them, those of a moment together."""
        records = self._part.merged(self._merged_reader, self._number)
        first = next(records, None)
        if first is None:
            return
        now = first.wall_time_ns
        yield from self._look(now - SECOND)
        for record in chain([first], records):
            now = max(now, record.wall_time_ns)
            yield from self._die(record.wall_time_ns)
            ranks = [rank for node in self._nodes for rank in node.ranks]
            advance(1 + sum(rank.advance(record.step) for rank in ranks))
            self._judge(record.step)
            if record.sampled:
                self._outliers.update(record)
                self._ratios.update(record)
                self._magnitudes.update(record)
                self._noise_scale.update(record)
            yield from self._look(record.wall_time_ns, record)
        if self._hung_ns >= now:
            now = self._hung_ns
            yield from self._die(now)
            yield from self._look(now, hung=True)
        if self._ends:
            now = max([now, *(death.time_ns for death in self._deaths)])
            yield from self._die(now + 1)
            self._judge(None)
            yield from self._look(now + SECOND, over=True)

    def _make_nodes(self, events: Sequence[Event]) -> list[_Node]:
        merged_reader, attempt = self._merged_reader, self._number
        nodes: dict[str, _Node] = {}
        for number in merged_reader.ranks(attempt):
            said = [e.what for e in events if e.source == paths.rank_name(number)]
            told = number in self._shown
            records = self._part.of_rank(merged_reader, attempt, number) if told else iter(())
            rank = ReplayedRank(number, merged_reader.facts(attempt, number).meta, said, records)
            node = nodes.setdefault(rank.node, _Node(rank.node))
            node.ranks.append(rank)
            node.is_head |= bool(rank.meta.get("head"))
        if not nodes:  # the ranks' own records are lost, not what was merged of them
            nodes[paths.node_name(0)] = _Node(paths.node_name(0))
        if not any(node.is_head for node in nodes.values()):
            min(nodes.values(), key=lambda n: n.name).is_head = True
        for reading in read_readings(merged_reader, attempt):
            if reading.node in nodes:
                nodes[reading.node].readings.append(reading)
        for node in nodes.values():
            node.readings.reverse()
        return list(nodes.values())

    def _within(self, deaths: list[Death]) -> list[Death]:
        """Return those in the part, the last one first."""
        stop, after = self._part.steps.stop, self._part.after
        kept = [
            d
            for d in deaths
            if (stop is None or 0 <= d.step < stop) and d.step >= after and 0 < d.time_ns < 2**63
        ]
        return sorted(kept, key=lambda d: (d.time_ns, d.rank), reverse=True)

    def _die(self, until_ns: int) -> Iterator[NodeView]:
        """Yield a view for each death before a time."""
        while self._deaths and self._deaths[-1].time_ns < until_ns:
            death = self._deaths.pop()
            self._died[death.rank] = death.signal
            for node in self._nodes:
                if death.first and any(r.number == death.rank for r in node.ranks):
                    node.first_failure = FirstFailure(death.rank, death.signal, death.time_ns)
            yield from self._look(death.time_ns)

    def _judge(self, step: int | None) -> None:
        """Count what was found up to a step; None: to the end."""
        while self._anomalies and (step is None or self._anomalies[-1].step <= step):
            anomaly = self._anomalies.pop()
            self._found[anomaly.detector, anomaly.level] += 1
            if anomaly.first_cause and anomaly.level == "page":
                self._cause = first_cause_of(anomaly)
            if anomaly.rank is not None:
                self._blamed[anomaly.rank][anomaly.level] += 1

    def _orders_until(self, record: StepRecord | None) -> Mapping[str, int]:
        """Return how many orders there were; nothing says when, so each counts from its step on."""
        if record is not None:
            self._step = max(self._step, record.step)
        return Counter(order.action for order in self._orders if order.start <= self._step)

    def _look(
        self,
        time_ns: int,
        record: StepRecord | None = None,
        *,
        over: bool = False,
        hung: bool = False,
    ) -> Iterator[NodeView]:
        if self._cause is not None and not self._cause.time_ns:  # an end, seen as it is told
            self._cause = replace(self._cause, time_ns=time_ns)
        for node in self._nodes:
            node.read(time_ns)
            view = self._view(node, time_ns, record, over=over)
            if hung:
                own = {rank.number for rank in node.ranks}
                stuck = {number: phase for number, phase in self._stuck.items() if number in own}
                view = replace(view, state=HUNG, stuck=stuck)
            yield view

    def _view(
        self, node: _Node, time_ns: int, record: StepRecord | None, *, over: bool
    ) -> NodeView:
        meta = node.ranks[0].meta if node.ranks else {}
        dropped: Counter[str] = Counter()
        for rank in node.ranks:
            dropped += rank.dropped
        return NodeView(
            time_ns=time_ns,
            run_id=str(meta.get("run_id", "")),
            directory=self._where,
            attempt=self._number,
            node=node.name,
            world_size=whole(meta.get("world_size"), 0),
            torch=str(meta.get("torch", "")),
            backend=str(meta.get("backend", "")),
            is_head=node.is_head,
            detectors=tuple(TITLES),
            ranks=tuple(
                self._rank(rank, node, record, over=over)
                for rank in node.ranks
                if rank.number in self._shown
            ),
            state=self.end.state if over else RUNNING,
            restarts=self._restarts,
            finished=over and all(r.closed and r.number not in self._died for r in node.ranks),
            first_failure=node.first_failure,
            orders=self._orders_until(record) if node.is_head else {},
            first_cause=self._cause if node.is_head else None,
            nodes_expected=len(self._nodes) if node.is_head else None,
            outliers=self._outliers.now if node.is_head else (),
            update_ratios=self._ratios.now if node.is_head else {},
            magnitudes=self._magnitudes.now if node.is_head else {},
            noise_scale=self._noise_scale.now if node.is_head else None,
            merged=record if record and record.sampled and node.is_head else None,
            anomalies=dict(self._found),
            records_dropped=dropped if over else dict.fromkeys(dropped, 0),
            host=node.reading.host if node.reading else {},
        )

    def _rank(
        self, rank: ReplayedRank, node: _Node, record: StepRecord | None, *, over: bool
    ) -> RankView:
        step = record.step if record and record.sampled else -1
        view = rank.view(step, died=rank.number in self._died, over=over)
        process = node.reading.ranks.get(rank.number, {}) if node.reading else {}
        resident = process.get("resident_bytes")
        return replace(
            view,
            end=self._died.get(rank.number, ""),
            anomalies=dict(self._blamed[rank.number]),
            resident_bytes=None if resident is None else int(resident),
            cpu_seconds=process.get("cpu_seconds"),
        )


def _hung_since(events: Sequence[Event]) -> int:
    """Return when a daemon noticed last that its ranks stand still, or one of them; 0: never."""
    said = (e.what.time_ns for e in events if isinstance(e.what, StalledEvent | SuspendedEvent))
    return max(said, default=0)
