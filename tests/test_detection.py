"""The benchmark of detection counts what it says: in time, by name, and nothing before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.detection.faults import FAULTS
from benchmarks.detection.healthy import HEALTHY
from benchmarks.detection.report import page
from benchmarks.detection.results import Key, Result
from benchmarks.detection.rivals import RIVALS, isnan, seven_sigma, zclip
from benchmarks.detection.score import judge_fault, judge_healthy, wilson
from benchmarks.detection.unlisted import UNLISTED
from ddpprobe.detectors.suite import DETECTORS
from ddpprobe.records.step import Anomaly
from tests.detectors.made_records import record

LOUD = Anomaly("dead_units", "warn", 0, 0, None, "act1", None, "forward", first_cause=False,
               message="", values={}, sampled=True)  # fmt: skip


def test_a_fault_is_the_same_on_all_ranks_and_another_with_another_seed() -> None:
    for kind in FAULTS.values():
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
    planned = {"attn_logit", "saturated", "collapse", "hang"}
    known = {d.name for d in DETECTORS} | planned | {"rank_lost"}
    every = (*FAULTS.values(), *UNLISTED.values())
    assert all(set(fault.expected.detectors) <= known for fault in every)


def test_what_nobody_listed_is_counted_apart() -> None:
    listed = judge_fault(FAULTS["F01"](0, 0), 0, 1, [])
    found = replace(LOUD, detector="mode_flip", step=UNLISTED["U08"](0, 0).start)
    apart = judge_fault(UNLISTED["U08"](0, 0), 0, 1, [found])
    silent: dict[str, list[int]] = {rival: [] for rival in RIVALS}
    results = [Result(o, silent, "code", "machine", "day") for o in (listed, apart)]
    text = page(results, [Key("U01", 0, 1)])
    first, second = text.split("## Faults that no list had")
    assert "| ddpprobe | 0/1" in first
    assert "every=1: 1/1" in second
    assert "not run" in second.split("## The healthy runs")[0]
