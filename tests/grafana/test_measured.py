"""The reference of each detector says what the benchmark has found of it, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddpprobe.detectors.suite import DETECTORS
from grafana.measured import read, told

DOCS = Path(__file__).parents[2] / "docs"
TABLE = """# Page

## By detector

|  | meant for it | found by it first | found by any | late | paged in 7 healthy runs | warned |
| --- | --- | --- | --- | --- | --- | --- |
| `one` | 54 | 53 | 54 | 2, 19 | 0 | 1 |
| `two` | 8 | 0 | 5 | - | 0 | 0 |

## More

| `three` | 1 | 1 | 1 | 0, 0 | 0 | 0 |
"""
PAGE = """# Detectors

Text.

## `one` and `two`

What they do.

**What it cannot tell.** Much.

## `three`

**What it cannot tell.** All.

## Other

`one` again.
"""


def test_each_section_says_what_was_measured_once_however_often_it_is_made() -> None:
    page = told(PAGE, read(TABLE))
    assert told(page, read(TABLE)) == page
    one, three = re.findall(r"^\*\*Measured\*\* .*$", page, re.MULTILINE)
    assert "`one`: of 54 runs with a fault that it is meant for it was the first to find 53" in one
    assert "(median 2 steps after it, 90 % within 19), and 54 were found" in one
    assert "in 7 healthy runs it paged in 0 and warned in 1; `two`: of 8 runs" in one
    assert "the first to find 0, and 5 were found" in one
    assert "`three`: not yet" in three
    assert re.sub(r"\*\*Measured\*\* .*\n\n", "", page) == PAGE
    other = told(page, read(TABLE.replace("| 53 |", "| 52 |")))
    assert other == page.replace("the first to find 53", "the first to find 52")


@pytest.mark.parametrize("broken", ["", TABLE.replace("| 53 |", "| many |"),
                                    TABLE.replace("healthy", "other")])  # fmt: skip
def test_a_table_of_another_form_is_refused_and_never_left_out(broken: str) -> None:
    with pytest.raises(ValueError, match="no table by detector"):
        read(broken)


def test_the_page_has_a_line_for_every_detector_and_the_figures_of_the_benchmark() -> None:
    page = (DOCS / "reference" / "detectors.md").read_text()
    measured = read((DOCS / "detection.md").read_text())
    lines = "".join(re.findall(r"^\*\*Measured\*\* .*$", page, re.MULTILINE))
    for detector in DETECTORS:
        said = measured.get(detector.name, "not yet")
        assert f"`{detector.name}`: {said}" in lines
