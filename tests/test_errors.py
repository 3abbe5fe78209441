"""Every error that a user can meet is below `ddpprobe.Error`, exported, and documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import nn

import ddpprobe
from ddpprobe import errors
from ddpprobe.rundir.fuse import Fuse

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "python.md"
BUILT_IN = {
    "AnomalyStop": (RuntimeError,),
    "CaptureError": (ValueError, RuntimeError),
    "InstallError": (ValueError, RuntimeError),
    "ModelRefused": (ValueError,),
    "PackDamaged": (ValueError,),
    "SummaryError": (RuntimeError,),
    "UnknownName": (KeyError, ValueError, RuntimeError),
    "UnknownSeries": (ddpprobe.RunError, ValueError),
}


def all_errors() -> dict[str, type[Exception]]:
    return {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }


def test_all_have_one_base_and_are_exported_under_their_name():
    for name, kind in all_errors().items():
        assert issubclass(kind, ddpprobe.Error)
        assert getattr(ddpprobe, name) is kind
        assert name in ddpprobe.__all__


def test_each_keeps_the_built_in_bases_by_which_callers_catch_it():
    for name, bases in BUILT_IN.items():
        assert all(issubclass(all_errors()[name], base) for base in bases)


def test_the_reference_lists_each_of_them_and_no_other():
    section = PAGE.read_text().partition("\n## Errors\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(all_errors())


def test_a_path_without_a_run_is_an_error_that_says_what_to_give(tmp_path):
    (tmp_path / "file").touch()
    for path in ("/nope", tmp_path, tmp_path / "file"):
        with pytest.raises(ddpprobe.RunNotFound, match=r"give the .*install\(\)|run directory"):
            ddpprobe.open(path)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (ddpprobe.InstallError, lambda: ddpprobe.install(nn.Linear(1, 1), on_anomaly="nope")),
        (ddpprobe.InstallError, lambda: ddpprobe.install(nn.Linear(1, 1), every=0)),
        (ddpprobe.InstallError, lambda: ddpprobe.Schedule(every=0)),
        (ddpprobe.InstallError, lambda: ddpprobe.install(nn.DataParallel(nn.Linear(1, 1)))),
        (ddpprobe.CaptureError, lambda: ddpprobe.capture(nn.Linear(1, 1), "nope").open()),
    ],
)
def test_wrong_use_of_the_public_functions_raises_one_of_them(kind, wrong, tmp_path, monkeypatch):
    monkeypatch.setenv("DDPPROBE_DIR", str(tmp_path / "run"))
    with pytest.raises(kind) as caught:
        wrong()
    assert isinstance(caught.value, ddpprobe.Error)


@pytest.mark.parametrize("place", [3, b"runs/gpt", "a\0b", Path("a\0b")])
def test_a_run_dir_that_is_no_path_is_named_with_an_example(place):
    with pytest.raises(ddpprobe.InstallError) as caught:
        ddpprobe.install(nn.Linear(1, 1), run_dir=place, daemon="none")
    assert "run_dir must be a path" in str(caught.value)
    assert "such as run_dir='runs/gpt'" in str(caught.value)
    assert repr(place) in str(caught.value)


def test_each_method_of_a_probe_that_is_switched_off_does_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("DDPPROBE_DISABLE", "1")
    with ddpprobe.install(nn.Linear(1, 1), run_dir=tmp_path / "run") as probe:
        monkeypatch.delenv("DDPPROBE_DISABLE")  # it was read once
        probe.log(loss=1.0, indices=[1])
        probe.listen(None)
        probe.note("unfreeze", config=3)
        probe.step()
        probe.trigger("look")
        with probe.pause("eval"):
            pass
    probe.close()
    assert (probe.run_dir, probe.run_id, list(tmp_path.iterdir())) == (None, None, [])


@pytest.mark.parametrize("word", ["1", "true", "Yes", "on"])
def test_strictness_takes_the_words_of_the_other_switches(word, monkeypatch):
    monkeypatch.setenv("DDPPROBE_STRICT", word)
    with pytest.raises(ZeroDivisionError):
        Fuse("x").guard(lambda: 1 / 0)()


def test_any_other_word_for_strictness_is_refused_at_install(tmp_path, monkeypatch):
    monkeypatch.setenv("DDPPROBE_STRICT", "banana")
    with pytest.raises(ddpprobe.InstallError, match="DDPPROBE_STRICT=banana: write DDPPROBE_STR"):
        ddpprobe.install(nn.Linear(1, 1), run_dir=tmp_path / "run", daemon="none")
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("DDPPROBE_STRICT", "off")
    ddpprobe.install(nn.Linear(1, 1), run_dir=tmp_path / "run", daemon="none").close()
