"""The table of what finds room below the cap counts every series, in the order of priority."""

from __future__ import annotations

import pytest

from ddpprobe.metrics.render import render
from ddpprobe.metrics.table import SERIES_LIMIT
from grafana import series_table


@pytest.mark.parametrize("sites", [30, 1500])
def test_every_series_is_counted_once_and_what_comes_first_is_whole(sites: int) -> None:
    view = series_table.view_of(sites)
    assert len(set(series_table.sites_of(sites))) == sites
    shown = series_table.counted(view, SERIES_LIMIT)
    every = series_table.counted(view, 10**6)
    lines = render(view, openmetrics=False).decode().splitlines()
    assert sum(shown) == len([line for line in lines if not line.startswith("#")])
    lacking = [i for i, pair in enumerate(zip(shown, every, strict=True)) if pair[0] < pair[1]]
    if sites == 30:
        assert lacking == []
    else:
        assert lacking[:1] == [len(shown) - 1]  # only the class that comes last
        assert sum(shown) == SERIES_LIMIT
