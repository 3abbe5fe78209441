"""Versions that nobody has tried are told in one line, once; those that were are not."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from torch import nn

import ddpprobe
from ddpprobe.rank import versions

ROOT = Path(__file__).parent.parent.parent
PAIRS = [(python, torch) for python, found in versions.TRIED.items() for torch in found]


@pytest.mark.parametrize(("python", "torch"), PAIRS)
def test_of_a_pair_that_was_tried_nothing_is_said(python: str, torch: str) -> None:
    assert versions.untried(f"{python}.99", f"{torch}.0+cu130") == ""


@pytest.mark.parametrize(
    ("python", "torch"),
    [
        ("3.99.1", f"{PAIRS[0][1]}.1"),
        (f"{PAIRS[0][0]}.0", "9.10.0a0+git"),
        ("3.99.1", "9.10.0"),
        ("3.1", "2.6.0"),  # 3.11 was
    ],
)
def test_a_pair_that_was_not_tried_is_named_and_those_that_were(python: str, torch: str) -> None:
    said = versions.untried(python, torch)
    assert said == (
        f"it was not tried on Python {python} with torch {torch}, but on {versions.listed()}"
    )


def test_versions_that_were_tried_each_with_another_are_no_pair(monkeypatch) -> None:
    monkeypatch.setattr(versions, "TRIED", {"3.11": ("2.6", "2.13"), "3.12": ("2.13",)})
    assert versions.untried("3.12.1", "2.6.0") == (
        "it was not tried on Python 3.12.1 with torch 2.6.0, but on Python 3.11 with torch 2.6, "
        "2.13; Python 3.12 with torch 2.13"
    )


def test_it_is_said_once_in_a_process_however_many_runs_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "TRIED", {"3.11": ("1.0",)})
    versions.tell_untried.cache_clear()
    with caplog.at_level(logging.WARNING, "ddpprobe"):
        for name in "ab":
            ddpprobe.install(nn.Linear(1, 1), run_dir=tmp_path / name, daemon="none").close()
    versions.tell_untried.cache_clear()
    (line,) = [r.getMessage() for r in caplog.records if "not tried" in r.getMessage()]
    assert line.endswith("but on Python 3.11 with torch 1.0")


def test_the_documents_name_the_pairs_that_were_tried() -> None:
    page = (ROOT / "docs/reference/python.md").read_text()
    passes = "`make test-versions` (real jobs, and the fast tests of what touches torch) on"
    assert f"{passes} {versions.listed()}." in page


def test_the_workflows_run_on_a_python_that_was_tried() -> None:
    files = sorted((ROOT / ".github/workflows").glob("*.yml"))
    named = [v for file in files for v in re.findall(r"python:(3\.\d+)", file.read_text())]
    assert named
    assert set(named) <= set(versions.TRIED)
