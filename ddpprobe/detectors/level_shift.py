"""`level_shift`: loss, gradients or outputs move to another level at once, and stay there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddpprobe.detectors.held_batches import HeldBatches
from ddpprobe.detectors.history import LARGEST_DEX
from ddpprobe.detectors.level_window import LevelWindow
from ddpprobe.detectors.loss import PositiveLoss, mean_losses
from ddpprobe.detectors.rank_scalars import largest
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.settled_sizes import SettledSizes
from ddpprobe.detectors.sites_of_kind import Floats, SitesOfKind
from ddpprobe.detectors.sound_steps import SoundStepsDetector
from ddpprobe.detectors.subtrees import common_module, named
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.step import LEARNING_RATE, TRAINABLE, TRAINING, Anomaly, StepRecord

# So few values are enough where a shift is so many times as large, in decades.
QUICK, QUICK_BLOCKS, QUICK_TIMES = 4, 8, 2.0
# Or so few blocks before them, so many steps after the first, where a shift is so many times as
# large and so clear: a run that is sampled at every tenth step has no more in its first 360. Once
# there are more, it must be clearer: of few values chance alone makes a shift more often, and a run
# that goes on for long meets it.
EARLY_BLOCKS, EARLY_STEPS = 3, 100
EARLY_TOGETHER, EARLY_SHARE = (1.5, 6.0), (6.0, 6.0)
EARLY_LATER = 2.0  # times as clear
# In decades: what a loop changes on purpose explains a shift. The learning rate, how many
# parameters are trained, which share of the modules is in training mode (norms that are put into
# evaluation mode; `mode_flip` tells it), and how many elements all outputs have (the size of a
# batch).
MEANT = np.array([0.04, 1e-6, 1e-6, 0.1])
# A loss is of every step, and rises at once: what was changed more than so many blocks before does
# not explain that; nor does a learning rate that falls no faster than so many times its usual fall.
LATELY, AT_ONCE = 3, 3.0
# Decades by which a loss falls, and how clearly, before that is another loss. Of 100 healthy runs
# of unlike kinds none has more than 0.33, nor is 2.7 times as clear.
FALL, FALL_CLEAR = 0.7, 5.0
# A loss that has been zero or negative is judged as it is, not by its logarithm: it must move so
# many times as far as all that came before it in the window lies apart, and so clearly. Of 16
# healthy runs (actors, critics, policy gradients, energies) the largest are 0.72 and 2.9; of ten
# with a reward that is wrong, 2.2 and 10.6 are the smallest.
SIGNED_TIMES, SIGNED_CLEAR = 1.5, 6.0
NUMBERS = (
    ("loss", "forward"),
    ("gradient norm", "backward"),
    ("gradient norm by loss", "backward"),
)
# Of one module or parameter: kind of site, phase.
RMS, SHARE = "rms of the output", "share of the gradient norm"
PLACES = {RMS: ("output", "forward"), SHARE: ("grad", "backward")}
FEWEST_TOGETHER = 4  # outputs that must move together: fewer may be one and those after it


@dataclass(frozen=True, slots=True)
class _Shift:
    """One series that has shifted: `place` of it, its last `values`; the rest as in `Shifts`.

    `signed`: the medians before and now, of a number that has no logarithm.
    """

    place: int
    values: int
    size: float
    clear: float
    certain: float
    signed: tuple[float, float] | None = None


class LevelShift(SoundStepsDetector):
    """Warns when a number of the run has moved to another level at once and stays there.

    Other data, other labels, a loss that is scaled otherwise, weights that were loaded, a module
    that computes something else. Judged are the loss of every step, downwards only where it falls
    to a fifth or less, and, on sampled steps, the gradient norm, upwards only, the gradient norm
    divided by the loss, the rms of each module's output, and the share that each parameter has of
    the gradient norm. All of the last values must lie beyond all of those before, and the step
    between them must be larger than any before it. Nothing is said where the learning rate, the
    number of trained parameters, the share of modules in training mode, the size of all outputs
    together, or that of one output that is the same for a while before and after has changed
    meanwhile; of the loss, if that was lately, and no rate that falls as it always does. Of several
    steps on one batch the first alone is looked at, but for the loss.

    Args:
        loss_ratio: how many times the loss of the block before.
        norm_ratio: the same of the gradient norm, and of it by the loss.
        output_ratio: the same of the output of one module among many, and of a parameter's share.
        together_ratio: the same of outputs, where half of all move in one direction.
        clear: how many times the largest step between two blocks before it.
        by_loss_clear: the same of the gradient norm by the loss.
        output_clear: the same of one output, and of a parameter's share.
        recent: values of a block; all of the last block must lie beyond those before.
        blocks: so many blocks before it are compared with.
        quiet_steps: steps without a shift after which the next one is told.
    """

    name = "level_shift"
    title = "A number moved to another level"

    def __init__(
        self, *, loss_ratio: float = 1.12, norm_ratio: float = 1.4, output_ratio: float = 2.0,
        together_ratio: float = 1.2, clear: float = 3.0, by_loss_clear: float = 4.0,
        output_clear: float = 10.0, recent: int = 8, blocks: int = 6, quiet_steps: int = 100,
    ) -> None:  # fmt: skip
        above_zero(
            loss_ratio=loss_ratio, norm_ratio=norm_ratio, output_ratio=output_ratio,
            together_ratio=together_ratio, clear=clear, by_loss_clear=by_loss_clear,
            output_clear=output_clear,
        )  # fmt: skip
        at_least(1, recent=recent)
        at_least(2, blocks=blocks)
        at_least(0, quiet_steps=quiet_steps)
        self._of_loss = math.log10(loss_ratio), clear
        self._of_norm = math.log10(norm_ratio), clear
        self._together_dex = math.log10(together_ratio)
        self._of_output = math.log10(output_ratio), output_clear
        self._by_loss_clear = by_loss_clear
        self._recent, self._blocks, self._quiet = recent, blocks, quiet_steps
        self._reset()

    def _is_about(self, record: StepRecord) -> bool:
        """Whether it looks at this record: also at one that is there for its losses alone."""
        return not record.partial

    def _reset(self) -> None:
        length = max(self._recent * (self._blocks + 1), QUICK * (QUICK_BLOCKS + 1))
        self._loss = PositiveLoss(whole=True)
        self._losses = LevelWindow(length, of_batches=True)
        self._norms, self._meant = LevelWindow(length), LevelWindow(length)
        self._signed = LevelWindow(length, least_noise=0.0)
        self._rms, self._shares = LevelWindow(length), LevelWindow(length)
        self._sizes = SettledSizes(length)
        self._held = HeldBatches()
        self._outputs, self._gradients = SitesOfKind("output"), SitesOfKind("grad")
        self._telling = Telling(self._quiet)
        self._begun: int | None = None  # the first step
        self._late = False  # it is long after

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        self._begun = record.step if self._begun is None else self._begun
        self._late = record.step - self._begun >= EARLY_STEPS
        loss, of_loss = self._judged_loss(record)
        numbers: dict[int, _Shift] = {}
        places: dict[str, list[_Shift]] = {}
        again = record.sampled and self._held.again(record)
        sound = record.sampled and self._is_sound(record) and not again
        if sound and not record.skipped and not record.missing:
            norms = self._gradients.read(record, "norm")
            norm = float(np.sqrt(np.nansum(np.square(norms))))
            by_loss = norm / loss if loss > 0 else math.nan
            self._norms.push(_logs([norm, by_loss]), record.step)
            elements = self._outputs.read(record, "numel")
            self._sizes.push(_logs(elements), record.step)
            chosen = [largest(record, name) for name in (LEARNING_RATE, TRAINABLE, TRAINING)]
            self._meant.push(_logs([*chosen, float(np.nansum(elements))]), record.step)
            for shift in self._found(self._norms, *self._of_norm):
                if shift.certain >= self._by_loss_clear if shift.place else shift.size > 0:
                    numbers[1 + shift.place] = shift
            places = self._shifted_places(record, norms, norm)
        meant = bool(of_loss or numbers or places) and self._is_meant()
        if meant:
            places, numbers = {}, {}
        if of_loss is not None and not self._loss_is_meant(also=meant):
            numbers[0] = of_loss
        if not (numbers or places):
            return []
        return [self._verdict(record, numbers, places)] if self._telling.due(record.step) else []

    def _judged_loss(self, record: StepRecord) -> tuple[float, _Shift | None]:
        """Return the loss of the record's own step, if it has a logarithm, and what has shifted."""
        loss, found = math.nan, None
        for step, value in self._loss.read(record):
            self._losses.push(_logs([value]), step)
            for shift in self._found(self._losses, *self._of_loss):
                # One that falls is what training is for, but not so far at once.
                if shift.size > 0 or (shift.size <= -FALL and shift.certain >= FALL_CLEAR):
                    found = shift
            loss = value if step == record.step else math.nan
        for step, value in mean_losses(record, whole=True):
            self._signed.push(np.array([value]), step)
            if self._loss.over:
                found = self._signed_shift() or found
        return loss, found

    def _signed_shift(self) -> _Shift | None:
        """Return the shift of a loss that has been zero or negative, if it is far and clear."""
        for values, blocks in ((self._recent, self._blocks), (QUICK, QUICK_BLOCKS)):
            shifts = self._signed.shifts(values, blocks)
            if not len(shifts.places):
                continue
            past = self._signed.last(values * (blocks + 1))[:, 0]
            size, clear, spread = shifts.size[0], shifts.clear[0], np.ptp(past[:-values])
            if abs(size) >= SIGNED_TIMES * spread > 0 and clear >= SIGNED_CLEAR:
                now = float(np.median(past[-values:]))
                certain = float(shifts.certain[0])
                return _Shift(
                    0, values, float(size), float(clear), certain, (now - float(size), now)
                )
        return None

    def _is_meant(self) -> bool:
        """Whether the loop has changed in the window what explains a shift."""
        moved = (self._meant.largest_move(QUICK) > MEANT).any()
        return bool(moved) or self._sizes.have_moved()

    def _loss_is_meant(self, *, also: bool) -> bool:
        """Whether a loss that has risen has risen by what the loop changed.

        Args:
            also: something explains what is seen on sampled steps alone.
        """
        since = self._losses.step_of(LATELY * self._recent)
        if self._sizes.have_moved(since, least_now=1):  # one look may be all since then
            return True
        if not also:
            return False
        lately = self._meant.values_since(since)
        rise = np.fmax.reduce(lately - np.fmin.accumulate(lately), axis=0, initial=0.0)
        fall = np.fmax.reduce(np.fmax.accumulate(lately) - lately, axis=0, initial=0.0)
        # Of the learning rate, from look to look.
        falls, of_late = (
            -np.diff(values[:, 0]) for values in (self._meant.values_since(-math.inf), lately)
        )
        usual = np.median(falls[np.isfinite(falls)]) if np.isfinite(falls).any() else 0.0
        if np.fmax.reduce(of_late, initial=0.0) <= AT_ONCE * usual:
            fall[0] = 0.0
        return bool((np.fmax(rise, fall) > MEANT).any())

    def _shifted_places(
        self, record: StepRecord, norms: Floats, norm: float
    ) -> dict[str, list[_Shift]]:
        """Return what has shifted at single modules and parameters, by what of them."""
        rms = _logs(self._outputs.read(record, "rms"))
        self._rms.push(rms, record.step)
        self._shares.push(_logs(norms) - _logs([norm]), record.step)
        found = {
            RMS: self._shifted_outputs(int(np.isfinite(rms).sum())),
            SHARE: self._found(self._shares, *self._of_output, EARLY_SHARE),
        }
        return {what: shifts for what, shifts in found.items() if shifts}

    def _shifted_outputs(self, known: int) -> list[_Shift]:
        """Return the outputs that have shifted: one far and clearly, or half of them together."""
        some = self._found(self._rms, self._together_dex, self._of_norm[1], EARLY_TOGETHER)
        for way in (1, -1):
            same = [shift for shift in some if way * shift.size > 0]
            if len(same) >= max(FEWEST_TOGETHER, known / 2):
                return same
        return self._found(self._rms, *self._of_output)

    def _found(
        self, window: LevelWindow, dex: float, clear: float,
        early: tuple[float, float] | None = None,
    ) -> list[_Shift]:  # fmt: skip
        """Return the series of a window that have shifted, far and clearly enough.

        `early`: how many times as far, and as clearly, where there are few values.
        """
        tests = [
            (self._recent, self._blocks, 1.0, clear),
            (QUICK, QUICK_BLOCKS, QUICK_TIMES, clear),
        ]
        if early is not None and self._late:
            times, least = early
            more = EARLY_LATER if window.holds(QUICK * (QUICK_BLOCKS + 1)) else 1.0
            tests.append((QUICK, EARLY_BLOCKS, times, more * least))
        found: dict[int, _Shift] = {}
        for values, blocks, times, least in tests:
            shifts = window.shifts(values, blocks)
            for at, place in enumerate(shifts.places.tolist()):
                size, certain = float(shifts.size[at]), float(shifts.certain[at])
                if abs(size) >= times * dex and certain >= least:
                    shift = _Shift(place, values, size, float(shifts.clear[at]), certain)
                    found.setdefault(place, shift)
        return list(found.values())

    def _verdict(
        self, record: StepRecord, numbers: dict[int, _Shift], places: dict[str, list[_Shift]]
    ) -> Anomaly:
        """Return what is to be said; the first module in execution order stands for all else."""
        module = kind = None
        also: list[str] = []
        if places:
            what, shifts = next(iter(places.items()))
            kind, phase = PLACES[what]
            sites = self._outputs if kind == "output" else self._gradients
            by_place = {shift.place: shift for shift in shifts}
            first, *others = [p for p in sites.order().tolist() if p in by_place]
            shift, module = by_place[first], sites.fqns[first]
            if what == SHARE:  # all shares move where one of them is large
                owners = [sites.fqns[p].rpartition(".")[0] for p in by_place]
                module = common_module(owners) or None
            also += [f"that of {named([sites.fqns[p] for p in others])}"] if others else []
        else:
            number = min(numbers)
            shift, (what, phase) = numbers.pop(number), NUMBERS[number]
        also += [NUMBERS[number][0] for number in sorted(numbers)]
        joined = f"; with it {', '.join(also)}" if also else ""
        of = "" if what == "loss" else "sampled "
        level: dict[str, float]
        if shift.signed is None:
            level = {"ratio": 10.0 ** max(-LARGEST_DEX, min(LARGEST_DEX, shift.size))}
            moved = _times(level["ratio"])
        else:
            level = dict(zip(("before", "now"), shift.signed, strict=True))
            moved = f"about {level['now']:.3g}, not {level['before']:.3g} as"
        message = (
            f"{what} has been {moved} before, at each of the last {shift.values} {of}"
            f"steps: {_how_clear(shift.clear)}{joined}. No change "
            "of learning rate or sizes explains it; unless another anomaly does, look at the data, "
            "the labels, the scale of the loss, and what was loaded"
        )
        values = {
            **level,
            **({"clear": shift.clear} if math.isfinite(shift.clear) else {}),
            "values": shift.values,
            "outputs": len(places.get(RMS, [])),
        }
        return self.anomaly(record, "warn", message, values, module=module, kind=kind, phase=phase)


def _how_clear(clear: float) -> str:
    """Return how far a number has moved; infinite: its level never did before."""
    if not math.isfinite(clear):
        return "its level had not moved at all in its window"
    return f"{clear:.3g} x as far as it ever moved in its window"


def _times(ratio: float) -> str:
    return f"{ratio:.3g} x its level" if ratio > 1 else f"{1 / ratio:.3g} x below its level"


def _logs(numbers: Sequence[float] | Floats) -> Floats:
    """Return log10 of numbers [n]; NaN where there is none."""
    given = np.asarray(numbers, np.float64)
    known = np.isfinite(given) & (given > 0)
    return np.log10(given, out=np.full(given.shape, np.nan), where=known)
