"""What falls silent is said once, with a name; what merely comes and goes is not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpprobe.detectors.coverage import FEWEST_ABSENT, NEVER, Coverage, patience
from ddpprobe.detectors.subtrees import by_subtree, common_module, subtrees
from ddpprobe.records.step import COUNTS, VALUES, Anomaly, Site, StepRecord
from tests.detectors import made_records

OBSERVED = COUNTS.index("observed")
LAYERS = tuple(
    Site(f"layers.{i}.{part}", kind)
    for i in range(4) for part in ("attn", "mlp") for kind in ("output", "grad_output")
)  # fmt: skip
WEIGHTS = tuple(Site(f"layers.{i}.mlp.weight", "grad") for i in range(4))
SITES = (Site("embed", "output"), *LAYERS, *WEIGHTS)
Absent = Callable[[int, Site], bool]


def record(step: int, gone: Absent = lambda *_: False, *, listed: bool = True) -> StepRecord:
    """A sampled step; an absent site is `listed` as unobserved, or has no row at all."""
    sites = SITES if listed else tuple(s for s in SITES if not gone(step, s))
    counts = np.zeros((len(sites), len(COUNTS)), np.int64)
    counts[:, OBSERVED] = [not gone(step, s) for s in sites]
    values = np.zeros((len(sites), len(VALUES)))
    return StepRecord(0, step, (0, 1), step, sites=sites, counts=counts, values=values)


def run(records: Iterable[StepRecord]) -> list[Anomaly]:
    return made_records.run(Coverage(), records)


def after(step: int, prefix: str, kinds: Sequence[str] = ()) -> Absent:
    def gone(now: int, site: Site) -> bool:
        return now >= step and site.fqn.startswith(prefix) and (not kinds or site.kind in kinds)

    return gone


@pytest.mark.parametrize("listed", [True, False])
def test_a_module_that_falls_silent_is_one_warning_that_covers_all_its_sites(listed: bool) -> None:
    gone = after(100, "layers.2")
    (warning,) = run(record(s, gone, listed=listed) for s in range(300))
    assert (warning.detector, warning.level, warning.step) == ("coverage", "warn", 102)
    assert (warning.module, warning.kind, warning.phase) == ("layers.2", None, "forward")
    assert (warning.rank, warning.first_cause) == (None, False)
    assert dict(warning.values) == {"lost": 5, "reporting": len(SITES) - 5, "modules": 1}
    assert warning.message.startswith(
        "5 sites in layers.2 report no more (grad, grad_output, output)"
    )
    assert "\n" not in warning.message


def test_weights_which_take_turns_are_neither_lost_nor_counted() -> None:
    in_turn = tuple(Site("embed.weight", kind) for kind in ("param", "update"))
    records = []
    for step in range(300):
        whole = record(step, after(100, "embed"))
        seen = np.zeros((2, len(COUNTS)), np.int64)
        seen[:, OBSERVED] = step < 100 or step % 8 == 0
        records.append(
            replace(
                whole, sites=(*whole.sites, *in_turn), counts=np.concatenate((whole.counts, seen)),
                values=np.concatenate((whole.values, np.zeros((2, len(VALUES))))),
            )
        )  # fmt: skip
    (warning,) = run(records)
    assert dict(warning.values) == {"lost": 1, "reporting": len(SITES) - 1, "modules": 1}


def test_one_site_is_named_itself() -> None:
    (warning,) = run(record(s, after(100, "embed")) for s in range(200))
    assert (warning.module, warning.kind) == ("embed", "output")
    assert warning.message.startswith("1 site in embed reports no more (output)")


def test_the_largest_silent_modules_are_named_and_not_what_lies_around_them() -> None:
    gone = lambda now, site: now >= 100 and site.fqn in {"embed", "layers.0.attn"}  # noqa: E731
    (warning,) = run(record(s, gone) for s in range(200))
    assert (warning.module, warning.values["modules"]) == ("embed", 2)
    assert warning.message.startswith("3 sites in embed, layers.0.attn report no more")


def test_of_gradients_that_stop_the_part_nearest_to_the_loss_is_the_one_to_look_at() -> None:
    """A layer's output is detached: what comes before it gets none because of it."""
    for names, module in (
        ({"layers.0.attn", "layers.1.attn"}, "layers.1.attn"),  # as large as one another
        ({"layers.0.attn", "layers.0.mlp", "layers.0.mlp.weight", "layers.1.attn"}, "layers.0"),
    ):
        gone = lambda now, site, names=names: (  # noqa: E731
            now >= 100 and site.fqn in names and site.kind != "output"
        )
        (warning,) = run(record(s, gone) for s in range(200))
        assert (warning.module, warning.phase) == (module, "backward")


