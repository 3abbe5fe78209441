"""The heat map: modules in order of execution, steps, and how large or how broken they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.step import Anomaly, Site
from ddpprobe.report.columns import StepColumn
from ddpprobe.report.encode import figure, names, typed
from ddpprobe.report.rows import Floats, stat_of
from ddpprobe.report.story import Story

MOST_KINDS = 8  # of the ten that there are
MOST_LINES = 160  # sites of one kind; more share lines with their neighbours
KIND_WORDS = {
    "input": "inputs",
    "output": "outputs",
    "grad_output": "gradients of outputs",
    "grad_input": "gradients of inputs",
    "grad_local": "gradients of parameters, before the reduction",
    "grad": "gradients of parameters, after the reduction",
    "param": "parameters",
    "update": "changes of parameters by one step",
    "buffer": "buffers",
    "optim_state": "second moments of the optimizer",
}
LAST = ("buffer", "optim_state")  # they tell least, where there are too many
_SIZES = (("rms", "root mean square"), ("abs_max", "largest magnitude"))
_HOW_MANY = "%{customdata:,.0f} elements not finite"
_BAD_SCALE = [[0, "--calm"], [0.001, "--bad-soft"], [1, "--bad"]]
Group = list[int]


def heat_maps(story: Story) -> list[dict[str, Any]]:
    """Return a figure for each kind of site and way to look at it; the guilty kind first."""
    kinds = dict.fromkeys(site.kind for site in story.table.sites)
    cause = story.causes[0] if story.causes else None
    guilty = cause.kind if cause else None
    ordered = sorted(kinds, key=lambda kind: (kind != guilty, kind not in KIND_WORDS, kind in LAST))
    return [each for kind in ordered[:MOST_KINDS] for each in _maps_of(story, kind, cause)]


def without(ranks: int) -> str:
    """Mark what is merged without so many ranks; "" if it lacks none."""
    return f", without {ranks} rank{'' if ranks == 1 else 's'}" if ranks else ""


def column_names(columns: Sequence[StepColumn[Any]]) -> list[str]:
    """Name columns by their steps, and by the attempt where there are several.

    Those whose numbers lack ranks are marked.
    """
    several = len({column.attempt for column in columns}) > 1
    return names(
        [
            (f"attempt {c.attempt}: " if several else "")
            + (str(c.first) if c.first == c.last else f"{c.first} to {c.last}")
            + (" lost" if not c.steps else "")
            + without(getattr(c.content, "absent", 0))
            for c in columns
        ]
    )


def grouped(places: Sequence[int], alone: set[int], most: int) -> list[Group]:
    """Return the places line by line: each its own, or so many neighbours together as it takes.

    Args:
        places: of those that are wanted, in order of execution.
        alone: places that share no line.
        most: lines, not counting those that are alone.
    """
    width = -(-len(places) // most)
    lines: list[Group] = []
    for single, run in groupby(places, key=lambda p: p in alone):
        together = list(run)
        step = 1 if single else width
        lines += [together[i : i + step] for i in range(0, len(together), step)]
    return lines


def line_name(sites: Sequence[Site], group: Group) -> str:
    """Name a line: a site, or the first of several."""
    first = sites[group[0]]
    leaf = f"[{first.leaf}]" if first.leaf else ""
    label = f"{first.fqn or '(root)'}{leaf}"
    return label if len(group) == 1 else f"{label} +{len(group) - 1}"


def layout_of(labels: list[str], annotations: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return the layout of a map of steps, with a line for each label, the first one on top."""
    return {
        "annotations": list(annotations),
        "plot_bgcolor": "--gap",
        "showlegend": False,
        "xaxis": {
            "type": "category", "title": {"text": "step", "standoff": 10},
            "automargin": True, "tickangle": 0, "showgrid": False, "zeroline": False,
        },
        "yaxis": {
            "type": "category", "autorange": "reversed", "categoryarray": labels,
            "categoryorder": "array", "automargin": True, "showgrid": False, "zeroline": False,
            "ticks": "",
        },
        "margin": {"t": 30, "r": 8, "b": 44, "l": 8},
        "meta": {"rows": len(labels)},
    }  # fmt: skip


def bar(title: str) -> dict[str, Any]:
    """Return the bar beside a map that explains its colours."""
    side = {"text": title, "side": "right"}
    return {"title": side, "thickness": 12, "outlinewidth": 0, "x": 1.01, "xpad": 4}


