"""`nonfinite`: the first NaN or Inf of the run, and the rank and module it came from.

Pages at once, on one element. The origin is the record's `first_bad`, the smallest (step, micro,
phase, order) over all ranks' *local* tensors. No rank is named where several have theirs at that
place, nor for what was reduced over the ranks, unless it is bad on one of them alone. What follows
from an origin (later steps, other ranks) is not reported again; what does not is an origin itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddpprobe.detectors import origins
from ddpprobe.detectors.detector import Detector
from ddpprobe.detectors.rank_scalars import scalars
from ddpprobe.detectors.settings import at_least
from ddpprobe.records.step import (
    IN_TURN,
    LENT,
    NAN,
    NONFINITE,
    NUMEL,
    OBSERVED,
    PHASE_OF_KIND,
    SEVERAL,
    STATE_KINDS,
    UNORDERED,
    Anomaly,
    FirstBad,
    Site,
    StepRecord,
)

_REDUCED = ("grad", "param")
_AT_ONCE = "; on several ranks at once, none of them first"
_STAGES = (
    "; on several stages of a pipeline: which of them was first is not known, as the host's clock "
    "does not tell it of a device, and no number of a stage was found in what calls the model"
)
MOST_SITES = 1024  # bounds the state: of more, those that were bad longest ago are forgotten


class _Place(NamedTuple):
    """What is told once; `rank` counts where a NaN came on a step that does not name its module."""

    level: str
    phase: str
    fqn: str | None
    kind: str | None
    leaf: str
    rank: int | None


@dataclass(slots=True)
class _Seen:
    """The last step that showed a place, and the first and the last one of which it was told."""

    last: int
    first: int
    told: int


class NonFinite(Detector):
    """Fires on the first non-finite value, and again on each that is a new origin.

    What comes after an origin is its descendant (the weights are bad) until a sampled step is
    clean. An origin that did no harm (an infinity, with a finite loss and finite gradients in the
    same sampled step) has none. The same site is told again after `quiet_steps` steps without it.
    Where no module is named, another rank is another site, and the same one is told again after a
    clean sampled step each time that as many steps have gone by as between its first and its last
    word: nobody knows whether it is the same fault.

    Gradients of a step that a GradScaler skipped are the scaler at work (it probes for the largest
    scale that fits): level info. No scaler mends a forward that is not finite, as the scale is not
    in it, nor a parameter: these are pages.

    Args:
        quiet_steps: steps without a non-finite value after which the next one is reported.
    """

    name = "nonfinite"
    title = "First non-finite tensor"
    # This soon after a gradient explosion a NaN is its end; later it is a fault of its own.
    follows_within = 8

    def __init__(self, *, quiet_steps: int = 100) -> None:
        at_least(0, quiet_steps=quiet_steps)
        self._quiet = quiet_steps
        self._attempt: int | None = None
        self._spread: dict[str, int] = {}  # level -> last step of which the next may be bad
        self._sites: dict[_Place, _Seen] = {}
        self._clean = -1  # the last sampled step that was
        self._looked: origins.LastLook | None = None
        self._checked: int | None = None  # last step after which all was looked at and finite

    def update(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        if record.attempt != self._attempt:
            self._attempt, self._spread, self._sites = record.attempt, {}, {}
            self._checked = self._looked = None
            self._clean = -1
        origin = _origin(record)
        known = _Known(self._checked, self._looked)
        if origins.was_checked(record):
            self._checked = record.step
        if record.sampled and record.sites and not record.partial:
            self._looked = origins.LastLook.of(record)
        found = [] if origin is None else self._told_of(record, origin, known)
        if _is_clean(record):
            self._spread.clear()  # it began with good weights
            self._clean = record.step
        return found

    def _told_of(self, record: StepRecord, origin: FirstBad, known: _Known) -> list[Anomaly]:
        """Return what is to be said of the earliest evidence of a record."""
        level = "info" if record.skipped and _is_scaled(record, origin) else "page"
        place, spread = _place(record, origin, level), self._spread.get(level, -1)
        seen = self._sites.get(place)
        before = max(seen.last if seen else -1, spread)
        due = before < 0 or origin.step - before > self._quiet
        another = (
            not due and spread < 0 and seen is not None and self._is_another(place, seen, origin)
        )
        self._remember(place, origin.step, anew=due, told=due or another)
        if not _did_no_harm(record, origin):
            # A parameter that was bad before this step still is; any other word may come late.
            last = record.step if origin.is_state else origin.step
            self._spread[level] = max(last, self._spread.get(level, -1))
        return [_anomaly(record, origin, level, known)] if due or another else []

    def _is_another(self, place: _Place, seen: _Seen, origin: FirstBad) -> bool:
        """Whether what has no name is to be told once more, as it may be another fault.

        Ever more rarely: a step that goes bad now and then is one fault for most of its time.
        """
        clean_between = seen.last < self._clean < origin.step
        rare = origin.step - seen.first >= 2 * (seen.told - seen.first)
        return place.rank is not None and clean_between and rare

    def _remember(self, place: _Place, step: int, *, anew: bool, told: bool) -> None:
        if place not in self._sites and len(self._sites) >= MOST_SITES:
            del self._sites[min(self._sites, key=lambda one: self._sites[one].last)]
        seen = self._sites.get(place)
        if seen is None or anew:
            seen = self._sites[place] = _Seen(step, step, step)
        seen.last = max(step, seen.last)
        seen.told = step if told else seen.told


class _Known(NamedTuple):
    """What was known before a record: the last step after which all was finite, and the rows."""

    checked: int | None
    looked: origins.LastLook | None


def _place(record: StepRecord, origin: FirstBad, level: str) -> _Place:
    named = (record.sampled and origin.step == record.step) or origin.phase == "step"
    # The first infinity of a mask may come on each rank in another step.
    nan = origin.nan > 0 or not origin.numel
    whose = origin.rank if level == "page" and nan and not (named and origin.fqn) else None
    return _Place(level, origin.phase, origin.fqn, origin.kind, origin.leaf, whose)


def _is_clean(record: StepRecord) -> bool:
    """Whether it is a whole sampled step in which nothing is bad."""
    whole = record.sampled and bool(record.sites) and not record.partial
    bad = record.first_bad is not None or _bad_reduced(record) is not None
    return whole and not bad and all(map(math.isfinite, scalars(record, "loss")))


def _origin(record: StepRecord) -> FirstBad | None:
    """Return the earliest evidence: forward, loss, backward, reduced gradient, parameter."""
    witness, loss = record.first_bad, _bad_loss(record)
    if loss is not None and loss.step < (witness.step if witness else record.step):
        return loss
    if witness is not None and (
        witness.phase == "forward" or witness.step < record.step or was_lent(record, witness)
    ):
        return witness
    return loss or witness or _bad_reduced(record)


def was_lent(record: StepRecord, witness: FirstBad) -> bool:
    """Whether it was bad in a pass for another model's step, which came before any loss of this."""
    whose = record.ranks if witness.rank == SEVERAL else (witness.rank,)
    return any(witness.micro < record.scalars.get(rank, {}).get(LENT, 0) for rank in whose)


