"""Every error that a user can meet is below `ddpprobe.Error`, exported, and documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe import errors
from ddpprobe.rundir.fuse import Fuse

from .made_runs import Made

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "python.md"
BUILT_IN = {
    "AnomalyStop": (RuntimeError,),
    "CaptureError": (ValueError, RuntimeError, TypeError),
    "InstallError": (ValueError, RuntimeError, TypeError),
    "ModelRefused": (ValueError,),
    "PackDamaged": (ValueError,),
    "SummaryError": (RuntimeError, TypeError),
    "UnknownName": (KeyError, IndexError, ValueError, RuntimeError),
    "UnknownRow": (ddpprobe.SummaryError, KeyError),
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


@pytest.mark.parametrize("listener", [None, 3, lambda *_: None])
def test_what_is_no_listener_is_refused_with_the_methods_of_one(listener, tmp_path):
    with ddpprobe.install(nn.Linear(1, 1), run_dir=tmp_path / "run", daemon="none") as probe:
        with pytest.raises(ddpprobe.InstallError) as caught:
            probe.listen(listener)
    assert "sampled(step, numbers) and closed()" in str(caught.value)
    assert type(listener).__name__ in str(caught.value)


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


def captured(*modules, **options):
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with ddpprobe.capture(net, *modules, **options) as seen:
        net(torch.ones(1, 2))
    return seen


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: ddpprobe.capture(3), 'Write ddpprobe.capture(model, "layers.*")'),
        (lambda: captured(3), "globs such as 'layers.*.attn'"),
        (lambda: captured(exclude=3), "globs such as 'layers.*.attn'"),
        (lambda: captured(exclude=[3]), "globs such as 'layers.*.attn'"),
        (lambda: captured(exclude="layers.*"), "'layers.*' matches no module"),
        (lambda: captured(to="foo"), "to must be a device such as 'cpu'"),
        (lambda: captured(to=3.5), "to must be a device such as 'cpu'"),
        (lambda: captured(range=3), "range must be (low, high)"),
        (lambda: captured(near_zero="x"), "near_zero must be a number"),
        (lambda: captured(near_zero=float("nan")), "near_zero must be a number"),
        (lambda: captured()[5], "no module 5 of 3 captured ones"),
        (lambda: captured()[1.5], "the name of a captured module"),
    ],
)
def test_wrong_use_of_a_capture_is_a_capture_error_that_says_what_to_give(wrong, says):
    with pytest.raises(ddpprobe.CaptureError, match=re.escape(says)):
        wrong()


def test_a_plain_text_leaves_out_what_one_glob_names():
    assert list(captured(exclude="1")) == ["", "0"]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"input_sizes": 3}, "a size such as (8, 3, 32, 32)"),
        ({"input_sizes": (1, 2), "input_dtypes": 3}, "a torch.dtype, or one for each"),
        ({"optimizer": 3}, "a torch.optim.Optimizer or a list of them, got int"),
    ],
)
def test_wrong_use_of_summary_is_a_summary_error(wrong, says):
    with pytest.raises(ddpprobe.SummaryError, match=re.escape(says)):
        ddpprobe.summary(nn.Linear(2, 2), **wrong)


def test_a_row_that_a_summary_has_not_is_told_with_those_that_it_has():
    with pytest.raises(ddpprobe.UnknownRow) as caught:
        ddpprobe.summary(nn.Sequential(nn.ReLU()))["nope"]
    assert str(caught.value) == "no module 'nope'; there are: '', '0'"


@pytest.mark.parametrize(
    ("kind", "wrong", "says"),
    [
        (ddpprobe.UnknownSeries, lambda run: run.series(3, "rms"), "site_glob is a text such as"),
        (ddpprobe.UnknownSeries, lambda run: run.series("*", 3), "stat is a text such as 'rms'"),
        (ddpprobe.UnknownSeries, lambda run: run.scalars(3), "name is a text such as 'loss'"),
        (ddpprobe.UnknownSeries, lambda run: run.matching_scalars(3), "glob is a text such as"),
        (ddpprobe.UnknownSeries, lambda run: run.derived(3), "glob is a text such as"),
        (ddpprobe.UnknownSeries, lambda run: run.histograms(3), "site_glob is a text such as"),
        (ddpprobe.UnknownSeries, lambda run: run.histograms("zz"), "no site matches 'zz'"),
        (
            ddpprobe.UnknownSeries,
            lambda run: run.histograms().near_zero("x"),
            "below must be a power of two",
        ),
        (
            ddpprobe.UnknownSeries,
            lambda run: run.histograms().quantiles(0.5),
            "such as [0.05, 0.5, 0.95]",
        ),
        (
            ddpprobe.UnknownSeries,
            lambda run: run.histograms().quantiles([0.5, 2]),
            "shares from 0 to 1",
        ),
        (ddpprobe.UnknownSeries, lambda run: run.records(after="x"), "such as after=412, got 'x'"),
        (
            ddpprobe.TensorError,
            lambda run: run.tensor("x:output", "5"),
            "such as step=412, got '5'",
        ),
        (ddpprobe.TensorError, lambda run: run.tensor(3, 5), "site is a text such as"),
        (ddpprobe.TensorError, lambda run: run.capsules(5, 3), "module is a text such as"),
    ],
)
def test_wrong_use_of_a_run_says_what_to_give(kind, wrong, says, tmp_path):
    run = ddpprobe.open(Made(tmp_path, ranks=1).whole(1).close().path)
    with pytest.raises(kind, match=re.escape(says)):
        wrong(run)


@pytest.mark.parametrize("chunks", ["foo", 0, -4, {"step": 0}, {3: 2}, [3]])
def test_chunks_that_are_none_are_refused_with_examples(chunks, tmp_path):
    run = ddpprobe.open(Made(tmp_path, ranks=1).whole(1).close().path)
    with pytest.raises(ddpprobe.UnknownSeries, match="step"):
        run.to_xarray(chunks=chunks)


@pytest.mark.parametrize("opens", [ddpprobe.open, ddpprobe.runs, ddpprobe.open_models])
@pytest.mark.parametrize("place", [3, b"run", "a" * 5000, "a\0b", ""])
def test_what_is_no_path_holds_no_run(opens, place):
    with pytest.raises(ddpprobe.RunNotFound, match="give "):
        opens(place)
