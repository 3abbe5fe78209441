"""The options of `install()`: the environment is applied once, and a wrong one says what came."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import ddpprobe
from ddpprobe.errors import InstallError
from ddpprobe.rank.options import InstallOptions, as_globs, is_disabled


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
    for name in ("DIR", "EVERY", "BUDGET", "LISTEN", "LINGER", "WEB_CONFIG", "MAX_AGE"):
        monkeypatch.setenv(f"DDPPROBE_{name}", "")
    options().check(nn.Linear(1, 1), lambda _: None)
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


def test_no_step_is_no_interval_and_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPPROBE_EVERY", "0")
    with pytest.raises(ValueError, match="DDPPROBE_EVERY must be .* such as DDPPROBE_EVERY=10"):
        options().schedule()


@pytest.mark.parametrize("option", ["include", "exclude", "capture"])
def test_of_a_model_without_modules_inside_no_name_matches(option: str) -> None:
    said = options(**{option: ("zzz",)}).check(nn.Linear(1, 1), lambda _: None).facts["unmatched"]
    assert next(iter(said.values())).endswith("The model has no modules inside: leave it out")


def test_a_task_that_is_no_text_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"task must be one of .*got \['rl'\]"):
        options(task=["rl"]).check(nn.Linear(1, 1), lambda _: None)


@pytest.mark.parametrize(
    ("variable", "wrong", "right"),
    [
        ("LISTEN", "13377", "HOST:PORT"),
        ("LISTEN", "localhost", "HOST:PORT"),
        ("LISTEN", "foo:bar", "HOST:PORT"),
        ("LINGER", "abc", "DDPPROBE_LINGER=20"),
        ("LINGER", "nan", "DDPPROBE_LINGER=20"),
        ("LINGER", "-1", "DDPPROBE_LINGER=20"),
        ("MAX_BYTES", "20XB", "20GB"),
        ("MAX_AGE", "soon", "14d"),
        ("HISTOGRAMS", "maybe", "DDPPROBE_HISTOGRAMS=1"),
        ("WEB_CONFIG", "/nowhere/web.yml", "no such file"),
        ("WEB_CONFIG", __file__, "test_options.py"),
    ],
)
def test_a_variable_of_the_daemons_is_refused_where_somebody_reads_it(
    variable: str, wrong: str, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"DDPPROBE_{variable}", wrong)
    with pytest.raises(ValueError, match=rf"DDPPROBE_{variable}.*{right}"):
        options().check(nn.Linear(1, 1), lambda _: None)
    options(daemon="none").check(nn.Linear(1, 1), lambda _: None)  # which nobody starts


def test_variables_of_the_daemons_that_make_sense_are_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "web.yml").touch()
    for name, value in {
        "LISTEN": "[::1]:0", "LINGER": "0.5", "MAX_BYTES": "20 GiB", "MAX_AGE": "12h",
        "HISTOGRAMS": "1", "WEB_CONFIG": str(tmp_path / "web.yml"),
    }.items():  # fmt: skip
        monkeypatch.setenv(f"DDPPROBE_{name}", value)
    options().check(nn.Linear(1, 1), lambda _: None)


@pytest.mark.parametrize(
    ("value", "disabled"),
    [("1", True), ("true", True), ("Yes", True), ("", False), ("0", False), ("off", False)],
)
def test_it_is_switched_off_by_a_word_that_says_so(
    value: str, disabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPPROBE_DISABLE", value)
    assert is_disabled() is disabled


def test_any_other_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPPROBE_DISABLE", "please")
    with pytest.raises(InstallError, match="DDPPROBE_DISABLE=please: write DDPPROBE_DISABLE=1"):
        is_disabled()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"include": as_globs(None)}, "include must be a glob .*got None"),
        ({"exclude": as_globs(3)}, "exclude must be a glob .*got 3"),
        ({"capture": as_globs(["a", 1])}, "capture must be a glob .*got 1"),
        ({"run_dir": 3}, "run_dir must be a path .*got 3"),
        ({"run_dir": ""}, "run_dir must be a path .*got ''"),
        ({"name": 3}, "name must be .*got 3"),
        ({"name": ""}, "name must be"),
        ({"name": ".."}, "name must be"),
        ({"name": "../esc"}, "name must be .*run_dir"),
        ({"name": "/tmp/abs"}, "name must be"),
        ({"every": 2.5}, "every must be an integer"),
        ({"every": 2**70}, "every must be an integer"),
        ({"first_step": 2**63}, "first_step must be a step number"),
        ({"backward": np.array(["output", "full"])}, "backward must be one of"),
        ({"detectors": {"grad_spike": {3: 1}}}, "grad_spike has no setting 3; it has z="),
    ],
)
def test_what_is_no_name_or_path_is_refused_with_an_example(given: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        options(**given).check(nn.Linear(1, 1), lambda _: None)
    options(name="gpt small.2", run_dir=Path("x")).check(nn.Linear(1, 1), lambda _: None)


@pytest.mark.parametrize(
    "ranges", [(1, 2), 5, ((3, 1),), ((1, 2, 3),), ((1.5, 2),), ((False, True),), "ab"]
)
def test_ranges_that_are_none_are_refused_with_an_example(ranges: object) -> None:
    with pytest.raises(InstallError, match=r"ranges=\(\(100, 120\),\)"):
        ddpprobe.Schedule(ranges=ranges)  # type: ignore[arg-type]


def test_nothing_changes_them() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        options().every = 1  # type: ignore[misc]


def test_a_set_of_globs_has_one_order_on_all_ranks() -> None:
    globs = {f"layers.{i}.*" for i in range(20)}
    assert as_globs(globs) == as_globs(frozenset(globs)) == tuple(sorted(globs))
    assert set(as_globs({"b", 1})) == {"b", 1}
    assert as_globs(["b", "a"]) == ("b", "a")


def test_a_number_that_stands_for_no_end_is_taken() -> None:
    never, always = ddpprobe.Schedule(every=sys.maxsize), ddpprobe.Schedule(dense_until=sys.maxsize)
    later = ddpprobe.Schedule(every=sys.maxsize, ranges=((3, 1 << 70),))
    assert [never.sampled(7), always.sampled(7), later.sampled(7)] == [False, True, True]


def test_a_name_with_brackets_is_matched_as_it_is_written() -> None:
    model = nn.ModuleDict({"odd[0]": nn.Linear(1, 1), "odd0": nn.Linear(1, 1)})
    chosen = options(include=("odd[0]",), capture=("odd[0]",))
    chosen.check(model, lambda _: None)
    assert [name for name in model if chosen.select(name)] == ["odd[0]", "odd0"]  # also as a glob


@pytest.mark.parametrize(
    ("option", "glob", "other", "name"),
    [("include", "b", "b", "a"), ("capture", "b*", "b", "a"),
     ("histograms", "head.weight", "head.weight", "embed.weight")],
)  # fmt: skip
def test_who_means_a_shared_module_by_its_other_name_is_told_the_first(
    option: str, glob: str, other: str, name: str
) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "embed": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    model["b"], model["head"].weight = model["a"], model["embed"].weight
    told = options(**{option: (glob,)}).check(model, lambda _: None).facts["unmatched"]
    (text,) = told.values()
    assert text.endswith(f"'{other}' is another name of '{name}', by which it is recorded")
