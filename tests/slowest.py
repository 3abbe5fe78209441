"""What the files of the suite took, printed at its end: the slowest first.

Under xdist the controller has the reports of all workers and adds them up, so the seconds of all
files together are more than those of the run.
"""

from __future__ import annotations

from collections import Counter

import pytest

FILES = 25


class Slowest:
    """Adds up set-up, call and tear-down of every test by its file."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._tests: dict[str, set[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take one phase of one test."""
        file = report.nodeid.partition("::")[0]
        self._seconds[file] += report.duration
        self._tests.setdefault(file, set()).add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table where more than one file ran."""
        if len(self._seconds) < 2:
            return
        shown = self._seconds.most_common(FILES)
        terminalreporter.section(f"slowest {len(shown)} files of {len(self._seconds)}")
        for file, seconds in shown:
            count = len(self._tests[file])
            terminalreporter.write_line(f"{seconds:8.2f}s {count:5d} tests  {file}")


def listen(config: pytest.Config) -> None:
    """Listen where all reports come together: on the controller, or in the only process."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Slowest(), "ddpprobe-slowest")
