"""Records as a rank would make them, from a few numbers: what the tests of detectors feed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ddpprobe.detectors.detector import Detector
from ddpprobe.records.step import COUNTS, VALUES, Anomaly, Site, StepRecord, empty_rows
from tests.detectors import said

Row = Mapping[str, float]  # statistic of `COUNTS` or `VALUES` -> number; "rms" sets the squares


def record(
    step: int, scalars: Mapping[int, Row] | None = None, rows: Mapping[Site, Row] | None = None,
    ranks: int | None = None, **changes: object,
) -> StepRecord:  # fmt: skip
    """A sampled step. A row has 100 elements, was observed, and is 0 in what is not given."""
    scalars, rows = scalars or {}, rows or {}
    counts, values = empty_rows(len(rows))
    for i, row in enumerate(rows.values()):
        given = {"numel": 100, "tapped": 1, "observed": 1, "min": 0, "max": 0, **row}
        if "rms" in given:
            given["sum_sq"] = given.pop("rms") ** 2 * given["numel"]
        for name, number in given.items():
            if name in COUNTS:
                counts[i, COUNTS.index(name)] = number
            else:
                values[i, VALUES.index(name)] = number
    world = tuple(range(ranks if ranks is not None else max(1, len(scalars))))
    base = StepRecord(
        0, step, world, step, sites=_table(tuple(rows)), counts=counts, values=values,
        scalars=scalars,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


_TABLES: dict[tuple[Site, ...], tuple[Site, ...]] = {}


def _table(sites: tuple[Site, ...]) -> tuple[Site, ...]:
    """The same sites are the same object, as they are in a run."""
    return _TABLES.setdefault(sites, sites)


def hear(detector: Detector, records: Iterable[StepRecord]) -> list[Anomaly]:
    """Everything that a detector says of a stream."""
    return [a for r in records for a in detector.update(r)] + detector.finish()


def run(detector: Detector, records: Iterable[StepRecord]) -> list[Anomaly]:
    """The same, which is what it said of it before."""
    found = hear(detector, records)
    said.check(found)
    return found


def levels(found: Iterable[Anomaly]) -> list[tuple[str, int]]:
    """Level and step of each."""
    return [(a.level, a.step) for a in found]
