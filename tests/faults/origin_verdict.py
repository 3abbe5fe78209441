"""Whether what ddpprobe says of where a NaN began is right, undecided or wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.faults.origin_plans import BETWEEN, Plan

RIGHT, UNDECIDED, WRONG = "right", "undecided", "wrong"
_SHARED = ("lr_inf", "eps_zero")  # the same happens on all ranks


@dataclass(frozen=True, slots=True)
class Truth:
    """What may be said: the exact ranks and modules, and whether None may stand for them."""

    ranks: tuple[int | None, ...]
    modules: tuple[str, ...]
    phases: tuple[str, ...]
    may_be_unknown: bool
    nearest: tuple[str, ...] = ()  # whose parameters are as near as an unsampled step can tell


def truth(plan: Plan) -> Truth:
    """Return what is true of a plan; modules may also be named by one of their parameters."""
    origin = plan.origin
    modules: tuple[str, ...] = (origin.module,)
    ranks: tuple[int | None, ...] = (plan.rank,)
    phases: tuple[str, ...] = ("forward",)
    outside = origin.kind in BETWEEN
    match origin.kind:
        case "grad" | "autograd":
            phases = ("backward",)
        case "lr_inf" | "reduction":
            phases, outside = ("step",), True  # of all parameters
            modules = _ALL
        case "eps_zero" | "exp_avg":
            phases = ("step",)
        case "param":
            # Between two steps: after the one, or in the next one's forward.
            phases = ("forward", "step")
        case "buffer":
            # DDP gives rank 0's buffers to all of them.
            ranks = (0, None) if plan.wrap == "ddp" else ranks
    if origin.kind in _SHARED and plan.world > 1:
        ranks = (*range(plan.world), None)
    if origin.kind == "param" and plan.wrap == "fsdp2":
        # It comes to all ranks by the gather: the one can be told only by its own part.
        ranks = (plan.rank, None)
    near = () if plan.sampled or phases != ("backward",) else _NEAREST.get(origin.module, ())
    return Truth(ranks, modules, phases, outside or not plan.sampled, near)


_NEAREST = {"blocks.1": ("blocks.1.down",)}
_BLOCKS = tuple(f"blocks.{i}.{leaf}" for i in range(3) for leaf in ("norm", "up", "down"))
_ALL = ("embed", *_BLOCKS, "wrap.child", "head")


def judge(plan: Plan, anomalies: Sequence[Mapping[str, Any]], status: int) -> tuple[str, str]:
    """Return right, undecided or wrong, and why.

    Args:
        plan: what was done.
        anomalies: of `ddpprobe anomalies RUN --json`, in their order.
        status: its exit code.
    """
    pages = [a for a in anomalies if a["level"] == "page"]
    if _is_harmless(plan):
        return (WRONG, f"a page: {_told(pages[0])}") if pages else (RIGHT, "")
    numbers = [a for a in pages if a["detector"] == "nonfinite"]
    if _was_seen_by_nobody(plan) and not numbers and status:
        return UNDECIDED, f"nothing is said of a number, exit code {status}"
    if not pages:
        return WRONG, "no page"
    first = pages[0]
    if first["detector"] != "nonfinite":
        return WRONG, f"first is {first['detector']}: {first['message']}"
    return _judge_first(plan, first)


def _is_harmless(plan: Plan) -> bool:
    """Whether there is nothing to page: a scaler skips it, or what is logged is not kept."""
    kind, scaler = plan.origin.kind, plan.origin.scaler
    skipped = kind == "overflow" or (kind == "grad" and scaler)
    return kind == "nothing" or skipped or (kind == "logged_loss" and not plan.sampled)


def _was_seen_by_nobody(plan: Plan) -> bool:
    """Whether the process was gone before any code but the module's could see the number.

    Hooks of modules there are on sampled steps alone, and what is far away is read a step later. It
    may not be called healthy even so.
    """
    return plan.origin.then in ("exit", "kill") and (plan.far or not plan.sampled)


def _judge_first(plan: Plan, first: Mapping[str, Any]) -> tuple[str, str]:
    true, said = truth(plan), _told(first)
    if not first["first_cause"]:
        return WRONG, f"no first cause: {said}"
    if _shows_in_the_next_forward(plan) and "nor whether a parameter was so" in first["message"]:
        late = (first["step"], first["phase"]) == (plan.step + 1, "forward")
        return (UNDECIDED, said) if late else (WRONG, said)
    steps = (plan.step,)
    if plan.origin.kind == "param" and first["phase"] == "step":
        steps = (plan.step - 1, plan.step)
    if first["step"] not in steps or first["phase"] not in true.phases:
        return WRONG, said
    timed = first["phase"] != "step" and plan.origin.kind != "param"
    if timed and first["micro"] != plan.origin.micro:
        return WRONG, f"micro-batch {first['micro']}: {said}"
    unknown = []
    if first["rank"] not in true.ranks:
        if first["rank"] is not None:
            return WRONG, said
        unknown.append("rank")
    if not _names(plan, true, first):
        if first["module"] is not None and not _owners(first) & set(true.nearest):
            return WRONG, said
        unknown.append("module")
    if not unknown or (unknown == ["module"] and plan.origin.kind in BETWEEN):
        return RIGHT, ""
    return (UNDECIDED if true.may_be_unknown else WRONG), f"{', '.join(unknown)} unknown: {said}"


def _shows_in_the_next_forward(plan: Plan) -> bool:
    """Whether nobody looked at the weights in between, as the host cannot."""
    late = ("lr_inf", "eps_zero", "exp_avg", "reduction")
    return plan.far and not plan.sampled and plan.origin.kind in late


def _names(plan: Plan, true: Truth, said: Mapping[str, Any]) -> bool:
    if said["module"] is None or _owners(said) & set(true.modules):
        return said["module"] is not None
    # The next module may be named for what came before it, if that is said.
    told = "between" in str(said["message"]) or said["kind"] == "input"
    return plan.origin.kind in BETWEEN and told


def _owners(said: Mapping[str, Any]) -> set[str]:
    """Return the module that is named, and of a parameter its owner."""
    module = said["module"]
    if module is None:
        return set()
    return {module, module.rpartition(".")[0]} if said["kind"] in _OF_PARAMETERS else {module}


_OF_PARAMETERS = ("param", "grad", "grad_local", "buffer", "optim_state")


def _told(anomaly: Mapping[str, Any]) -> str:
    words = [
        f"{key} {anomaly[key]}" for key in ("step", "micro", "rank", "module", "kind", "phase")
    ]
    return f"{', '.join(words)}: {anomaly['message']}"
