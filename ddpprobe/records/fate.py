"""What is known of the end of one rank, and how far it had come."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from ddpprobe.records.step import STEP_PHASES

Rank = Annotated[int, "rank"]  # not negative, and of a size that a bit mask may have
_CUT, _NEAR = "...", 24  # what a text ends with that was cut; characters of a word
_TIMED_OUT = re.compile(r"tim(?:ed|e) ?-?out|failed to pass monitored", re.IGNORECASE)


def cut(text: str, most: int) -> str:
    """Return a text, or its beginning and "...", which ends with a word where one ends nearby."""
    if len(text) <= most:
        return text
    begun = text[: most - len(_CUT)]
    head, _, rest = begun.rpartition(" ")
    is_near = head and len(rest) <= _NEAR and text[len(begun)] != " "
    return (head if is_near else begun).rstrip(" .,:;") + _CUT


def placed(where: str, script: str) -> str:
    """Say where an exception was raised, after its text; as of `Reason`. "" if nothing is known."""
    return (f" at {script} ({where})" if script else f" at {where}") if where else ""


@dataclass(frozen=True, slots=True)
class Reason:
    """An exception behind the one that a rank ended by; all of it as of `RaisedError`."""

    type: str = ""
    message: str = ""
    where: str = ""
    script: str = ""
    group: str = ""


@dataclass(frozen=True, slots=True)
class RaisedError:
    """The exception that a rank ended by.

    Attributes:
        type: name of its class.
        message: its text, shortened.
        where: file, line and function of its innermost frame outside of torch; "" if not known.
        collective: it came out of communication with other ranks.
        asked: it was raised by a handler of a signal, or is Python's answer to SIGINT.
        behind: the exception that was handled when communication broke, in words; "" if none was.
        script: the innermost line of the script, if `where` is not one.
        group: the group of exceptions that it was one of, in words; "" if it was in none.
        cause: the first of those that it was raised because of.
        handled: the first of those that were merely handled when it was raised.
    """

    type: str = ""
    message: str = ""
    where: str = ""
    collective: bool = False
    asked: bool = False
    behind: str = ""
    script: str = ""
    group: str = ""
    cause: Reason | None = None
    handled: Reason | None = None

    @property
    def timed_out(self) -> bool:
        """Whether the others were waited for in vain."""
        told = self.collective and not self.is_retold
        return told and bool(_TIMED_OUT.search(f"{self.type} {self.message}"))

    @property
    def is_retold(self) -> bool:
        """Whether it is another rank's failure, of which this one was told: nothing broke."""
        return self.collective and self.type == "CheckpointException"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank had come: `steps` finished, then the micro-batch and the phase within.

    `step` is the number of the optimizer step, `phase` one of `STEP_PHASES`.

    Raises:
        ValueError: there is no such phase.
    """

    steps: int
    micro: int
    phase: str
    step: int

    def __post_init__(self) -> None:
        if self.phase not in STEP_PHASES:
            raise ValueError(f"no phase {self.phase!r:.40}: it is one of {', '.join(STEP_PHASES)}")

    @property
    def begun(self) -> bool:
        """Whether it had begun a step at all; else `step` is the one that it was to begin."""
        return self.steps > 0 or self.phase != "data"

    @property
    def key(self) -> tuple[int, int, int]:
        """What orders two ranks of a job; after a step comes the data of the next one."""
        place = STEP_PHASES.index(self.phase)
        return self.steps, self.micro if place else -1, place


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the thread of a rank that trains was in its code while it stood still.

    Attributes:
        where: file, line and function of the innermost frame of the script's, and of the innermost
            of all in brackets where that is another one.
        waits: that one is torch's, of communication with other ranks, or a backward whose gradients
            are being reduced. False: it is none of that, though a script may wait for others in
            torch's C++. None: nor is it, and the host may wait there for a device.
        clock: how far the rank had come.
        within: the call of torch's for a checkpoint that it was in ("torch.save"), or "the wait for
            threads at exit"; "" if in none.
    """

    where: str
    waits: bool | None
    clock: Progress
    within: str = ""


