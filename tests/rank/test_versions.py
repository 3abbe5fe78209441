"""Versions that nobody has tried are told in one line, once; those that were are not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from torch import nn

import ddpprobe
from ddpprobe.rank import versions

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("python", "torch", "line"),
    [
        (f"{versions.PYTHONS[0]}.99", f"{versions.TORCHES[0]}.0+cu130", ""),
        ("3.99.1", f"{versions.TORCHES[-1]}.1", "it was not tried on Python 3.99.1, but on"),
        (f"{versions.PYTHONS[0]}.0", "9.10.0a0+git", "it was not tried on torch 9.10.0a0+git, but"),
        ("3.99.1", "9.10.0", "it was not tried on Python 3.99.1 and torch 9.10.0, but on Python"),
    ],
)
def test_what_was_not_tried_is_named(python: str, torch: str, line: str) -> None:
    said = versions.untried(python, torch)
    assert said.startswith(line)
    assert bool(said) == bool(line)


def test_it_is_said_once_in_a_process_however_many_runs_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "TORCHES", ("1.0",))
    versions.tell_untried.cache_clear()
    with caplog.at_level(logging.WARNING, "ddpprobe"):
        for name in "ab":
            ddpprobe.install(nn.Linear(1, 1), run_dir=tmp_path / name, daemon="none").close()
    versions.tell_untried.cache_clear()
    (line,) = [r.getMessage() for r in caplog.records if "not tried" in r.getMessage()]
    assert line.endswith("torch 1.0")


def test_the_documents_name_the_versions_that_were_tried() -> None:
    page = (ROOT / "docs/reference/python.md").read_text()
    tried = f"Python {', '.join(versions.PYTHONS)} and torch {', '.join(versions.TORCHES)}"
    assert f"The tests have been run on {tried}." in page
