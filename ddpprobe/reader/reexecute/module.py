"""One module of a run executed again from what was captured of it: `ddpprobe replay --step ...`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ddpprobe.errors import PackDamaged, RunError, StoreDamaged, TensorError, UnknownSeries
from ddpprobe.reader.captured_steps import listed
from ddpprobe.reader.reexecute.call import Outcome, execute
from ddpprobe.reader.reexecute.model import build, fill, find
from ddpprobe.reader.reexecute.op_watch import BACKWARD, FORWARD, Op
from ddpprobe.reader.reexecute.scene import scene_of, tensor_of
from ddpprobe.reader.reexecute.verdict import (
    SAYS,
    ExecutionVerdict,
    is_finite,
    judge,
)
from ddpprobe.reader.run import Run
from ddpprobe.reader.tensors import StoredCall
from ddpprobe.records.step import NONFINITE, StepRecord

DOUBLE_SAYS: Mapping[str, str] = {
    "overflow": "finite there: it left the range of its type (overflow)",
    "bad maths": "not finite there either: the mathematics is at fault, not the type",
}


@dataclass(frozen=True, slots=True)
class Which:
    """Which call is wanted; None leaves it open.

    Attributes:
        step, module: of the capture.
        attempt: default: the last that captured the step.
        rank, micro, call: default: the first whose output is not finite, or whose rank an anomaly
            of the step names; else the first there is.
    """

    step: int
    module: str
    attempt: int | None = None
    rank: int | None = None
    micro: int | None = None
    call: int | None = None


@dataclass(frozen=True, slots=True)
class Execution:
    """A re-execution and what it says.

    Attributes:
        stored_call: what was executed.
        device: where.
        verdict: the answer.
        double: the execution in float64, None if it was not asked for or could not be done.
        double_failed: why it could not.
    """

    stored_call: StoredCall
    device: str
    verdict: ExecutionVerdict
    double: Outcome | None
    double_failed: str | None

    @property
    def place(self) -> str:
        """What was executed, in words."""
        of, name = self.stored_call, self.stored_call.module or "(root)"
        call = f" call {of.call}" if of.call else ""
        attempt = f" attempt {of.attempt}" if of.attempt else ""
        return f"step {of.step} micro {of.micro}{call}{attempt} rank {of.rank} {name}"

    @property
    def says(self) -> str:
        """The verdict in a sentence."""
        return SAYS[self.verdict.word]

    @property
    def in_double(self) -> str | None:
        """What float64 says of the fault, in a sentence."""
        if self.double_failed is not None:
            return f"could not be tried: {self.double_failed}"
        return DOUBLE_SAYS.get(self.verdict.double or "")

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        of, verdict = self.stored_call, self.verdict
        return {
            "attempt": of.attempt, "step": of.step, "micro": of.micro, "call": of.call,
            "rank": of.rank, "module": of.module, "class": str(of.about.get("class", "")),
            "device": self.device, "verdict": verdict.word, "says": self.says, "why": verdict.why,
            "phase": verdict.phase, "first_bad_op": _op_json(verdict.op),
            "float64": verdict.double, "float64_failed": self.double_failed,
            "compared": [
                {**asdict(c), "bitwise": c.bitwise, "within_rounding": c.within}
                for c in verdict.compared
            ],
            "notes": list(verdict.notes),
        }  # fmt: skip


def reexecute(run: Run, which: Which, spec: str, device: str, *, in_double: bool) -> Execution:
    """Build the user's module, fill it from a stored call, and call it as the run did.

    Args:
        run: live, ended or crashed.
        which: the call.
        spec: `pkg.mod:fn`, the user's function; their code runs, and nothing of the store's does.
        device: torch's name of a device.
        in_double: try it in float64 as well.

    Raises:
        RunError: what was asked for is not there, or does not fit; the text says what is there.
            Its exit code is 3 where the capture is damaged.
    """
    place = _device(device)
    try:
        stored_call = choose(run, which)
        scene = scene_of(stored_call)
        told = evidence(run, stored_call)
    except TensorError as error:
        raise RunError(str(error), 3 if run.lost else 2) from error
    except (StoreDamaged, PackDamaged) as error:
        raise RunError(f"{run.path}: {error}", 3) from error
    module = find(build(spec), scene)
    notes = fill(module, scene, place, double=False)
    now = execute(module, scene, place)
    double = failed = None
    if in_double:
        try:
            fill(module, scene, place, double=True)
            double = execute(module, scene, place, double=True)
        except RunError as error:  # a type that the module insists on
            failed = str(error)
    scene = scene.noting(*notes)
    return Execution(
        stored_call, device, judge(scene, now, double, bad_before=told), double, failed
    )


def choose(run: Run, which: Which) -> StoredCall:
    """Return the stored call that is wanted.

    Raises:
        RunError: there is none; the text says which there are.
        TensorError: the step or the module was not captured.
    """
    calls = run.capsules(which.step, which.module, which.attempt)
    wanted = {"rank": which.rank, "micro": which.micro, "call": which.call}
    named = {name: value for name, value in wanted.items() if value is not None}
    left = [c for c in calls if all(getattr(c, n) == v for n, v in named.items())]
    if not left:
        there = [f"rank {c.rank} micro {c.micro} call {c.call}" for c in calls]
        asked = " ".join(f"{n} {v}" for n, v in named.items())
        raise RunError(f"no capsule of {asked}; there is {listed(there)}")
    return _guilty(run, left)


def _guilty(run: Run, capsules: list[StoredCall]) -> StoredCall:
    if len(capsules) == 1:
        return capsules[0]
    for stored_call in capsules:
        outputs = [t for (kind, _, _), t in stored_call.tensors.items() if kind == "output"]
        if not all(is_finite(tensor_of(t.read(), t.dtype)) for t in outputs):
            return stored_call
    first = capsules[0]
    for a in run.anomalies():
        if (a.attempt, a.step) == (first.attempt, first.step) and a.rank is not None:
            mine = [c for c in capsules if c.rank == a.rank]
            return next((c for c in mine if c.micro == a.micro), (*mine, first)[0])
    return first


def evidence(run: Run, stored_call: StoredCall) -> dict[str, bool | None]:
    """Return by phase whether the rank's own record shows something bad that the module made.

    None where the step was not sampled, or nothing inside the module reports in that phase.
    """
    try:
        records = run.records(stored_call.rank, stored_call.attempt, after=stored_call.step - 1)
        record = next(iter(records), None)
    except UnknownSeries:  # its tensors are held, and no record of it
        record = None
    if record is None or record.step != stored_call.step or not record.sampled:
        return {FORWARD: None, BACKWARD: None}
    inside = f"{stored_call.module}." if stored_call.module else ""
    first = record.first_bad
    if first is not None and first.step < record.step:
        first = None  # a parameter was bad before all micro-batches
    if first is not None and first.micro > stored_call.micro:
        return {FORWARD: False, BACKWARD: False}  # the rows are sums over micro-batches
    if first is not None and first.micro < stored_call.micro:
        return {FORWARD: None, BACKWARD: None}
    return {
        FORWARD: _has_bad(record, inside, ("output",), stored_call.module),
        # The gradient of the module's own output came from behind it.
        BACKWARD: _has_bad(record, inside, ("grad_output", "grad_local"), None),
    }


def _has_bad(
    record: StepRecord, inside: str, kinds: Iterable[str], itself: str | None
) -> bool | None:
    rows = [
        row
        for row, site in enumerate(record.sites)
        if site.kind in kinds
        and (site.fqn == itself or (site.fqn != "" and site.fqn.startswith(inside)))
    ]
    return bool(record.counts[rows, NONFINITE].any()) if rows else None


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise RunError(f"--device {name}: expected cpu, cuda, or cuda:1")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RunError(f"--device {name}: this torch sees no CUDA device; leave it out for cpu")
    return device


def _op_json(op: Op | None) -> dict[str, Any] | None:
    return asdict(op) if op is not None else None
