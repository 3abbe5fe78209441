"""Histograms over the steps as pictures. matplotlib is an extra, imported by whoever draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ddpprobe.errors import UnknownSeries
from ddpprobe.reader.series_plot import SeriesFigure
from ddpprobe.reader.text import lacking

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ddpprobe.records.step import Site

MOST_SITES = 24
_COLUMNS = 3


def figure_of(
    sites: Sequence[Site], steps: NDArray[np.int64], edges: NDArray[np.float64],
    bins: NDArray[np.int64], absent: NDArray[np.int64],
) -> Figure:  # fmt: skip
    """Draw an image per site, in execution order; the steps of further attempts follow.

    The title says how many of the steps lack ranks, if any does.

    Args:
        sites: at most `MOST_SITES`.
        steps: int64 [rows].
        edges: float64 [bins + 1].
        bins: int64 [rows, sites, bins].
        absent: int64 [rows]; how many ranks each step lacks.

    Raises:
        UnknownSeries: there is no histogram, or there are too many sites.
    """
    if not 0 < len(sites) <= MOST_SITES:
        raise UnknownSeries(
            f"{len(sites)} sites with histograms: 1 to {MOST_SITES} can be drawn; choose "
            "some, such as run.histograms('blocks.0.*')"
        )
    columns = min(_COLUMNS, len(sites))
    lines, without = -(-len(sites) // columns), lacking(absent)
    figure = SeriesFigure(figsize=(4.2 * columns, 2.6 * lines), layout="constrained")
    if without:
        figure.suptitle(without, fontsize="small")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for column, ax in enumerate(axes):
        if column < len(sites):
            _image(ax, steps, edges, bins[:, column])
            ax.set_title(str(sites[column]), fontsize="small")
        else:
            ax.set_axis_off()
    return figure


def _image(
    ax: Axes, steps: NDArray[np.int64], edges: NDArray[np.float64], bins: NDArray[np.int64]
) -> None:
    """Draw the bins that hold anything; each is as high as any other, as the axis is of octaves."""
    filled = np.flatnonzero(bins.any(axis=0))
    first, end = (int(filled[0]), int(filled[-1]) + 1) if filled.size else (0, bins.shape[1])
    rows = np.arange(len(steps) + 1) - 0.5
    shown = np.ma.masked_array(np.log1p(bins[:, first:end]), bins[:, first:end] == 0)
    ax.pcolormesh(rows, np.arange(first, end + 1), shown.T, cmap="viridis", rasterized=True)
    marks = np.unique(np.linspace(first, end, 6).astype(int))
    ax.set_yticks(marks, [f"{edges[i]:.1g}" for i in marks], fontsize="x-small")
    ticks = np.unique(np.linspace(0, len(steps) - 1, 6).astype(int))
    ax.set_xticks(ticks, [str(steps[i]) for i in ticks], fontsize="x-small")