@dataclass(frozen=True, slots=True)
class Fate:
    """What is known of the end of one rank.

    Attributes:
        rank, node: which one.
        how: "SIGKILL", "exit:3", "unknown" (nobody saw it); "" while it is not known to have ended.
        order: in one daemon's eyes, a number that is less than that of every process that was
            proven to live after this one's death; -1: nothing is proven.
        witness: which daemon's eyes; orders of different ones say nothing.
        outlived_by: ranks that another rank saw alive after this one's death, itself included.
        time_ns: Unix time at which the end was noticed; 0: not known.
        memory_kills: processes around it that the kernel had killed for want of memory just then.
        closed: it said that nothing more will come.
        raised: and that an exception was the reason.
        error: the exception, also one that was under way when it said so.
        sets_handlers: its script handles SIGTERM or SIGINT itself.
        handles: and, as it closed, a handler of these had run, or may have.
        at_exit: it closed at the end of its interpreter; its script had not said that it was over.
        asked: it closed in such a handler, or on its way to sys.exit() out of one.
        pool: it closed in a worker of this ("Ray"), which ends it when it likes; "" if in none.
        threads: names of those for which its process waited when it closed after an exception.
        beat_closed: its last heartbeat says that it closed.
        clock: how far it had come; None: not known.
        stands: where it stood in its code, if it has not moved on since; None: not known.
        suspended: it was stopped (SIGSTOP) when last looked at.
        stalled: all ranks of its node lived and stood still for much longer than a step takes.
        heard: anything was heard of it at all.
        dead: a daemon wrote it down as a death.
        paused: it had said that it does something else than training.
        launcher: how the torchrun that started it ended, as `how`; "" if that is not known.
    """

    rank: Rank
    node: str = ""
    how: str = ""
    order: int = -1
    witness: str = ""
    outlived_by: tuple[Rank, ...] = ()
    time_ns: int = 0
    memory_kills: int = 0
    closed: bool = False
    raised: bool = False
    error: RaisedError | None = None
    sets_handlers: bool = False
    handles: bool = False
    at_exit: bool = False
    asked: bool = False
    pool: str = ""
    threads: tuple[str, ...] = ()
    beat_closed: bool = False
    clock: Progress | None = None
    stands: Standing | None = None
    suspended: bool = False
    stalled: bool = False
    heard: bool = False
    dead: bool = False
    paused: bool = False
    launcher: str = ""

    @property
    def failed(self) -> bool:
        """Whether an exception ended it.

        Python also keeps one of a prompt within the script (`code.interact`), which ended nothing:
        by its exit code and its place the training then came to its end.
        """
        return self.raised and not (self.how == "exit:0" and self.is_between_steps)

    @property
    def is_between_steps(self) -> bool:
        """Whether it is known to have been between two steps when last heard of."""
        return self.clock is not None and self.clock.phase == STEP_PHASES[0]

    @property
    def is_within_step(self) -> bool:
        """Whether it is known to have been within a step when last heard of."""
        return self.clock is not None and self.clock.phase != STEP_PHASES[0]

    @property
    def trains(self) -> bool:
        """Whether nothing of it says that it ended, ends, or stands still."""
        ends = self.how or self.closed or self.raised or self.asked or self.at_exit
        return not (ends or self.beat_closed or self.suspended or self.stalled)

    @property
    def may_be_handled(self) -> bool:
        """Whether its end may be the doing of its script's handler of a signal."""
        return self.handles if self.closed else self.sets_handlers

    def died_before(self, other: Fate) -> bool:
        """Whether the other one was seen alive after this one's death."""
        same = self.witness == other.witness and min(self.order, other.order) >= 0
        return (same and self.order < other.order) or other.rank in self.outlived_by
