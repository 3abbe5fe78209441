"""Numbers of a whole step equal their published formulas, and are absent where they do not hold."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddpprobe.records.derived import (
    DERIVED,
    NOISE_SCALE,
    NOISE_WINDOW,
    DerivedNumbers,
    NoiseScale,
    expert_loads,
    is_in_expert,
)
from ddpprobe.records.step import COUNTS, SUM_SQ, Site, StepRecord, empty_rows

HOME = Path(__file__).parent.parent.parent
SIZE = 64  # elements of a tensor


def merged(
    rows: Sequence[tuple[Site, float, int]], scalars: dict[int, dict[str, float]], step: int = 0
) -> StepRecord:
    """Return a merged record of sites, each with its rms and number of elements."""
    counts, values = empty_rows(len(rows))
    for i, (_, rms, numel) in enumerate(rows):
        counts[i, COUNTS.index("numel")] = numel
        counts[i, COUNTS.index("tapped")] = 1
        counts[i, COUNTS.index("observed")] = numel > 0
        values[i, SUM_SQ] = rms * rms * numel
    sites = tuple(site for site, _, _ in rows)
    return StepRecord(
        0, step, tuple(scalars), 0, sites=sites, counts=counts, values=values, scalars=scalars
    )


def of_gradients(own: np.ndarray, step: int = 0, mean: np.ndarray | None = None) -> StepRecord:
    """Return the record of a step in which each rank had a gradient [ranks, SIZE]."""
    whole = own.mean(axis=0) if mean is None else mean
    rows = [
        (Site("fc.weight", "grad_local"), 1.0, own.size),
        (Site("fc.weight", "grad", "", "replicated"), float(np.sqrt((whole**2).mean())), SIZE),
    ]
    norms = np.linalg.norm(own, axis=1)
    said = {rank: {"grad_norm_local": float(norm)} for rank, norm in enumerate(norms)}
    return merged(rows, said, step)


@pytest.mark.parametrize("ranks", [2, 5])
def test_the_noise_scale_is_that_of_the_gradients_distribution(ranks: int) -> None:
    """Of g = mu + noise of variance v in each element: S = SIZE v, G^2 = |mu|^2."""
    draw = np.random.default_rng(7)
    mu, fold = draw.normal(size=SIZE), DerivedNumbers()
    steps = [
        fold.update(of_gradients(mu + draw.normal(scale=3.0, size=(ranks, SIZE)), step))
        for step in range(2000)
    ]
    noise, signal = (np.mean([s[name] for s in steps]) for name in ("grad_noise", "grad_signal"))
    assert noise == pytest.approx(9.0 * SIZE, rel=0.03)
    assert signal == pytest.approx(mu @ mu, rel=0.1)
    window = steps[100 - NOISE_WINDOW + 1 : 101]
    ratio = np.mean([s["grad_noise"] for s in window]) / np.mean([s["grad_signal"] for s in window])
    assert steps[100].get("grad_noise_scale") == (pytest.approx(ratio) if ratio > 0 else None)
    assert all("grad_noise_scale" not in s for s in steps[: NOISE_WINDOW - 1])


def test_equal_gradients_have_no_noise_and_another_attempt_starts_anew() -> None:
    fold, same = DerivedNumbers(), np.ones((3, SIZE))
    for step in range(NOISE_WINDOW):
        found = fold.update(of_gradients(same, step))
    assert found["grad_noise"] == pytest.approx(0, abs=1e-9)
    assert found["grad_signal"] == pytest.approx(SIZE)
    assert found["grad_noise_scale"] == pytest.approx(0, abs=1e-9)
    assert "grad_noise_scale" not in fold.update(replace(of_gradients(same), attempt=1))


def test_the_noise_scale_stands_over_steps_that_do_not_tell_it() -> None:
    rng, fold, numbers = np.random.default_rng(0), NoiseScale(), DerivedNumbers()
    for step in range(NOISE_WINDOW):
        assert fold.now is None
        each = of_gradients(1 + rng.normal(size=(3, SIZE)), step)
        assert fold.update(each) == numbers.update(each).get("grad_noise_scale")
    known = fold.now
    assert known is not None
    assert fold.update(replace(each, skipped=True)) is None
    assert fold.now == known
    assert fold.update(replace(each, attempt=1)) is None
    assert fold.now is None


OWN = np.random.default_rng(1).normal(size=(2, SIZE))
WHOLE = of_gradients(OWN)
SAID = WHOLE.scalars[0]


@pytest.mark.parametrize(
    "record",
    [
        replace(WHOLE, ranks=(0,)),
        replace(WHOLE, missing=(2,)),
        replace(WHOLE, skipped=True),
        replace(WHOLE, partial=True),
        replace(WHOLE, scalars={0: SAID}),
        replace(WHOLE, scalars={0: SAID, 1: {**SAID, "micro_batches": 2}}),
        replace(WHOLE, scalars={0: SAID, 1: {**SAID, "unreduced": 1}}),
        replace(WHOLE, scalars={0: SAID, 1: {"grad_norm_local": math.nan}}),
        of_gradients(OWN, mean=OWN.sum(axis=0) * 2),
        replace(WHOLE, sites=(Site("other.weight", "grad_local"), WHOLE.sites[1])),
        replace(WHOLE, sites=(replace(WHOLE.sites[0], placement="sharded"), WHOLE.sites[1])),
    ],
    ids=[
        "one rank", "a rank is missing", "skipped", "partial", "a rank said nothing",
        "two micro-batches", "not reduced", "not finite", "a sum", "another parameter", "sharded",
    ],
)  # fmt: skip
def test_no_noise_is_told_where_the_formula_does_not_hold(record: StepRecord) -> None:
    assert "grad_noise" in DerivedNumbers().update(WHOLE)
    found = DerivedNumbers().update(record)
    assert not {"grad_noise", "grad_signal"} & found.keys()


def blocks(rms: Sequence[float], chain: str = "model.layers") -> list[tuple[Site, float, int]]:
    rows = [(Site("embed", "output"), 5.0, SIZE)]
    for number, each in enumerate(rms):
        rows += [
            (Site(f"{chain}.{number}.fc", "output"), 1.0, SIZE),
            (Site(f"{chain}.{number}", "output"), each, SIZE),
            (Site(f"{chain}.{number}", "grad_output"), 1 / each, SIZE),
        ]
    return rows


GROWING = [math.exp(0.25 * n) for n in range(12)]


@pytest.mark.parametrize("other", ["head.layers", "tail.layers"])
def test_growth_is_told_of_the_longest_chain_of_blocks(other: str) -> None:
    for rows in (
        [*blocks(GROWING), *blocks([1, 9, 9], other)],
        [*blocks([1, 9, 9], other), *blocks(GROWING)],
    ):
        found = DerivedNumbers().update(merged(rows, {0: {}}))
        assert found["output_growth"] == pytest.approx(0.25)
        assert found["grad_output_growth"] == pytest.approx(-0.25)


def test_growth_is_by_block_where_some_are_not_there_and_of_all_leaves_of_an_output() -> None:
    """Of a pipeline's stage, or of a step in which some blocks were left out."""
    rows = [row for row in blocks(GROWING) if not re.search(r"\.[0167]\b", row[0].fqn)]
    assert DerivedNumbers().update(merged(rows, {0: {}}))["output_growth"] == pytest.approx(0.25)
    # A second leaf of the last output, three times as large: its rms is that of both together.
    rows.append((Site("model.layers.11", "output", "1"), 0.0, 2 * SIZE))
    assert DerivedNumbers().update(merged(rows, {0: {}}))["output_growth"] == pytest.approx(
        0.25 - math.log(3) / 2 / 9
    )


