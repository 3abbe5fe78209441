"""Histograms over the steps: of each named site an image, as fastai's `color_dim` draws it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.histogram import BINS, EDGES, NEAR_ZERO, near_zero
from ddpprobe.records.step import Counts, Site
from ddpprobe.report.bins import SiteBins
from ddpprobe.report.columns import StepColumn
from ddpprobe.report.encode import figure, typed
from ddpprobe.report.heat import KIND_WORDS, bar, column_names, layout_of

_HEIGHT = 420


def histogram_maps(sites: list[Site], columns: list[StepColumn[SiteBins]]) -> list[dict[str, Any]]:
    """Return a figure for each site; [] without histograms."""
    both = [column.content.padded(len(sites)) for column in columns]
    steps = column_names(columns)
    return [
        _map(site, np.stack([x[i] for x, _ in both]), np.stack([y[i] for _, y in both]), steps)
        for i, site in enumerate(sites)
    ]


def _map(site: Site, bins: NDArray[np.int64], counts: Counts, steps: list[str]) -> dict[str, Any]:
    """Draw the bins from the first to the last that holds anything, the largest on top."""
    filled = np.flatnonzero(bins.any(axis=0))
    first, end = (int(filled[0]), int(filled[-1]) + 1) if filled.size else (0, BINS)
    shown = bins[:, first:end].T[::-1].astype(np.float64)
    labels = [f"{EDGES[i]:.2g} to {EDGES[i + 1]:.2g}" for i in reversed(range(first, end))]
    data = {
        "type": "heatmap", "x": steps, "y": labels,
        "z": typed(np.log10(np.where(shown > 0, shown, np.nan)), "float32"),
        "customdata": typed(shown, "float32"), "colorscale": "Cividis", "colorbar": bar("log₁₀ n"),
        "hovertemplate": "%{y}<br>step %{x}<br>%{customdata:,.0f} elements<extra></extra>",
    }  # fmt: skip
    share = near_zero(counts, bins)
    known = share[~np.isnan(share)]
    words = f"{site.fqn or '(root)'}{f'[{site.leaf}]' if site.leaf else ''}"
    title = f"{words}, {KIND_WORDS.get(site.kind, site.kind)}"
    if known.size:
        title += f" (below {NEAR_ZERO:g}: {known[0]:.1%} at first, {known[-1]:.1%} at last)"
    return figure(title, [data], layout_of(labels), _HEIGHT)
