"""A gradient that some ranks alone have lost is found, and named; one that all lose is not."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from ddpprobe.detectors.grad_none_or_zero import GradNoneOrZero
from ddpprobe.records.step import ACTIVE, Anomaly, Site, StepRecord
from tests.detectors.made_records import record, run

NAMES = ("embed.weight", "blocks.0.fc.weight", "blocks.0.fc.bias", "blocks.1.fc.weight",
         "blocks.1.fc.bias", "head.weight")  # fmt: skip
SITES = tuple(Site(name, "grad_local") for name in NAMES)
Gone = Callable[[int, int, str], bool]  # step, rank, parameter


def step(number: int, gone: Gone, world: int = 3, how: str = "zero") -> StepRecord:
    """Merged over the ranks: a gradient that is gone has only zeros, or no elements."""
    away = {s: sum(gone(number, r, s.fqn) for r in range(world)) for s in SITES}
    rows = {
        s: {"numel": 100 * (world - n), "observed": world - n, "rms": 0.1} if how == "None"
        else {"numel": 100 * world, "zeros": 100 * n, "rms": 0.1}
        for s, n in away.items()
    }  # fmt: skip
    said = {r: {ACTIVE: float(sum(not gone(number, r, n) for n in NAMES))} for r in range(world)}
    return record(number, said, rows)


def told(stream: Iterable[StepRecord]) -> list[Anomaly]:
    return run(GradNoneOrZero(), stream)


@pytest.mark.parametrize("how", ["None", "zero"])
@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("world", [2, 3, 16])
def test_the_rank_and_the_module_are_named(how: str, every: int, world: int) -> None:
    def gone(now: int, rank: int, name: str) -> bool:
        return now >= 160 and rank == 1 and name.startswith("blocks.0")

    (warn,) = told(step(s, gone, world, how) for s in range(0, 300, every))
    assert (warn.level, warn.rank, warn.module) == ("warn", 1, "blocks.0")
    assert (warn.kind, warn.phase) == ("grad_local", "backward")
    assert warn.values == {"parameters": 2, "ranks": 1, "since": 160}
    assert "2 parameters since step 160, in blocks.0; " in warn.message
    assert 175 <= warn.step <= 160 + 5 * every + 15


def test_a_rank_that_has_lost_all_gradients_is_found() -> None:
    (warn,) = told(step(s, lambda now, rank, _: now >= 60 and rank == 1) for s in range(120))
    assert (warn.rank, warn.module, warn.values["parameters"]) == (1, "", len(NAMES))


def test_several_ranks_are_told_and_none_is_named() -> None:
    def gone(now: int, rank: int, name: str) -> bool:
        return now >= 60 and rank < 2 and name == "head.weight"

    (warn,) = told(step(s, gone) for s in range(120))
    assert (warn.rank, warn.module, warn.values["ranks"]) == (None, "head", 2)
    assert warn.message.startswith("ranks 0-1 have had no gradient")


def test_what_all_ranks_lose_together_is_no_matter_of_a_rank() -> None:
    assert told(step(s, lambda now, _, name: now >= 60 and "blocks" in name)
                for s in range(200)) == []  # fmt: skip


def test_behind_what_all_have_lost_a_rank_that_loses_more_is_found() -> None:
    def gone(now: int, rank: int, name: str) -> bool:
        one = now >= 120 and rank == 2 and name == "head.weight"
        return one or (now >= 60 and name == "embed.weight")

    (warn,) = told(step(s, gone) for s in range(200))
    assert (warn.rank, warn.module, warn.values["since"]) == (2, "head", 120)


@pytest.mark.parametrize("chance", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("world", [2, 8])
def test_experts_without_tokens_are_left_alone(chance: float, world: int) -> None:
    drawn = np.random.default_rng(0).random((1500, world, len(NAMES))) < chance
    stream = (step(s, lambda now, r, n: bool(drawn[now, r, NAMES.index(n)]), world)
              for s in range(1500))  # fmt: skip
    assert told(stream) == []


def test_ranks_that_differ_from_the_start_are_left_alone() -> None:
    gone: Gone = lambda _, rank, name: rank == 1 and name == "head.weight"  # noqa: E731
    assert told(step(s, gone) for s in range(200)) == []


def test_a_rank_that_comes_back_is_told_again_only_when_it_loses_more() -> None:
    def gone(now: int, rank: int, name: str) -> bool:
        lost = {"head.weight": now // 50 in {2, 4, 6}, "embed.weight": now // 50 == 6}
        return rank == 0 and lost.get(name, False)

    first, second = told(step(s, gone) for s in range(350))
    assert (first.values["since"], second.values["since"]) == (100, 300)


def test_one_rank_alone_and_ranks_that_do_not_say_it_are_not_judged() -> None:
    gone: Gone = lambda now, rank, name: now >= 60 and name == "head.weight" and not rank  # noqa: E731
    assert told(step(s, gone, world=1) for s in range(100)) == []
    endless = (
        record(s, {r: {ACTIVE: 1e999 if s == 50 else 4.0} for r in (0, 1)}) for s in range(99)
    )
    assert told(endless) == []
    silent = (record(s, {r: {} for r in range(3)}) for s in range(100))
    assert told(silent) == []