def marked(base: dict[str, Any], cells: NDArray[np.bool_], says: str) -> dict[str, Any]:
    """Return a map over another one, of which only these cells are seen."""
    return {
        **base, "z": typed(np.where(cells, 1.0, np.nan), "float32"), "zmin": 0, "zmax": 1,
        "showscale": False, "colorscale": [[0, "--bad"], [1, "--bad"]],
        "hovertemplate": f"%{{y}}<br>step %{{x}}<br>{says}<extra></extra>",
    }  # fmt: skip


def _maps_of(story: Story, kind: str, cause: Anomaly | None) -> Iterator[dict[str, Any]]:
    sites = story.table.sites
    places = [i for i, site in enumerate(sites) if site.kind == kind]
    blamed = {(a.module, a.kind) for a in story.anomalies}
    alone = {i for i in places if (sites[i].fqn, sites[i].kind) in blamed}
    lines = grouped(places, alone, MOST_LINES)
    rows = [column.content for column in story.maps]
    bad = stat_of(rows, lines, "nonfinite")
    labels = names([line_name(sites, group) for group in lines])
    steps = column_names(story.maps)
    mark = _mark(story, lines, cause, kind)
    words = KIND_WORDS.get(kind, kind)
    for stat, title in _SIZES:
        data = _size_map(stat_of(rows, lines, stat), bad, labels, steps, title)
        yield figure(f"{words}: {title}", data, layout_of(labels, mark), _height(labels))
    if np.nansum(bad) > 0:
        data = _bad_map(bad, labels, steps)
        title = f"{words}: non-finite elements"
        yield figure(title, data, layout_of(labels, mark), _height(labels))


def _size_map(
    sizes: Floats, bad: Floats, labels: list[str], steps: list[str], title: str
) -> list[dict[str, Any]]:
    """Draw log10 of a size, all zeros as the lowest colour, and what is not finite over it."""
    with np.errstate(divide="ignore"):
        z = np.log10(sizes)
    finite = z[np.isfinite(z)]
    low, high = (finite.min(), finite.max()) if finite.size else (-1.0, 1.0)
    low, high = (low - 0.5, high + 0.5) if high - low < 0.1 else (low, high)
    z = np.where(sizes == 0, low, z)
    base = {"type": "heatmap", "x": steps, "y": labels, "xgap": 0, "ygap": 0}
    data = [
        {
            **base, "z": typed(z, "float32"), "zmin": float(low), "zmax": float(high),
            "colorscale": "Cividis", "colorbar": bar("log₁₀"),
            "hovertemplate": f"%{{y}}<br>step %{{x}}<br>log₁₀ {title} %{{z:.2f}}<extra></extra>",
        }
    ]  # fmt: skip
    if np.nansum(bad) > 0:
        there = marked(base, bad > 0, _HOW_MANY)
        data.append({**there, "customdata": typed(bad, "float32")})
    return data


def _bad_map(bad: Floats, labels: list[str], steps: list[str]) -> list[dict[str, Any]]:
    z = np.log10(1 + bad)
    return [
        {
            "type": "heatmap", "x": steps, "y": labels, "z": typed(z, "float32"),
            "customdata": typed(bad, "float32"), "zmin": 0, "zmax": float(np.nanmax(z)),
            "colorscale": _BAD_SCALE, "colorbar": bar("log₁₀(1 + n)"),
            "hovertemplate": f"%{{y}}<br>step %{{x}}<br>{_HOW_MANY}<extra></extra>",
        }
    ]  # fmt: skip


def _mark(
    story: Story, lines: list[Group], cause: Anomaly | None, kind: str
) -> list[dict[str, Any]]:
    """Point at the cell of the first cause; on such axes a number counts categories."""
    if cause is None or cause.kind != kind:
        return []
    sites = story.table.sites
    y = next((i for i, g in enumerate(lines) if any(sites[p].fqn == cause.module for p in g)), None)
    found = (i for i, c in enumerate(story.maps) if c.covers(cause.attempt, cause.step))
    x = next(found, None)
    if x is None or y is None:
        return []
    left = x > len(story.maps) / 2
    return [
        {
            "x": x, "y": y, "text": "first cause", "showarrow": True,
            "ax": -64 if left else 64, "ay": -22 if y > 2 else 26, "arrowhead": 2, "arrowwidth": 2,
            "arrowcolor": "--ink", "standoff": 4, "font": {"color": "--ink", "size": 12},
            "bgcolor": "--card", "bordercolor": "--ink", "borderpad": 4, "borderwidth": 1,
        },
        {
            "x": x, "y": y, "text": "□", "showarrow": False,
            "font": {"color": "--ink", "size": 20},
        },
    ]  # fmt: skip


def _height(labels: list[str]) -> int:
    return int(np.clip(90 + 15 * len(labels), 240, 980))
