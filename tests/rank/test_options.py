"""The options of `install()`: the environment is applied once, and a wrong one says what came."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import nn

from ddpprobe.rank.options import InstallOptions


def options(**given: Any) -> InstallOptions:
    base = {
        "run_dir": None, "every": 10, "include": ("*",), "exclude": (), "capture": (),
        "on_anomaly": "record", "budget": None, "backward": "output", "name": None,
        "daemon": "auto", "first_step": 0, "detectors": {}, "task": None,
    }  # fmt: skip
    return InstallOptions(**base | given).with_environment()


def test_the_environment_overrides_what_the_script_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("DIR", "there"), ("EVERY", "3"), ("BUDGET", "0.5"), ("LISTEN", "a:1")):
        monkeypatch.setenv(f"DDPPROBE_{name}", value)
    found = options(run_dir="here", every=7, budget=0.1)
    assert (found.run_dir, found.listen) == ("there", "a:1")
    assert (found.schedule().every, found.share()) == (3, 0.5)
    for name in ("DIR", "EVERY", "BUDGET", "LISTEN"):
        monkeypatch.setenv(f"DDPPROBE_{name}", "9")
    assert (found.schedule().every, found.share(), found.listen) == (3, 0.5, "a:1")  # read once


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DIR", "EVERY", "BUDGET", "LISTEN"):
        monkeypatch.setenv(f"DDPPROBE_{name}", "")
    found = options(run_dir="here", every=7, budget=0.1)
    assert (found.run_dir, found.listen) == ("here", None)
    assert (found.schedule().every, found.share()) == (7, 0.1)


def test_a_text_is_a_number_only_where_the_environment_gave_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for wrong in ({"every": "5"}, {"budget": "0.5"}):
        with pytest.raises((TypeError, ValueError)):
            options(**wrong).check(nn.Linear(1, 1), lambda _: None)
    monkeypatch.setenv("DDPPROBE_EVERY", "5")
    assert options().check(nn.Linear(1, 1), lambda _: None).schedule.every == 5


def test_nothing_changes_them() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        options().every = 1  # type: ignore[misc]