def test_two_layers_are_named_and_not_their_list() -> None:
    gone = lambda now, site: now >= 100 and site.fqn[:8] in {"layers.1", "layers.3"}  # noqa: E731
    (warning,) = run(record(s, gone) for s in range(200))
    assert (warning.module, warning.values["modules"]) == ("layers.1", 2)
    assert "in layers.1, layers.3 report no more" in warning.message


def test_what_falls_silent_later_is_named_itself_and_not_with_what_was_told_before() -> None:
    def gone(now: int, site: Site) -> bool:
        begun = {"layers.2.attn": 100, "layers.2.mlp": 120, "layers.2.mlp.weight": 120}
        return now >= begun.get(site.fqn, 999)

    first, second = run(record(s, gone) for s in range(200))
    assert (first.module, second.module) == ("layers.2.attn", "layers.2.mlp")
    assert (first.values["lost"], second.values["lost"]) == (2, 3)


def test_all_sites_of_a_kind_are_named_by_the_deepest_module_that_holds_them() -> None:
    (warning,) = run(record(s, after(100, "", ("grad",))) for s in range(200))
    assert (warning.module, warning.kind, warning.phase) == ("layers", "grad", "step")


def test_what_is_silent_in_one_kind_only_stays_out_of_the_name_of_another() -> None:
    gone = after(100, "layers.2", ("output",))
    (warning,) = run(record(s, gone) for s in range(200))
    assert (warning.module, warning.kind) == ("layers.2", "output")


def test_gradients_alone_are_said_to_be_frozen_or_detached() -> None:
    gone = after(100, "layers.1", ("grad", "grad_output", "grad_local"))
    (warning,) = run(record(s, gone) for s in range(200))
    assert (warning.module, warning.phase) == ("layers.1", "backward")
    assert "requires_grad=False" in warning.message


def test_a_rank_that_reports_nothing_is_said_at_once() -> None:
    def rank_sites(step: int) -> StepRecord:
        seen = {0: 21.0, 1: 0.0 if step >= 30 else 21.0}
        return replace(record(step), scalars={r: {"sites_observed": n} for r, n in seen.items()})

    (warning,) = run(rank_sites(s) for s in range(60))
    assert (warning.step, warning.rank, warning.level) == (30, 1, "warn")
    assert warning.message.startswith("rank 1 reports none of 21 sites")


@pytest.mark.parametrize("listed", [True, False])
def test_a_model_that_reports_nothing_is_said_at_once_and_once(listed: bool) -> None:
    (warning,) = run(record(s, after(9, ""), listed=listed) for s in range(60))
    assert (warning.step, warning.rank, warning.module) == (9, None, None)
    assert warning.message.startswith("ranks 0-1 report none of 21 sites")


def test_a_model_that_never_reported_is_not_a_loss() -> None:
    assert run(record(s, after(0, "")) for s in range(60)) == []


def test_what_a_missing_rank_would_have_reported_is_not_lost() -> None:
    gone = after(100, "layers.3")
    records = [record(s, gone, listed=False) for s in range(200)]
    late = [replace(r, ranks=(0,), missing=(1,)) if r.step >= 100 else r for r in records]
    assert run(late) == []


def test_steps_that_were_not_sampled_or_never_ended_say_nothing() -> None:
    gone = after(50, "layers.3")
    for change in ({"sampled": False}, {"partial": True}):
        assert run(replace(record(s, gone), **change if s >= 50 else {}) for s in range(200)) == []


def test_a_restart_forgets_everything() -> None:
    first = [record(s) for s in range(100)]
    again = [replace(record(s, after(0, "layers.1"), listed=False), attempt=1) for s in range(100)]
    assert run(first + again) == []
    silent = [replace(record(s, after(0, "")), attempt=1) for s in range(100)]
    assert run(first + silent) == []


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_count_that_is_none_is_taken_as_not_said(number: float) -> None:
    strange = [replace(record(s), scalars={0: {"sites_observed": number}}) for s in range(20)]
    assert run(strange) == []


