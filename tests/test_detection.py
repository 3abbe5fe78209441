"""The benchmark of detection counts what it says: in time, by name, and nothing before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from benchmarks.detection.breadth import BREADTH
from benchmarks.detection.faults import FAULTS
from benchmarks.detection.habits import HABITS
from benchmarks.detection.habits_blind import HABITS_BLIND
from benchmarks.detection.habits_blind_three import HABITS_BLIND_THREE
from benchmarks.detection.habits_blind_two import HABITS_BLIND_TWO
from benchmarks.detection.healthy import HEALTHY
from benchmarks.detection.jobs import JOBS, PLANTED, QUIET
from benchmarks.detection.report import page
from benchmarks.detection.results import Key, Result
from benchmarks.detection.rivals import RIVALS, isnan, seven_sigma, zclip
from benchmarks.detection.score import judge_fault, judge_healthy, wilson
from benchmarks.detection.set_a import SET_A
from benchmarks.detection.set_b import SET_B
from benchmarks.detection.set_c import SET_C
from benchmarks.detection.set_d import SET_D
from benchmarks.detection.set_e import SET_E
from benchmarks.detection.set_f import SET_F
from benchmarks.detection.set_g import SET_G
from benchmarks.detection.sharded import SHARDED
from benchmarks.detection.unlisted import UNLISTED
from benchmarks.detection.zoo import ZOO
from ddpprobe.detectors.suite import DETECTORS
from ddpprobe.records.step import Anomaly
from tests.detectors.made_records import record

LOUD = Anomaly("dead_units", "warn", 0, 0, None, "act1", None, "forward", first_cause=False,
               message="", values={}, sampled=True)  # fmt: skip


def test_a_fault_is_the_same_on_all_ranks_and_another_with_another_seed() -> None:
    for kind in PLANTED.values():
        drawn = {(f.start, f.victim, f.strength, f.where) for f in (kind(3, 0), kind(3, 1))}
        assert len(drawn) == 1
    assert len({FAULTS["N02"](seed, 0).start for seed in range(8)}) > 4


@pytest.mark.parametrize(("late", "every", "found"), [(0, 1, True), (20, 1, True), (21, 1, False),
                                                      (50, 10, True), (51, 10, False)])  # fmt: skip
def test_a_verdict_counts_up_to_the_limit(late: int, every: int, found: bool) -> None:
    fault = FAULTS["F01"](0, 0)
    outcome = judge_fault(fault, 0, every, [replace(LOUD, step=fault.start + late)])
    assert (outcome.found, outcome.late) == (found, late if found else None)


def test_another_detector_information_and_what_came_before_do_not_count() -> None:
    fault = FAULTS["F01"](0, 0)
    at = fault.start
    said = [replace(LOUD, detector="desync", step=at), replace(LOUD, level="info", step=at)]
    outcome = judge_fault(fault, 0, 1, [*said, replace(LOUD, step=at - 1)])
    assert outcome.found is False
    assert outcome.warns == (f"dead_units@{at - 1}",)


def test_a_module_is_named_rightly_by_the_part_around_it_but_not_by_the_root() -> None:
    fault = FAULTS["E06"](0, 0)
    base = replace(LOUD, detector="output_jump", step=fault.start)
    names = {f"{fault.where}.q": True, fault.where.rpartition(".")[0]: True, "": False,
             "blocks.7": False}  # fmt: skip
    for module, right in names.items():
        assert judge_fault(fault, 0, 1, [replace(base, module=module)]).module is right


def test_a_healthy_run_lists_what_was_said_of_it() -> None:
    outcome = judge_healthy("H01", 0, 1, [LOUD, replace(LOUD, level="page", step=7)])
    assert (outcome.pages, outcome.warns) == (("dead_units@7",), ("dead_units@0",))
    assert {"H01", "H18", "X01"} <= set(HEALTHY)


def test_rivals_speak_where_their_rule_says_so() -> None:
    calm = [
        record(s, {0: {"loss": 1 + s % 7 / 10, "grad_norm": 1 + s % 5 / 10}}) for s in range(60)
    ]
    wild = record(60, {0: {"loss": 90.0, "grad_norm": 90.0}})
    assert (zclip([*calm, wild]), seven_sigma([*calm, wild])) == ([60], [60])
    assert (zclip(calm), seven_sigma(calm), isnan(calm)) == ([], [], [])
    assert isnan([record(3, {0: {"loss": float("nan")}})]) == [3]


def test_a_share_has_its_wilson_interval() -> None:
    assert wilson(0, 180) == "0/180 = 0% (0%-2%)"
    assert wilson(9, 10) == "9/10 = 90% (60%-98%)"


def test_detectors_that_are_expected_exist_or_are_planned() -> None:
    planned = {"attn_logit", "saturated", "collapse", "hang", "level_shift", "sample_outlier"}
    known = {d.name for d in DETECTORS} | planned | {"rank_lost"}
    every = PLANTED.values()
    assert all(set(fault.expected.detectors) <= known for fault in every)


def test_what_nobody_listed_is_counted_apart() -> None:
    listed = judge_fault(FAULTS["F01"](0, 0), 0, 1, [])
    found = replace(LOUD, detector="mode_flip", step=UNLISTED["U08"](0, 0).start)
    apart = judge_fault(UNLISTED["U08"](0, 0), 0, 1, [found])
    silent: dict[str, list[int]] = {rival: [] for rival in RIVALS}
    results = [Result(o, silent, "code", "machine", "day") for o in (listed, apart)]
    text = page(results, [Key("U01", 0, 1)])
    first, second = text.split("## The third ten that no list had")
    assert "| ddpprobe | 0/1" in first
    assert "every=1: 1/1" in second
    assert "not run" in second.split("## The healthy runs")[0]


def test_the_two_sets_that_were_written_without_the_rules_are_counted_each_on_its_own() -> None:
    silent: dict[str, list[int]] = {rival: [] for rival in RIVALS}
    told = replace(LOUD, detector="grad_spike", step=SET_A["U35"](0, 0).start)
    outcomes = [
        judge_fault(SET_A["U35"](0, 0), 0, 1, [told]),
        *(judge_fault(SET_B[name](0, 0), 0, 1, []) for name in ("U49", "U50")),
    ]
    text = page([Result(o, silent, "code", "machine", "day") for o in outcomes], [])
    held_out, learned = (
        text.split("## Set B")[1].split("## The third ten that no list had")[0].split("## Set A")
    )
    assert "every=1: 0/2" in held_out
    assert "every=1: 1/1" in learned
    assert all(f"| {name} |" in held_out for name in SET_B)
    assert all(f"| {name} |" in learned for name in SET_A)


@pytest.mark.parametrize(
    ("first", "second", "found", "detector", "missed"),
    [
        ("Set C", "Set D", "U60", "grad_spike", ("U62", "U65")),
        ("Set F", "Set E", "U75", "nonfinite", ("U76", "U80")),
        ("Set G", "Set F", "U98", "desync", ("U75", "U79")),
    ],
)
def test_each_of_the_later_sets_has_a_table_of_its_own_too(
    first: str, second: str, found: str, detector: str, missed: tuple[str, str]
) -> None:
    sets = {"Set C": SET_C, "Set D": SET_D, "Set E": SET_E, "Set F": SET_F, "Set G": SET_G}
    silent: dict[str, list[int]] = {rival: [] for rival in RIVALS}
    fault = sets[first][found](0, 0)
    told = replace(LOUD, detector=detector, step=fault.start)
    outcomes = [
        judge_fault(fault, 0, 1, [told]),
        *(judge_fault(sets[second][name](0, 0), 0, 1, []) for name in missed),
    ]
    text = page([Result(o, silent, "code", "machine", "day") for o in outcomes], [])
    tables = {name: text.split(f"## {name}")[1].split("\n## ")[0] for name in (first, second)}
    assert "every=1: 1/1" in tables[first]
    assert "every=1: 0/2" in tables[second]
    assert all(f"| {name} |" in table for of, table in tables.items() for name in sets[of])
    assert not {*SET_C, *SET_D, *SET_E, *SET_F, *SET_G} & {*SET_A, *SET_B}


def test_no_two_jobs_share_a_name_and_each_draws_by_its_own() -> None:
    blind = (HABITS_BLIND, HABITS_BLIND_TWO, HABITS_BLIND_THREE)
    groups = (FAULTS, UNLISTED, SHARDED, HEALTHY, BREADTH, HABITS, *blind, ZOO)
    assert len(JOBS) == sum(map(len, groups)) == len(PLANTED) + len(QUIET)
    assert all(kind.__name__ == name for name, kind in JOBS.items())


def test_a_fault_under_fsdp2_has_shards_on_all_its_ranks() -> None:
    assert len(SHARDED) >= 10
    assert all(kind.wrap == "fsdp2" and kind.world >= 2 for kind in SHARDED.values())
    assert all(issubclass(kind, FAULTS[name[:3]]) for name, kind in SHARDED.items())


def test_what_is_healthy_in_other_ways_and_what_is_sharded_stay_out_of_the_first_table() -> None:
    silent: dict[str, list[int]] = {rival: [] for rival in RIVALS}
    warned = [judge_healthy(job, 0, 1, [LOUD]) for job in ("Y01", "Z01")]
    outcomes = [*warned, judge_fault(SHARDED["S01-fsdp2"](0, 0), 0, 1, [])]
    text = page([Result(o, silent, "code", "machine", "day") for o in outcomes], [])
    assert "| ddpprobe | - | - | - | - |" in text
    ways = text.split("## Healthy runs in other ways to train")[1]
    assert ways.count("1 runs: 0 with a page, 1 with a warning.") == 2
    assert "| 1 | 0 | 1 (`dead_units`) |" in ways
    sharded = text.split("## The faults under FSDP2")[1].split("## The healthy runs")[0]
    assert "every=1: 0/1" in sharded


def test_an_architecture_is_trained_by_a_warm_up_and_a_cosine_that_ends_near_zero() -> None:
    job = ZOO["Z01"](0, 0)
    job.model = nn.Linear(2, 2)
    job.optimizer = job.make_optimizer()
    assert [g["weight_decay"] for g in job.optimizer.param_groups] == [0.05, 0.0]
    rates = []
    for step in range(job.steps):
        job.step = step
        job.before_step()
        rates.append(job.optimizer.param_groups[0]["lr"])
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[0] < 0.1 * max(rates) == 0.1 * job.rate
    assert rates[-1] == pytest.approx(0.01 * job.rate)


def test_each_detector_has_its_own_finds_and_false_alarms() -> None:
    silent: dict[str, list[int]] = {rival: [] for rival in RIVALS}
    fault = FAULTS["F01"](0, 0)  # meant for `dead_units` and `grad_none_or_zero`
    outcomes = [
        judge_fault(fault, 0, 1, [replace(LOUD, step=fault.start + 3)]),
        judge_fault(fault, 0, 10, []),
        judge_healthy("H01", 0, 1, [LOUD, replace(LOUD, detector="desync", level="page")]),
    ]
    text = page([Result(o, silent, "code", "machine", "day") for o in outcomes], [])
    rows = text.split("## By detector")[1].split("## The faults")[0].splitlines()
    told = {row.split("`")[1]: row for row in rows if row.startswith("| `")}
    assert set(told) == {d.name for d in DETECTORS} | {"rank_lost"}
    assert told["dead_units"] == "| `dead_units` | 2 | 1 | 1 | 3, 3 | 0 | 1 |"
    assert told["grad_none_or_zero"] == "| `grad_none_or_zero` | 2 | 0 | 1 | - | 0 | 0 |"
    assert told["desync"] == "| `desync` | 0 | 0 | 0 | - | 1 | 0 |"
