"""The table of what was shown says no more than the tests did."""

from __future__ import annotations

from pathlib import Path

from . import proof

CASE = '<testcase classname="tests.frameworks.{}" name="{}">{}</testcase>'
CASES = (
    ("test_loops", "test_a_nan_is_named_by_step[('fabric', 1)]", ""),
    ("test_loops", "test_a_nan_is_named_by_step[('fabric', 2)]", "<failure/>"),
    ("test_loops", "test_the_loss_is_the_models[('fabric', 1)]", ""),
    ("test_ray", "test_a_nan_is_named_by_step[1]", "<skipped/>"),
)


def test_a_cell_says_yes_only_if_all_its_tests_passed(tmp_path: Path) -> None:
    file = tmp_path / "proof.xml"
    cases = "".join(CASE.format(*case) for case in CASES)
    file.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    results = proof.results_of([file])
    assert proof.cell(results, "Lightning Fabric", "true loss") == "yes"
    assert proof.cell(results, "Lightning Fabric", "fault named") == "FAILED"
    assert proof.cell(results, "Accelerate", "true loss") == "-"
    assert "| Ray Train | not run |" in proof.table(results)


def test_the_tests_behind_each_column_are_there() -> None:
    texts = [p.read_text() for p in Path(__file__).parent.glob("test_*.py")]
    for begin in proof.COLUMNS.values():
        assert any(f"def {begin}" in text for text in texts)


def test_the_page_has_a_row_for_each_framework() -> None:
    block = proof.BLOCK.search(proof.PAGE.read_text())
    assert block is not None
    assert [row for row in proof.ROWS if f"| {row} | " not in block[0]] == []
