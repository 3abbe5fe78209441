"""The ranks side by side, so that the one that differs stands out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.step import REDUCE_SECONDS
from ddpprobe.report.encode import figure, typed
from ddpprobe.report.heat import bar, column_names, layout_of, marked
from ddpprobe.report.numbers import quiet
from ddpprobe.report.rows import Floats
from ddpprobe.report.story import Story

MOST_RANKS = 64  # in the map; those that differ most
MOST_LISTED = 256  # in the table
COMPARED = {
    "grad_norm_local": "gradient norm before the reduction",
    "forward_seconds": "time in forward",
    "backward_seconds": "time in backward",
    REDUCE_SECONDS: "time in the reduction of gradients: least where all wait for a rank",
    "data_seconds": "time between steps (data)",
    "optimizer_seconds": "time in the optimizer",
}
DIFFERS = 0.26  # |log2 of a rank's median over that of all|: a fifth more, or less
_SCALE = [[0, "--c1"], [0.5, "--card-2"], [1, "--c2"]]


def ratios(story: Story, what: str) -> tuple[Floats, NDArray[np.bool_]]:
    """Return log2(rank's value / median over ranks) [columns, ranks], and where it was not finite.

    Only where at least two ranks gave a positive number; else NaN.
    """
    table = story.numbers(what)
    positive = np.where(table.mean > 0, table.mean, np.nan)
    enough = np.isfinite(positive).sum(axis=1) > 1
    middle = np.where(enough, quiet(np.nanmedian, positive), np.nan)
    with np.errstate(all="ignore"):
        return np.log2(positive / middle[:, None]), table.bad > 0


def differences(story: Story, what: str) -> dict[int, float]:
    """Return rank -> median over the run of log2(rank's value / median over ranks)."""
    found, _ = ratios(story, what)
    if not np.isfinite(found).any():
        return {}
    medians = quiet(np.nanmedian, found, axis=0)
    return {rank: float(medians[i]) for rank, i in story.labels.ranks.items()}


def differs(medians: Mapping[int, float], rank: int) -> bool:
    """Return whether a rank is far from the median of all; of two ranks nobody can tell which."""
    return len(medians) > 2 and abs(medians.get(rank, 0.0)) > DIFFERS


def standing_out(story: Story, most: int = 4) -> list[int]:
    """Return the ranks to look at: those that a page blames, then those that differ most."""
    blamed = dict.fromkeys(a.rank for a in story.anomalies if a.level == "page")
    ranks = [r for r in blamed if r is not None and r in story.labels.ranks]
    medians = differences(story, "grad_norm_local")
    differing = [r for r in medians if differs(medians, r)]
    differing.sort(key=lambda r: -abs(medians[r]))
    return list(dict.fromkeys([*ranks, *differing]))[:most]


def rank_maps(story: Story) -> list[dict[str, Any]]:
    """Return a figure for each thing that the ranks can be compared by."""
    if len(story.labels.ranks) < 2:
        return []
    steps = column_names(story.lines)
    maps = []
    for what, title in COMPARED.items():
        found, bad = ratios(story, what)
        if np.isfinite(found).any() or bad.any():
            maps.append(_map(story, found, bad, steps, title))
    return maps


def _map(
    story: Story, found: Floats, bad: NDArray[np.bool_], steps: list[str], title: str
) -> dict[str, Any]:
    order = _shown(story, found, bad)
    ranks = list(story.labels.ranks)
    labels = [f"rank {ranks[i]}" for i in order]
    sizes = np.abs(found[np.isfinite(found)])
    most = max(0.5, float(np.quantile(sizes, 0.99))) if sizes.size else 1.0
    base = {"type": "heatmap", "x": steps, "y": labels, "ygap": 1}
    ticks = np.round(np.array([-most, -most / 2, 0, most / 2, most]), 2)
    data: list[dict[str, Any]] = [
        {
            **base, "z": typed(found[:, order].T, "float32"), "zmin": -most, "zmax": most,
            "colorscale": _SCALE, "customdata": typed(2 ** found[:, order].T, "float32"),
            "colorbar": {**bar("of the median"), "tickvals": ticks.tolist(),
                         "ticktext": [f"{2**t:.3g} x" for t in ticks]},
            "hovertemplate": "%{y}<br>step %{x}<br>%{customdata:.3f} of the median<extra></extra>",
        }
    ]  # fmt: skip
    if bad.any():
        data.append(marked(base, bad[:, order].T, "not finite"))
    height = int(np.clip(100 + 22 * len(labels), 200, 900))
    return figure(title, data, layout_of(labels), height)


def _shown(story: Story, found: Floats, bad: NDArray[np.bool_]) -> list[int]:
    """Return the places of the ranks to show, by rank: all, or those that stand out most."""
    ranks = story.labels.ranks
    if len(ranks) > MOST_RANKS:
        sizes = np.nan_to_num(np.abs(found)).mean(axis=0) + 100.0 * bad.any(axis=0)
        blamed = standing_out(story)
        sizes[[ranks[r] for r in blamed]] += 1000.0
        places = set(np.argsort(-sizes, kind="stable")[:MOST_RANKS].tolist())
    else:
        places = set(ranks.values())
    return [place for _, place in sorted(ranks.items()) if place in places]
