"""What `make test-versions` installs, what it counts, and which pairs it tries."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.versions import __main__ as command
from tests.versions import environment
from tests.versions.environment import Count

ROOT = Path(__file__).parent.parent
RESULTS = """<testsuites><testsuite>
<testcase classname="a" name="good"/><testcase classname="a" name="left"><skipped/></testcase>
<testcase classname="a" name="bad"><failure/></testcase>
<testcase classname="b" name="broken"><error/></testcase>
</testsuite></testsuites>"""


def test_torch_brings_the_versions_of_what_it_asks_for_and_all_else_is_pinned() -> None:
    pinned = {environment.name_of(line) for line in environment.pins().splitlines() if "==" in line}
    assert {"numpy", "zarr", "pytest", "hypothesis"} <= pinned
    assert pinned.isdisjoint({"torch", "sympy", "networkx", "typing-extensions"})


def test_every_test_that_failed_or_broke_is_counted_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "results.xml"
    file.write_text(RESULTS)
    found = environment.counted(file, 1)
    assert found == Count(1, 1, ("a::bad", "b::broken"), 1)
    assert str(found) == "**2 failed**, 1 passed, 1 skipped"


@pytest.mark.parametrize(("count", "good"), [
    (Count(3, 1, (), 0), True), (Count(0, 4, (), 0), False), (Count(3, 0, (), 2), False),
    (Count(3, 0, ("a",), 1), False),
])  # fmt: skip
def test_a_pair_holds_if_something_ran_and_all_of_it_passed(count: Count, good: bool) -> None:
    assert count.good == good


def test_a_run_that_wrote_no_results_passed_nothing(tmp_path: Path) -> None:
    assert environment.counted(tmp_path / "none.xml", 4) == Count(0, 0, (), 4)
    assert "exit code 4" in str(Count(0, 0, (), 4))


def test_without_words_the_pairs_that_were_tried_are_tried(monkeypatch) -> None:
    monkeypatch.setattr(command, "TRIED", {"3.11": ("2.6", "2.13"), "3.13": ("2.13",)})
    assert command.pairs(None, None) == [("3.11", "2.6"), ("3.11", "2.13"), ("3.13", "2.13")]
    assert command.pairs(["3.13"], None) == [("3.13", "2.13")]
    assert command.pairs(["3.12"], ["2.7", "2.8"]) == [("3.12", "2.7"), ("3.12", "2.8")]
    assert command.pairs(["3.14"], None) == [("3.14", "2.13"), ("3.14", "2.6")]


def test_a_python_that_is_not_there_makes_a_row_that_says_so(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    row, held = command.try_pair("3.99", "2.13", 1, keep=False)
    assert "there is no python3.99 on the PATH" in row
    assert not held


def test_what_it_runs_is_there() -> None:
    assert [p for p in (*command.JOBS, *command.TESTS) if not (ROOT / p).exists()] == []
