"""Numbers and names in the words of plotly.js: typed arrays, and text that is only text."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ddpprobe.reader.text import plain
from ddpprobe.records.rank_names import ranks_text

NAME_CHARACTERS = 80
_TYPES = {"float64": "f8", "float32": "f4"}


def typed(values: ArrayLike, dtype: str = "float64") -> dict[str, str]:
    """Return an array as base64, which plotly.js decodes: far smaller than JSON, and NaN a gap."""
    array = np.ascontiguousarray(values, dtype)
    out = {
        "dtype": _TYPES[dtype],
        "bdata": base64.b64encode(array.astype(f"<{_TYPES[dtype]}").tobytes()).decode("ascii"),
    }
    return {**out, "shape": ", ".join(map(str, array.shape))} if array.ndim > 1 else out


def name(text: object, most: int = NAME_CHARACTERS) -> str:
    """Return a stranger's name for a plot: no control characters, no markup, not too long.

    plotly.js reads a little HTML in every text. Of a long name the end tells more.
    """
    clean = plain(text)
    clean = clean if len(clean) <= most else "…" + clean[1 - most :]
    return clean.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def names(texts: Sequence[object]) -> list[str]:
    """Return names for a category axis, on which two of a kind would fall together."""
    seen: dict[str, int] = {}
    out = []
    for text in texts:
        label = name(text)
        seen[label] = seen.get(label, 0) + 1
        out.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return out


def ranks_named(ranks: Sequence[int], every: int) -> str:
    """Name some of `every` rank of a run."""
    return "every rank" if len(ranks) == every > 1 else ranks_text(ranks)


def figure(
    title: str, data: list[dict[str, Any]], layout: dict[str, Any], height: int
) -> dict[str, Any]:
    """Return one plot; `title` is what a choice between several calls it."""
    return {"title": title, "data": data, "layout": layout, "height": height}
