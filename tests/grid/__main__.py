"""`python -m tests.grid [--far] [WORDS...]`: run the cells whose name holds all words.

A word may list alternatives: `python -m tests.grid ddp,fsdp2 eager`. With `--far` the host cannot
look into tensors, as on a GPU (`tests.far`).

Without any all of them run, and docs/reference/coverage.md is written anew.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.grid.axes import Cell, cells
from tests.grid.launch import run_cells


def main() -> int:
    """Run; 1 if a cell failed."""
    far = "--far" in sys.argv
    words = [word for word in sys.argv[1:] if word != "--far"]
    chosen = [cell for cell in cells() if _matches(cell, words)]
    print(f"{len(chosen)} of {len(cells())} cells", flush=True)
    with tempfile.TemporaryDirectory(prefix="ddpprobe-grid-") as scratch:
        results = run_cells(chosen, Path(scratch), _say, far=far)
    failed = [r for r in results.values() if r["problems"]]
    if not words and not far:
        from tests.grid.table import write

        write(results)
    print(f"{len(results) - len(failed)} cells are right, {len(failed)} are not")
    return bool(failed)


def _matches(cell: Cell, words: list[str]) -> bool:
    parts = set(cell.name.split())
    return all(parts & set(word.split(",")) for word in words)


def _say(line: str, said: set[str] = set()) -> None:  # noqa: B006  (of this process)
    outcome = json.loads(line)
    if outcome["cell"] in said:
        return  # another rank of a cell that broke
    said.add(outcome["cell"])
    mark = "FAILED" if outcome["problems"] else outcome["result"].partition(":")[0]
    print(f"{mark:8} {outcome['cell']}  {outcome['worst']:.1e} {outcome['faults']}", flush=True)
    if mark in ("limited", "refused"):
        print("         " + outcome["result"], flush=True)
    for problem in outcome["problems"][:4]:
        print("         " + problem[-1500:].replace("\n", "\n         "), flush=True)
    if len(outcome["problems"]) > 4:
        print(f"         ... {len(outcome['problems'])} in all", flush=True)


if __name__ == "__main__":
    sys.exit(main())
