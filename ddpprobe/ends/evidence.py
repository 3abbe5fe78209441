"""What is known of how each rank of an attempt ended, gathered from events and heartbeats.

The daemon gathers while it happens, a reader afterwards, from the same events; in which order they
come makes no difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ddpprobe.records.events import (
    Beat,
    ClosedEvent,
    ContinuedEvent,
    DeathEvent,
    Event,
    ExitEvent,
    FateEvent,
    HandlesEvent,
    JobEvent,
    LastBeatsEvent,
    LauncherEvent,
    MovingEvent,
    PausedEvent,
    PeerExitEvent,
    ResumedEvent,
    StalledEvent,
    StandsEvent,
    SuspendedEvent,
)
from ddpprobe.records.fate import Fate, Progress, Standing
from ddpprobe.records.step import STEP_PHASES
from ddpprobe.rundir.heartbeat import STATES, Heartbeat

UNKNOWN = "unknown"  # it ended, and nobody saw how


@dataclass(frozen=True, slots=True)
class Case:
    """All that an attempt's end is judged by.

    Attributes:
        fates: of every rank of the job, ascending.
        live: it is under way: who is not known to have ended lives.
        partial: ranks of other nodes may be missing here, with their evidence.
        scheduler: what runs the job and may have ended it, in words; "" if that is not known.
    """

    fates: tuple[Fate, ...]
    live: bool = False
    partial: bool = False
    scheduler: str = ""


@dataclass(slots=True)
class Evidence:
    """Gathers what events and heartbeats say; see `case`."""

    _fates: dict[int, Fate] = field(default_factory=dict)
    _told: dict[int, Fate] = field(default_factory=dict)  # of other nodes' ranks, second-hand
    _stalls: dict[str, tuple[int, bool]] = field(default_factory=dict)  # node -> (when, still)
    _suspended: dict[int, tuple[int, bool]] = field(default_factory=dict)
    _peers: dict[int, PeerExitEvent] = field(default_factory=dict)  # by who ended: all that is told
    _launchers: dict[str, str] = field(default_factory=dict)  # node -> how it ended
    _scheduler: str = ""
    # What `_fate` last made of each rank, while that holds: a head is asked several times a second,
    # and news come of few of its thousands of ranks.
    _made: dict[int, Fate] = field(default_factory=dict)

    def take_event(self, event: Event, rank: int | None, node: str = "") -> None:
        """Take what a rank says, or (None) a daemon; of the other it says nothing."""
        if rank is None:
            self._take_daemon_s(event, node)
        else:
            self._take_rank_s(event, rank, node)

    def _take_rank_s(self, event: Event, rank: int, node: str) -> None:
        match event:
            case ClosedEvent():
                self._closed(rank, node, event)
            case PausedEvent() | ResumedEvent():
                self._set(rank, node, paused=isinstance(event, PausedEvent))
            case HandlesEvent():
                self._set(rank, node, sets_handlers=True)
            case JobEvent():
                self._scheduler = self._scheduler or event.scheduler
            case PeerExitEvent():
                self._peer_exit(node, event)
            case StandsEvent():
                self._stands(rank, node, event)

    def _take_daemon_s(self, event: Event, node: str) -> None:
        match event:
            case ExitEvent():
                self._exit(node, event)
            case DeathEvent():
                self._death(node, event)
            case LauncherEvent():
                if self._launchers.get(node, UNKNOWN) == UNKNOWN:
                    self._launchers[node] = event.how
                    self._made.clear()
            case FateEvent():
                self._told[event.fate.rank] = event.fate
                self._made.pop(event.fate.rank, None)
            case LastBeatsEvent():
                for number, beat in event.ranks.items():
                    self._beaten(number, node, beat)
            case StalledEvent() | MovingEvent():
                still = (event.time_ns, isinstance(event, StalledEvent))
                self._stalls[node] = max(self._stalls.get(node, still), still)
                self._made.clear()
            case SuspendedEvent() | ContinuedEvent():
                said = (event.time_ns, isinstance(event, SuspendedEvent))
                self._suspended[event.rank] = max(self._suspended.get(event.rank, said), said)
                self._made.pop(event.rank, None)

    def take_rank(self, rank: int, node: str = "") -> None:
        """Take that there is something of a rank."""
        self._set(rank, node)

    def take_beat(self, rank: int, node: str, beat: Heartbeat) -> None:
        """Take a heartbeat."""
        self._beaten(rank, node, beat)

    def case(
        self, world_size: int, *, live: bool, stalled: bool = False, partial: bool = False
    ) -> Case:
        """Return what is known, of `world_size` ranks at least.

        Args:
            world_size: ranks of the job.
            live: see `Case`.
            stalled: nobody moves just now, whether or not a daemon has written it down.
            partial: see `Case`.
        """
        numbers = sorted({*range(world_size), *self._fates, *self._told})
        fates = tuple(self._made.get(rank) or self._fate(rank) for rank in numbers)
        if stalled:
            fates = tuple(replace(fate, stalled=True) for fate in fates)
        return Case(fates, live, partial, self._scheduler)

    @property
    def told(self) -> set[int]:
        """Ranks of which another node's daemon has told."""
        return set(self._told)

    @property
    def last_turn(self) -> int:
        """Unix time in ns of the newest word that ranks stand still, are suspended, or go on."""
        return max(
            (when for when, _ in (*self._stalls.values(), *self._suspended.values())), default=0
        )

    def is_stalled(self, node: str) -> bool:
        """Whether the daemon of a node said last that its ranks stand still."""
        return self._stalls.get(node, (0, False))[1]

    def is_suspended(self, rank: int) -> bool:
        """Whether its daemon said last that a rank is suspended."""
        return self._suspended.get(rank, (0, False))[1]

    def _fate(self, rank: int) -> Fate:
        """Return what is known of a rank: of what it left here, or else what was told of it."""
        if rank not in self._fates and rank in self._told:
            fate = self._told[rank]
        else:
            fate = _as_peers_say(self._fates.get(rank, Fate(rank)), self._peers.get(rank))
            if fate.stands is not None and fate.stands.clock != fate.clock:  # it has moved on
                fate = replace(fate, stands=None)
            fate = replace(
                fate, suspended=self.is_suspended(rank), stalled=self.is_stalled(fate.node),
                launcher=self._launchers.get(fate.node, ""),
            )  # fmt: skip
        self._made[rank] = fate
        return fate

    def _set(self, rank: int, node: str, **facts: Any) -> None:  # noqa: ANN401
        known = self._fates.get(rank)
        facts |= {"heard": True, **({"node": node} if node else {})}
        if known is None or any(getattr(known, name) != fact for name, fact in facts.items()):
            self._fates[rank] = replace(known or Fate(rank), **facts)
            self._made.pop(rank, None)

    def _moved(self, rank: int, node: str, clock: Progress | None) -> None:
        known = self._fates.get(rank, Fate(rank)).clock
        if clock is not None and (known is None or clock.key > known.key):
            self._set(rank, node, clock=clock)

    def _closed(self, rank: int, node: str, event: ClosedEvent) -> None:
        self._set(
            rank, node, closed=True, raised=event.status != "ok", error=event.error,
            handles=event.handles, at_exit=event.at_exit, asked=event.asked,
            pool=event.pool, threads=event.threads,
        )  # fmt: skip
        self._beaten(rank, node, event)

    def _stands(self, rank: int, node: str, event: StandsEvent) -> None:
        clock = _clock_said(event)
        known = self._fates.get(rank, Fate(rank)).stands
        if clock is not None and (known is None or clock.key >= known.clock.key):
            self._set(rank, node, stands=Standing(event.where, event.waits, clock, event.within))
            self._moved(rank, node, clock)

    def _peer_exit(self, node: str, event: PeerExitEvent) -> None:
        """Put what one rank says of another's end to what others say of that."""
        self._set(event.rank, node)
        known = self._peers.get(event.rank, event)
        first, other = sorted((known, event), key=lambda e: (e.how == UNKNOWN, e.time_ns, e.how))
        alive = tuple(sorted({*first.alive, *other.alive}))
        self._peers[event.rank] = replace(first, alive=alive)
        self._made.pop(event.rank, None)

    def _exit(self, node: str, event: ExitEvent) -> None:
        if self._fates.get(event.rank, Fate(event.rank)).how in {"", UNKNOWN}:
            self._set(
                event.rank, node, how=event.how, order=event.order, witness=event.witness,
                time_ns=event.time_ns, memory_kills=event.memory_kills,
            )  # fmt: skip
        self._beaten(event.rank, node, event)

    def _death(self, node: str, event: DeathEvent) -> None:
        """Take a death; of a version that wrote down no exits that is all there is, unordered."""
        rank = event.rank
        self._set(rank, node, dead=True)
        if not self._fates.get(rank, Fate(rank)).how:
            self._set(rank, node, how=event.signal, time_ns=event.time_ns)
        self._moved(rank, node, clock_of(event.step, 0, "data", event.step))

    def _beaten(
        self, rank: int, node: str, said: ClosedEvent | ExitEvent | Beat | Heartbeat
    ) -> None:
        self._set(rank, node, **({"beat_closed": True} if said.state == "closed" else {}))
        self._moved(rank, node, _clock_said(said))


def _as_peers_say(fate: Fate, said: PeerExitEvent | None) -> Fate:
    """Add what other ranks saw: how and when a rank ended only if no daemon did."""
    if said is None:
        return fate
    if fate.how in {"", UNKNOWN}:
        fate = replace(fate, how=said.how, time_ns=said.time_ns)
    return replace(fate, outlived_by=said.alive)


def _clock_said(
    said: ClosedEvent | ExitEvent | StandsEvent | Beat | Heartbeat,
) -> Progress | None:
    step = -1 if said.step is None else said.step
    steps = step if said.steps is None else said.steps
    return clock_of(steps, said.micro or 0, said.state or "data", step)


def clock_of(steps: int, micro: int, state: str, step: int) -> Progress | None:
    """Return how far a rank is by its heartbeat; outside of training nothing is said of a phase."""
    if state not in STATES or step < 0:
        return None
    phase = state if state in STEP_PHASES else "data"
    return Progress(steps, micro, phase, step)
