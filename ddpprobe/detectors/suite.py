"""All detectors over one stream in root-cause order, and the order in which to read them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from ddpprobe.detectors.batch_norm import BatchNorm
from ddpprobe.detectors.batch_size import BatchSize
from ddpprobe.detectors.collapse import Collapse
from ddpprobe.detectors.coverage import Coverage
from ddpprobe.detectors.cross_entropy import CrossEntropy
from ddpprobe.detectors.dead_units import DeadUnits
from ddpprobe.detectors.desync import Desync
from ddpprobe.detectors.detector import AFTERMATH_STEPS, Detector
from ddpprobe.detectors.environment import Environment
from ddpprobe.detectors.frozen_param import FrozenParam
from ddpprobe.detectors.grad_altered import GradAltered
from ddpprobe.detectors.grad_dropped import GradDropped
from ddpprobe.detectors.grad_none_or_zero import GradNoneOrZero
from ddpprobe.detectors.grad_spike import GradSpike
from ddpprobe.detectors.grad_zeros import GradZeros
from ddpprobe.detectors.init_scale import InitScale
from ddpprobe.detectors.input_shift import InputShift
from ddpprobe.detectors.level_shift import LevelShift
from ddpprobe.detectors.loss_runaway import LossRunaway
from ddpprobe.detectors.loss_scale import LossScale
from ddpprobe.detectors.loss_spike import LossSpike
from ddpprobe.detectors.mode_flip import ModeFlip
from ddpprobe.detectors.never_updated import NeverUpdated
from ddpprobe.detectors.nonfinite import NonFinite
from ddpprobe.detectors.optimizer_reset import OptimizerReset
from ddpprobe.detectors.output_drop import OutputDrop
from ddpprobe.detectors.output_jump import OutputJump
from ddpprobe.detectors.rank_outlier import RankOutlier
from ddpprobe.detectors.recompute import Recompute
from ddpprobe.detectors.reduction import Reduction
from ddpprobe.detectors.resume import Resume
from ddpprobe.detectors.router import Router
from ddpprobe.detectors.same_data import SameData
from ddpprobe.detectors.saturated import Saturated
from ddpprobe.detectors.settings import Number, Settings, parse
from ddpprobe.detectors.slowdown import Slowdown
from ddpprobe.detectors.sound_steps import SoundSteps, SoundStepsDetector
from ddpprobe.detectors.stale_weights import StaleWeights
from ddpprobe.detectors.straggler import Straggler
from ddpprobe.detectors.stuck_data import StuckData
from ddpprobe.detectors.targets import TrainingTargets
from ddpprobe.detectors.unsampled_spike import UnsampledSpike
from ddpprobe.detectors.update_ratio import UpdateRatio
from ddpprobe.detectors.vanishing import Vanishing
from ddpprobe.detectors.weight_jump import WeightJump
from ddpprobe.records.near_names import by_nearness
from ddpprobe.records.step import LEVELS, PHASES, Anomaly, StepRecord

Earlier = Callable[[StepRecord], Iterable[StepRecord]]

BEFORE_STEPS = 8  # so far before a first cause an anomaly may lie that follows from it
WARNINGS, NAMED = 64, 2  # newest ones that are remembered; that a first cause names


class Suite:
    """Runs detectors on each record and decides which page is the first cause.

    Args:
        detectors: in root-cause order: what is found first in a record explains the rest of it.
        earlier: returns what earlier attempts said, for an attempt whose first record is given.

    Only a page can be a first cause; exactly one is, in every episode (see `follows`).
    """

    def __init__(self, detectors: Sequence[Detector], earlier: Earlier | None = None) -> None:
        self._detectors = tuple(detectors)
        self._earlier = earlier
        sound = SoundSteps()
        for detector in self._detectors:
            if isinstance(detector, SoundStepsDetector):
                detector.share(sound)
        self._cause: Anomaly | None = None
        self._warnings: deque[Anomaly] = deque(maxlen=WARNINGS)

    # A number that overflows or is none in what a record says is no reason to warn on the console.
    @np.errstate(all="ignore")
    def update(self, record: StepRecord) -> list[Anomaly]:
        """Feed the record to every detector."""
        earlier, self._earlier = self._earlier, None
        for each in earlier(record) if earlier is not None and record.attempt > 0 else ():
            for detector in self._detectors:
                if detector.across_attempts:
                    detector.update(each)
        found = [self._place(a) for d in self._detectors for a in d.update(record)]
        self._warnings.extend(a for a in found if a.level == "warn")
        return [self._after_warnings(a) if a.first_cause else a for a in found]

    def finish(self) -> list[Anomaly]:
        """End the stream."""
        return [self._place(a) for d in self._detectors for a in d.finish()]

    def _raised(self, anomaly: Anomaly) -> Anomaly:
        """Make a warning a page that came with what it is raised after."""
        since = anomaly.values.get("since")
        if anomaly.level != "warn" or since is None:
            return anomaly
        causes = _RAISED_AFTER.get(anomaly.detector, frozenset())
        # Weights that are another's just when the optimizer is a new one: the script begins anew.
        built_anew = {
            a.step
            for a in self._warnings
            if a.detector == OptimizerReset.name and a.attempt == anomaly.attempt
        }
        at_once = (
            a
            for a in self._warnings
            if a.detector in causes
            and a.attempt == anomaly.attempt
            and since - BEFORE_STEPS <= a.step <= anomaly.step
            and a.step not in built_anew
        )
        sign = min(at_once, key=when, default=None)
        if sign is None:
            return anomaly
        message = f"{anomaly.message}; a page, as {sign.detector} warned at step {sign.step}"
        if sign.step < since:
            message += ": resume from before that one"
        return replace(anomaly, level="page", message=message)

    def _place(self, anomaly: Anomaly) -> Anomaly:
        anomaly = self._raised(anomaly)
        first = anomaly.level == "page" and not (self._cause and follows(anomaly, self._cause))
        if first:
            self._cause = anomaly
        return replace(anomaly, first_cause=first)

    def _after_warnings(self, cause: Anomaly) -> Anomaly:
        """Name in a first cause what only warned of a step before it: that was earlier."""
        told = [
            f"{a.detector} at step {a.step}" + (f" (rank {a.rank})" if a.rank is not None else "")
            for a in sorted(self._warnings, key=when)
            if a.attempt == cause.attempt and 0 < cause.step - a.step <= AFTERMATH_STEPS
        ]
        if not told:
            return cause
        more = f" and {len(told) - NAMED} more" if len(told) > NAMED else ""
        before = ", ".join(told[:NAMED])
        return replace(cause, message=f"{cause.message}; warned of before it: {before}{more}")


# In root-cause order.
DETECTORS: tuple[type[Detector], ...] = (
    NonFinite,
    Desync,
    Reduction,
    GradAltered,
    Recompute,
    LossScale,
    StaleWeights,
    OptimizerReset,
    Resume,
    FrozenParam,
    NeverUpdated,
    GradDropped,
    InitScale,
    BatchNorm,
    TrainingTargets,
    CrossEntropy,
    WeightJump,
    UpdateRatio,
    OutputJump,
    OutputDrop,
    GradSpike,
    UnsampledSpike,
    Saturated,
    DeadUnits,
    GradNoneOrZero,
    GradZeros,
    Vanishing,
    Collapse,
    LossSpike,
    LossRunaway,
    LevelShift,
    RankOutlier,
    Router,
    Environment,
    SameData,
    StuckData,
    InputShift,
    BatchSize,
    ModeFlip,
    Straggler,
    Slowdown,
    Coverage,
)
_RAISED_AFTER = {detector.name: detector.raised_after for detector in DETECTORS}
_FOLLOWS_WITHIN = {detector.name: detector.follows_within for detector in DETECTORS}


def default_suite(settings: Settings | None = None, earlier: Earlier | None = None) -> Suite:
    """Return the detectors of a run, in root-cause order.

    Args:
        settings: what is not to be as by default, by detector; None in place of settings: without
            that detector. See `read_settings`, `chosen` and `recorded`.
        earlier: as of `Suite`.
    """
    wanted = {kind: (settings or {}).get(kind.name, {}) for kind in DETECTORS}
    detectors = [kind(**given) for kind, given in wanted.items() if given is not None]
    return Suite(detectors, earlier)


# What a kind of training does to numbers that a detector takes for faults elsewhere.
TASKS: Mapping[str, Settings] = MappingProxyType(
    {
        # two losses that work against each other
        "gan": dict.fromkeys(("loss_spike", "loss_runaway", "level_shift")),
        # heavy tails; a row weighs as much as its reward
        "rl": dict.fromkeys(
            (
                *("loss_spike", "loss_runaway", "level_shift", "grad_spike", "unsampled_spike"),
                "cross_entropy",
            )
        ),
    }
)
_KNOWN = {kind.name: kind for kind in DETECTORS}


def read_settings(given: Iterable[tuple[str, str | None]]) -> Settings:
    """Return settings for `default_suite` from (detector, "key=value") as they are typed.

    None instead of an assignment only names a detector.

    Raises:
        ValueError: there is no such detector or setting, or no such value; says what there is.
    """
    texts: dict[str, dict[str, str]] = {}
    for name, assignment in given:
        _detector(name)
        if assignment is None:
            continue
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(f"{assignment!r}: expected key=value, such as quiet_steps=20")
        texts.setdefault(name, {})[key] = value
    return {name: parse(_KNOWN[name], texts[name]) for name in texts}


def chosen(detectors: Mapping[str, object], task: str | None) -> Settings:
    """Return settings for `default_suite` from the arguments of `install()`.

    Args:
        detectors: by name, settings by name; True: as by default; False: without it.
        task: one of `TASKS`, whose settings hold where `detectors` says nothing.

    Raises:
        ValueError: there is no such task, detector or setting, or no such value.
    """
    if task is not None and not (isinstance(task, str) and task in TASKS):
        raise ValueError(f"task must be one of {', '.join(TASKS)}, or None; got {task!r}")
    if not isinstance(detectors, Mapping):
        raise ValueError(  # noqa: TRY004  (told to all ranks alike)
            "detectors must be a mapping such as {'straggler': False, 'grad_spike': {'z': 10}}, "
            f"got {detectors!r}"
        )
    found = dict(TASKS[task]) if task is not None else {}
    for name, given in detectors.items():
        kind = _detector(name)
        if given is False:
            found[name] = None
        elif given is True:
            found[name] = {}
        elif isinstance(given, Mapping):
            found[name] = parse(kind, given)
        else:
            raise ValueError(f"detectors[{name!r}] must be True, False or settings, got {given!r}")
    return found


def recorded(said: object) -> Settings:
    """Return the settings that a run was recorded with, as a rank wrote them down.

    What this version does not know, or a stranger has made up, is as by default.
    """
    found: dict[str, Mapping[str, Number] | None] = {}
    for name, given in said.items() if isinstance(said, Mapping) else ():
        if name in _KNOWN and given is None:
            found[name] = None
        elif name in _KNOWN and isinstance(given, Mapping):
            with contextlib.suppress(ValueError, OverflowError):
                found[name] = parse(_KNOWN[name], given)
    return found


def over(settings: Settings, others: Settings) -> Settings:
    """Return settings that hold over others; a detector that has some is not switched off."""
    found = dict(others)
    for name, given in settings.items():
        found[name] = None if given is None else {**(others.get(name) or {}), **given}
    return found


def _detector(name: object) -> type[Detector]:
    if not isinstance(name, str) or name not in _KNOWN:
        near = ", ".join(by_nearness(str(name), _KNOWN))
        raise ValueError(f"no detector {name!r}: choose one of {near}")
    return _KNOWN[name]


def follows(anomaly: Anomaly, cause: Anomaly) -> bool:
    """Whether an anomaly is close enough after (or before) a first cause to be its consequence."""
    if anomaly.attempt != cause.attempt:
        return False
    within = _FOLLOWS_WITHIN.get(anomaly.detector, AFTERMATH_STEPS)
    return -BEFORE_STEPS <= anomaly.step - cause.step <= within


@dataclass
class Episode:
    """A first cause and what followed from it; `cause` is None for what stands alone."""

    cause: Anomaly | None
    followed: list[Anomaly] = field(default_factory=list)


def episodes(anomalies: Iterable[Anomaly]) -> list[Episode]:
    """Group anomalies by first cause, in order of cause; what belongs to none comes last.

    A warning that was later raised to a page of the same step is left out: the page says it all.
    """
    given = list(anomalies)
    paged = {_event(a) for a in given if a.level == "page"}
    kept = [a for a in given if a.level != "warn" or _event(a) not in paged]
    kept.sort(key=when)
    groups = [Episode(a) for a in kept if a.first_cause]
    alone = Episode(None)
    for anomaly in kept:
        if not anomaly.first_cause:
            near = [g for g in groups if g.cause and follows(anomaly, g.cause)]
            # The latest cause that is not after it; one just after it if there is no other.
            before = [g for g in near if g.cause and g.cause.step <= anomaly.step]
            (before[-1] if before else near[0] if near else alone).followed.append(anomaly)
    for group in (*groups, alone):
        group.followed.sort(key=lambda a: (LEVELS.index(a.level), when(a)))
    return [*groups, alone] if alone.followed else groups


def order_of_cause(anomalies: Iterable[Anomaly]) -> list[Anomaly]:
    """Return anomalies as one list: each first cause, then what followed from it."""
    out: list[Anomaly] = []
    for episode in episodes(anomalies):
        out += [episode.cause] if episode.cause else []
        out += episode.followed
    return out


def _event(anomaly: Anomaly) -> tuple[object, ...]:
    """Return what a page has in common with the warning that was raised to it."""
    when_and_who = anomaly.detector, anomaly.attempt, anomaly.step, anomaly.rank
    return (*when_and_who, anomaly.module, anomaly.kind)


def when(anomaly: Anomaly) -> tuple[int, int, int, int, int]:
    """Return what orders anomalies in time, as `FirstBad.key` orders origins."""
    phase = PHASES.index(anomaly.phase) if anomaly.phase in PHASES else len(PHASES)
    rank = -1 if anomaly.rank is None else anomaly.rank
    return (anomaly.attempt, anomaly.step, anomaly.micro, phase, rank)
