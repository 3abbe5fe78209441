"""The table of the slowest files."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from .slowest import CPU, FILES, LONGEST, Cpu, Slowest, listen, longest_first


def printed(slowest: Slowest) -> list[str]:
    lines: list[str] = []
    slowest.pytest_terminal_summary(SimpleNamespace(section=lines.append, write_line=lines.append))
    return lines


def test_all_phases_of_all_tests_of_a_file_are_added_up_and_the_slowest_stand_first() -> None:
    slowest = Slowest()
    for i in range(FILES + 3):
        taken: list[tuple[str, object]] = [("another's", "word")]
        for phase in ("setup", "call", "teardown"):
            nodeid = f"tests/test_{i:02d}.py::test_it[{phase == 'call'}]"
            taken.append((CPU, i / 4))
            report = SimpleNamespace(nodeid=nodeid, duration=i / 2, user_properties=[*taken])
            slowest.pytest_runtest_logreport(report)
    section, *rows, whole = printed(slowest)
    assert section == f"slowest {FILES} files of {FILES + 3}"
    assert [row.split() for row in rows] == [
        [f"{3 * i / 2:.2f}s", f"{3 * i / 4:.2f}s", "2", "tests", f"tests/test_{i:02d}.py"]
        for i in reversed(range(3, FILES + 3))
    ]
    both = (sum(3 * i / parts for i in range(FILES + 3)) for parts in (2, 4))
    assert whole.split() == [
        *(f"{seconds:.2f}s" for seconds in both),
        "all",
        "(wall",
        "and",
        "CPU)",
    ]


def test_one_file_needs_no_table() -> None:
    slowest = Slowest()
    report = SimpleNamespace(nodeid="tests/test_a.py::b", duration=1.0, user_properties=[])
    slowest.pytest_runtest_logreport(report)
    assert printed(slowest) == []


def test_a_worker_leaves_it_to_the_controller() -> None:
    registered: list[object] = []
    manager = SimpleNamespace(register=lambda plugin, name: registered.append(plugin))
    listen(SimpleNamespace(pluginmanager=manager, workerinput={}))
    listen(SimpleNamespace(pluginmanager=manager))
    assert [type(plugin) for plugin in registered] == [Cpu, Cpu, Slowest]


def test_a_report_has_the_cpu_seconds_since_the_one_before() -> None:
    cpu, reports = Cpu(), []
    for _ in range(2):
        before = time.process_time()
        while time.process_time() < before + 0.08:
            pass
        report = SimpleNamespace(user_properties=[])
        writing = cpu.pytest_runtest_makereport()
        next(writing)
        with pytest.raises(StopIteration) as end:
            writing.send(report)
        assert end.value.value is report
        reports.append(report)
    for (name, seconds), *more in (report.user_properties for report in reports):
        assert (name, more) == (CPU, [])
        assert seconds > 0.05  # a clock of hundredths


def test_the_longest_files_begin_first_and_nothing_else_changes_its_place() -> None:
    first, second, *_ = LONGEST
    order = [
        "tests/test_a.py::a",
        f"{second}::a",
        "tests/test_a.py::b",
        f"{first}::b",
        f"{first}::a",
    ]
    items = [SimpleNamespace(nodeid=nodeid) for nodeid in order]
    longest_first(items)
    assert [item.nodeid for item in items] == [order[i] for i in (3, 4, 1, 0, 2)]


def test_every_file_that_begins_first_is_there() -> None:
    root = Path(__file__).parents[1]
    assert [file for file in LONGEST if not (root / file).is_file()] == []
