"""The one form in which every benchmark tells its figures: a Markdown section with its command."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch


def section(title: str, module: str, text: str, *tables: str) -> str:
    """Return a section of docs/benchmarks.md.

    Args:
        title: of the section.
        module: what prints it, with its arguments: `python -m benchmarks.<module>`.
        text: how it was measured, and what it says.
        tables: from `table`, or any other Markdown.
    """
    body = "\n\n".join(part.strip() for part in (text, *tables) if part.strip())
    return f"## {title}\n\n`python -m benchmarks.{module}`\n\n{body}\n"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return "minimum / **median** / maximum"."""
    low, mid, high = min(values), statistics.median(values), max(values)
    return f"{low:.{digits}f} / **{mid:.{digits}f}** / {high:.{digits}f}"


def verdict(value: float, goal: float) -> str:
    """Return whether a figure that should be small is: "yes" or "no"."""
    return "yes" if value <= goal else "no"


def machine() -> str:
    """Return what the figures were measured on, in one line."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{os.cpu_count()} cores ({model}), {gpu}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )
