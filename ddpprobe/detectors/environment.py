"""`environment`: ranks run on other libraries, code, switches or devices than the others."""

from __future__ import annotations

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.settings import at_least
from ddpprobe.records.environment import GPU, SCALAR
from ddpprobe.records.rank_names import ranks_text
from ddpprobe.records.step import Anomaly, StepRecord

MOST_NAMED = 4


class Environment(SampledDetector):
    """Warns of ranks that have other libraries, code, switches or variables than most ranks.

    A node was set up anew, or has the script of yesterday. Ranks compare what they run on once, at
    `install()`; it is told at the first sampled step. Where nothing but the GPU is another one it
    is information: that may be meant.

    Args:
        looks: sampled steps of an attempt that are looked at, if not all ranks are in the first.
    """

    name = "environment"
    title = "Ranks run on unlike software"

    def __init__(self, *, looks: int = 8) -> None:
        at_least(1, looks=looks)
        self._most_looks = looks
        self._begin()

    def _begin(self) -> None:
        self._left = self._most_looks

    def _reset(self) -> None:
        """Nothing that a note announces changes what ranks run on."""

    def _is_about(self, record: StepRecord) -> bool:
        return record.sampled

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        if not self._left:
            return []
        self._left -= 1
        numbers: dict[str, dict[int, float]] = {}
        for rank, scalars in sorted(record.scalars.items()):
            for name in scalars:
                if name.startswith(SCALAR):
                    numbers.setdefault(name, {})[rank] = float(scalars[name])
        if numbers:
            self._left = 0
            return [_anomaly(record, numbers)]
        if not record.missing:  # all have said that they do not differ
            self._left = 0
        return []


def _anomaly(record: StepRecord, numbers: dict[str, dict[int, float]]) -> Anomaly:
    others = sorted({rank for of in numbers.values() for rank, number in of.items() if number})
    most = sorted({rank for of in numbers.values() for rank in of} - {*others})
    names = [name.removeprefix(SCALAR) for name in sorted(numbers)]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    what = f"{', '.join(names[:MOST_NAMED])}{more}"
    who = f"{ranks_text(others)} {'differs' if len(others) == 1 else 'differ'}"
    who += f" from {ranks_text(most)}" if most else ""
    message = (
        f"{who} in what they run on: {what}; `ddpprobe info` lists what each has; give all nodes "
        "one image, and one copy of the code"
    )
    values = {"differences": len(names), "ranks": len(others)}
    level = "info" if names == [GPU] else "warn"
    alone = others[0] if len(others) == 1 and len(most) > 1 else None
    return Environment.anomaly(record, level, message, values, rank=alone)
