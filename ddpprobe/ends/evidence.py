"""What is known of how each rank of an attempt ended, gathered from events and heartbeats.

The daemon gathers while it happens, a reader afterwards, from the same events; in which order they
come makes no difference.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ddpprobe.hearsay import MALFORMED, int64
from ddpprobe.hearsay import rank as rank_of
from ddpprobe.heartbeat import STATES, STEP_PHASES, Heartbeat

UNKNOWN = "unknown"  # it ended, and nobody saw how
_TIMED_OUT = re.compile(r"tim(?:ed|e) ?-?out", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Clock:
    """How far a rank had come: `steps` finished, then the micro-batch and the phase within.

    `step` is the number of the optimizer step, `phase` one of `heartbeat.STEP_PHASES`.
    """

    steps: int
    micro: int
    phase: str
    step: int

    @property
    def key(self) -> tuple[int, int, int]:
        """What orders two ranks of a job; behind a step comes the data of the next one."""
        place = STEP_PHASES.index(self.phase)
        return self.steps, self.micro if place else -1, place


@dataclass(frozen=True, slots=True)
class Error:
    """The exception that a rank ended by.

    Attributes:
        type: name of its class.
        message: its text, shortened.
        where: file, line and function of its innermost frame outside of torch; "" if not known.
        collective: it came out of communication with other ranks.
        asked: it was raised by a handler of a signal, or is a KeyboardInterrupt.
    """

    type: str
    message: str = ""
    where: str = ""
    collective: bool = False
    asked: bool = False

    @property
    def timed_out(self) -> bool:
        """Whether the others were waited for in vain."""
        return self.collective and bool(_TIMED_OUT.search(f"{self.type} {self.message}"))


@dataclass(frozen=True, slots=True)
class Fate:
    """What is known of the end of one rank.

    Attributes:
        rank, node: which one.
        how: "SIGKILL", "exit:3", "unknown" (nobody saw it); "" while it is not known to have ended.
        order: in one daemon's eyes, a number that is less than that of every process that was
            proven to live after this one's death; -1: nothing is proven.
        witness: which daemon's eyes; orders of different ones say nothing.
        time_ns: Unix time at which the end was noticed; 0: not known.
        closed: it said that nothing more will come.
        raised: and that an exception was the reason.
        error: the exception, also one that was under way when it said so.
        handles: its script handled SIGTERM or SIGINT itself.
        at_exit: it closed at the end of its interpreter; its script had not said that it was over.
        asked: it closed on its way to sys.exit() out of such a handler.
        beat_closed: its last heartbeat says that it closed.
        clock: how far it had come; None: not known.
        suspended: it was stopped (SIGSTOP) when last looked at.
        stalled: all ranks of its node lived and stood still for much longer than a step takes.
        heard: anything was heard of it at all.
        dead: a daemon wrote it down as a death.
        paused: it had said that it does something else than training.
    """

    rank: int
    node: str = ""
    how: str = ""
    order: int = -1
    witness: str = ""
    time_ns: int = 0
    closed: bool = False
    raised: bool = False
    error: Error | None = None
    handles: bool = False
    at_exit: bool = False
    asked: bool = False
    beat_closed: bool = False
    clock: Clock | None = None
    suspended: bool = False
    stalled: bool = False
    heard: bool = False
    dead: bool = False
    paused: bool = False

    def died_before(self, other: Fate) -> bool:
        """Whether the other one was seen alive after this one's death."""
        same = self.witness == other.witness and min(self.order, other.order) >= 0
        return same and self.order < other.order


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
    _stalls: dict[str, tuple[int, bool]] = field(default_factory=dict)  # node -> (when, still)
    _suspended: dict[int, tuple[int, bool]] = field(default_factory=dict)
    _scheduler: str = ""

    def take_event(self, event: Mapping[str, Any], rank: int | None, node: str = "") -> None:
        """Take a LIFE event of a rank, or (None) of a daemon; what makes no sense says nothing."""
        with contextlib.suppress(*MALFORMED):
            match event.get("event"):
                case "closed" if rank is not None:
                    self._closed(rank, node, event)
                case "paused" | "resumed" as word if rank is not None:
                    self._set(rank, node, paused=word == "paused")
                case "job" if rank is not None:
                    self._scheduler = self._scheduler or str(event["scheduler"])
                case "exit" if rank is None:
                    self._exit(node, event)
                case "death" if rank is None:
                    self._death(node, event)
                case "last_beats" if rank is None:
                    for number, beat in event["ranks"].items():
                        self._beaten(rank_of(int(number)), node, beat)
                case "stalled" | "moving" as word if rank is None:
                    still = (int64(event["time_ns"]), word == "stalled")
                    self._stalls[node] = max(self._stalls.get(node, still), still)
                case "suspended" | "continued" as word if rank is None:
                    whom, still = rank_of(event["rank"]), word == "suspended"
                    said = (int64(event["time_ns"]), still)
                    self._suspended[whom] = max(self._suspended.get(whom, said), said)

    def take_rank(self, rank: int, node: str = "") -> None:
        """Take that there is something of a rank."""
        self._set(rank, node)

    def take_beat(self, rank: int, node: str, beat: Heartbeat) -> None:
        """Take a heartbeat."""
        self._beaten(rank, node, beat_facts(beat))

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
        numbers = {*range(world_size), *self._fates}
        fates = []
        for rank in sorted(numbers):
            fate = self._fates.get(rank, Fate(rank))
            still = stalled or self.is_stalled(fate.node)
            fates.append(replace(fate, suspended=self.is_suspended(rank), stalled=still))
        return Case(tuple(fates), live, partial, self._scheduler)

    def is_stalled(self, node: str) -> bool:
        """Whether the daemon of a node said last that its ranks stand still."""
        return self._stalls.get(node, (0, False))[1]

    def is_suspended(self, rank: int) -> bool:
        """Whether its daemon said last that a rank is suspended."""
        return self._suspended.get(rank, (0, False))[1]

    def _set(self, rank: int, node: str, **facts: Any) -> None:  # noqa: ANN401
        known = self._fates.get(rank, Fate(rank))
        self._fates[rank] = replace(known, node=node or known.node, heard=True, **facts)

    def _moved(self, rank: int, node: str, clock: Clock | None) -> None:
        known = self._fates.get(rank, Fate(rank)).clock
        if clock is not None and (known is None or clock.key > known.key):
            self._set(rank, node, clock=clock)

    def _closed(self, rank: int, node: str, event: Mapping[str, Any]) -> None:
        raised = event.get("status", "ok") != "ok"
        said = event.get("error")
        error = read_error(said) if isinstance(said, Mapping) else None
        flags = {name: bool(event.get(name)) for name in ("handles", "at_exit", "asked")}
        self._set(rank, node, closed=True, raised=raised, error=error, **flags)
        self._beaten(rank, node, event)

    def _exit(self, node: str, event: Mapping[str, Any]) -> None:
        rank = rank_of(event["rank"])
        if self._fates.get(rank, Fate(rank)).how in {"", UNKNOWN}:
            self._set(
                rank, node, how=str(event["how"]), order=int64(event["order"]),
                witness=str(event["witness"]), time_ns=int64(event["time_ns"]),
            )  # fmt: skip
        self._beaten(rank, node, event)

    def _death(self, node: str, event: Mapping[str, Any]) -> None:
        """Take a death; of a version that wrote down no exits that is all there is, unordered."""
        rank = rank_of(event["rank"])
        self._set(rank, node, dead=True)
        if not self._fates.get(rank, Fate(rank)).how:
            how, when = str(event.get("signal", UNKNOWN)), int64(event.get("time_ns", 0))
            self._set(rank, node, how=how, time_ns=when)
        self._beaten(rank, node, event)

    def _beaten(self, rank: int, node: str, said: Mapping[str, Any]) -> None:
        state, step = str(said.get("state", "data")), int64(said.get("step", -1))
        self._set(rank, node, **({"beat_closed": True} if state == "closed" else {}))
        if step < 0:
            return
        steps, micro = int64(said.get("steps", step)), int64(said.get("micro", 0))
        self._moved(rank, node, clock_of(steps, micro, state, step))


