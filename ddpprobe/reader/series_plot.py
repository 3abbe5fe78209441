"""A series as a picture. matplotlib is an extra, imported by whoever draws."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from ddpprobe.reader.text import lacking

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ddpprobe.reader.series import Series

MOST_LINES = 12  # that can be told apart; of more sites an image is drawn
MOST_LABELS = 40  # site names beside an image
_DECADES = 100.0  # largest by smallest value from which on the axis is logarithmic


class SeriesFigure(Figure):
    """A figure that a notebook shows, without pyplot, which keeps every figure that it made."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png")
        return out.getvalue()


def figure_of(series: Series) -> Figure:
    """Draw a series: a line per site, or an image with a row per site, first one on top.

    Positions on the horizontal axis are steps; a restarted run's further attempts are lines, or
    columns, of their own. Steps at which a site had elements that are not finite are marked red;
    the title says how many of the steps lack ranks, if any does.

    Args:
        series: with at least one row and one site.
    """
    figure = SeriesFigure(figsize=(9, 4.5), layout="constrained")
    ax = figure.subplots()
    (_lines if len(series.sites) <= MOST_LINES else _image)(ax, series)
    ax.set_title(lacking(series.absent), fontsize="small")
    return figure


def _lines(ax: Axes, series: Series) -> None:
    for column, site in enumerate(series.sites):
        colour = f"C{column % 10}"
        for attempt in np.unique(series.attempts):
            rows = np.flatnonzero(series.attempts == attempt)
            known = rows[~np.isnan(series.values[rows, column])]
            first = attempt == series.attempts[0]
            label = str(site) if first else None
            ax.plot(series.steps[known], series.values[known, column], ".-", c=colour, label=label)
    bad = series.steps[(np.nan_to_num(series.nonfinite) > 0).any(axis=1)]
    for step in np.unique(bad):
        ax.axvline(float(step), color="red", linewidth=0.8, alpha=0.6, zorder=0)
    ax.set(xlabel="step", ylabel=series.stat)
    if _spans_decades(series):
        ax.set_yscale("log")
    ax.legend(fontsize="small")


def _image(ax: Axes, series: Series) -> None:
    log = _spans_decades(series)
    with np.errstate(divide="ignore", invalid="ignore"):
        shown = np.log10(series.values) if log else series.values
    shown = np.ma.masked_invalid(shown)
    rows = np.arange(len(series.steps))
    mesh = ax.pcolormesh(
        np.append(rows, len(rows)) - 0.5, np.arange(len(series.sites) + 1) - 0.5, shown.T,
        cmap="viridis", rasterized=True,
    )  # fmt: skip
    where, site = np.nonzero(np.nan_to_num(series.nonfinite) > 0)
    ax.plot(where, site, "x", color="red", markersize=4)
    ax.invert_yaxis()
    every = -(-len(series.sites) // MOST_LABELS)
    names = [str(site) for site in series.sites]
    ax.set_yticks(range(0, len(names), every), names[::every], fontsize="x-small")
    ticks = np.unique(np.linspace(0, len(rows) - 1, 8).astype(int))
    ax.set_xticks(ticks, [str(series.steps[i]) for i in ticks])
    ax.set(xlabel="step")
    ax.figure.colorbar(mesh, ax=ax, label=f"log10({series.stat})" if log else series.stat)


def _spans_decades(series: Series) -> bool:
    known = series.values[np.isfinite(series.values)]
    return bool(known.size) and known.min() > 0 and known.max() > _DECADES * known.min()
