"""What checkpointing computes in the backward is what the forward computed, or it is told."""

from __future__ import annotations

import math

import pytest

from ddpprobe.detectors.recompute import Recompute
from ddpprobe.records.step import (
    RECOMPUTED,
    RECOMPUTED_AT,
    Anomaly,
    Site,
    StepRecord,
    fqn_number,
)
from tests.detectors.made_records import record, run

FQNS = ["blocks.0.fc", "blocks.0.drop", "blocks.0", "blocks.1", ""]
SITES = {Site(fqn, "output"): {"rms": 1.0} for fqn in FQNS}
Said = tuple[float, str]


def look(step: int, *ranks: Said) -> StepRecord:
    said = {
        rank: {RECOMPUTED: share, RECOMPUTED_AT: fqn_number(fqn)}
        for rank, (share, fqn) in enumerate(ranks)
    }
    return record(step, said, SITES)


def told(*looks: Said) -> list[Anomaly]:
    """What is said of looks at which two ranks compute the same."""
    return run(Recompute(), [look(10 * i, each, each) for i, each in enumerate(looks)])


SAME, APART = (0.0, "blocks.0"), (0.5, "blocks.1")


def test_the_output_that_differs_most_is_told_at_the_third_look() -> None:
    (warn,) = told(SAME, SAME, APART, (0.6, "blocks.0.drop"), SAME, (0.1, ""), APART, APART)
    assert (warn.level, warn.step, warn.rank, warn.module) == ("warn", 50, None, "blocks.0.drop")
    assert (warn.phase, warn.kind) == ("backward", "output")
    assert warn.values == {"share": 0.6, "looks": 3, "since": 20}
    assert warn.message.startswith("blocks.0.drop computes something else in the backward")
    assert "at 3 of the last 6 sampled steps" in warn.message


@pytest.mark.parametrize(
    "looks",
    [
        [SAME] * 20,
        [(9e-4, "blocks.0")] * 20,  # rounding, at the very most
        [APART, APART, *[SAME] * 6] * 7,  # a mode that was changed now and then
        [APART] * 2,
        [(math.nan, "blocks.0")] * 20,
    ],
)
def test_what_is_the_same_or_was_once_another_is_not(looks: list[Said]) -> None:
    assert told(*looks) == []


def test_one_rank_that_differs_is_named() -> None:
    (warn,) = run(Recompute(), [look(i, SAME, (0.2, "blocks.1"), SAME) for i in range(9)])
    assert (warn.rank, warn.module) == (1, "blocks.1")
    (alone,) = run(Recompute(), [look(i, (0.2, "")) for i in range(9)])
    assert (alone.rank, alone.module, alone.kind) == (None, "", "output")
    assert alone.message.startswith("the model computes")


def test_it_is_told_again_behind_a_quiet_time() -> None:
    steps = [*range(10), *range(2000, 2010)]
    found = run(Recompute(), [look(i, APART) for i in steps])
    assert [warn.step for warn in found] == [2, 2000]


def test_a_module_without_a_row_has_no_name_and_a_step_without_a_look_is_none() -> None:
    (warn,) = run(Recompute(), [look(i, (0.9, "elsewhere")) for i in range(3)])
    assert (warn.module, warn.kind) == (None, None)
    assert warn.message.startswith("a module computes")
    apart = [look(i, APART) for i in range(3)]
    between = [record(i, {0: {"loss": 1.0}}, SITES) for i in range(3, 30)]
    assert len(run(Recompute(), [*apart[:2], *between, *apart[2:]])) == 1
    assert run(Recompute(), between) == []