def clock_of(steps: int, micro: int, state: str, step: int) -> Clock | None:
    """Return how far a rank is by its heartbeat; outside of training nothing is said of a phase."""
    if state not in STATES or step < 0:
        return None
    phase = state if state in STEP_PHASES else "data"
    return Clock(steps, micro, phase, step)


def read_error(said: Mapping[str, Any]) -> Error:
    """Return the exception in a goodbye."""
    kind, message, where = (str(said.get(name, "")) for name in ("type", "message", "where"))
    collective, asked = (bool(said.get(name)) for name in ("collective", "asked"))
    return Error(kind, message, where, collective, asked)


def exit_event(
    fate_rank: int, how: str, order: int, witness: str, time_ns: int, beat: Heartbeat | None
) -> dict[str, Any]:
    """Return the LIFE event by which a daemon says that a rank's process has ended."""
    told: dict[str, Any] = {
        "event": "exit", "rank": fate_rank, "how": how, "order": order, "witness": witness,
        "time_ns": time_ns,
    }  # fmt: skip
    return told if beat is None else {**told, **beat_facts(beat)}


def beat_facts(beat: Heartbeat) -> dict[str, Any]:
    """Return what of a heartbeat says how far a rank had come."""
    return {"step": beat.step, "steps": beat.steps, "micro": beat.micro, "state": beat.state}


def named(ranks: Iterable[int], word: str = "or") -> str:
    """Name ranks in a sentence: `rank 3`, `rank 1 or 3`, `ranks 0, 1 and 2`."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    many = "s" if word == "and" else ""
    return f"rank{many} {', '.join(map(str, numbers[:-1]))} {word} {numbers[-1]}"