def _did_no_harm(record: StepRecord, origin: FirstBad) -> bool:
    """Whether an infinity of the forward got no further: the loss and all gradients are finite."""
    known = record.sampled and not record.partial and origin.step == record.step
    if not known or origin is not record.first_bad or origin.nan or origin.phase != "forward":
        return False
    later = [
        row for row, site in enumerate(record.sites)
        if PHASE_OF_KIND[site.kind] != "forward" and site.kind not in IN_TURN
    ]  # fmt: skip
    if _bad_loss(record) is not None or not record.counts[later][:, OBSERVED].any():
        return False
    return not (record.counts[:, NAN].any() or record.counts[later][:, NONFINITE].any())


def _bad_loss(record: StepRecord) -> FirstBad | None:
    """Return the first non-finite loss; it comes after the forward, before the backward.

    A backward fault cannot reach the loss of its own step, so the loss outranks it. Those of steps
    that were not sampled are told by the next record.
    """
    found = (
        (step, bad)
        for step, losses in origins.known_losses(record)
        if (bad := {r: x for r, x in losses.items() if not math.isfinite(x)})
    )
    step, bad = next(found, (record.step, {}))
    if not bad:
        return None
    witness = record.first_bad if step == record.step else None
    at = witness if witness and witness.phase == "backward" else None
    at = at if at and (at.rank in bad or (at.rank == SEVERAL and len(bad) > 1)) else None
    # Without a local witness a loss that is bad on several ranks (they may have averaged it) blames
    # none of them.
    rank = at.rank if at else min(bad) if len(bad) == 1 else SEVERAL
    loss = bad[rank] if rank in bad else next(iter(bad.values()))
    return FirstBad(
        step=at.step if at else step,
        micro=at.micro if at else 0,
        phase="forward",
        order=-1,
        rank=rank,
        nan=int(math.isnan(loss)),
        pos_inf=int(loss == math.inf),
        neg_inf=int(loss == -math.inf),
        numel=1,
    )


