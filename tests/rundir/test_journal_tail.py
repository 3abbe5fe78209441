"""A rank's journal is read in looks of a bounded number of records, and none of them is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpprobe.records.step import StepRecord
from ddpprobe.rundir.journal import JournalWriter
from ddpprobe.rundir.journal_tail import RankTail

LIMIT = 8


def write(journal: JournalWriter, *steps: int) -> None:
    for step in steps:
        assert journal.append_record(StepRecord(0, step, (0,), step, sampled=False))


@pytest.mark.parametrize("behind", [0, 2, LIMIT])
def test_fewer_records_than_the_limit_are_all_that_there_were_when_it_was_asked(
    behind: int, tmp_path: Path
) -> None:
    """What a look that reached its limit left behind is not all: more was written meanwhile."""
    journal, tail = JournalWriter(tmp_path, {"rank": 0}), RankTail(tmp_path, 0)
    write(journal, *range(LIMIT + behind))
    assert [r.step for r in tail.read(LIMIT)] == list(range(LIMIT))
    write(journal, *range(LIMIT + behind, LIMIT + behind + 3))
    found: list[int] = []
    while more := [r.step for r in tail.read(LIMIT)]:
        found += more
        if len(more) < LIMIT:
            break
    assert found == list(range(LIMIT, LIMIT + behind + 3))
    assert tail.read(LIMIT) == []
    write(journal, 99)
    assert [r.step for r in tail.read(LIMIT)] == [99]
    journal.close()
    tail.close()
