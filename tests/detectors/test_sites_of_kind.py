"""The memory of sites: what is not a number is not remembered, and none pushes another out."""

from __future__ import annotations

import numpy as np
import pytest

from ddpprobe.detectors import sites_of_kind
from ddpprobe.detectors.sites_of_kind import Beside, SitesOfKind, SiteWindow
from ddpprobe.records.step import Site
from tests.detectors.made_records import record

NAN = np.nan


def test_what_is_not_finite_is_no_point_of_its_site_nor_of_others() -> None:
    window = SiteWindow(3)
    for values in ([1.0, NAN], [2.0, 5.0], [NAN, np.inf], [3.0, NAN]):
        window.add(np.array(values))
    assert window.points(2).tolist() == [3, 1]
    assert window.highest(2).tolist() == [3.0, 5.0]
    assert window.lowest(2).tolist() == [1.0, 5.0]


def test_values_are_remembered_in_single_precision() -> None:
    """There are as many of them as sites times looks."""
    window = SiteWindow(3)
    window.add(np.array([0.1]))
    assert window.highest(1).tolist() == window.lowest(1).tolist() == [float(np.float32(0.1))]


def test_each_site_forgets_its_own_oldest_value() -> None:
    window = SiteWindow(2)
    for values in ([9.0, 7.0], [1.0, NAN], [2.0, NAN]):
        window.add(np.array(values))
    assert window.highest(2).tolist() == [2.0, 7.0]


def test_sites_that_come_later_have_no_points_before() -> None:
    window = SiteWindow(4)
    window.add(np.array([1.0]))
    window.add(np.array([2.0, 8.0]))
    assert window.points(3).tolist() == [2, 1, 0]
    assert window.highest(3).tolist() == [2.0, 8.0, -np.inf]
    assert window.lowest(3).tolist() == [1.0, 8.0, np.inf]


def rows(kind: str, **sizes: float) -> dict[Site, dict[str, float]]:
    return {Site(fqn, kind, dtype="float32"): {"rms": size} for fqn, size in sizes.items()}


def test_a_site_keeps_its_place_whatever_a_record_lacks_and_in_whatever_order() -> None:
    sites = SitesOfKind("output")
    first = record(0, rows=rows("output", a=1.0, b=2.0) | rows("grad", a=9.0))
    assert sites.read(first, "rms").tolist() == [1.0, 2.0]
    assert (sites.fqns, sites.dtypes, sites.order().tolist()) == (
        ["a", "b"], ["float32"] * 2, [0, 1],
    )  # fmt: skip
    found = sites.read(record(1, rows=rows("output", c=3.0, b=4.0)), "rms")
    np.testing.assert_array_equal(found, [NAN, 4.0, 3.0])
    assert (sites.fqns, sites.order().tolist()) == (["a", "b", "c"], [2, 1])
    assert sites.read(first, "max").tolist()[:2] == [0.0, 0.0]


def test_what_was_not_observed_or_is_one_ranks_part_has_no_number() -> None:
    sites = SitesOfKind("output")
    given = rows("output", a=1.0, b=2.0)
    given[Site("b", "output", dtype="float32")]["observed"] = 0
    for placement in ("partial", "unknown"):
        given[Site(placement, "output", "", placement)] = {"rms": 5.0}
    for placement in ("sharded", "replicated"):
        given[Site(placement, "output", "", placement)] = {"rms": 6.0}
    found = sites.read(record(0, rows=given), "rms")
    assert sites.fqns == ["a", "b", "sharded", "replicated"]
    np.testing.assert_array_equal(found, [1.0, NAN, 6.0, 6.0])


def test_there_are_not_more_sites_than_may_be_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites_of_kind, "MOST_SITES", 2)
    sites = SitesOfKind("output")
    assert sites.read(record(0, rows=rows("output", a=1.0, b=2.0, c=3.0)), "rms").size == 2
    assert sites.read(record(1, rows=rows("output", c=3.0, b=4.0)), "rms")[1] == 4.0


@pytest.mark.parametrize("mine", [{}, {"a": 1.0}, {"a": 1.0, "b": 1.0}])
@pytest.mark.parametrize("others", [{}, {"b": 7.0}, {"c": 8.0, "a": 9.0}])
def test_beside_a_site_is_what_another_kind_says_of_the_same_parameter(
    mine: dict[str, float], others: dict[str, float]
) -> None:
    sites = SitesOfKind("grad")
    beside = Beside(sites, "param")
    for more in ({}, {"late": 3.0}):
        made = record(
            len(more), rows=rows("grad", **mine, **more) | rows("param", **others, **more)
        )
        sites.read(made, "rms")
        found = beside.read(made, "rms")
        want = [{**others, **more}.get(fqn, NAN) for fqn in (*mine, *more)]
        np.testing.assert_array_equal(found, want)


def test_what_is_left_beside_a_nan_is_no_number_of_its_site() -> None:
    sites = SitesOfKind("output")
    for step, (bad, left) in enumerate([(0, 1.0), (50, NAN), (100, NAN), (0, 1.0)]):
        made = record(step, rows={Site("a", "output"): {"rms": 1.0, "nan": bad, "zeros": 20}})
        for stat in ("rms", "norm", "min", "abs_max", "sum"):
            assert np.isnan(sites.read(made, stat)[0]) == np.isnan(left)
        assert sites.read(made, "zero_ratio").tolist() == [0.2]  # of all elements
        assert sites.read(made, "nonfinite").tolist() == [bad]


def test_infinities_that_a_site_has_had_at_each_look_are_its_own() -> None:
    mask, score, bad = (Site(name, "output") for name in ("mask", "score", "bad"))
    sites = SitesOfKind("output")
    for step, infinite in enumerate([0, 50, 50, 0, 50]):
        made = record(
            step,
            rows={
                mask: {"rms": 1.0, "neg_inf": 50}, score: {"rms": 1.0, "neg_inf": infinite},
                bad: {"rms": 1.0, "neg_inf": 50, "nan": 1},
            },
        )  # fmt: skip
        known = np.isfinite(sites.read(made, "rms")).tolist()
        assert known == [True, not infinite, False]
        assert sites.lost(made).tolist() == [False, bool(infinite), False]
