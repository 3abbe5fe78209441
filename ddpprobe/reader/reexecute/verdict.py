"""What a re-execution says beside what was recorded: does the fault repeat, and what kind is it?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ddpprobe.reader.reexecute.call import Outcome
from ddpprobe.reader.reexecute.op_watch import BACKWARD, FORWARD, Op, TensorFacts, facts
from ddpprobe.reader.reexecute.scene import AUTOCAST, Scene, Tensors

# Another order of the same additions (threads, another device) moves a result by a few units in
# the last place of its largest element.
ROUNDING_UNITS = 32

REPEATS, NOT_REPRODUCIBLE, CAME_IN = "repeats", "not reproducible", "came in"
AGREES, ONLY_NOW, UNCLEAR = "agrees", "only now", "unclear"
SAYS: Mapping[str, str] = {
    REPEATS: "the fault repeats: software",
    NOT_REPRODUCIBLE: "not reproducible: hardware, a race, or state outside of the module",
    CAME_IN: "the fault came in from outside of the module",
    AGREES: "no fault: the module gives what it gave in the run",
    ONLY_NOW: "a fault that the run had not: it was built otherwise, or runs on another device",
    UNCLEAR: "it cannot be told",
}


@dataclass(frozen=True, slots=True)
class Compared:
    """One tensor of the run and of the re-execution.

    Attributes:
        kind: `output` or `grad`.
        name: the leaf of an output, the FQN of a gradient.
        recorded, now: both.
        differing: elements that differ in any bit; two NaNs are equal.
        largest: largest absolute difference of elements finite in both.
        allowed: what rounding may make of it: `ROUNDING_UNITS` of the shortest type involved.
    """

    kind: str
    name: str
    recorded: TensorFacts
    now: TensorFacts
    differing: int
    largest: float
    allowed: float

    @property
    def bitwise(self) -> bool:
        """Whether every element is the same."""
        return not self.differing

    @property
    def within(self) -> bool:
        """Whether rounding explains all of the difference."""
        same = (self.recorded.nan, self.recorded.inf) == (self.now.nan, self.now.inf)
        return self.bitwise or (same and self.largest <= self.allowed)


@dataclass(frozen=True, slots=True)
class ExecutionVerdict:
    """The answer.

    Attributes:
        word: a key of `SAYS`.
        why: what it rests on, in a sentence.
        phase: in which the fault is: `forward`, `backward`; None without one.
        op: the first bad operator of that phase, if one was found.
        compared: the tensors side by side.
        double: what float64 says of a fault that repeats: `overflow`, `bad maths`, or None.
        notes: what limits the verdict.
    """

    word: str
    why: str
    phase: str | None
    op: Op | None
    compared: tuple[Compared, ...]
    double: str | None
    notes: tuple[str, ...]


def judge(
    scene: Scene, now: Outcome, double: Outcome | None, *, bad_before: Mapping[str, bool | None]
) -> ExecutionVerdict:
    """Compare what was recorded with what came out now.

    Args:
        scene: the recorded call.
        now: the re-execution in the run's own types.
        double: the one in float64, if there was one.
        bad_before: phase -> whether this rank's record of the step shows something non-finite that
            the module made in it; None: the record does not say.
    """
    outputs = [
        compare("output", leaf, told, now.outputs[leaf], _shortest(scene))
        for leaf, told in scene.outputs.items()
        if leaf in now.outputs and now.outputs[leaf].shape == told.shape
    ]
    gradients = [
        compare("grad", fqn, told, now.gradients[fqn], _shortest(scene))
        for fqn, told in scene.gradients.items()
        if fqn in now.gradients and now.gradients[fqn].shape == told.shape
    ]
    word, why, phase = _forward(scene, now, outputs, bad_before)
    if word in (AGREES, UNCLEAR) and now.went_back:
        then = _backward(scene, now, bad_before)
        word, why, phase = then or _beside(gradients, (word, why, phase))
    notes = _notes(scene, now, word)
    if word == NOT_REPRODUCIBLE and _drew_unknown(scene, now):
        word = UNCLEAR
        why = f"{why}; but it draws random numbers, whose state before the call was not recorded"
    op = {FORWARD: now.forward_op, BACKWARD: now.backward_op}.get(phase or "")
    kind = _in_double(double, phase) if word in (REPEATS, ONLY_NOW) else None
    return ExecutionVerdict(
        word, why, phase, None if word == CAME_IN else op, (*outputs, *gradients), kind, notes
    )


def compare(kind: str, name: str, stored: Tensor, now: Tensor, shortest: float) -> Compared:
    """Compare two tensors of one shape; `shortest` is the coarsest rounding on the way to them."""
    a, b = stored.detach(), now.detach()
    unit = max(shortest, _unit(stored), _unit(now))
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    a, b = a.double(), b.double()
    same = (a.isnan() & b.isnan()) | ((a == b) & (a.signbit() == b.signbit()))
    known = a.isfinite() & b.isfinite()
    gap = (a - b)[known].abs()
    scale = a[known].abs().amax() if gap.numel() else torch.zeros(())
    return Compared(
        kind,
        name,
        facts(stored),
        facts(now),
        int((~same).sum()),
        float(gap.amax()) if gap.numel() else 0.0,
        ROUNDING_UNITS * unit * float(scale),
    )


Answer = tuple[str, str, str | None]


def _forward(
    scene: Scene, now: Outcome, outputs: list[Compared], told: Mapping[str, bool | None]
) -> Answer:
    was_bad = told[FORWARD]
    if outputs:
        was_bad = any(c.recorded.nan or c.recorded.inf for c in outputs)
    if _finite(now.outputs):
        if was_bad:
            return NOT_REPRODUCIBLE, "the output was not finite in the run, and is now", FORWARD
        return _difference(outputs)
    if now.forward_op is None or not _finite(scene.parameters):
        return CAME_IN, f"{_culprit(scene)} not finite{_whence(scene)}", FORWARD
    if was_bad is False:
        return ONLY_NOW, "the output is not finite now, and was in the run", FORWARD
    both = "the output is not finite, as it was in the run"
    return REPEATS, both if was_bad else "the output is not finite; the run's is not known", FORWARD


def _difference(outputs: list[Compared]) -> Answer:
    """Judge outputs that are finite in both."""
    if not outputs:
        return UNCLEAR, "the output was not recorded; now it is finite", None
    off = [c for c in outputs if not c.within]
    if off:
        one = max(off, key=lambda c: c.largest)
        why = (
            f"{one.differing} of {math.prod(one.now.shape)} elements of the output differ, by up "
            f"to {one.largest:.3g}, where rounding explains {one.allowed:.3g}"
        )
        return NOT_REPRODUCIBLE, why, FORWARD
    how = "bit for bit" if all(c.bitwise for c in outputs) else "within rounding"
    return AGREES, f"the output is the recorded one {how}", None


def _backward(scene: Scene, now: Outcome, told: Mapping[str, bool | None]) -> Answer | None:
    was_bad = told[BACKWARD]
    if _finite(now.gradients) and _finite(now.input_gradients):
        if was_bad and _finite(scene.grad_outputs):
            why = "a gradient was not finite in the run, and is now"
            return NOT_REPRODUCIBLE, why, BACKWARD
        return None
    if now.backward_op is None or not _finite(scene.parameters):
        return CAME_IN, f"{_culprit(scene)} not finite", BACKWARD
    if was_bad is False:
        why = "a gradient is not finite now; this rank's record of the step has none"
        return ONLY_NOW, why, BACKWARD
    known = "both gradients are not finite" if was_bad else "a gradient is not finite"
    return REPEATS, known, BACKWARD


def _beside(gradients: list[Compared], forward: Answer) -> Answer:
    """Judge gradients that are finite in both, beside what the forward says."""
    off = [c for c in gradients if not c.within]
    if forward[0] != AGREES or not off:
        return forward
    one = max(off, key=lambda c: c.largest / max(c.allowed, c.largest * 1e-9))
    more = f", and {len(off) - 1} more do" if len(off) > 1 else ""
    why = (
        f"{forward[1]}, but the gradient of {one.name} differs by up to {one.largest:.3g}, where "
        f"rounding explains {one.allowed:.3g}{more}: a part of it came by another way (a loss on "
        "the weights, a second backward), or one of the two is wrong"
    )
    return UNCLEAR, why, BACKWARD


def _culprit(scene: Scene) -> str:
    """Name the first that went into the call and is not finite."""
    what = {
        "a parameter was": scene.parameters, "an input was": scene.inputs,
        "a buffer was": scene.buffers, "the gradient of the output was": scene.grad_outputs,
    }  # fmt: skip
    found = (text for text, tensors in what.items() if not _finite(tensors))
    return next(found, "something that was not recorded was")


def _whence(scene: Scene) -> str:
    """Say where to look for a bad input: code between modules belongs to the one around them."""
    around = scene.module.rpartition(".")[0] or "the model"
    return f": replay the module that made it, or {around}" if not _finite(scene.inputs) else ""


def _in_double(double: Outcome | None, phase: str | None) -> str | None:
    if double is None:
        return None
    if phase == BACKWARD:
        fine = _finite(double.gradients) and _finite(double.input_gradients)
        return ("overflow" if fine else "bad maths") if double.went_back else None
    return "overflow" if _finite(double.outputs) else "bad maths"


def _drew_unknown(scene: Scene, now: Outcome) -> bool:
    return bool(now.random) and not scene.rng


def _notes(scene: Scene, now: Outcome, word: str) -> tuple[str, ...]:
    notes = list(scene.notes)
    if _drew_unknown(scene, now):
        notes.append(f"random numbers were drawn ({', '.join(now.random)}) from another state")
    if word not in (REPEATS, CAME_IN) and not now.went_back:
        notes.append("no gradient of the output was recorded: the backward was not run")
    return tuple(notes)


def is_finite(tensor: Tensor) -> bool:
    """Whether every element is a number; whole numbers always are."""
    found = facts(tensor) if _has_numbers(tensor) else None
    return found is None or not (found.nan or found.inf)


def _finite(tensors: Tensors) -> bool:
    return all(map(is_finite, tensors.values()))


def _has_numbers(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _shortest(scene: Scene) -> float:
    """Return the coarsest rounding unit that the call itself works with."""
    casts = [torch.finfo(AUTOCAST[name]).eps for name in scene.autocast.values()]
    own = [_unit(t) for t in (*scene.inputs.values(), *scene.parameters.values())]
    return max((*casts, *own), default=0.0)


def _unit(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if _has_numbers(tensor) else 0.0
