"""What happens to a rank or to its node, as their journals say it: one class per kind of event.

A journal holds an event as a JSON object (`to_json`), whose key `event` is the class's name in
snake case, less the suffix, and so does the store. `rundir.validate.event` reads it back, by the
annotations below.

A field without a default is one that no reader can do without. One whose default is None is left
out where it is None. Times are Unix ns; -1 is a step, or a number, that is not known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_args

from ddpprobe.records.fate import Fate, RaisedError, Rank

ACTIONS = ("capture", "stop", "tell")  # that the head orders


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The last heartbeat of a rank, as `heartbeat.Heartbeat` says it."""

    step: int
    steps: int | None = None
    micro: int | None = None
    sampled: int
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """How far a rank had come, by its heartbeat; None: not said."""

    step: int | None = None
    steps: int | None = None
    micro: int | None = None
    state: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnyOrder:
    """An order; its daemon tells `modules`, `reason` and `cause` of it, a rank the `step`."""

    number: int
    action: str
    start: int
    stop: int
    step: int | None = None
    modules: tuple[str, ...] | None = None
    reason: str | None = None
    cause: str | None = None


# ---- what a rank says


@dataclass(frozen=True, slots=True, kw_only=True)
class BlindEvent:
    """Modules ran and were not heard; without `modules`: no forward of the model was seen."""

    step: int = -1
    modules: tuple[str, ...] | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetEvent:
    """From `step` on every `every`-th step is sampled; `ratio` is what that costs, if known."""

    step: int
    every: int
    budget: float | None
    ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedEvent:
    """A pack of full tensors was written."""

    step: int
    bytes: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedEvent(_Place):
    """Nothing more will come.

    Attributes:
        sampled: sampled steps that it took; -1: not said.
        status: "ok", or "exception" if nobody caught it.
        error: the exception, also one that was under way and may still be caught.
        handles: a handler of SIGTERM or SIGINT of the script's has run, or may have.
        at_exit: it is said at the end of the interpreter.
        asked: it is said in such a handler, or on the way to sys.exit() out of one.
        pool: what has started its process as a worker, and ends it when it likes, by an exit code
            of its own choice ("Ray"); "" if nothing does.
        threads: names of those for which its process waits after an exception, some of them.
    """

    sampled: int = -1
    status: str = "ok"
    error: RaisedError | None = None
    handles: bool = False
    at_exit: bool = False
    asked: bool = False
    pool: str = ""
    threads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedEvent:
    """So many things more were lost."""

    reason: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseEvent:
    """A part of the probe switched itself off."""

    component: str
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlesEvent:
    """The script handles SIGTERM or SIGINT itself, so it may end without a goodbye."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """What runs the job and may end it, in words."""

    scheduler: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LateOrderEvent(_AnyOrder):
    """A rank heard of an order too late; `step` was the first one that it could still be for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderEvent(_AnyOrder):
    """The head's daemon ordered something (then there is a `cause`), or a rank heard of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteEvent:
    """What the script said by `probe.note`, after `step`; `config`: names and values as texts."""

    step: int = -1
    what: str = ""
    config: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PausedEvent:
    """The hooks are off the model until `ResumedEvent`."""

    reason: str = ""
    time_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerExitEvent:
    """The process of another rank of the node ended: `how`, as `ends.evidence.Fate` has it.

    Attributes:
        alive: ranks that were seen alive after that, the one that says so among them.
    """

    rank: Rank
    how: str
    alive: tuple[Rank, ...]
    time_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedEvent:
    """The pause is over."""

    time_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SitesEvent:
    """How many sites should deliver, and did; said again when it changes."""

    expected: int
    observed: int
    step: int = -1
    unsupported: Mapping[str, int] = field(default_factory=dict)
    silent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyEvent:
    """Infinities of a site are known to do no harm from now on."""

    step: int | None = None
    fqn: str = ""
    kind: str = ""
    leaf: str = ""
    values: tuple[str, ...]
    told: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StandsEvent(_Place):
    """The rank stands still; `where`, `waits` and `within` as of `Standing`."""

    where: str
    waits: bool | None = None
    within: str = ""
    time_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyEvent:
    """What wraps the model, and the device it is on."""

    wrapper: str = ""
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerEvent:
    """The script asks for a capture, for the `number`-th time."""

    number: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UncapturedEvent:
    """Modules that were chosen cannot be captured: some of their names, and how many they are."""

    modules: tuple[str, ...] = ()
    count: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnkeptEvent:
    """Numbers given to `probe.log` are in no record; said once for each name."""

    step: int = -1
    names: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsampledEvent:
    """A step that was due has no rows, or not all of them."""

    step: int = -1
    reason: str = ""


# ---- what a node's daemon says


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEvent:
    """What was typed to start the ranks of the head, and where; said once by each daemon.

    Attributes:
        words: the command line; words that their names call secrets are `***`.
        directory: the working directory.
        commit: what git had checked out there; None if that is not known.
        changed: whether a file that git tracks differed from it.
    """

    words: tuple[str, ...]
    directory: str = ""
    commit: str | None = None
    changed: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuedEvent:
    """A rank that was suspended goes on."""

    rank: Rank
    time_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeathEvent:
    """A rank ended badly."""

    rank: Rank
    signal: str = "unknown"
    time_ns: int = 0
    step: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEvent:
    """How the attempt ended, as far as is known now: as `ends.end.End`."""

    state: str
    ranks: tuple[Rank, ...]
    how: str
    step: int | None
    phase: str | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitEvent(_Place):
    """The process of a rank ended: the attributes are those of `ends.evidence.Fate`."""

    rank: Rank
    how: str
    order: int
    witness: str
    time_ns: int
    memory_kills: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FateEvent:
    """The head's daemon was told by another node's how one of its ranks ended."""

    fate: Fate


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedEvent:
    """The attempt is over, and everything of it was merged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstCauseEvent:
    """The first cause of the newest episode, as the head's daemon has told it on `/metrics`.

    The fields are those of `Anomaly`; `time_ns` is when it was seen.
    """

    detector: str
    step: int
    micro: int = 0
    rank: int | None = None
    module: str | None = None
    kind: str | None = None
    phase: str
    time_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LastBeatsEvent:
    """How far the ranks came by their heartbeats."""

    ranks: Mapping[Rank, Beat]


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherEvent:
    """The torchrun that started all ranks of the node ended: by this code or signal."""

    how: str
    time_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingEvent:
    """The ranks that stood still move again."""

    time_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderDroppedEvent:
    """What would have been ordered for a cause is not, and why."""

    cause: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedEvent:
    """The steps from `first` to `last` are kept as evidence."""

    first: int
    last: int
    cause: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedEvent:
    """The head holds every step up to this one."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedEvent:
    """Everything of the node is in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledEvent:
    """All ranks of the node live, and none has moved for much longer than a step takes."""

    time_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendedEvent:
    """A rank was stopped by a signal."""

    rank: Rank
    time_ns: int


