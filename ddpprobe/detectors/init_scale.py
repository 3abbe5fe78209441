"""`init_scale`: a layer, or what a model returns, begins too large; or a layer with one number."""

from __future__ import annotations

import numpy as np

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.first_outputs import FirstOutputs, first_outputs
from ddpprobe.detectors.loss import mean_losses
from ddpprobe.detectors.rank_scalars import largest
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.sites_of_kind import Beside, Floats, SitesOfKind
from ddpprobe.detectors.subtrees import and_also
from ddpprobe.records.step import LEARNING_RATE, Anomaly, StepRecord

ALIKE = 1e-6  # relative: of float32
# Rows are taken after the first step, which has moved each by another bit. No random start, and
# nothing that was trained, lies so close together where there are so many.
NEARLY_ALIKE, ENOUGH = 0.05, 64
FROM_ZERO = 1e-3  # share of a weight that was there before the step, if rounding alone is


class InitScale(SampledDetector):
    """Warns when a layer's weights are far too large at the first look, also beside others'.

    Judged is the gain: the rms of a weight, times the root of its number of inputs. That number is
    the weight's elements by its bias's, so a layer without a bias is not judged, nor is a norm. All
    common ways to begin have a gain of 0.5 to 2 (torch's default 0.58, Glorot about 1, Kaiming's
    for a ReLU 1.41); where weights were trained before, it is the layers beside it that count. A
    layer all of whose weights are about the same number, and not 0, is told as well: its units get
    the same gradient, and stay alike.

    So is a model that begins sure of wrong answers: the logits of its cross-entropy spread widely
    at the first step, the loss is that of guesses by them, and falls to half within some steps,
    which go into making the logits smaller. A model that was trained before has such logits and a
    small loss.

    Args:
        gain: above which a layer is too large.
        ratio: how many times the median gain of the others it must be.
        others: judged layers without which there is no verdict.
        deviation: of the logits at the first step, above which they spread widely.
        by_guess: times the deviation, above which the loss is that of guesses.
        within: steps in which the loss must fall to half.
    """

    name = "init_scale"
    title = "A layer begins too large"

    def __init__(
        self, *, gain: float = 6.0, ratio: float = 6.0, others: int = 2, deviation: float = 6.0,
        by_guess: float = 1.2, within: int = 50,
    ) -> None:  # fmt: skip
        above_zero(gain=gain, ratio=ratio, deviation=deviation, by_guess=by_guess)
        at_least(1, others=others, within=within)
        self._gain, self._ratio, self._others = gain, ratio, others
        self._deviation, self._by_guess, self._within = deviation, by_guess, within
        self._begin()

    def _reset(self) -> None:
        """Forget nothing: what a weight began with stays, whatever is announced."""

    def _begin(self) -> None:
        self._weights = SitesOfKind("param")
        self._changes = Beside(self._weights, "update")
        self._pairs: list[tuple[int, int]] = []  # places of a weight and its bias
        self._paired = 0  # parameters among which pairs were looked for
        self._first: dict[int, float] = {}  # place of a weight -> its gain at the first look
        self._begun: int | None = None  # the first step
        self._sure: FirstOutputs | None = None  # of wrong answers, in that step

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly, for all layers first seen in it."""
        return self._layers(record) or self._outputs(record)

    def _outputs(self, record: StepRecord) -> list[Anomaly]:
        if self._begun is None:
            self._begun, first = record.step, first_outputs(record)
            self._sure = first if first is not None and self._is_sure(first) else None
            return []
        sure, passed = self._sure, record.step - self._begun
        if sure is None or passed > self._within:
            return []
        loss = min((loss for _, loss in mean_losses(record, whole=True)), default=sure.loss)
        if loss > sure.loss / 2:
            return []
        self._sure = None
        message = (
            f"the model began sure of wrong answers: at step {self._begun} its logits had a "
            f"standard deviation of {sure.deviation:.3g} and the loss was {sure.loss:.3g}, after "
            f"{passed} steps it is {loss:.3g}: these went into making the logits smaller; begin "
            "their layer smaller (a head that has the weights of an embedding begins as that does)"
        )
        values = {"deviation": sure.deviation, "loss_first": sure.loss, "loss": loss}
        told = self.anomaly(
            record, "warn", message, values, module=sure.module, kind="output", phase="forward"
        )
        return [told]

    def _is_sure(self, first: FirstOutputs) -> bool:
        spread = first.deviation
        return spread >= self._deviation and first.loss >= self._by_guess * spread

    def _layers(self, record: StepRecord) -> list[Anomaly]:
        if record.missing:  # of what is sharded only a part is there
            return []
        rms = self._weights.read(record, "rms")
        self._pair()
        fresh = [pair for pair in self._pairs if pair[0] not in self._first]
        if not fresh:
            return []
        numel = self._weights.read(record, "numel")
        alike = self._alike(record, fresh, numel)
        for weight, bias in fresh:
            inputs = numel[weight] / numel[bias] if numel[bias] > 0 else np.nan
            gain = rms[weight] * np.sqrt(inputs)
            if inputs > 1 and gain > 0:  # NaN is neither; what begins at zero is looked at again
                self._first[weight] = float(gain)
        return alike or self._verdict(record, [w for w, _ in fresh if w in self._first])

    def _alike(
        self, record: StepRecord, fresh: list[tuple[int, int]], numel: Floats
    ) -> list[Anomaly]:
        low, high = (self._weights.read(record, stat) for stat in ("min", "max"))
        whole = np.abs(low) > self._moved_from_zero(record)
        apart = (high - low) / np.where(whole, np.abs(low), np.nan)  # NaN: not alike
        same = [
            self._weights.fqns[w]
            for w, b in fresh
            if numel[w] > numel[b] and apart[w] <= (NEARLY_ALIKE if numel[w] >= ENOUGH else ALIKE)
        ]
        if not same:
            return []
        others = and_also(same[1:])
        message = (
            f"all of its weights are about the same number at the first look{others}: the units "
            "of such a layer get much the same gradient and stay alike; give it a random "
            "initialization"
        )
        values = {"layers": len(same)}
        return [self.anomaly(record, "warn", message, values, module=same[0], kind="param")]

    def _moved_from_zero(self, record: StepRecord) -> Floats:
        """Return up to which magnitude weights [n] may have begun at zero.

        Adam makes one number of these, if their gradients have one sign. In the first step what
        they were before it is known: it is the weight less what the step changed.
        """
        steps = record.step - (record.step if self._begun is None else self._begun) + 1
        total, changed = self._weights.read(record, "sum"), self._changes.read(record, "sum")
        rate = 2 * steps * np.nan_to_num(largest(record, LEARNING_RATE))
        known = np.isfinite(changed) & (steps == 1)
        zero = np.abs(total - changed) <= FROM_ZERO * np.abs(total)
        return np.where(known, np.where(zero, np.inf, 0.0), rate)

    def _pair(self) -> None:
        fqns = self._weights.fqns
        if len(fqns) == self._paired:
            return
        self._paired, place = len(fqns), {fqn: i for i, fqn in enumerate(fqns)}
        self._pairs = []
        for weight, fqn in enumerate(fqns):
            module, _, name = fqn.rpartition(".")
            beside = ".".join(filter(None, (module, name.replace("weight", "bias"))))
            if beside != fqn and beside in place:
                self._pairs.append((weight, place[beside]))

    def _verdict(self, record: StepRecord, fresh: list[int]) -> list[Anomaly]:
        large = []
        for weight in fresh:
            others = [g for w, g in self._first.items() if w != weight]
            if len(others) < self._others or self._first[weight] <= self._gain:
                continue
            if self._first[weight] > self._ratio * float(np.median(others)):
                large.append(weight)
        if not large:
            return []
        large.sort(key=lambda w: -self._first[w])
        worst = large[0]
        usual = float(np.median([g for w, g in self._first.items() if w != worst]))
        fqns = [self._weights.fqns[w] for w in large]
        others_named = and_also(fqns[1:])
        message = (
            f"its gain (rms of the weight x root of its inputs) is {self._first[worst]:.3g} at the "
            f"first look, where that of {len(self._first) - 1} other layers is {usual:.3g} "
            f"(median){others_named}: look at its initialization, or at what was loaded into it"
        )
        values = {"gain": self._first[worst], "others": usual, "layers": len(large)}
        return [self.anomaly(record, "warn", message, values, module=fqns[0], kind="param")]