def test_a_site_that_came_back_is_soon_lost_again_only_when_it_was_steady_again() -> None:
    def on_and_off(back: int) -> Absent:
        return lambda now, s: s.fqn == "embed" and (40 <= now < 80 or now >= 80 + back)

    assert len(run(record(s, on_and_off(255)) for s in range(450))) == 1
    assert len(run(record(s, on_and_off(256)) for s in range(450))) == 2


def test_a_site_that_came_back_is_lost_again_when_it_is_away_far_longer_than_before() -> None:
    gone: Absent = lambda now, s: s.fqn == "embed" and (40 <= now < 80 or now >= 180)  # noqa: E731
    first, second = run(record(s, gone) for s in range(400))
    assert (first.step, second.step) == (43, 180 + 4 * 40 - 1)


def layers_record(step: int, present: Sequence[bool]) -> StepRecord:
    """One sampled step of `layers.0`, `layers.1`, ..., each present or not."""
    sites = tuple(Site(f"layers.{i}", "output") for i in range(len(present)))
    counts = np.zeros((len(sites), len(COUNTS)), np.int64)
    counts[:, OBSERVED] = present
    return StepRecord(0, step, (0,), step, sites=sites, counts=counts,
                      values=np.zeros((len(sites), len(VALUES))))  # fmt: skip


def test_a_layer_that_was_lucky_so_far_is_not_lost_where_its_peers_come_and_go() -> None:
    present = np.random.default_rng(0).random((38, 6)) >= 0.2
    present[:34, 4], present[34:, 4] = True, False  # as in a healthy run with LayerDrop
    assert run(layers_record(s, present[s]) for s in range(38)) == []
    present[:, [0, 1, 2, 3, 5]] = True
    (warning,) = run(layers_record(s, present[s]) for s in range(38))
    assert (warning.step, warning.module) == (37, "layers.4")


def test_an_expert_that_was_called_now_and_then_is_not_lost() -> None:
    present = np.ones((300, 8), bool)
    present[:, [1, 6, 7]] = False
    present[:, 5] = [s in {4, 9} for s in range(300)]
    present[30, 3] = False
    assert run(layers_record(s, present[s]) for s in range(300)) == []


@pytest.mark.parametrize("rate", [0.5, 0.2, 0.05])
def test_a_layer_that_is_gone_for_good_is_named_under_layer_drop(rate: float) -> None:
    present = np.random.default_rng(int(100 * rate)).random((400, 12)) >= rate
    present[300:, 7] = False
    (warning,) = run(layers_record(s, present[s]) for s in range(400))
    assert (warning.module, warning.values["lost"]) == ("layers.7", 1)
    assert 300 < warning.step < 380


@pytest.mark.parametrize("rate", [0.5, 0.2, 0.1, 0.05, 0.01])
def test_layer_drop_is_no_loss(rate: float) -> None:
    rng = np.random.default_rng(int(rate * 100))
    dropped = rng.random((1000, 4)) < rate

    def gone(step: int, site: Site) -> bool:
        return site.fqn != "embed" and bool(dropped[step, int(site.fqn.split(".")[1])])

    assert run(record(s, gone, listed=False) for s in range(1000)) == []


def test_an_expert_without_tokens_is_no_loss() -> None:
    rng = np.random.default_rng(3)
    sites = tuple(Site(f"experts.{i}", "output") for i in range(8))
    share = np.exp(rng.standard_normal(8))
    records = []
    for step in range(1000):
        tokens = rng.multinomial(12, share / share.sum())
        some = tuple(s for s, n in zip(sites, tokens, strict=True) if n)
        counts = np.ones((len(some), len(COUNTS)), np.int64)
        values = np.zeros((len(some), len(VALUES)))
        records.append(StepRecord(0, step, (0,), step, sites=some, counts=counts, values=values))
    assert run(records) == []