# ---- what a node's daemon says to the head's, and no journal holds


@dataclass(frozen=True, slots=True)
class Asking:
    """It has the orders up to number `last`, and asks for the others."""

    attempt: int
    last: int


@dataclass(frozen=True, slots=True)
class Ended:
    """These of its ranks will deliver nothing more."""

    attempt: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of the end of one of its ranks, or of one that moves no more."""

    attempt: int
    fate: Fate


@dataclass(frozen=True, slots=True)
class Wish:
    """A `TriggerEvent` of one of its ranks, whose `cause` names it."""

    attempt: int
    cause: str
    reason: str
    step: int


Event = (
    BlindEvent | BudgetEvent | CapturedEvent | ClosedEvent | CommandEvent | ContinuedEvent
    | DeathEvent | DroppedEvent | EndEvent | ExitEvent | FateEvent | FinishedEvent | FirstCauseEvent
    | FuseEvent | HandlesEvent | JobEvent | LastBeatsEvent | LateOrderEvent | LauncherEvent
    | MovingEvent | NoteEvent | OrderEvent | OrderDroppedEvent | PausedEvent | PeerExitEvent
    | PinnedEvent | PushedEvent | ResumedEvent | SealedEvent | SitesEvent | StalledEvent
    | StandsEvent | SteadyEvent | SuspendedEvent | TopologyEvent | TriggerEvent | UncapturedEvent
    | UnkeptEvent | UnsampledEvent
)  # fmt: skip
KINDS = {
    re.sub(r"\B([A-Z])", r"_\1", kind.__name__.removesuffix("Event")).lower(): kind
    for kind in get_args(Event)
}
Message = Asking | Ended | Told | Wish
MESSAGES = {"orders": Asking, "ended": Ended, "told": Told, "trigger": Wish}
_NAMES = {kind: name for kinds in (KINDS, MESSAGES) for name, kind in kinds.items()}


def to_json(event: Event | Message) -> dict[str, Any]:
    """Return the JSON object that a journal holds of an event."""
    said = asdict(event)
    kept = [f.name for f in fields(event) if said[f.name] is not None or f.default is not None]
    return {"event": _NAMES[type(event)], **{name: said[name] for name in kept}}
