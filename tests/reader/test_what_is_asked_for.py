"""What a run has not is refused by name, and never given back as if it were empty."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddpprobe.cli.main import main
from ddpprobe.errors import TensorError, UnknownSeries
from ddpprobe.reader.run import Run, open_run

from ..made_runs import Made

Ask = Callable[..., Any]
BY_RANK: dict[str, Ask] = {
    "records": lambda run, **part: list(run.records(**part)),
    "series": lambda run, **part: run.series("*", "rms", **part),
    "near zero": lambda run, **part: run.series("*", "near_zero_ratio", **part),
    "histograms": lambda run, **part: run.histograms(**part),
    "scalars": lambda run, **part: run.scalars("loss", **part),
    "matching scalars": lambda run, **part: run.matching_scalars("*", **part),
    "xarray": lambda run, **part: run.to_xarray(**part),
    "lazy xarray": lambda run, **part: run.to_xarray(chunks={}, **part),
    "pandas": lambda run, **part: run.to_pandas(**part),
    "polars": lambda run, **part: run.to_polars(**part),
    "plot": lambda run, **part: run.plot("*", "rms", **part),
    "sampled steps": lambda run, **part: run.sampled_steps(**{"attempt": 0, **part}),
}
BY_ATTEMPT: dict[str, Ask] = {
    **BY_RANK,
    "derived": lambda run, **part: run.derived(**part),
    "ranks": lambda run, **part: run.ranks(**part),
    "readings": lambda run, **part: list(run.readings(**part)),
}
NO_STEPS = ("records", "xarray", "lazy xarray", "sampled steps", "ranks", "readings")
BY_STEPS = {name: ask for name, ask in BY_ATTEMPT.items() if name not in NO_STEPS}


def _numpy(number: int) -> Any:
    return np.int64(number)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks and two attempts."""
    path = tmp_path_factory.mktemp("made") / "run"
    for attempt in range(2):
        Made(path, attempt=attempt).whole(6).close()
    return open_run(path)


@pytest.mark.parametrize("name", BY_RANK)
def test_a_rank_that_is_not_there_is_refused(run: Run, name: str) -> None:
    for rank in (5, -1, "0", 1.0, True):
        where = "attempt 0" if name == "sampled steps" else "this run"
        text = f"no rank {rank!r} in {where}; it has 0, 1"
        with pytest.raises(UnknownSeries, match=re.escape(text)):
            BY_RANK[name](run, rank=rank)


@pytest.mark.parametrize("name", BY_ATTEMPT)
def test_an_attempt_that_is_not_there_is_refused(run: Run, name: str) -> None:
    for attempt in (3, -1, "1"):
        text = f"no attempt {attempt!r} in this run; it has 0, 1"
        with pytest.raises(UnknownSeries, match=re.escape(text)):
            BY_ATTEMPT[name](run, attempt=attempt)


@pytest.mark.parametrize("name", BY_STEPS)
@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (slice(-3, None), "start of steps=slice(-3, None, None) is no whole number of at least 0"),
        (slice(None, -1), "stop of steps=slice(None, -1, None) is no whole number of at least 0"),
        (slice(0, 9, 0), "step of steps=slice(0, 9, 0) is no whole number of at least 1"),
        (slice(0, 2.5), "stop of steps=slice(0, 2.5, None) is no whole number"),
        (slice("a", None), "start of steps=slice('a', None, None) is no whole number"),
        ((0, 3), "steps=(0, 3) is no slice: give step numbers, such as steps=slice(100, 200)"),
        (3, "steps=3 is no slice"),
    ],
)
def test_steps_that_are_none_are_refused(run: Run, name: str, steps: Any, text: str) -> None:
    with pytest.raises(UnknownSeries, match=re.escape(text)):
        BY_STEPS[name](run, steps=steps)


def test_several_globs_are_several_and_no_others_are_taken(run: Run) -> None:
    sites = ["blocks.0.mlp:output", "blocks.1.mlp:output"]
    assert [str(site) for site in run.series(sites, "rms").sites] == sites
    assert [s.name for s in run.matching_scalars(("lo*", "loss"))] == ["loss"]
    for wrong in ([], [3], {"*"}):
        with pytest.raises(UnknownSeries, match="is a text such as"):
            run.series(wrong, "rms")


def test_what_is_there_is_given_also_by_numbers_of_numpy(run: Run) -> None:
    part = slice(_numpy(2), _numpy(4))
    found = run.series("*", "rms", _numpy(1), part, _numpy(1))
    assert found.steps.tolist() == [2, 3]
    assert set(found.attempts.tolist()) == {1}
    assert [r.ranks for r in run.records(_numpy(0), 0)] == [(0,)] * 6


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two attempts of unlike size: rank 2 is in the second alone."""
    path = tmp_path_factory.mktemp("made") / "run"
    for attempt, ranks in enumerate((2, 4)):
        Made(path, ranks=ranks, attempt=attempt).whole(6).close()
    return open_run(path)


def test_a_rank_that_another_attempt_has_is_refused_for_this_one(sizes: Run) -> None:
    with pytest.raises(UnknownSeries, match="no rank 2 in attempt 0; it has 0, 1$"):
        sizes.records(2, 0)
    assert len(list(sizes.records(2))) == 6
    assert sizes.sampled_steps(1, 2) == list(range(6))


def test_runs_whose_attempts_have_unlike_sizes_are_compared(
    sizes: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Made(tmp_path / "run", ranks=4).whole(6).close().path
    assert main(["compare", str(sizes.path), str(other)]) == 0
    assert "compared: 6 sampled steps" in capsys.readouterr().out
    assert main(["trace", str(sizes.path), "--site", "*", "--rank", "2", "--steps", "90:"]) == 2
    assert "they reach from 0 to 5" in capsys.readouterr().err


def test_of_a_run_that_has_nothing_yet_nothing_is_given(tmp_path: Path) -> None:
    made = Made(tmp_path / "run")
    run = open_run(made.close().path)
    assert list(open_run(run.path).records(0)) == []
    assert run.matching_scalars(rank=0) == []


def test_captures_of_an_attempt_that_is_not_there_are_refused(run: Run) -> None:
    text = "no attempt 3 in this run; it has 0, 1"
    with pytest.raises(TensorError, match=text):
        run.captures(attempt=3)
    with pytest.raises(TensorError, match=text):
        run.tensor("blocks.0.mlp:output", 3, attempt=3)
    with pytest.raises(TensorError, match=text):
        run.capsules(3, "blocks.0.mlp", attempt=3)
    assert run.captures(attempt=1) == []
    with pytest.raises(TensorError, match=r"step 3 was not captured in attempt 1; no step was$"):
        run.capsules(3, "blocks.0.mlp", attempt=1)
    with pytest.raises(TensorError, match=r"step 3 was not captured; no step was$"):
        run.capsules(3, "blocks.0.mlp")
