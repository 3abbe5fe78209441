"""Overflow that no scale cures is paged; a scaler that looks for its scale is left alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpprobe.detectors.loss_scale import LossScale
from ddpprobe.detectors.suite import default_suite
from ddpprobe.records.step import Anomaly, FirstBad, StepRecord
from tests.detectors import made_records

EVERY = 10
BAD = FirstBad(0, 0, "backward", 7, 1, "blocks.3.fc", "grad_output", "", 0, 5, 0, 64)


def amp(
    fits: Callable[[int], float], steps: int, scale: float = 65536.0, interval: int = 2000,
    first: int = 0,
) -> Iterator[StepRecord]:  # fmt: skip
    """A GradScaler over `steps` steps: the records its run delivers.

    `fits(step)` is the highest scale whose gradients are finite. Every skipped step delivers a
    record, of the others the sampled ones do.
    """
    good = 0
    for step in range(first, first + steps):
        skipped = scale > fits(step)
        sampled = step % EVERY == 0
        if skipped or sampled:
            scalars = {r: {"loss_scale": scale} for r in (0, 1)}
            bad = replace(BAD, step=step) if skipped else None
            yield StepRecord(
                0, step, (0, 1), step, sampled=sampled, skipped=skipped, first_bad=bad,
                scalars=scalars,
            )  # fmt: skip
        good = 0 if skipped else good + 1
        if skipped or good == interval:
            scale, good = (scale / 2 if skipped else scale * 2), 0


def run(records: Iterable[StepRecord]) -> list[Anomaly]:
    return made_records.run(LossScale(), records)


@pytest.mark.parametrize("settles", [2.0**-4, 2.0**-1, 1.0, 2.0**10, 2.0**16])
def test_a_healthy_warm_up_of_up_to_twenty_skips_and_the_probes_after_it_say_nothing(
    settles: float,
) -> None:
    records = list(amp(lambda _: settles, 12_000))
    assert sum(r.skipped for r in records) >= 16 - math.log2(settles)
    assert run(records) == []
    # Nor does any other detector take the scaler's work for more than information.
    suite = default_suite()
    assert {a.level for r in records for a in suite.update(r)} <= {"info"}


def test_an_eager_scaler_that_probes_every_sixty_steps_from_2_to_the_20_says_nothing() -> None:
    assert run(amp(lambda _: 2.0**9, 3000, scale=2.0**20, interval=60)) == []


def test_a_scale_that_wanders_around_one_says_nothing() -> None:
    assert run(amp(lambda s: 1.0 if s % 97 else 0.4, 5000, interval=20)) == []


@pytest.mark.parametrize("start", [100, 150, 3333])
def test_nine_skips_in_a_row_after_the_warm_up_are_a_page(start: int) -> None:
    (page,) = run(amp(lambda s: 0.0 if s >= start else 65536.0, start + 30))
    assert (page.level, page.step, page.rank) == ("page", start + 8, None)
    assert (page.module, page.kind, page.phase) == ("blocks.3.fc", "grad_output", "backward")
    assert page.message.startswith("9 steps in a row were skipped (loss scale now 256)")
    assert page.values["skipped_in_a_row"] == 9


@pytest.mark.parametrize(("quiet", "pages"), [(100, 1), (101, 2)])
def test_it_pages_again_only_after_more_than_a_hundred_steps_without_a_skip(
    quiet: int, pages: int
) -> None:
    again = 208 + quiet  # the last skip of the first time is that of step 208
    fits = lambda s: 0.0 if 200 <= s < 209 or again <= s < again + 9 else 65536.0  # noqa: E731
    assert len(run(amp(fits, again + 20, scale=2.0**20))) == pages


def test_skips_of_a_late_warm_up_do_not_count_as_skips_behind_it() -> None:
    assert run(amp(lambda s: 0.0 if 80 <= s < 108 else 65536.0, 200, scale=2.0**20)) == []
    (page,) = run(amp(lambda s: 0.0 if 80 <= s < 109 else 65536.0, 200, scale=2.0**20))
    assert page.step == 108


def test_a_rank_s_scale_that_is_no_number_does_not_hide_another_s() -> None:
    strange = {0: {"loss_scale": math.nan}, 1: {"loss_scale": 2.0**-30}}
    (page,) = run([StepRecord(0, 5, (0, 1), 5, skipped=True, scalars=strange)])
    assert page.values["scale"] == 2.0**-30


def test_eight_skips_in_a_row_are_none() -> None:
    assert run(amp(lambda s: 0.0 if 200 <= s < 208 else 65536.0, 400)) == []


def test_a_resumed_run_warms_up_again() -> None:
    assert run(amp(lambda _: 2.0**-3, 300, first=5000)) == []
    attempts = [
        replace(r, attempt=a) for a in (0, 1) for r in amp(lambda _: 1.0, 200, first=90 * a)
    ]
    assert run(attempts) == []


def test_overflow_from_the_first_step_is_a_page_when_it_can_be_no_warm_up() -> None:
    (page,) = run(amp(lambda _: 0.0, 90))
    assert page.step == 40
    assert page.message.startswith("41 steps in a row were skipped (loss scale now 5.96046e-08)")


def test_every_other_step_skipped_is_chronic_too() -> None:
    (page,) = run(amp(lambda s: 0.0 if s >= 200 and s % 2 else 65536.0, 400))
    assert page.values["scale"] < 1
    assert "fell from 65536 since the warm-up (loss scale now 0.5)" in page.message
    assert page.step < 240


def test_a_scale_below_all_use_is_a_page_however_slowly_it_got_there() -> None:
    (page,) = run(amp(lambda s: 0.0 if s % 3 == 0 else 65536.0, 90, scale=2.0**-10))
    assert page.message.startswith("no scale is low enough")


def test_an_overflow_of_the_forward_says_that_no_scale_mends_it() -> None:
    forward = replace(BAD, phase="forward", kind="output")
    records = [
        replace(r, first_bad=forward if r.skipped else None)
        for r in amp(lambda s: 0.0 if s >= 200 else 65536.0, 300)
    ]
    (page,) = run(records)
    assert (page.phase, "no loss scale mends" in page.message) == ("forward", True)


def test_it_pages_once_an_episode_and_again_after_a_hundred_steps_without_a_skip() -> None:
    assert len(run(amp(lambda s: 0.0 if s >= 200 else 65536.0, 1000))) == 1
    twice = amp(lambda s: 0.0 if s % 400 > 385 and s > 300 else 65536.0 * 4, 1300, interval=30)
    assert [p.step for p in run(twice)] == [394, 794, 1194]


def test_the_page_is_a_first_cause_and_the_skips_before_it_only_information() -> None:
    suite = default_suite()
    records = amp(lambda s: 0.0 if s >= 200 else 65536.0, 260)
    found = [a for r in records for a in suite.update(r)]
    assert [(a.detector, a.level, a.first_cause) for a in found] == [
        ("nonfinite", "info", False),
        ("loss_scale", "page", True),
    ]


def test_a_run_on_one_rank_blames_it() -> None:
    records = [replace(r, ranks=(0,)) for r in amp(lambda s: 0.0 if s > 200 else 65536.0, 260)]
    assert [a.rank for a in run(records)] == [0]


@given(st.lists(st.tuples(st.booleans(), st.floats() | st.none()), max_size=60))
def test_no_value_makes_it_raise_and_a_run_without_skips_says_nothing(
    steps: list[tuple[bool, float | None]],
) -> None:
    records = [
        StepRecord(0, i, (0,), i, skipped=skip, scalars={0: {} if x is None else {"loss_scale": x}})
        for i, (skip, x) in enumerate(steps)
    ]
    found = made_records.hear(LossScale(), records)
    assert found == made_records.hear(LossScale(), records)
    assert made_records.hear(LossScale(), [replace(r, skipped=False) for r in records]) == []
