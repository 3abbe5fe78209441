"""Steps of which loss, weights and gradients are as finite as ever: those that can be compared."""

from __future__ import annotations

import math

import numpy as np

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.rank_scalars import scalars
from ddpprobe.detectors.sites_of_kind import SitesOfKind, grown
from ddpprobe.records.step import StepRecord


class SoundSteps:
    """Follows whether a NaN has come into the loss, the weights or the gradients.

    What is zero, lower or alike behind one follows from it. A weight or a gradient that never was
    finite spoils nothing: an unused one that nobody has set, or what the script mends itself.
    """

    def __init__(self) -> None:
        self._weights, self._gradients = SitesOfKind("param"), SitesOfKind("grad")
        self._bad = np.zeros(0, np.bool_)  # weights, at the last look at each: they take turns

    def take(self, record: StepRecord) -> bool:
        """Take the next sampled step; return whether it can be compared with others."""
        now = self._weights.lost(record)
        self._bad = grown(self._bad, len(now), 0)
        seen = ~np.isnan(self._weights.read(record, "numel"))
        self._bad = np.where(seen, now, self._bad)
        spoilt = self._bad.any() or self._gradients.lost(record).any()
        return not spoilt and all(map(math.isfinite, scalars(record, "loss")))


class SoundStepsDetector(SampledDetector):
    """A detector of whole sampled steps in which no NaN is at work."""

    _sound: SoundSteps | None = None
    _sound_of: int | None = None  # the attempt

    def _is_about(self, record: StepRecord) -> bool:
        """Whether it looks at this record: at whole sampled steps without a NaN."""
        return super()._is_about(record) and self._is_sound(record)

    def _is_sound(self, record: StepRecord) -> bool:
        """Whether a sampled step can be compared; to be asked once for each."""
        if self._sound is None or self._sound_of != record.attempt:
            self._sound, self._sound_of = SoundSteps(), record.attempt
        return self._sound.take(record)
