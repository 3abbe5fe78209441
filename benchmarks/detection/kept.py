"""Keeps the records of each run, so that other detectors can be judged without running it again.

Detectors are pure folds over records: judged by those that are kept, they say what they would have
said of the run (live, stored and replayed are the same: `tests/distributed/test_replayed.py`). What
no detector says (`rank_lost`, by the end of a run) is kept as it was said.
"""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import final

from benchmarks.detection.results import Key
from ddpprobe.detectors.suite import DETECTORS, default_suite
from ddpprobe.records.step import Anomaly, StepRecord

_FAST = 1  # of gzip's levels; the others gain a tenth


@final
class Kept:
    """The directory of what is kept; of a run, by the newest code only.

    Args:
        path: of the directory.
        code: of the name of a job, the fingerprint of the code by which it is recorded.
    """

    def __init__(self, path: Path, code: Callable[[str], str]) -> None:
        self._place, self._code = path, code

    def keep(self, key: Key, records: list[StepRecord], said: Iterable[Anomaly]) -> None:
        """Keep a run: its records, and what was said of it."""
        names = {detector.name for detector in DETECTORS}
        others = [anomaly for anomaly in said if anomaly.detector not in names]
        self._place.mkdir(parents=True, exist_ok=True)
        for other in self._place.glob(f"{_name(key)}.*"):
            other.unlink()
        half = self._file(key).with_suffix(".half")
        with gzip.open(half, "wb", _FAST) as file:
            pickle.dump((records, others), file)
        half.rename(self._file(key))

    def kept(self, key: Key) -> tuple[list[StepRecord], list[Anomaly]] | None:
        """Return the records of a run, and what no detector said of it; None if it is not kept."""
        if not self._file(key).exists():
            return None
        with gzip.open(self._file(key)) as file:
            found: tuple[list[StepRecord], list[Anomaly]] = pickle.load(file)
        return found

    def judged(self, key: Key) -> tuple[list[StepRecord], list[Anomaly]] | None:
        """Return the records of a run and what is said of it now; None if it is not kept."""
        found = self.kept(key)
        if found is None:
            return None
        records, said = found
        suite = default_suite()
        found = [anomaly for record in records for anomaly in suite.update(record)]
        return records, [*found, *suite.finish(), *said]

    def _file(self, key: Key) -> Path:
        return self._place / f"{_name(key)}.{self._code(key.job)}.pickle.gz"


def _name(key: Key) -> str:
    return f"{key.job}-{key.seed}-{key.every}"
