"""A robust memory of one positive series: how far above its own past is this value?"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

MAD_TO_SIGMA = 1.4826  # for a normal distribution, sigma = 1.4826 x median absolute deviation
LARGEST_DEX = 300.0  # keeps 10**dex a finite, positive float64


@dataclass(frozen=True, slots=True)
class WindowedValue:
    """One value against the window before it.

    `z` is robust, in log10; `dex` = log10(value / median); `median` and `highest` are in the unit
    of the series; `points` is how many values the window held.
    """

    value: float
    z: float
    dex: float
    median: float
    highest: float
    points: int

    @property
    def ratio(self) -> float:
        """The value over the window's median."""
        return float(10.0 ** min(self.dex, LARGEST_DEX))


class LogHistory:
    """The last `window` values of a series, as log10 of their magnitude.

    z = (x - median) / max(1.4826 x MAD, floor_dex). The floor keeps a series that hardly moves (a
    clipped norm, a converged loss) from calling its own rounding an outlier. Zero and non-finite
    values have no logarithm: they are neither remembered nor judged.
    """

    def __init__(self, window: int = 64, least: int = 32, floor_dex: float = 0.05) -> None:
        self._logs: deque[float] = deque(maxlen=window)
        self._least = least
        self._floor = floor_dex

    def read(self, value: float) -> WindowedValue | None:
        """Judge a value against what was added before; None until `least` values are known."""
        log = log_magnitude(value)
        if log is None or len(self._logs) < self._least:
            return None
        middle = median(self._logs)
        spread = MAD_TO_SIGMA * median(abs(x - middle) for x in self._logs)
        return WindowedValue(
            value=abs(value),
            z=(log - middle) / max(spread, self._floor),
            dex=log - middle,
            median=10.0**middle,
            highest=10.0 ** max(self._logs),
            points=len(self._logs),
        )

    def add(self, value: float) -> None:
        """Remember a value."""
        log = log_magnitude(value)
        if log is not None:
            self._logs.append(log)


def log_magnitude(value: float) -> float | None:
    """Return log10 of |value|, within +-300; None for zero, NaN and infinities."""
    if not math.isfinite(value) or value == 0:
        return None
    return max(-LARGEST_DEX, min(LARGEST_DEX, math.log10(abs(value))))
