"""Which deaths there are: each plan is one run of a few ranks, drawn by a seed and its number."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any

# What the rank does to itself, or what is done to it from outside.
OWN_SIGNALS = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")
EXCEPTIONS = (
    "ValueError", "RuntimeError", "KeyError", "ZeroDivisionError", "AssertionError", "OSError",
    "MemoryError", "StopIteration", "ConnectionResetError", "LossDiverged",
)  # fmt: skip
EXITS = ("sys.exit:1", "sys.exit:3", "sys.exit:17", "os._exit:1", "os._exit:5", "os._exit:137")
HANGS = ("sleep", "SIGSTOP")
ENDINGS = ("return", "os._exit:0", "os._exit:1", "SIGABRT", "SIGTERM")
PHASES = ("data", "forward", "backward", "optimizer", "between")
WAITING = "collective"  # in the reduction of the gradients, while the others have not come to it
FAULTS = {
    "signal": 42, "exception": 52, "exit": 30, "stop": 28, "hang": 20, "node": 18, "orderly": 10,
}  # fmt: skip
DAEMONS = {"alive": 52, "stopped": 20, "late": 14, "dead": 14}
LIVED = ("alive", "stopped")
SETTLED = 2  # in step 1 DDP's forward waits for the others: it makes its buckets anew
HANDLERS = ("default", "sys.exit:0", "sys.exit:143", "os._exit:143")


@dataclass(frozen=True, slots=True)
class Plan:
    """One death.

    Attributes:
        number: of the draw.
        world: ranks.
        fault: one of `FAULTS`: a fatal signal; an exception; a chosen exit code; a signal to the
            whole job; a rank that stops; all ranks and the daemon at once; an orderly end.
        how: which of these.
        rank: to which it happens; -1: to all.
        step, phase: where it happens; a signal to the job comes in or after that step.
        daemon: alive; stopped around the deaths; started after them; killed before them.
        launcher: what it does at the first death (of a hang: at its end). "torchrun": SIGTERM to
            the others, SIGKILL to who is left after a grace. "kill": SIGKILL. "idle": nothing.
            "watchdog" (of a hang): SIGABRT to those that wait, as NCCL's does, then as torchrun.
        looks: seconds from the first death until it does that, but for a hang: torchrun looks every
            0.1 s, others hear of it at once.
        handler: what the script's own handler of SIGTERM and SIGINT does.
        wrapped: the script catches what its training raises and says sys.exit(1).
        teardown: seconds from the last word of a failed rank to the end of its process.
        reaped: whether the launcher reaps the dead at once, or only when all are.
        every: of sampled steps.
    """

    number: int
    world: int
    fault: str
    how: str
    rank: int
    step: int
    phase: str
    daemon: str
    launcher: str
    looks: float = 0.0
    handler: str = "default"
    wrapped: bool = False
    teardown: float = 0.6
    reaped: bool = True
    every: int = 2

    @property
    def alone(self) -> bool:
        """Whether a single rank died of its own."""
        return self.fault in ("exception", "exit") or (
            self.fault == "signal" and self.how != "SIGKILL"
        )

    @property
    def watched(self) -> bool:
        """Whether the daemon lived through the deaths."""
        return self.fault != "node" and self.daemon in LIVED

    def as_json(self) -> dict[str, Any]:
        """Return what `Plan(**...)` takes."""
        return asdict(self)

    def __str__(self) -> str:
        who = "all ranks" if self.rank < 0 else f"rank {self.rank}"
        words = f"{self.fault} {self.how} to {who} of {self.world} in step {self.step}"
        words += f" {self.phase}, daemon {self.daemon}, launcher {self.launcher}"
        if self.handler != "default":
            words += f", handler {self.handler}"
        words += f", which looks {self.looks} s later" if self.looks else ""
        return words + (", wrapped" if self.wrapped else "") + f", teardown {self.teardown} s"


def draw(seed: int, number: int) -> Plan:
    """Return the plan of this number; the same for the same seed."""
    rng = random.Random(f"death {seed} {number}")
    world = rng.choice((2, 2, 3, 4))
    fault = _weighted(rng, FAULTS)
    plan = Plan(
        number=number, world=world, fault=fault, how="", rank=rng.randrange(world),
        step=rng.randrange(1, 6), phase=rng.choice(PHASES), daemon=_weighted(rng, DAEMONS),
        launcher=rng.choice(("torchrun", "torchrun", "kill", "idle")),
        handler=rng.choice((*HANDLERS, *["default"] * 4)),
        teardown=rng.choice((0.0, 0.6, 0.6, 0.6, 0.6, 6.0)), reaped=rng.random() < 0.7,
        every=rng.choice((1, 2, 10)),
    )  # fmt: skip
    # By numbers of its own: what else a seed draws is what it was before.
    late = random.Random(f"looks {seed} {number}")
    looks = late.choice((0.0, round(late.uniform(0.01, 0.1), 3)))
    return replace(_fitting(rng, plan), looks=looks)


def _fitting(rng: random.Random, plan: Plan) -> Plan:
    match plan.fault:
        case "signal":
            plan = replace(plan, how=rng.choice((*OWN_SIGNALS, *["SIGKILL"] * 5)))
            waits = plan.how == "SIGKILL" and rng.random() < 0.3
            step = max(plan.step, SETTLED)
            return replace(plan, phase=WAITING, step=step) if waits else plan
        case "exception":
            return replace(plan, how=rng.choice(EXCEPTIONS), wrapped=rng.random() < 0.12)
        case "exit":
            return replace(plan, how=rng.choice(EXITS))
        case "stop":
            how = rng.choice(("SIGTERM", "SIGTERM", "SIGINT"))
            handler = rng.choice((*HANDLERS, "default"))
            launcher = rng.choice(("torchrun", "idle"))
            return replace(plan, how=how, rank=-1, phase="", handler=handler, launcher=launcher)
        case "hang":
            launcher = rng.choice(("torchrun", "kill", "watchdog"))
            phase, step = rng.choice(("data", "forward", "forward")), max(plan.step, SETTLED)
            how = rng.choice(HANGS)
            return replace(plan, how=how, phase=phase, launcher=launcher, step=step)
        case "node":
            return replace(plan, how="SIGKILL", rank=-1, phase="", launcher="idle")
    return replace(plan, how=rng.choice(ENDINGS), rank=-1, phase="", launcher="idle")


def _weighted(rng: random.Random, table: dict[str, int]) -> str:
    return rng.choices([*table], [*table.values()])[0]
