"""A gradient spike is found at once and named; healthy streams never page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from ddpprobe.detectors.grad_spike import GradSpike
from ddpprobe.detectors.groups import group_of
from ddpprobe.detectors.history import LogHistory
from ddpprobe.records.step import COUNTS, VALUES, Anomaly, Site, StepRecord
from tests.detectors import made_records

SUM_SQ = VALUES.index("sum_sq")
HUGE = 1e308


def record(
    step: int, norms: Iterable[float], losses: Iterable[float] | None = None, **changes: object
) -> StepRecord:
    """A record of ranks that report scalars only; the reduced norm is their rms."""
    local = np.array(list(norms), float)
    loss = np.ones(len(local)) if losses is None else np.array(list(losses))
    with np.errstate(all="ignore"):
        reduced = float(np.sqrt(np.mean(local**2)))
    scalars = {
        rank: {
            "grad_norm_local": float(local[rank]),
            "grad_norm": reduced,
            "loss": float(loss[rank]),
        }
        for rank in range(len(local))
    }
    base = StepRecord(0, step, tuple(range(len(local))), step, scalars=scalars)
    return replace(base, **changes)  # type: ignore[arg-type]


def steady(steps: int, ranks: int = 4, seed: int = 0, start: int = 0) -> list[StepRecord]:
    rng = np.random.default_rng(seed)
    return [
        record(start + s, np.exp(0.3 * rng.standard_normal(ranks)), 1 + 0.1 * rng.random(ranks))
        for s in range(steps)
    ]


def run(records: Iterable[StepRecord], **settings: float) -> list[Anomaly]:
    return made_records.run(GradSpike(**settings), records)  # type: ignore[arg-type]


def test_a_spike_on_all_ranks_warns_at_once_and_names_none() -> None:
    (warn,) = run([*steady(100), record(100, [100.0] * 4)])
    assert (warn.level, warn.step, warn.rank, warn.first_cause) == ("warn", 100, None, False)
    assert warn.values["ratio"] > 50
    assert warn.values["points"] == 64
    assert "x the median" in warn.message


def test_a_spike_of_one_rank_names_it() -> None:
    (warn,) = run([*steady(100), record(100, [1.0, 1.0, 100.0, 1.0])])
    assert (warn.rank, warn.kind, warn.phase) == (2, "grad_local", "backward")
    assert warn.message.startswith("local gradient norm ")


def test_a_rank_that_hardly_passes_its_peers_is_not_blamed() -> None:
    quiet = steady(100)
    (warn,) = run([*quiet, record(100, [60.0, 58.0, 59.0, 61.0])], z=22.0, ratio=4.0)
    assert warn.rank is None


@pytest.mark.parametrize(("other", "blamed"), [(2.5, 2), (3.5, None)])
def test_a_rank_is_blamed_whose_norm_grew_twice_as_much_as_any_others(
    other: float, blamed: int | None
) -> None:
    quiet = [record(step, [1.0 + step % 7 / 100] * 4) for step in range(100)]
    (warn,) = run([*quiet, record(100, [1.0, other, 6.0, 1.0])])
    assert warn.rank == blamed


def test_a_single_rank_run_names_its_rank() -> None:
    (warn,) = run([*steady(100, ranks=1), record(100, [100.0])])
    assert warn.rank == 0


def every(interval: int, records: list[StepRecord]) -> list[StepRecord]:
    return [replace(r, step=interval * r.step) for r in records]


def test_the_first_32_steps_and_12_sampled_ones_give_no_verdict() -> None:
    assert run([*steady(31), record(31, [1000.0] * 4)]) == []
    assert run(every(10, [*steady(11), record(11, [1000.0] * 4)])) == []


def test_at_an_interval_of_ten_a_growth_is_found_behind_120_steps() -> None:
    found = run(every(10, [*steady(12), record(12, [1000.0] * 4)]))
    assert [(a.level, a.step) for a in found] == [("warn", 120)]
    assert len(run([*steady(32), record(32, [1000.0] * 4)])) == 1


def test_a_value_below_the_windows_maximum_is_no_spike() -> None:
    loud = [record(s, [50.0 if s == 40 else 1.0]) for s in range(60)]
    assert [a.step for a in run([*loud, record(60, [49.0])])] == [40]


@pytest.mark.parametrize("at", [92, 96, 100, 104, 108])
def test_a_loss_spike_within_eight_steps_makes_it_a_page_for_the_original_step(at: int) -> None:
    stream = steady(130)
    stream[100] = record(100, [100.0] * 4, [1.0] * 4)
    stream[at] = replace(
        stream[at],
        scalars={r: {**s, "loss": 100.0} for r, s in stream[at].scalars.items()},
    )
    found = run(stream)
    assert [a.step for a in found] == [100] * len(found)
    assert [a.level for a in found] == (["page"] if at <= 100 else ["warn", "page"])
    assert found[-1].first_cause
    assert f"the loss spiked too, at step {at}" in found[-1].message


@pytest.mark.parametrize(("usual", "then"), [(-1.0, -100.0), (1.0, -100.0)])
def test_a_loss_that_falls_far_below_zero_is_no_spike(usual: float, then: float) -> None:
    stream = [record(s, [1.0 + s % 7 / 50] * 4, [usual] * 4) for s in range(130)]
    stream[100] = record(100, [100.0] * 4, [then] * 4)
    assert [a.level for a in run(stream)] == ["warn"]


@pytest.mark.parametrize(("times", "level"), [(2.5, "page"), (1.5, "warn")])
def test_the_loss_must_be_twice_its_median_for_a_page(times: float, level: str) -> None:
    stream = steady(130)
    usual = [said["loss"] for said in stream[100].scalars.values()]
    stream[100] = record(100, [100.0] * 4, [times * loss for loss in usual])
    assert [a.level for a in run(stream)] == [level]


def test_a_gradient_that_explodes_with_the_loss_is_paged_once_and_then_warned_of() -> None:
    stream = steady(140)
    for n in range(4):
        stream[100 + n] = record(100 + n, [100.0**n * 100] * 4, [100.0 * 10**n] * 4)
    found = [(a.level, a.step) for a in run(stream)]
    assert found == [("page", 100), ("warn", 101), ("warn", 102), ("warn", 103)]


def test_no_step_is_paged_twice_however_short_the_quiet() -> None:
    stream = steady(140)
    for step in (100, 102, 104):
        stream[step] = record(step, [100.0 * 2 ** (step - 100)] * 4, [100.0] * 4)
    pages = [a.step for a in run(stream, quiet_steps=0) if a.level == "page"]
    assert pages == [100, 102, 104]


@pytest.mark.parametrize("at", [91, 109])
def test_a_loss_spike_nine_steps_away_does_not(at: int) -> None:
    stream = steady(130)
    stream[100] = record(100, [100.0] * 4)
    stream[at] = record(at, [1.0] * 4, [100.0] * 4)
    assert [a.level for a in run(stream)] == ["warn"]


def test_the_third_spike_within_fifty_steps_is_a_page_for_the_first() -> None:
    stream = steady(160)
    for step, norm in ((100, 60.0), (120, 70.0), (149, 80.0)):
        stream[step] = record(step, [norm] * 4)
    warn, page = run(stream)
    assert [(a.level, a.step) for a in (warn, page)] == [("warn", 100), ("page", 100)]
    assert page.message == f"{warn.message}; 3 spikes within 50 steps: 100, 120, 149"
    stream[149], stream[150] = steady(1)[0], record(150, [80.0] * 4)
    stream[149] = replace(stream[149], step=149)
    assert [(a.level, a.step) for a in run(stream)] == [("warn", 100)]


@pytest.mark.parametrize(
    ("ranks", "levels"), [((2, 2, 2), ["warn", "page"]), ((0, 1, 2), ["warn"])]
)
def test_three_spikes_of_different_ranks_are_chance_and_of_one_rank_a_fault(
    ranks: tuple[int, ...], levels: list[str]
) -> None:
    stream = steady(160, ranks=64)
    for i, rank in enumerate(ranks):
        norms = np.ones(64)
        norms[rank] = 12.0 + 3 * i  # too little to move the norm over 64 ranks by a factor of 4
        stream[100 + 20 * i] = record(100 + 20 * i, norms)
    assert [a.level for a in run(stream, z=4.0)] == levels


def test_a_repeated_spike_is_reported_after_a_hundred_quiet_steps_or_ten_times_worse() -> None:
    def levels(second: int, norm: float) -> list[int]:
        stream = steady(320)
        stream[100] = record(100, [100.0] * 4)
        stream[second] = record(second, [norm] * 4)
        return [a.step for a in run(stream)]

    assert levels(190, 500.0) == [100]
    assert levels(190, 5000.0) == [100, 190]
    assert levels(201, 100.0) == [100, 201]


def test_a_restart_empties_the_window() -> None:
    later = [replace(r, attempt=1) for r in steady(31, start=101)]
    assert run([*steady(100), *later, record(132, [1000.0] * 4, attempt=1)]) == []


@pytest.mark.parametrize("changes", [{"skipped": True}, {"partial": True}, {"sampled": False}])
def test_steps_without_a_whole_gradient_are_neither_judged_nor_remembered(
    changes: dict[str, bool],
) -> None:
    assert run([*steady(100), record(100, [1e6] * 4, **changes)]) == []
    assert run([record(s, [1.0], **changes) for s in range(64)] + [record(64, [1e6])]) == []


def test_nan_zero_and_extreme_values_neither_raise_nor_enter_the_window() -> None:
    odd = [np.nan, np.inf, -np.inf, 0.0, HUGE, 5e-324, 1.7976931348623157e308]
    noise = [record(100 + i, [x] * 4, [x] * 4) for i, x in enumerate(odd[:4])]
    found = run([*steady(100), *noise, record(104, [100.0] * 4)])
    assert [a.step for a in found] == [104]
    for x in odd[4:]:
        for a in run([*steady(100), record(100, [x] * 4, [x] * 4)]):
            assert all(np.isfinite(v) for v in a.values.values())


def with_rows(base: StepRecord, norms: dict[str, float], **site: str) -> StepRecord:
    sites = tuple(Site(name, "grad", **{"placement": "replicated", **site}) for name in norms)
    counts, values = np.zeros((len(sites), len(COUNTS)), np.int64), np.zeros((len(sites), 4))
    counts[:, 0] = 8
    values[:, SUM_SQ] = np.square(list(norms.values()))
    return replace(base, sites=sites, counts=counts, values=values, scalars={})


BLOCKS = [f"blocks.{i}.{part}.fc.weight" for i in range(3) for part in ("attn", "mlp")]


def test_the_global_norm_comes_from_the_reduced_rows_and_the_module_that_grew_is_named() -> None:
    rng = np.random.default_rng(1)
    stream = [
        with_rows(r, {b: float(np.exp(0.2 * rng.standard_normal())) for b in BLOCKS})
        for r in steady(100)
    ]
    norms = dict.fromkeys(BLOCKS, 1.0)
    (warn,) = run([*stream, with_rows(record(100, [1.0]), {**norms, BLOCKS[3]: 300.0})])
    assert warn.module == "blocks.1.mlp"
    assert warn.message.startswith("gradient norm ")
    assert warn.values["norm"] == pytest.approx(np.sqrt(300.0**2 + 5))
    (everywhere,) = run([*stream, with_rows(record(100, [1.0]), dict.fromkeys(BLOCKS, 300.0))])
    assert everywhere.module is None


def test_on_all_ranks_a_module_must_have_grown_twice_as_much_as_the_others() -> None:
    rows = {**dict.fromkeys(BLOCKS, 1.0), BLOCKS[3]: 100.0}
    stream = [with_rows(record(s, [1.0] * 4), rows) for s in range(100)]
    for others, module in ((2.3, None), (2.2, "blocks.1.mlp")):
        now = {**dict.fromkeys(BLOCKS, others), BLOCKS[3]: 450.0}
        (warn,) = run([*stream, with_rows(record(100, [1.0] * 4), now)])
        assert (warn.rank, warn.module) == (None, module)


def with_local_rows(base: StepRecord, of_ranks: list[dict[str, float]]) -> StepRecord:
    """The local gradients of all ranks merged: their squares are added."""
    names = list(of_ranks[0])
    values = np.zeros((len(names), len(VALUES)))
    values[:, SUM_SQ] = [sum(rank[name] ** 2 for rank in of_ranks) for name in names]
    counts = np.ones((len(names), len(COUNTS)), np.int64)
    counts[:, 1:4] = 0
    sites = tuple(Site(f"{name}.weight", "grad_local") for name in names)
    return replace(base, sites=sites, counts=counts, values=values)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_the_module_of_one_ranks_spike_is_named_however_many_ranks_hide_it(ranks: int) -> None:
    rng = np.random.default_rng(0)
    names = ("embed", "blocks.0.mlp", "blocks.1.mlp", "head")
    stream = []
    for step in range(101):
        own = [{n: float(np.exp(0.1 * rng.standard_normal())) for n in names} for _ in range(ranks)]
        if step == 100:
            own[1]["blocks.1.mlp"] *= 30
        norms = [float(np.sqrt(sum(x * x for x in o.values()))) for o in own]
        stream.append(with_local_rows(record(step, norms), own))
    (warn,) = run(stream)
    assert (warn.rank, warn.module) == (1, "blocks.1.mlp")


@pytest.mark.parametrize("seed", range(5))
def test_no_module_is_named_where_all_of_one_ranks_gradients_grew(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = ("embed", "blocks.0.mlp", "blocks.1.mlp", "head")
    stream = []
    for step in range(101):
        grown = [30 if (step, r) == (100, 1) else 1 for r in range(16)]
        own = [{n: g * float(np.exp(0.1 * rng.standard_normal())) for n in names} for g in grown]
        norms = [float(np.sqrt(sum(x * x for x in o.values()))) for o in own]
        stream.append(with_local_rows(record(step, norms), own))
    (warn,) = run(stream)
    assert (warn.rank, warn.module) == (1, None)


def sharded(step: int, parts: tuple[float, float]) -> StepRecord:
    """Two ranks whose local norm is about 2; `parts` are those that each holds of the mean."""
    local = 2 + 0.1 * (step % 3)
    said = {r: {"grad_norm_local": local, "grad_norm": x, "loss": 1.0, "micro_batches": 1}
            for r, x in enumerate(parts)}  # fmt: skip
    norm = float(np.sqrt(sum(x * x for x in parts)))
    rows = with_rows(record(step, [local] * 2), {"a": norm, "b": 0.01}, placement="sharded")
    return replace(rows, scalars=said)


def test_the_rank_whose_shard_is_larger_than_any_mean_is_named() -> None:
    quiet = [sharded(s, (1 + 0.1 * (s % 4), 1)) for s in range(100)]
    (warn,) = run([*quiet, sharded(100, (1, 90))])
    assert (warn.rank, warn.kind) == (1, "grad")
    (warn,) = run([*quiet, sharded(100, (90, 90))])
    assert warn.rank is None


def test_no_rank_is_named_by_a_shard_that_a_mean_may_have_or_where_gradients_are_summed() -> None:
    quiet = [sharded(s, (0.1 + 0.01 * (s % 4), 0.1)) for s in range(100)]
    (warn,) = run([*quiet, sharded(100, (0.1, 2.0))])
    assert warn.rank is None
    summed = [sharded(s, (1, 4 + 0.1 * (s % 4))) for s in range(100)]
    (warn,) = run([*summed, sharded(100, (1, 90))])
    assert warn.rank is None


def test_no_rank_is_named_by_a_shard_where_a_gradient_is_the_sum_of_micro_batches() -> None:
    stream = [*(sharded(s, (1 + 0.1 * (s % 4), 1)) for s in range(100)), sharded(100, (1, 90))]
    several = [
        replace(r, scalars={rank: {**s, "micro_batches": 2} for rank, s in r.scalars.items()})
        for r in stream
    ]
    (warn,) = run(several)
    assert warn.rank is None


def test_a_shard_missing_from_the_global_norm_is_no_reading() -> None:
    norms = dict.fromkeys(BLOCKS, 1.0)
    stream = [with_rows(r, norms, placement="sharded") for r in steady(100)]
    torn = with_rows(record(100, [1.0]), dict.fromkeys(BLOCKS, 1e4), placement="sharded")
    assert run([*stream, replace(torn, missing=(9,))]) == []
    assert len(run([*stream, torn])) == 1


def test_no_module_is_named_by_rows_that_lack_a_shard() -> None:
    norms = dict.fromkeys(BLOCKS, 1.0)
    bare = [*steady(100), record(100, [1.0, 1.0, 100.0, 1.0])]
    grown = {**norms, BLOCKS[1]: 1e4}
    stream = [
        replace(with_rows(r, grown if r.step == 100 else norms, placement="sharded"),
                scalars=r.scalars)
        for r in bare
    ]  # fmt: skip
    (whole,) = run(stream)
    (torn,) = run([*stream[:100], replace(stream[100], missing=(9,))])
    assert whole.module is not None
    assert (torn.rank, torn.kind, torn.module) == (2, "grad_local", None)


def test_rows_of_any_numbers_do_not_raise() -> None:
    detector = GradSpike()
    for step, x in enumerate([1.0] * 40 + [np.nan, np.inf, -1.0, HUGE, 1e150, 0.0]):
        torn = with_rows(record(step, [1.0]), dict.fromkeys(BLOCKS, 1.0))
        torn.values[:, SUM_SQ] = x
        detector.update(torn)


@pytest.mark.parametrize(
    ("parameter", "group"),
    [
        ("blocks.2.mlp.fc.weight", "blocks.2.mlp"),
        ("model.layers.17.self_attn.q.weight", "model.layers.17.self_attn"),
        ("embed.weight", "embed"),
        ("0.weight", "0"),
        ("scale", ""),
    ],
)
def test_a_group_is_the_module_cut_after_the_first_index(parameter: str, group: str) -> None:
    assert group_of(parameter) == group


def shapes(steps: int) -> dict[str, NDArray[np.float64]]:
    t = np.arange(steps)
    return {
        "flat": np.ones(steps),
        "drift": 10 ** (2 * t / steps - 1),
        "five decades down": 10 ** (-5 * t / steps),
        "power law": (1.0 + t) ** -1.5,
        "warm-up": np.where(t < 100, 10 ** (t / 66 - 1.5), 1.0),
        "waves": 10 ** (0.5 * np.sin(t / 20)),
    }


def healthy(
    shape: NDArray[np.float64], seed: int, tail: str, noisiest: float = 0.8
) -> Iterator[StepRecord]:
    rng = np.random.default_rng(seed)
    sigma = rng.uniform(0.1, noisiest)
    for step, level in enumerate(shape):
        noise = np.exp(sigma * rng.standard_normal(4))
        if tail == "heavy":
            noise = np.sqrt(np.mean(rng.standard_t(3, (4, 32)) ** 2, axis=1))
        yield record(step, level * noise, np.sqrt(level) * np.exp(0.1 * rng.standard_normal(4)))


@pytest.mark.parametrize("tail", ["lognormal", "heavy"])
def test_healthy_streams_never_page_and_hardly_warn(tail: str) -> None:
    count: Counter[str] = Counter()
    runs = 0
    for seed in range(6):
        for shape in shapes(300).values():
            found = run(healthy(shape, seed, tail))
            count["page"] += sum(a.level == "page" for a in found)
            count["runs with a warning"] += bool(found)
            runs += 1
    assert count["page"] == 0
    assert count["runs with a warning"] <= (0 if tail == "lognormal" else 0.3 * runs)


def test_a_hundredfold_spike_is_found_in_every_healthy_shape_at_its_step() -> None:
    # Up to sigma 0.4: noisier, a factor of 100 is less than 8 standard deviations.
    for seed in range(3):
        for name, shape in shapes(1000).items():
            stream = list(healthy(shape, seed, "lognormal", noisiest=0.4))[: 500 + seed]
            at = len(stream) - 1
            losses = [s["loss"] for s in stream[at].scalars.values()]
            stream[at] = record(at, [100 * shape[at]] * 4, losses)
            assert [a.step for a in run(stream)] == [at], (name, seed)


def test_the_same_stream_gives_the_same_anomalies_twice() -> None:
    stream = [*steady(100), record(100, [100.0] * 4), *steady(20, start=101, seed=3)]
    stream.append(record(121, [1e5, 1.0, 1.0, 1.0], [1e3] * 4))
    assert run(stream) == run(stream) != []


def test_state_does_not_grow_with_the_run() -> None:
    detector = GradSpike()
    for r in steady(500):
        detector.update(r)
    assert len(detector._histories) == 4 + 2  # four ranks, the reduced norm, the loss
    assert all(len(h._logs) == 64 for h in detector._histories.values())
    assert detector._episode.recent == []


def test_history_measures_in_decades_over_a_floor() -> None:
    history = LogHistory(window=4, least=4)
    for value in (1.0, 1.0, -1.0, 1.0):
        history.add(value)
    reading = history.read(10.0)
    assert reading is not None
    assert reading.z == pytest.approx(1 / 0.05)
    assert reading.ratio == pytest.approx(10.0)
    assert history.read(0.0) is None
