"""The table of the slowest files."""

from __future__ import annotations

from types import SimpleNamespace

from .slowest import FILES, Slowest, listen


def printed(slowest: Slowest) -> list[str]:
    lines: list[str] = []
    slowest.pytest_terminal_summary(SimpleNamespace(section=lines.append, write_line=lines.append))
    return lines


def test_all_phases_of_all_tests_of_a_file_are_added_up_and_the_slowest_stand_first() -> None:
    slowest = Slowest()
    for i in range(FILES + 3):
        for phase in ("setup", "call", "teardown"):
            nodeid = f"tests/test_{i:02d}.py::test_it[{phase == 'call'}]"
            slowest.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, duration=i / 2))
    section, *rows = printed(slowest)
    assert section == f"slowest {FILES} files of {FILES + 3}"
    assert [row.split() for row in rows] == [
        [f"{3 * i / 2:.2f}s", "2", "tests", f"tests/test_{i:02d}.py"]
        for i in reversed(range(3, FILES + 3))
    ]


def test_one_file_needs_no_table() -> None:
    slowest = Slowest()
    slowest.pytest_runtest_logreport(SimpleNamespace(nodeid="tests/test_a.py::b", duration=1.0))
    assert printed(slowest) == []


def test_a_worker_leaves_it_to_the_controller() -> None:
    registered: list[object] = []
    manager = SimpleNamespace(register=lambda plugin, name: registered.append(plugin))
    listen(SimpleNamespace(pluginmanager=manager, workerinput={}))
    assert registered == []
    listen(SimpleNamespace(pluginmanager=manager))
    assert [type(plugin) for plugin in registered] == [Slowest]
