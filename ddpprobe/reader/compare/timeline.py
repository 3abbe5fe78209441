"""A run as one stream of steps, however often it was started; two runs step by step."""

from __future__ import annotations

from collections.abc import Iterator

from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.run import Run
from ddpprobe.records.step import StepRecord
from ddpprobe.rundir.paths import RunDir


def timeline(run: Run, rank: int | None = None) -> Iterator[StepRecord]:
    """Yield a run's records by step; of each step the last start that reached it holds."""
    attempts = run.attempts()
    ends: dict[int, int] = {}
    end = 1 << 63
    for attempt in reversed(attempts):
        ends[attempt] = end
        if attempt != attempts[0]:
            first = next(_of(run, rank, attempt), None)
            end = min(end, first.step) if first else end
    for attempt in attempts:
        for record in _of(run, rank, attempt):
            if record.step >= ends[attempt]:
                break
            yield record


def _of(run: Run, rank: int | None, attempt: int) -> Iterator[StepRecord]:
    """Return the records of an attempt, which may have had fewer ranks than another."""
    held = rank is None or run.has_rank(rank, attempt)
    return run.records(rank, attempt) if held else iter(())


def aligned(
    a: Iterator[StepRecord], b: Iterator[StepRecord]
) -> Iterator[tuple[StepRecord | None, StepRecord | None]]:
    """Pair two ascending streams by step; None where one of them has no such step."""
    one, two = next(a, None), next(b, None)
    while one is not None or two is not None:
        has_one = one is not None and (two is None or one.step <= two.step)
        has_two = two is not None and (one is None or two.step <= one.step)
        yield one if has_one else None, two if has_two else None
        one = next(a, None) if has_one else one
        two = next(b, None) if has_two else two


def length(run: Run) -> int:
    """Return how many merged records the store holds; what only journals hold comes on top."""
    merged_reader = MergedReader(RunDir(run.path))
    groups = (merged_reader.group(attempt, "merged") for attempt in merged_reader.attempts())
    return sum(group.rows for group in groups if group)
