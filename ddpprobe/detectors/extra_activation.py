"""An activation that outputs went through before a loss that has its own."""

from __future__ import annotations

import math

from ddpprobe.detectors.enough_looks import EnoughLooks
from ddpprobe.detectors.first_outputs import gradient_rows, stat_of
from ddpprobe.detectors.rank_scalars import scalars
from ddpprobe.records.step import EXTRA_ACTIVATION, EXTRA_ACTIVATIONS, StepRecord

# The sigmoid of a model: logits may lie between 0 and 1 as well, by chance, until they have moved.
STEPS, WIDE = 50, 0.5  # for which they must have lain there, and from which number to which
_INSIDE = " inside"  # of the model
_OWN = {
    "binary": "binary_cross_entropy_with_logits, which has a sigmoid",
    "classes": "a cross-entropy, which has a softmax",
}


class ExtraActivation:
    """For how many looks the gradient of what a model returns has shown one such activation.

    Looks at which it would make no difference are passed over.
    """

    def __init__(self) -> None:
        self._pair: tuple[str, str] | None = None
        self._looks, self._since = 0, -1
        self._low, self._high = math.inf, -math.inf  # of what the model returned at these

    def take(self, record: StepRecord) -> None:
        """Take the next sampled step."""
        places = [place for place in scalars(record, EXTRA_ACTIVATION) if math.isfinite(place)]
        if not places:
            return
        at = int(places[0]) - 1
        one = len(set(places)) == 1 and 0 <= at < len(EXTRA_ACTIVATIONS)
        pair = EXTRA_ACTIVATIONS[at] if one else None
        if pair != self._pair:
            self._pair, self._looks, self._since = pair, 0, record.step
            self._low, self._high = math.inf, -math.inf
        self._looks += 1
        if pair is not None and pair[0].endswith(_INSIDE):
            low, high = _range(record)
            self._low, self._high = min(self._low, low), max(self._high, high)

    def told(self, step: int, enough: EnoughLooks) -> tuple[int, str] | None:
        """Return how many looks have shown it, if that are enough, and what is to be said."""
        span = step - self._since
        if self._pair is None or not enough.reached(self._looks, span, differ=False):
            return None
        activation, loss = self._pair
        inside = activation.endswith(_INSIDE)
        if inside and (span < STEPS or self._high - self._low < WIDE):
            return None
        activation = activation.removesuffix(_INSIDE)
        goes = "has been" if inside else "goes"
        what = f"what the model returns {goes} through a {activation}"
        return self._looks, (
            f"{what} before {_OWN[loss]} of its own: give the loss what the last layer returns, as "
            "it is"
        )


def _range(record: StepRecord) -> tuple[float, float]:
    """Return the smallest and the largest number of the output whose gradient is looked at."""
    for _, row, _ in gradient_rows(record):
        return stat_of(record, row, "min"), stat_of(record, row, "max")
    return math.inf, -math.inf
