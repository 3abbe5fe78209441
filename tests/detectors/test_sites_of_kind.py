"""The memory of sites: what is not a number is not remembered, and none pushes another out."""

from __future__ import annotations

import numpy as np

from ddpprobe.detectors.sites_of_kind import SiteWindow

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
