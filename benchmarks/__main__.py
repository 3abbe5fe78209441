"""Runs every section and writes docs/benchmarks.md: `make bench`, on an otherwise idle machine."""

from __future__ import annotations

import argparse
import datetime
import importlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import tables

SECTIONS = (
    "kernel",
    "gpu",
    "overhead",
    "own_cost",
    "unmodified",
    "footprint",
    "slow_disk",
    "daemon_cost",
    "scale",
    "capture",
    "queries",
    "object_store",
    "soak",
)
_DOCUMENT = Path(__file__).parent.parent / "docs" / "benchmarks.md"
_INTRODUCTION = """
# What ddpprobe costs

Measured on {machine}, {date}, by `make bench`; each section names the command that makes it alone.
A ratio is that of two neighbours in time, in one run. A goal that does not hold is explained where
its figures are.
"""


def goals(section: str) -> Iterator[list[str]]:
    """Yield (what, figure, goal, holds) of each row of a section's tables that has a goal."""
    heading, header = "", None
    for line in section.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            header = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if header is None:
            header = cells
        elif "goal" in header and cells[header.index("goal")].strip("-"):
            end = header.index("goal")
            figures = "; ".join(cell for cell in cells[1:end] if cell)
            yield [f"{heading}: {cells[0]}", figures, *cells[end : end + 2]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run of all; writes nothing")
    parser.add_argument("--out", type=Path, default=_DOCUMENT)
    arguments = parser.parse_args(argv)
    written, failed = [], []
    for name in SECTIONS:
        try:
            module = importlib.import_module(f"benchmarks.{name}")
            written.append(module.main(["--quick"] if arguments.quick else []))
        except Exception:  # noqa: BLE001  (the other sections still have something to say)
            traceback.print_exc()
            failed.append(name)
    header = ("what", "figure", "goal", "holds")
    summary = tables.table(header, [row for section in written for row in goals(section)])
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    title = _INTRODUCTION.strip().format(machine=tables.machine(), date=today)
    print(summary)
    if not arguments.quick:
        arguments.out.write_text("\n\n".join((title, summary, *written)))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