def test_no_growth_is_told_of_a_block_of_which_an_output_did_not_arrive() -> None:
    rows = [*blocks(GROWING), (Site("model.layers.11", "output", "1"), 0.0, 0)]
    found = DerivedNumbers().update(merged(rows, {0: {}}))
    assert "output_growth" not in found
    assert found["grad_output_growth"] == pytest.approx(-0.25)


def test_growth_is_that_of_the_elements_that_are_finite() -> None:
    rows = [*blocks(GROWING), (Site("model.layers.11", "output", "1"), GROWING[11], SIZE)]
    record = merged(rows, {0: {}})
    counts, values = record.counts.copy(), record.values.copy()
    for row in (-1, -3):  # both outputs of the last block
        counts[row, [COUNTS.index(name) for name in ("nan", "pos_inf", "neg_inf")]] = 8, 16, 24
        values[row, SUM_SQ] *= (SIZE - 48) / SIZE
    assert record.sites[-3].key == ("model.layers.11", "output", "")
    found = DerivedNumbers().update(replace(record, counts=counts, values=values))
    assert found["output_growth"] == pytest.approx(0.25)


def test_gradients_that_clipping_has_made_zero_have_a_norm_of_zero() -> None:
    rows = [(Site("w", "grad", "", "replicated"), 1.0, SIZE)]
    said = {r: {"grad_norm": 8.0, "grad_norm_used": 0.0} for r in range(2)}
    assert DerivedNumbers().update(merged(rows, said))["global_grad_norm_used"] == 0.0


