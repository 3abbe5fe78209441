"""Whether what ddpprobe says of a death is right, undecided or wrong.

Right is the state, exactly the ranks to blame, and how they died. Undecided is what owns up to not
knowing: more than one candidate with the true one among them, no way of dying, or, where no daemon
saw the deaths, no state. Everything else is wrong, and so is a run that is dead and called healthy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.faults.death_plans import WAITING, Plan

RIGHT, UNDECIDED, WRONG = "right", "undecided", "wrong"
STATES = {
    "signal": "crashed", "exception": "crashed", "exit": "crashed", "stop": "stopped",
    "hang": "hung", "node": "vanished", "orderly": "ended",
}  # fmt: skip
NOT_KNOWN = ("unknown", "vanished")  # what may be said of deaths that nobody saw
# Where a rank is, in the words of its heartbeat and of a verdict.
_PHASES = {
    "data": ("data", "optimizer", "step"), "forward": ("forward",), "backward": ("backward",),
    WAITING: ("backward",), "optimizer": ("optimizer", "step"),
    "between": ("data", "optimizer", "step"),
}  # fmt: skip


def judge(plan: Plan, end: Mapping[str, Any]) -> tuple[str, str]:
    """Return right, undecided or wrong, and why.

    Args:
        plan: what was done.
        end: `end` of `ddpprobe anomalies RUN --json`.
    """
    state, ranks, how = end.get("state"), end.get("ranks"), end.get("how")
    if not isinstance(ranks, list):
        return WRONG, f"ranks are {ranks!r}"
    true = [plan.rank] if plan.rank >= 0 else []
    covered = not ranks or set(true) <= set(ranks)
    if state != STATES[plan.fault]:
        if state == "unknown" or (state in NOT_KNOWN and not plan.watched):
            if covered and (true or not ranks):
                return UNDECIDED, f"{state}, ranks {ranks}"
            return WRONG, f"{state}, but ranks {ranks}"
        if plan.fault == "hang" and plan.daemon != "alive" and (state, ranks) == ("stopped", []):
            return UNDECIDED, "stopped: that it hung before is not known"  # nobody looked
        return WRONG, f"{state}, ranks {ranks}, {how}"
    if ranks != true:
        several = bool(true) and set(true) < set(ranks)
        return (UNDECIDED if several else WRONG), f"{state}, ranks {ranks}, {how}"
    return _of_detail(plan, end)


def _of_detail(plan: Plan, end: Mapping[str, Any]) -> tuple[str, str]:
    how, step, phase = (end.get(key) for key in ("how", "step", "phase"))
    allowed = _ways(plan)
    if how in (None, "", "unknown"):
        if allowed:
            return UNDECIDED, "how is not known"
    elif how == "exit:1" and plan.fault == "exception" and not plan.wrapped:
        return UNDECIDED, "the exception is not named"
    elif plan.fault == "stop":
        if how not in _ways_of_stopping(plan) and how.startswith(("SIG", "exit:")):
            return WRONG, f"how is {how!r}"
    elif allowed and how not in allowed:
        return WRONG, f"how is {how!r}"
    if plan.rank < 0:
        return RIGHT, ""
    # Between two steps: after the one that was ended, or before the one that has not begun.
    steps = {plan.step, plan.step + {"data": -1, "between": 1}.get(plan.phase, 0)}
    if step is not None and step not in steps:
        return WRONG, f"in step {step}"
    if phase is not None and phase not in _PHASES[plan.phase]:
        return WRONG, f"in phase {phase}"
    return RIGHT, ""


def _ways(plan: Plan) -> set[str]:
    """Return the true ways of dying, an empty set where there is no true one."""
    match plan.fault:
        case "exception":
            # A module's own exception may be told by its full name.
            full = {plan.how, f"tests.faults.death_ranks.{plan.how}"}
            return full | {"exit:1"} if plan.wrapped else full
        case "exit":
            return {f"exit:{plan.how.partition(':')[2]}"}
        case "signal":
            return {plan.how}
    return set()


def _ways_of_stopping(plan: Plan) -> set[str]:
    """Return the signal, and the code with which a handler of it exits."""
    return {plan.how, f"exit:{plan.handler.partition(':')[2]}"}
