"""Pictures of captured statistics. matplotlib is an extra, loaded when the first one is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddpprobe.errors import CaptureError
from ddpprobe.inspect.capture.series import TensorStats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES = ("mean", "std", "near_zero")


def histograms(history: Sequence[TensorStats], ax: Axes | None = None) -> Axes:
    """Draw histograms as an image: calls to the right, values upwards, log(1 + count) in colour.

    Raises:
        CaptureError: there is no histogram, or matplotlib is not installed.
    """
    edges, counts = matrix(history)
    if ax is None:
        ax = _figure(figsize=(6, 3)).subplots()
    calls = np.concatenate([[0], np.cumsum([stats.calls for stats in history])])
    ax.pcolormesh(calls, edges, np.log1p(counts.T), cmap="viridis", rasterized=True)
    ax.set(xlabel="call", ylabel="value", title=_title(history[0]))
    ax.locator_params(axis="x", integer=True)
    return ax


def matrix(
    history: Sequence[TensorStats],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return histograms over the widest of their ranges: edges [bins + 1], counts [calls, bins].

    Exact: where ranges fit themselves, the finer bins add up to the coarser ones.

    Raises:
        CaptureError: there is no histogram.
    """
    bars = [stats.histogram for stats in history if stats.histogram is not None]
    if not bars or len(bars) != len(history):
        raise CaptureError("there is no histogram: capture with bins=64 (the default), not bins=0")
    widest = max(bars, key=lambda h: h.edges[-1]).edges
    bins = len(widest) - 1
    counts = np.zeros((len(bars), bins), np.int64)
    for row, bar in zip(counts, bars, strict=True):
        if bar.edges[-1] == widest[-1]:
            row[:] = bar.counts
            continue
        centres = (bar.edges[:-1] + bar.edges[1:]) / 2
        index = np.floor(centres / widest[-1] * (bins // 2)).astype(np.int64) + bins // 2
        np.add.at(row, index, bar.counts)
    return widest, counts


def statistics(history: Sequence[TensorStats], axes: Sequence[Axes] | None = None) -> list[Axes]:
    """Draw mean, std and near_zero of one tensor over the calls, into three axes.

    Raises:
        CaptureError: matplotlib is not installed.
    """
    if axes is None:
        axes = _figure(figsize=(12, 3)).subplots(1, len(LINES))
    for ax, name in zip(axes, LINES, strict=True):
        _line(ax, history, name, label=None)
        ax.set(xlabel="call", title=f"{_title(history[0])}: {name}")
    return list(axes)


def histogram_grid(histories: Mapping[str, Sequence[TensorStats]]) -> Figure:
    """Draw an image of histograms per tensor.

    Raises:
        CaptureError: there is nothing to draw, or matplotlib is not installed.
    """
    _require_some(histories)
    columns = min(3, len(histories))
    rows = math.ceil(len(histories) / columns)
    figure = _figure(figsize=(5 * columns, 2.6 * rows))
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax, history in zip(grid, histories.values(), strict=False):
        histograms(history, ax)
    for ax in grid[len(histories) :]:
        ax.set_axis_off()
    return figure


def statistics_lines(histories: Mapping[str, Sequence[TensorStats]]) -> Figure:
    """Draw mean, std and near_zero over the calls, a line per tensor.

    Raises:
        CaptureError: there is nothing to draw, or matplotlib is not installed.
    """
    _require_some(histories)
    figure = _figure(figsize=(13, 3.6))
    axes = figure.subplots(1, len(LINES))
    for ax, name in zip(axes, LINES, strict=True):
        for label, history in histories.items():
            _line(ax, history, name, label)
        ax.set(xlabel="call", title=name)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside right upper", fontsize="small", ncols=-(-len(labels) // 20)
    )
    return figure


def _line(ax: Axes, history: Sequence[TensorStats], name: str, label: str | None) -> None:
    calls = np.cumsum([stats.calls for stats in history]) - 1
    ax.plot(calls, [getattr(stats, name) for stats in history], label=label, marker=".")
    ax.locator_params(axis="x", integer=True)


def _title(stats: TensorStats) -> str:
    leaf = f"[{stats.leaf}]" if stats.leaf else ""
    return f"{stats.name or '(root)'}.{stats.kind}{leaf}"


def _require_some(histories: Mapping[str, object]) -> None:
    if not histories:
        raise CaptureError("nothing of this kind was captured, so there is nothing to draw")


def _figure(**options: Any) -> Figure:  # noqa: ANN401  (matplotlib's own options)
    try:
        from matplotlib import pyplot as plt  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise CaptureError(
            "the plots need matplotlib, which is not installed: pip install 'ddpprobe[plot]'"
        ) from error
    return plt.figure(layout="constrained", **options)