@pytest.mark.parametrize("placement", ["partial", "unknown"])
def test_one_ranks_part_tells_no_growth_and_no_balance(placement: str) -> None:
    rows = [*blocks(GROWING), *experts([1, 1, 1, 1])]
    whole = DerivedNumbers().update(merged(rows, {0: {}}))
    assert whole["expert_idle"] == 0
    parts = [(replace(site, placement=placement), rms, n) for site, rms, n in rows]
    assert DerivedNumbers().update(merged(parts, {0: {}})) == {}
    # Beside the whole of a tensor it adds nothing to it.
    beside = [(replace(s, leaf="part", placement=placement), 1e3, 8 * SIZE) for s, _, _ in rows]
    assert DerivedNumbers().update(merged([*rows, *beside], {0: {}})) == whole


def test_no_growth_is_told_of_few_blocks_bare_layers_or_a_block_that_was_not_called() -> None:
    bare = [(Site(f"net.{n}", "output"), 2.0**n, SIZE) for n in range(6)]
    silent = blocks([1, 2, 4, 8])
    silent = [(s, r, 0 if s.fqn == "model.layers.3" else n) for s, r, n in silent]
    for rows in (bare, blocks([1, 2]), silent):
        assert "output_growth" not in DerivedNumbers().update(merged(rows, {0: {}}))


def experts(*layers: Sequence[int]) -> list[tuple[Site, float, int]]:
    return [
        (Site(f"layers.{layer}.moe.experts.{expert}", "output"), 1.0, tokens * 8)
        for layer, loads in enumerate(layers)
        for expert, tokens in enumerate(loads)
    ]


def of_experts(*layers: Sequence[int]) -> StepRecord:
    return merged(experts(*layers), {0: {}})


def test_the_balance_of_experts_is_that_of_the_worst_layer() -> None:
    found = DerivedNumbers().update(of_experts([5, 5, 5, 5], [10, 10, 0, 0]))
    assert found["expert_violation"] == pytest.approx(1.0)
    assert found["expert_concentration"] == pytest.approx(0.5)
    assert found["expert_idle"] == pytest.approx(0.5)
    even = DerivedNumbers().update(of_experts([7, 7, 7]))
    assert even == pytest.approx(
        {"expert_violation": 0, "expert_concentration": 0, "expert_idle": 0}, abs=1e-12
    )
    assert DerivedNumbers().update(of_experts([0, 0])) == {}
    single = [(Site(f"experts.{n}", "output"), 1.0, int(n < 2)) for n in range(4)]
    assert DerivedNumbers().update(merged(single, {0: {}})) == pytest.approx(
        {"expert_violation": 1.0, "expert_concentration": 0.5, "expert_idle": 0.5}
    )


