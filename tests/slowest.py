"""The slowest files of the suite: they begin first, and what they took is printed at its end.

Under xdist the controller has the reports of all workers and adds them up, so the seconds of all
files together are more than those of the run. CPU seconds are those of the test's process and of
children that it waited for; forked ranks and daemons are others' children.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator

import pytest

FILES = 25
CPU = "cpu seconds"
# A worker takes file after file in the order of collection, so one of these that began last would
# be waited for. From the table of a run: the longest first.
LONGEST = (
    "tests/daemon/test_node.py",
    "tests/distributed/test_no_harm.py",
    "tests/distributed/test_two_nodes.py",
    "tests/integrations/test_six_scripts.py",
    "tests/rank/hooks/test_compiled.py",
    "tests/grafana/test_dashboard.py",
    "tests/test_faults.py",
    "tests/distributed/test_live.py",
    "tests/distributed/test_attribution.py",
    "tests/grafana/test_alerting.py",
    "tests/reader/collect/test_job.py",
    "tests/store/remote/test_upload.py",
    "tests/distributed/test_compiled_ranks.py",
    "tests/launch/test_train_gpt.py",
    "tests/rank/test_guest_manners.py",
    "tests/integrations/test_unmodified_launchers.py",
    "tests/daemon/test_launch.py",
    "tests/store/test_writer.py",
    "tests/grafana/test_rules.py",
    "tests/distributed/test_kills.py",
    "tests/reader/test_evidence.py",
    "tests/distributed/test_wrappers.py",
    "tests/test_probe.py",
    "tests/distributed/test_exact.py",
    "tests/distributed/test_stops.py",
    "tests/reader/test_run.py",
    "tests/reader/test_reader_races.py",
    "tests/rank/test_slow_disk.py",
    "tests/store/test_retention.py",
    "tests/distributed/test_capture.py",
    "tests/cli/commands/test_up.py",
    "tests/test_recipes.py",
)


def longest_first(items: list[pytest.Item]) -> None:
    """Put the tests of the longest files in front; all else stays in its order."""
    place = {file: number for number, file in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(LONGEST)))


class Cpu:
    """Writes into each report of this process what its phase of a test took of the CPU."""

    def __init__(self) -> None:
        self._before = _cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Take what passed since the report before."""
        report = yield
        now = _cpu_seconds()
        report.user_properties.append((CPU, now - self._before))
        self._before = now
        return report


class Slowest:
    """Adds up set-up, call and tear-down of every test by its file."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._cpu: Counter[str] = Counter()
        self._tests: dict[str, set[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take one phase of one test."""
        file = report.nodeid.partition("::")[0]
        self._seconds[file] += report.duration
        # Each phase's report has the properties of those before it as well.
        self._cpu[file] += next((x for name, x in report.user_properties[::-1] if name == CPU), 0)
        self._tests.setdefault(file, set()).add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table where more than one file ran."""
        if len(self._seconds) < 2:
            return
        shown = self._seconds.most_common(FILES)
        terminalreporter.section(f"slowest {len(shown)} files of {len(self._seconds)}")
        for file, seconds in shown:
            count = len(self._tests[file])
            cpu = self._cpu[file]
            terminalreporter.write_line(f"{seconds:8.2f}s {cpu:8.2f}s {count:5d} tests  {file}")
        whole = sum(self._seconds.values()), sum(self._cpu.values())
        terminalreporter.write_line(f"{whole[0]:8.2f}s {whole[1]:8.2f}s all (wall and CPU)")


def _cpu_seconds() -> float:
    user, system, childrens_user, childrens_system, _ = os.times()
    return user + system + childrens_user + childrens_system


def listen(config: pytest.Config) -> None:
    """Listen where all reports come together: on the controller, or in the only process."""
    config.pluginmanager.register(Cpu(), "ddpprobe-cpu")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Slowest(), "ddpprobe-slowest")