def _bad_reduced(record: StepRecord) -> FirstBad | None:
    """Return the first reduced gradient or parameter with a non-finite element, in row order."""
    if not record.counts[:, NONFINITE].any():
        return None
    for kind in _REDUCED:
        for row in np.flatnonzero(record.counts[:, NONFINITE].any(axis=1)):
            site: Site = record.sites[row]
            if site.kind == kind:
                nan, pos_inf, neg_inf = (int(n) for n in record.counts[row, NONFINITE])
                return FirstBad(
                    record.step, 0, "step", int(row), SEVERAL, site.fqn, kind, site.leaf,
                    nan, pos_inf, neg_inf, int(record.counts[row, NUMEL]),
                )  # fmt: skip
    return None


def _is_scaled(record: StepRecord, origin: FirstBad) -> bool:
    """Whether a loss scale that is too high explains it: gradients alone are bad."""
    if origin.phase == "forward" or origin.kind in STATE_KINDS:
        return False
    rows = np.flatnonzero(record.counts[:, NONFINITE].any(axis=1))
    return all(record.sites[row].kind not in STATE_KINDS for row in rows)


def _anomaly(record: StepRecord, origin: FirstBad, level: str, known: _Known) -> Anomaly:
    values = {
        "nan": origin.nan,
        "pos_inf": origin.pos_inf,
        "neg_inf": origin.neg_inf,
        "numel": origin.numel,
    }
    return NonFinite.anomaly(
        record, level, _message(record, origin, level, known), values,
        step=origin.step, micro=origin.micro, rank=origins.rank_of(record, origin),
        module=origin.fqn, kind=origin.kind, phase=origin.phase,
    )  # fmt: skip


def _message(record: StepRecord, origin: FirstBad, level: str, known: _Known) -> str:
    counts = {"NaN": origin.nan, "+Inf": origin.pos_inf, "-Inf": origin.neg_inf}
    found = ", ".join(f"{n} {what}" for what, n in counts.items() if n)
    if origin.kind is None and origin is not record.first_bad:
        text = f"non-finite loss ({found.removeprefix('1 ')})"
        if record.first_bad is not None and record.first_bad.fqn is not None:
            bad = record.first_bad
            text += f"; then {Site(bad.fqn or '', bad.kind or '', bad.leaf)} in {bad.phase}"
    elif origin.fqn is None:
        text = _nameless(record, origin)
    else:
        text = f"{found} of {origin.numel} elements" if found else "non-finite elements"
    text += _whence(record, origin, known)
    if origins.may_be_the_loss(record, origin):
        text += f"; {origins.LOSS_OR_BACKWARD}"
    text += origins.since(record, origin, known.looked)
    text += origins.grown_before(record, origin, known.looked)
    if origin.rank == SEVERAL and origin.kind != "grad" and origin is record.first_bad:
        text += _STAGES if origin.order == UNORDERED else _AT_ONCE
    if level == "info":
        text += "; the GradScaler skipped this step"
    return text


def _whence(record: StepRecord, origin: FirstBad, known: _Known) -> str:
    """Say where else it may have begun, by the kind of tensor that it was found in."""
    if origin.kind == "input":
        return f" {origins.between(origin)}"
    if origin.kind == "grad":
        return origins.reduction(record)
    if origin is record.first_bad and origin.kind in STATE_KINDS:
        return f"; {origins.born(record, origin, known.checked)}"
    if origin is record.first_bad and origins.is_of_unread_input(record, origin):
        return f"; {origins.UNREAD}"
    return ""


def _nameless(record: StepRecord, origin: FirstBad) -> str:
    text = "non-finite local tensor; which one is not known"
    unsampled = not (record.sampled and origin.step == record.step)
    if unsampled:
        text += ", as this step was not sampled"
    if origin.phase == "forward" and not origin.numel:  # of a device, where nobody could look
        text += ", nor whether a parameter was so before it"
    if unsampled:
        text += "; every=1 (DDPPROBE_EVERY=1) from a checkpoint before this step would name it"
    return text
