"""The most dangerous cells of the grid on real ranks, and the completeness of the rest."""

from __future__ import annotations

import itertools
from pathlib import Path

from tests.grid.axes import AXES, Cell, cells, excluded
from tests.grid.corners import CORE, REFUSED
from tests.grid.launch import run_cells
from tests.grid.table import PAGE, listed


def test_every_statistic_of_every_site_equals_the_unsharded_reference_or_the_wrapper_is_refused(
    tmp_path: Path,
) -> None:
    results = run_cells([*CORE, *REFUSED], tmp_path)
    refused = [results.pop(cell.name) for cell in REFUSED]
    assert all(r["result"].startswith("refused: ") and not r["problems"] for r in refused)
    assert set(results) == {cell.name for cell in CORE} <= {cell.name for cell in cells()}
    assert {name: r["problems"] for name, r in results.items() if r["problems"]} == {}
    assert all(r["result"].startswith(("exact", "limited")) for r in results.values())
    assert all(r["sites"] > 50 and r["same"] for r in results.values())


def test_the_page_lists_the_cells_that_there_are() -> None:
    assert listed() == [cell.name for cell in cells()], f"run make test-grid: {PAGE} is old"


def test_every_possible_pair_of_values_stands_in_some_cell() -> None:
    covered = {
        pair
        for cell in cells()
        for pair in itertools.combinations([(a, getattr(cell, a)) for a in AXES], 2)
    }
    for (a, left), (b, right) in itertools.combinations(AXES.items(), 2):
        for pair in (((a, x), (b, y)) for x in left for y in right):
            if pair not in covered:
                assert _impossible(dict(pair)), pair


def _impossible(fixed: dict[str, object]) -> bool:
    """No cell holds these values: each way to fill in the rest meets a constraint."""
    open_axes = [axis for axis in AXES if axis not in fixed]

    def fill(values: dict[str, object], left: list[str]) -> bool:
        if excluded(values):
            return False
        if not left:
            Cell(**values)
            return True
        return any(fill({**values, left[0]: value}, left[1:]) for value in AXES[left[0]])

    return not fill(fixed, open_axes)
