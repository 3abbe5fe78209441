"""Ranks that part are named with the parameter, once, and nothing else is taken for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpprobe.detectors.desync import Desync
from ddpprobe.detectors.suite import default_suite
from ddpprobe.records.merge import merge_all
from ddpprobe.records.rank_names import ranks_text
from ddpprobe.records.step import (
    BUFFER,
    JOINED,
    LEARNING_RATE,
    LOCAL_SGD,
    UNREDUCED,
    UNWRAPPED,
    USED_NORM,
    Anomaly,
    FirstBad,
    StepRecord,
)
from tests.detectors import made_records

Digests = dict[tuple[str, str], dict[int, int]]


def mask(*ranks: int) -> int:
    return sum(1 << r for r in ranks)


def record(step: int, digests: Digests | None = None, **changes: object) -> StepRecord:
    base = StepRecord(0, step, (0, 1, 2, 3), 10**9 * step, digests=digests or {})
    return replace(base, **changes)  # type: ignore[arg-type]


def split(step: int, *sides: tuple[int, ...], fqn: str = "fc.weight") -> StepRecord:
    return record(step, {(fqn, ""): {7 + i: mask(*side) for i, side in enumerate(sides)}})


def run(*records: StepRecord) -> list[Anomaly]:
    return made_records.run(Desync(), records)


def test_the_one_rank_that_differs_is_named_with_the_parameter() -> None:
    (page,) = run(split(10, (0, 1, 3), (2,)))
    assert (page.detector, page.level, page.step, page.rank) == ("desync", "page", 10, 2)
    assert (page.module, page.kind, page.phase) == ("fc.weight", "param", "step")
    assert page.message.startswith("rank 2 holds other bits of this parameter than ranks 0-1, 3")
    assert dict(page.values) == {"parameters": 1, "versions": 2, "suspects": 1, "ranks": 4}
    assert "\n" not in page.message


def test_ranks_that_are_at_other_steps_under_join_are_not_compared() -> None:
    def joined(norms: tuple[float, float], said: float = 1.0) -> StepRecord:
        scalars = {
            rank: {"grad_norm": norm} | ({JOINED: said} if said else {})
            for rank, norm in enumerate(norms)
        }
        return replace(split(33, (0,), (1,)), scalars=scalars)

    assert run(joined((0.5, 0.6))) == []
    for told in (joined((0.5, 0.5)), joined((0.5, 0.6), said=0.0)):
        (page,) = run(told)
        assert page.level == "page"


def test_replicas_that_torch_s_hook_of_local_sgd_parts_are_not_told() -> None:
    parted = split(33, (0,), (1,))
    meant = {rank: {LOCAL_SGD: 1.0} for rank in (0, 1)}
    assert run(replace(parted, scalars=meant)) == []
    assert [a.level for a in run(parted)] == ["page"]
    buffers = {(name, BUFFER): held for (name, _), held in parted.digests.items()}
    assert [a.kind for a in run(replace(parted, scalars=meant, digests=buffers))] == ["buffer"]


def test_a_minority_of_several_ranks_is_listed_and_none_of_them_blamed_alone() -> None:
    (page,) = run(split(10, (0, 3), (1, 4, 5)))
    assert page.rank is None
    assert page.message.startswith("ranks 0, 3 hold other bits of this parameter than ranks 1, 4-5")


def test_without_a_majority_any_rank_may_be_wrong() -> None:
    for sides in (((0,), (1,)), ((0, 1), (2, 3)), ((0, 1), (2,), (3,))):
        (page,) = run(split(10, *sides))
        assert page.rank is None
        assert "no majority, any may be wrong" in page.message
        for side in sides:
            assert ranks_text(side) in page.message


def test_the_first_parameter_in_the_order_of_the_model_is_named_and_the_others_counted() -> None:
    torn = {mask_: mask_ for mask_ in (mask(0, 1, 3), mask(2))}
    (page,) = run(record(10, {(name, ""): torn for name in ("b.weight", "a.weight", "c.bias")}))
    assert page.module == "b.weight"
    assert "and of 2 more than" in page.message
    assert page.values["parameters"] == 3


def test_a_shard_is_compared_within_its_own_replicas() -> None:
    held = {("w", "0"): {1: mask(0, 2, 4)}, ("w", "1"): {2: mask(1, 3), 3: mask(5)}}
    (page,) = run(record(10, held))
    assert page.rank == 5
    assert "(shard 1)" in page.message


def test_agreeing_ranks_and_missing_ones_are_no_desync() -> None:
    agreed: Digests = {("w", ""): {5: mask(0, 1, 3)}}
    assert run(*(record(s, agreed, ranks=(0, 1, 3), missing=(2,)) for s in range(50))) == []


def test_a_step_that_never_ended_is_not_judged() -> None:
    assert run(replace(split(10, (0, 1), (2,)), partial=True)) == []


def test_buffers_that_are_not_the_same_everywhere_warn_once_each_and_name_nobody() -> None:
    """Right may be the one rank that is not like the others: these have what was never set."""

    def held(step: int, *names: str) -> StepRecord:
        return record(step, {(name, BUFFER): {1: mask(0), 2: mask(1, 2, 3)} for name in names})

    first, second = run(held(10, "rope", "scale"), held(11, "rope"), held(12, "scale", "table"))
    assert (first.level, first.step, first.rank, first.module) == ("warn", 10, None, "rope")
    assert (first.kind, second.module, second.step) == ("buffer", "table", 12)
    assert first.message.startswith(
        "ranks 1-3 / rank 0 each hold other bits of this buffer and of 1 more, which no step"
    )
    assert dict(first.values) == {"buffers": 2, "versions": 2, "ranks": 4}


def test_a_buffer_that_differs_hides_no_parameter() -> None:
    both = {**split(10, (0, 1, 3), (2,)).digests, ("rope", BUFFER): {1: mask(0), 2: mask(1)}}
    page, warning = run(record(10, both))
    assert (page.level, page.rank, page.module) == ("page", 2, "fc.weight")
    assert dict(page.values)["parameters"] == 1
    assert (warning.level, warning.module) == ("warn", "rope")


def test_it_fires_once_an_episode_and_again_for_a_new_suspect() -> None:
    assert len(run(*(split(s, (0, 1, 3), (2,)) for s in range(10, 2000, 10)))) == 1
    pages = run(
        split(10, (0, 1, 2, 3), (4,)), split(20, (0, 1, 2), (3, 4)), split(30, (0, 1, 2), (4,))
    )
    assert [p.step for p in pages] == [10, 20]


def test_replicas_that_part_without_a_reduction_warn_and_page_if_it_lasts() -> None:
    alone = {rank: {"unreduced": 1.0} for rank in range(4)}
    apart = [replace(split(step, (0, 1), (2, 3)), scalars=alone) for step in (10, 11, 12)]
    (warning,) = run(*apart)
    assert (warning.level, warning.first_cause, warning.step) == ("warn", False, 10)
    assert "not reduced" in warning.message
    _, page = run(*apart, split(13, (0, 1), (2, 3)), split(14, (0, 1), (2, 3)))
    assert (page.level, page.step) == ("page", 13)
    (page,) = run(split(9, (0, 1), (2, 3)), *apart)  # known, and worse
    assert (page.level, page.step) == ("page", 9)


@pytest.mark.parametrize(("told", "lost"), [(1.0, True), (3.0, False)])
def test_whether_ddp_lost_its_hooks_is_said_where_no_sync_does_not_explain_it(
    told: float, lost: bool
) -> None:
    said = {rank: {UNREDUCED: told} for rank in range(4)}
    apart = replace(split(10, (0, 1), (2, 3)), scalars=said)
    (warning,) = run(apart)
    assert warning.level == "warn"
    assert ("DDP lost its hooks, or no_sync up to" in warning.message) == lost
    assert "no_sync up to the optimizer" in warning.message


def test_it_fires_again_after_a_hundred_quiet_steps_and_after_a_restart() -> None:
    torn = split(10, (0, 1, 3), (2,))
    assert len(run(torn, replace(torn, step=110))) == 1
    assert len(run(torn, replace(torn, step=111))) == 2
    assert len(run(torn, replace(torn, step=20, attempt=1))) == 2


def test_a_desync_of_the_step_of_a_nan_follows_from_it_and_a_later_nan_from_the_desync() -> None:
    bad = FirstBad(10, 0, "forward", 3, 2, "fc", "output", "", 1, 0, 0, 8)
    torn = split(10, (0, 1, 3), (2,))
    found = default_suite().update(replace(torn, first_bad=bad))
    assert [(a.detector, a.first_cause) for a in found] == [("nonfinite", True), ("desync", False)]
    suite = default_suite()
    found = suite.update(torn) + suite.update(record(11, first_bad=replace(bad, step=11)))
    assert [(a.detector, a.first_cause) for a in found] == [("desync", True), ("nonfinite", False)]


@given(
    sides=st.lists(st.integers(0, 3), min_size=2, max_size=12),
    order=st.randoms(use_true_random=False),
)
def test_the_verdict_is_that_of_the_checksums_in_whatever_order_ranks_arrive(
    sides: list[int], order: object
) -> None:
    parts = [
        StepRecord(0, 3, (rank,), 3, digests={("w", ""): {100 + side: 1 << rank}})
        for rank, side in enumerate(sides)
    ]
    shuffled = list(parts)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    found = Desync().update(merge_all(shuffled))
    assert found == Desync().update(merge_all(parts))
    assert bool(found) == (len(set(sides)) > 1)
    if found:
        largest = max(set(sides), key=sides.count)
        majority = 2 * sides.count(largest) > len(sides)
        minority = [r for r, side in enumerate(sides) if side != largest]
        alone = majority and len(minority) == 1
        assert found[0].rank == (minority[0] if alone else None)
        assert found[0].values["suspects"] == (len(minority) if majority else len(sides))


def test_learning_rates_that_are_not_the_same_are_told_with_it() -> None:
    rates = {rank: {LEARNING_RATE: 3e-3 if rank else 3e-4} for rank in range(4)}
    (page,) = run(replace(split(5, (0,), (1, 2, 3)), scalars=rates))
    assert "(the learning rate is 0.0003 on rank 0 and 0.003 on rank 1)" in page.message
    same = {rank: {LEARNING_RATE: 3e-3} for rank in range(4)}
    (page,) = run(replace(split(5, (0,), (1, 2, 3)), scalars=same))
    assert "learning rate" not in page.message


def unwrapped(
    step: int, used: tuple[float, float], *, local: tuple[float, float] = (1.0, 2.0),
    apart: bool = True, told: float = 2.0, shard: str = UNWRAPPED,
) -> StepRecord:  # fmt: skip
    """Two ranks of a model without a wrapper; the norms that their optimizers get."""
    said = {
        rank: {USED_NORM: used[rank], "grad_norm_local": local[rank], UNREDUCED: told}
        for rank in (0, 1)
    }
    digests = {("fc.weight", shard): {7: mask(0), 8: mask(1)}} if apart else {}
    return record(step, digests, ranks=(0, 1), scalars=said)


def alike(step: int) -> tuple[float, float]:
    return 1.0 + 0.1 * (step % 7), 1.0 + 0.1 * (step % 7)


def test_replicas_that_a_script_reduces_by_hand_are_judged_once_that_is_known() -> None:
    (page,) = run(*[unwrapped(s, alike(s), apart=s >= 10) for s in range(20)])
    assert (page.level, page.step, page.module, page.rank) == ("page", 10, "fc.weight", None)
    assert "how the script reduces gradients" in page.message
    assert "shard" not in page.message
    (first,) = run(*[unwrapped(s, alike(s)) for s in range(0, 200, 10)])  # from the start
    assert (first.level, first.step) == ("page", 30)


def test_ranks_that_train_models_of_their_own_are_no_replicas() -> None:
    own = [unwrapped(s, (1.0 + 0.1 * (s % 7), 2.0)) for s in range(20)]
    clipped = [unwrapped(s, (0.5, 0.5)) for s in range(20)]  # each by itself
    same = [unwrapped(s, alike(s), local=(1.0, 1.0)) for s in range(20)]  # data of one seed
    for records in (own, clipped, same):
        assert run(*records) == []
    wrapped = run(*[unwrapped(s, alike(s), told=1.0, shard="") for s in range(20)])
    assert [a.level for a in wrapped] == ["warn"]  # local SGD, as ever
