"""Part `marked`: every test that a machine without a GPU skips, file by file.

These are the tests marked `gpu`, and those that are skipped where CUDA or Triton is missing. In a
dry run they are skipped here, too, but for those that have a twin on the CPU.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from tests.gpu.findings import FAILED, PASSED, SKIPPED, Findings
from tests.gpu.parts import Case, Context

TESTS = Path(__file__).resolve().parents[1]
_NEEDS = re.compile(r"cuda|gpu|triton", re.IGNORECASE)
_MENTIONS = re.compile(r"mark\.gpu|skipif.*(cuda|triton)|import DEVICES", re.IGNORECASE)


def cases() -> dict[str, Case]:
    files = [f for f in sorted(TESTS.rglob("test_*.py")) if mentions(f)]
    return {str(f.relative_to(TESTS)): partial(run_file, f) for f in files}


def mentions(file: Path) -> bool:
    """Return whether some test of a file may need a GPU."""
    return any(_MENTIONS.search(line) for line in file.read_text().splitlines())


def run_file(file: Path, context: Context) -> None:
    """Run those tests of a file; each is a line as soon as it is over."""
    options = ["--import-mode=importlib", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # Warnings of another torch than the pinned one are for whoever upgrades.
    options += ["-o", "addopts=", "-o", "filterwarnings=default", "--rootdir", str(TESTS.parent)]
    options += ["--basetemp", str(context.scratch / "pytest"), str(file)]
    code = pytest.main(options, plugins=[_Chosen(context.findings)])
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        context.findings.add("all", SKIPPED, "no test of it needs a GPU")
    elif code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        context.findings.add("pytest", FAILED, f"ended with {code!r}: see the log")


class _Chosen:
    """A plugin that keeps the tests of which something depends on a GPU, and their results."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list) -> None:
        families = {item.originalname for item in items if needs_gpu(item)}
        chosen = [item for item in items if item.originalname in families]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.partition("::")[2]
        result = {"passed": PASSED, "skipped": SKIPPED}.get(report.outcome, FAILED)
        text = f"{report.duration:.1f} s"
        if result is SKIPPED:
            text = str(report.longrepr[2]).removeprefix("Skipped: ")
        if result is FAILED:
            text = crash_of(report)
        more = {"trace": report.longreprtext.splitlines()[-40:]} if result is FAILED else {}
        self._findings.add(name, result, text, **more)


def needs_gpu(item: pytest.Item) -> bool:
    skips = [m for m in item.iter_markers("skipif") if _NEEDS.search(m.kwargs.get("reason", ""))]
    return bool(skips) or item.get_closest_marker("gpu") is not None


def crash_of(report: pytest.TestReport) -> str:
    """Return the line that says what was wrong."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message).splitlines()[0] if crash else report.longreprtext[-200:]
