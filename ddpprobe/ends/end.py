"""How an attempt ended: its state, who may be the cause, and one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddpprobe.ends.evidence import UNKNOWN

RUNNING, ENDED, STOPPED = "running", "ended", "stopped"
CRASHED, HUNG, VANISHED, UNDECIDED = "crashed", "hung", "vanished", "unknown"
STATES = (RUNNING, ENDED, STOPPED, CRASHED, HUNG, VANISHED, UNDECIDED)
BAD = (CRASHED, HUNG, VANISHED)  # states that are a page


@dataclass(frozen=True, slots=True)
class End:
    """How an attempt ended.

    Attributes:
        state: one of `STATES`.
        ranks: candidates for the cause, ascending; one if it is decided, none if nobody is to
            blame.
        how: of the first candidate: "SIGKILL", "exit:3", "ValueError"; "" if there is nothing.
        step: the optimizer step it happened in; None: not known, or not the same for all.
        phase: in which phase of it, as `STEP_PHASES`; None as `step`.
        message: one sentence.
        grave: it is a page, although its state is `unknown`.
    """

    state: str
    ranks: tuple[int, ...] = ()
    how: str = ""
    step: int | None = None
    phase: str | None = None
    message: str = ""
    grave: bool = False

    @property
    def is_telling(self) -> bool:
        """As the function of this name."""
        return is_telling(self.state, self.how)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "state": self.state, "ranks": list(self.ranks), "how": self.how, "step": self.step,
            "phase": self.phase, "message": self.message,
        }  # fmt: skip


def is_telling(state: str, how: str) -> bool:
    """Whether there is more to say of an `End` than that it goes on, is over, or not known."""
    return state not in {RUNNING, ENDED} and (state in BAD or how != UNKNOWN)


def by_state(counts: Mapping[str, int]) -> dict[str, int]:
    """Return how many attempts ended in each state, those in which none did included."""
    return {state: counts.get(state, 0) for state in STATES if state != RUNNING}


def told(end: Mapping[str, Any], attempt: int | None = None) -> str:
    """Return what people are told of an end, given as `End.to_json`: its state and its message.

    It is empty where there is no more to say than the state. The attempt is named if it is given.
    """
    state, message = end["state"], str(end["message"])
    if not is_telling(state, end["how"]):
        return ""
    which = "" if attempt is None else f"attempt {attempt}: "
    return which + (message if message.startswith(state) else f"{state}: {message}")
