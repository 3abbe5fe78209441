"""Whom the origin of a non-finite value blames, and what is said of one born between forwards."""

from __future__ import annotations

import math

from ddpprobe.records.step import CHECKED, SEVERAL, STATE_KINDS, FirstBad, Site, StepRecord

_FOUND = {
    "param": "the parameter", "buffer": "the buffer", "optim_state": "the optimizer's state",
}  # fmt: skip


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


def born(record: StepRecord, origin: FirstBad, checked: int | None) -> str:
    """Say when something was born that was found behind a step, or before a forward.

    Args:
        record: that the origin came with.
        origin: of one of `STATE_KINDS`.
        checked: the last step behind which all of it was finite, if that is known.
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
        behind = f"behind the backward of step {origin.step} (the reduction, the optimizer)"
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