def test_experts_are_told_in_the_order_of_their_numbers_with_the_elements_of_each() -> None:
    loads = list(range(12))
    first, second = expert_loads(of_experts([5, 5], loads, [3], [0, 0]))
    assert (first[0], first[1].tolist()) == (
        ("layers.0.moe.experts.0", "layers.0.moe.experts.1"), [40.0, 40.0],
    )  # fmt: skip
    assert second[0] == tuple(f"layers.1.moe.experts.{n}" for n in loads)
    assert second[1].tolist() == [8.0 * n for n in loads]


def test_an_expert_that_was_never_called_is_known_by_its_parameters() -> None:
    called = [(Site("moe.experts.2", "output"), 1.0, 80)]
    weights = [(Site(f"moe.experts.{n}.fc.weight", "grad"), 1.0, 4) for n in range(4)]
    ((fqns, load),) = expert_loads(merged([*called, *weights], {0: {}}))
    assert fqns == tuple(f"moe.experts.{n}" for n in range(4))
    assert load.tolist() == [0.0, 0.0, 80.0, 0.0]
    assert expert_loads(merged(weights, {0: {}})) == []  # nobody calls them as modules


@pytest.mark.parametrize(
    ("fqn", "inside"),
    [
        ("layers.0.moe.experts.3", True), ("experts.0.fc.weight", True),
        ("mlp.routed_experts.10", True), ("moe.experts", False), ("moe.experts.router", False),
        ("experts_of.3", False), ("layers.0.fc", False), ("", False),
    ],
)  # fmt: skip
def test_what_is_in_an_expert_is_known_by_its_name(fqn: str, inside: bool) -> None:
    assert is_in_expert(fqn) is inside


def test_the_reference_names_each_number_with_its_unit_and_source() -> None:
    lines = (HOME / "docs/reference/python.md").read_text().splitlines()
    table = "\n".join(line for line in lines if line.startswith("| `"))
    for each in (*DERIVED, NOISE_SCALE):
        assert re.search(
            rf"^\| `{each.name}`( \(.+\))? \| {each.unit or '-'} \|", table, re.MULTILINE
        )
        cited = re.search(r"arXiv \S+", each.source)
        assert cited is None or cited[0].strip(",") in table


HELD = {"replicated": (5.0, 5.0), "sharded": (3.0, 4.0)}  # norms of two ranks' parts


@pytest.mark.parametrize("placement", HELD)
def test_the_used_norm_is_that_of_the_whole_whatever_a_rank_holds(placement: str) -> None:
    rows = [(Site("w", "grad", "", placement), 5.0 / math.sqrt(SIZE), SIZE)]
    parts = HELD[placement]
    said = {r: {"grad_norm": n, "grad_norm_used": n / 10} for r, n in enumerate(parts)}
    assert DerivedNumbers().update(merged(rows, said))["global_grad_norm_used"] == pytest.approx(
        0.5
    )
    del said[1]["grad_norm_used"]
    assert "global_grad_norm_used" not in DerivedNumbers().update(merged(rows, said))


def test_the_used_norm_of_gradients_held_in_two_ways_is_not_known() -> None:
    rows = [(Site(p, "grad", "", p), 1.0, SIZE) for p in HELD]
    said = {r: {"grad_norm": 1.0, "grad_norm_used": 1.0} for r in range(2)}
    assert "global_grad_norm_used" not in DerivedNumbers().update(merged(rows, said))


@pytest.mark.parametrize("norm", [0.0, 1e-4])
def test_the_used_norm_is_told_of_small_gradients_and_of_none_that_are_zero(norm: float) -> None:
    rows = [(Site("w", "grad", "", "replicated"), norm / math.sqrt(SIZE), SIZE)]
    said = {r: {"grad_norm": norm, "grad_norm_used": norm / 10} for r in range(2)}
    found = DerivedNumbers().update(merged(rows, said)).get("global_grad_norm_used")
    assert found == (pytest.approx(norm / 10) if norm else None)
