"""Whom the origin of a non-finite value blames, and what is said of one born between forwards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddpprobe.detectors.rank_scalars import scalars
from ddpprobe.detectors.statistics_of import statistic_of
from ddpprobe.records.every_loss import losses_of
from ddpprobe.records.step import (
    CHECKED,
    LOSS_OF_BAD,
    NONFINITE,
    OBSERVED,
    SEVERAL,
    STATE_KINDS,
    UNREAD_INPUT,
    FirstBad,
    Site,
    StepRecord,
)

GROWN = 1e3  # times what an output was at the last look: no step of a sound run does that
_FORWARD = ("input", "output")
_FOUND = {
    "param": "the parameter", "buffer": "the buffer", "optim_state": "the optimizer's state",
}  # fmt: skip
LOSS_OR_BACKWARD = (
    "no finite loss of this step is known: either the loss was so, or its backward up to here; "
    "with probe.log(loss=loss) before the backward the two can be told apart"
)


UNREAD = (
    "or it was given so, by the data or by code between two modules: what modules are given is not "
    "read on a device"
)


@dataclass(frozen=True, slots=True)
class LastLook:
    """The last whole sampled step: of each site if it was observed, was bad, and its abs-max."""

    step: int
    sites: tuple[Site, ...]
    observed: NDArray[np.bool_]
    bad: NDArray[np.bool_]
    largest: NDArray[np.float64]

    @classmethod
    def of(cls, record: StepRecord) -> LastLook:
        """Return what a record leaves behind."""
        observed, bad = record.counts[:, OBSERVED] > 0, _bad_rows(record)
        return cls(record.step, record.sites, observed, bad, statistic_of(record, "abs_max"))

    def was_finite(self, key: tuple[str | None, str | None, str]) -> bool | None:
        """Whether a site was; None: it was not observed."""
        rows = [i for i, site in enumerate(self.sites) if site.key == key and self.observed[i]]
        return not self.bad[rows].any() if rows else None


def rank_of(record: StepRecord, origin: FirstBad) -> int | None:
    """Return the rank to blame; None: several, or nobody knows.

    What was reduced, and what a step left behind, are as bad on one rank as on another. One of them
    is to blame only where all have delivered the whole step and no other has anything bad.
    """
    world = record.ranks + record.missing
    if len(world) == 1:
        return world[0]
    if origin.rank == SEVERAL:
        return None
    if origin.phase != "step":
        return origin.rank
    if record.missing or record.partial:
        return None
    if origin.kind in STATE_KINDS:
        return origin.rank if origin is record.first_bad else None
    return origin.rank if bad_after_the_reduction(record) == {origin.rank} else None


def bad_after_the_reduction(record: StepRecord) -> set[int]:
    """Return the ranks whose reduced gradients alone are not finite.

    Empty if a rank did not tell of both, or had a gradient that was bad before.
    """
    told = [record.scalars.get(rank, {}) for rank in record.ranks]
    if not all("grad_norm" in said and "grad_norm_local" in said for said in told):
        return set()
    if not all(math.isfinite(said["grad_norm_local"]) for said in told):
        return set()
    both = zip(record.ranks, told, strict=True)
    return {rank for rank, said in both if not math.isfinite(said["grad_norm"])}


def was_checked(record: StepRecord) -> bool:
    """Whether every rank looked at what this step left behind, and found nothing new."""
    clean = record.first_bad is None or record.first_bad.kind not in STATE_KINDS
    told = [record.scalars.get(rank, {}) for rank in record.ranks]
    return clean and not record.missing and all(CHECKED in said for said in told)


def is_of_unread_input(record: StepRecord, origin: FirstBad) -> bool:
    """Whether a rank that has it cannot tell if the module was given finite tensors."""
    ranks = record.ranks if origin.rank == SEVERAL else (origin.rank,)
    told = [record.scalars.get(rank, {}) for rank in ranks]
    return origin.kind == "output" and any(UNREAD_INPUT in said for said in told)


def born(record: StepRecord, origin: FirstBad, checked: int | None) -> str:
    """Say when something was born that was found after a step, or before a forward.

    Args:
        record: that the origin came with.
        origin: of one of `STATE_KINDS`.
        checked: the last step after which all of it was finite, if that is known.
    """
    what = f"{_FOUND[origin.kind or '']} {Site(origin.fqn or '', origin.kind or '', origin.leaf)}"
    what = what.rpartition(":")[0]
    if origin.phase == "forward" and origin.micro > 0:
        text = f"{what} was so before the forward of micro-batch {origin.micro} began"
        return f"{text}: written since the one before, or earlier if that made no use of it"
    if origin.phase == "forward":
        return f"{what} was so before the first step: look at what was loaded"
    if checked is not None and checked < record.step:
        seen = f", and was finite at the end of step {checked}"
    else:
        checked, seen = None, ""
    if origin.step < record.step:
        text = f"{what} was so before the forward of step {record.step} began{seen}"
        if checked == origin.step:
            return f"{text}: born between the two"
        behind = f"after the backward of step {origin.step} (the reduction, the optimizer)"
        return f"{text}: born {behind}, or earlier if no forward made use of it"
    text = f"{what} is so at the end of the step{seen}"
    if origin.kind == "buffer" or checked != record.step - 1:
        return text
    return f"{text}: born in the optimizer's step, or in what is done around it"


def between(origin: FirstBad) -> str:
    """Say what it means that a module was given something bad that no module had put out."""
    around = (origin.fqn or "").rpartition(".")[0] or "the model"
    return (
        f"in what came into {origin.fqn or 'the model'}, and in no output before it: born in it, "
        f"or between it and the module before, in the code of {around}, or in the data"
    )


def reduction(record: StepRecord) -> str:
    """Say that a reduced gradient is bad whose parts were finite; "" where it is not known."""
    ranks = bad_after_the_reduction(record)
    if not ranks:
        return ""
    alone = f", on rank {min(ranks)} alone" if len(ranks) == 1 < len(record.ranks) else ""
    return f"; every local gradient was finite before the reduction{alone}"


def known_losses(record: StepRecord) -> list[tuple[int, Mapping[int, float]]]:
    """Return what `losses_of` does, and the loss that a rank has told ahead of them."""
    found = {step: dict(losses) for step, losses in losses_of(record)}
    for rank, said in record.scalars.items():
        if LOSS_OF_BAD in said:
            found.setdefault(record.step, {}).setdefault(rank, float(said[LOSS_OF_BAD]))
    return sorted(found.items())


def may_be_the_loss(record: StepRecord, origin: FirstBad) -> bool:
    """Whether it is not known if a fault of the backward was one of the loss.

    What was looked at first in the backward is as bad in both cases.
    """
    if origin is not record.first_bad or origin.phase != "backward":
        return False
    losses = dict(known_losses(record)).get(origin.step, {})
    whose = record.ranks if origin.rank == SEVERAL else (origin.rank,)
    if all(math.isfinite(losses.get(rank, math.nan)) for rank in whose):
        return False
    return not (record.sampled and origin.step == record.step) or _is_nearest(record, origin)


def _is_nearest(record: StepRecord, origin: FirstBad) -> bool:
    """Whether no finite gradient of a sampled step was observed that is nearer to the loss."""
    if not origin.fqn:  # of what the model returns, or nobody knows of what
        return True
    observed, bad = record.counts[:, OBSERVED] > 0, _bad_rows(record)
    rows = [i for i, s in enumerate(record.sites) if s.kind == "grad_output" and observed[i]]
    of_root = [i for i in rows if not record.sites[i].fqn]
    if of_root:  # the last child may return the very tensor that the model does
        return bool(bad[of_root].any())
    if origin.kind == "grad_output":
        return bool(rows) and record.sites[rows[-1]].fqn == origin.fqn
    return bool(record.sites) and not rows


def since(record: StepRecord, origin: FirstBad, last: LastLook | None) -> str:
    """Say since when a sampled step's origin may have been so; "" where the step is exact.

    Between sampled steps only what reaches the model's output, the loss or a parameter's gradient
    is seen.
    """
    own = record.sampled and origin.step == record.step and origin is record.first_bad
    if not own or origin.is_state or record.partial or not origin.kind or last is None:
        return ""
    if origin.kind in STATE_KINDS or last.step >= record.step - 1 or _is_seen(record, origin):
        return ""
    finite = last.was_finite((origin.fqn, origin.kind, origin.leaf))
    if finite is False:
        return ""
    if finite is None:
        return f"; not looked at since step {last.step}, so it may have been so earlier"
    return f"; finite at step {last.step}, so it may have been so since step {last.step + 1}"


def grown_before(record: StepRecord, origin: FirstBad, last: LastLook | None) -> str:
    """Say which output was the first to be far above its last look before a forward's origin.

    What ends as a NaN in a norm or a softmax has often begun as a number that is far too large: a
    flipped bit of a weight, a step of the optimizer that was too long.
    """
    own = record.sampled and origin.step == record.step and origin is record.first_bad
    if not own or origin.phase != "forward" or origin.kind not in _FORWARD or last is None:
        return ""
    key = (origin.fqn, origin.kind, origin.leaf)
    row = next((i for i, site in enumerate(record.sites) if site.key == key), 0)
    fine = last.observed & ~last.bad
    at_last = zip(last.sites, last.largest, fine, strict=True)
    was = {site.key: float(largest) for site, largest, known in at_last if known}
    largest, bad = statistic_of(record, "abs_max"), _bad_rows(record)
    for site, now, is_bad in zip(record.sites[:row], largest, bad, strict=False):
        before = was.get(site.key, math.nan)
        if site.kind == "output" and not is_bad and now > GROWN * before > 0:
            return (
                f"; before it the output of {site.fqn or 'the model'} reached {now:.3g}, and was "
                f"at most {before:.3g} at step {last.step}: look there first"
            )
    return ""


def _is_seen(record: StepRecord, origin: FirstBad) -> bool:
    """Whether an origin has reached what is looked at in each step, sampled or not."""
    if not all(map(math.isfinite, scalars(record, "loss"))):
        return True
    watched = ("param",) if origin.kind == "grad" else ("grad_local", "grad")
    bad = _bad_rows(record)
    return any(
        site.kind in watched or (site.kind == "output" and not site.fqn)
        for row, site in enumerate(record.sites)
        if bad[row]
    )


def _bad_rows(record: StepRecord) -> NDArray[np.bool_]:
    """Return which rows have elements that are not finite."""
    bad: NDArray[np.bool_] = record.counts[:, NONFINITE].sum(axis=1) > 0
    return bad