@pytest.mark.parametrize(
    ("names", "level"),
    [
        (("experts.1", "experts.1.up"), "info"),
        (("blocks.0.mlp.local_experts.1.up",), "info"),
        (("experts.1", "head"), "warn"),
        (("branches.1",), "warn"),
        (("experts.norm",), "warn"),
    ],
)
def test_experts_that_are_chosen_no_more_are_an_information(
    names: tuple[str, ...], level: str
) -> None:
    sites = tuple(Site(name, "output") for name in ("embed", *names))
    counts = np.ones((len(sites), len(COUNTS)), np.int64)
    gone = counts.copy()
    gone[1:, COUNTS.index("observed")] = 0
    values = np.zeros((len(sites), len(VALUES)))
    (told,) = run(
        StepRecord(0, s, (0,), s, sites=sites, counts=counts if s < 60 else gone, values=values)
        for s in range(80)
    )
    assert (told.level, told.values["lost"]) == (level, len(names))


def test_the_longer_a_site_has_reported_the_sooner_it_is_missed() -> None:
    needed = [patience(n, 20_000, 8) for n in range(300)]
    assert set(needed[:8]) == {NEVER}
    assert needed[8:] == sorted(needed[8:], reverse=True)
    assert (needed[8], needed[16], needed[32], needed[64]) == (9, 5, 4, FEWEST_ABSENT)


@given(st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=4), min_size=1, max_size=4))
def test_the_prefix_covers_every_name_and_is_the_longest(names: list[list[str]]) -> None:
    common = [p for p in common_module(".".join(n) for n in names).split(".") if p]
    assert all(n[: len(common)] == common for n in names)
    longer = {tuple(n[: len(common) + 1]) for n in names}
    assert len(longer) > 1 or any(len(n) == len(common) for n in names)


PATHS = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(".".join)


@given(st.sets(PATHS, min_size=1, max_size=8), st.sets(PATHS, max_size=8))
def test_subtrees_hold_every_name_and_nothing_of_the_rest_and_cannot_be_larger(
    part: set[str], rest: set[str]
) -> None:
    def is_in(name: str, module: str) -> bool:
        return not module or f"{name}.".startswith(f"{module}.")

    found = by_subtree(part, rest)
    assert list(found) == subtrees(part, rest)
    assert sorted(n for names in found.values() for n in names) == sorted(part)
    for module, inside in found.items():
        assert all(is_in(name, module) for name in inside)
        alone = any(is_in(other, module) for other in rest)
        assert not alone or inside == [module]
        around = module.rpartition(".")[0]
        assert not module or alone or any(is_in(other, around) for other in rest)


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), max_size=80))
def test_the_verdict_does_not_depend_on_how_an_absence_is_written(seen: list[list[bool]]) -> None:
    sites = tuple(Site(name, "output") for name in "xyz")

    def made(step: int, *, listed: bool) -> StepRecord:
        rows = [i for i in range(3) if listed or seen[step][i]]
        counts = np.zeros((len(rows), len(COUNTS)), np.int64)
        counts[:, OBSERVED] = [seen[step][i] for i in rows]
        values = np.zeros((len(rows), len(VALUES)))
        some = tuple(sites[i] for i in rows)
        return StepRecord(0, step, (0,), step, sites=some, counts=counts, values=values)

    first, second = (
        made_records.hear(Coverage(), (made(s, listed=x) for s in range(len(seen))))
        for x in (True, False)
    )
    assert [(a.step, a.module, dict(a.values)) for a in first] == [
        (a.step, a.module, dict(a.values)) for a in second
    ]


def test_a_parameter_that_another_of_its_module_replaces_was_renamed() -> None:
    def renamed(step: int, new: str) -> StepRecord:
        late = step >= 100
        made = record(step, after(100, "layers.2.mlp.weight"))
        if not late:
            return made
        sites = (*made.sites, Site(new, "grad"))
        counts, values = (np.concatenate((x, x[:1])) for x in (made.counts, made.values))
        return replace(made, sites=sites, counts=counts, values=values)

    for new in ("layers.2.mlp.weight_orig", "layers.2.mlp.1.weight", "layers.2.mlp.a.b.weight"):
        assert run(renamed(s, new) for s in range(300)) == []
    for new in ("layers.1.mlp.weight_orig", "layers.2.mlp.1.bias", "layers.2.gate.weight"):
        (warn,) = run(renamed(s, new) for s in range(300))
        assert warn.module == "layers.2.mlp.weight"
