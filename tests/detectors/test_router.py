"""An expert that gets everything, and experts that get nothing, are told; small batches are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from ddpprobe.detectors.router import Router
from ddpprobe.records.step import Site, StepRecord
from tests.detectors.made_records import levels, record, run

WIDTH = 16


def step(number: int, *loads: Sequence[int], name: str = "experts") -> StepRecord:
    """Tokens of each expert, of each layer."""
    rows = {
        Site(f"blocks.{layer}.{name}.{expert}", "output"): {
            "numel": tokens * WIDTH, "observed": tokens > 0
        }
        for layer, load in enumerate(loads)
        for expert, tokens in enumerate(load)
    }  # fmt: skip
    return record(number, rows=rows)


def steps(
    load: Callable[[int], Sequence[int]], until: int = 300, every: int = 1
) -> list[StepRecord]:
    return [step(s, [8, 8, 8, 8], load(s)) for s in range(0, until, every)]


def balanced_until(at: int, then: Sequence[int]) -> Callable[[int], Sequence[int]]:
    return lambda s: [8, 9, 7, 8] if s < at else then


@pytest.mark.parametrize("every", [1, 10])
def test_an_expert_that_gets_nearly_all_is_named_once(every: int) -> None:
    (warn,) = run(Router(), steps(balanced_until(100, [1, 31, 0, 0]), every=every))
    assert (warn.level, warn.module, warn.kind) == ("warn", "blocks.1.experts.1", "output")
    assert warn.step == (120 if every == 1 else 170)  # 20 steps, and 8 looks
    assert warn.values == {"share": 31 / 32, "since": 100, "experts": 4}
    assert "has got 97% of what the 4 experts of its layer are given since step 100" in warn.message


def test_it_is_told_again_when_another_one_gets_all() -> None:
    stream = steps(lambda s: [32, 0, 0, 0] if s < 100 else [0, 0, 32, 0], 190)
    assert levels(run(Router(), stream)) == [("warn", 20), ("warn", 120)]


def test_two_experts_that_get_all_in_turn_are_told_once_each() -> None:
    stream = steps(lambda s: [32, 0, 0, 0] if s // 30 % 2 else [0, 0, 32, 0], 900)
    assert levels(run(Router(), stream)) == [("warn", 20), ("warn", 50)]
    again = steps(lambda s: [32, 0, 0, 0] if s < 50 or s >= 160 else [8, 8, 8, 8], 200)
    assert levels(run(Router(), again)) == [("warn", 20), ("warn", 180)]


def test_a_busy_expert_below_nineteen_of_twenty_and_all_for_a_few_steps_are_left_alone() -> None:
    assert run(Router(), steps(balanced_until(100, [1, 30, 1, 0]))) == []
    assert run(Router(), steps(lambda s: [0, 32, 0, 0] if s % 20 < 19 else [8, 8, 8, 8])) == []


def test_a_batch_so_small_that_one_gets_all_by_chance_is_left_alone() -> None:
    rng = np.random.default_rng(0)
    assert (
        run(Router(), steps(lambda _: np.eye(8, dtype=int)[rng.integers(8)].tolist(), 3000)) == []
    )


def test_most_experts_without_a_token_for_100_looks_are_told_once_with_their_layer() -> None:
    (info,) = run(Router(), steps(balanced_until(50, [16, 0, 16, 0, 0, 0])))
    assert (info.level, info.module, info.step) == ("info", "blocks.1.experts", 149)
    assert info.values == {"idle": 4, "since": 50, "experts": 6}
    assert run(Router(), steps(balanced_until(50, [16, 0, 16, 0, 0, 16]))) == []  # half is not most
    assert run(Router(), steps(lambda s: [16, 0, 0, 0, 16 * (s % 99 == 0), 16])) == []


def test_two_experts_and_what_is_not_called_so_are_left_alone() -> None:
    assert run(Router(), [step(s, [32, 0]) for s in range(300)]) == []
    assert run(Router(), [step(s, [32, 0, 0, 0], name="branches") for s in range(300)]) == []
    assert run(Router(), [record(s) for s in range(50)]) == []
