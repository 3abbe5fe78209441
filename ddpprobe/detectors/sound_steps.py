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

    What is zero, lower or alike after one follows from it. A weight or a gradient that never was
    finite spoils nothing: an unused one that nobody has set, or what the script mends itself.
    """

    def __init__(self) -> None:
        self._attempt: int | None = None
        self._last: StepRecord | None = None
        self._is_sound = True  # the last one

    def take(self, record: StepRecord) -> bool:
        """Take the next sampled step; return whether it can be compared with others.

        Several detectors may ask for the same record: it is looked at once.
        """
        if record is not self._last:
            if record.attempt != self._attempt:
                self._attempt = record.attempt
                self._weights, self._gradients = SitesOfKind("param"), SitesOfKind("grad")
                self._bad = np.zeros(0, np.bool_)  # weights, at the last look at each: in turn
            self._last, self._is_sound = record, self._look(record)
        return self._is_sound

    def _look(self, record: StepRecord) -> bool:
        now = self._weights.lost(record)
        self._bad = grown(self._bad, len(now), 0)
        seen = ~np.isnan(self._weights.read(record, "numel"))
        self._bad = np.where(seen, now, self._bad)
        spoilt = self._bad.any() or self._gradients.lost(record).any()
        return not spoilt and all(map(math.isfinite, scalars(record, "loss")))


class SoundStepsDetector(SampledDetector):
    """A detector of whole sampled steps in which no NaN is at work."""

    _sound: SoundSteps | None = None

    def share(self, sound: SoundSteps) -> None:
        """Ask somebody whom other detectors of the same records ask, too."""
        self._sound = sound

    def _is_about(self, record: StepRecord) -> bool:
        """Whether it looks at this record: at whole sampled steps without a NaN."""
        return super()._is_about(record) and self._is_sound(record)

    def _is_sound(self, record: StepRecord) -> bool:
        """Whether a sampled step can be compared."""
        if self._sound is None:
            self._sound = SoundSteps()
        return self._sound.take(record)
