"""Which of several models was bad first is said where the records tell it, and only there."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import ddpprobe
from ddpprobe.cli.commands.anomalies import first_of_models
from ddpprobe.reader.models import FirstOfModels, models_in
from ddpprobe.records.step import LENT, PASS, PASS_OF_BAD, Anomaly, FirstBad
from tests.made_runs import Made, record

RANKS = 2
# Of the step that is bad: where, and the scalars of each rank besides its last pass.
Bad = tuple[FirstBad | None, Mapping[str, float]]


def bad(phase: str = "forward", rank: int = 1, micro: int = 0, step: int = 3) -> FirstBad:
    return FirstBad(step, micro, phase, 4, rank, "blocks.1.mlp", "output", nan=3, numel=8)


def model(
    home: Path, name: str, told: Bad | None = None, *, process: str = "p", apart: bool = False,
    passes: bool = True, at: int = 3, without: int | None = None, attempt: int = 0,
) -> None:  # fmt: skip
    """Write six steps, of ten passes each, or five; `told` is of step 3, or `at`."""
    made = Made(home / name, ranks=RANKS, process=process, attempt=attempt)
    for step in range(6):
        for rank in range(RANKS):
            if step == without:
                continue
            scalars = {"loss": 1.0}
            if passes:
                scalars[PASS] = 10.0 * (step + 1) + (apart and rank)
            found = None
            if told is not None and step == at:
                found = told[0] if told[0] is not None and told[0].rank == rank else None
                scalars |= told[1] if found or told[0] is None else {}
            made.write(
                [record(rank, step, scalars={rank: scalars}, first_bad=found, attempt=attempt)]
            )
    made.close()


def firsts(home: Path) -> list[tuple[str, int]]:
    found = ddpprobe.open_models(home).first_causes()
    return sorted((one.model, one.anomaly.step) for one in found)


@pytest.mark.parametrize(
    ("a", "b", "first"),
    [
        ((bad(), {PASS_OF_BAD: 32.0}), (bad(), {PASS_OF_BAD: 33.0}), ["a"]),
        ((bad(), {PASS_OF_BAD: 33.0}), (bad(rank=0), {PASS_OF_BAD: 32.0}), ["b"]),
        # One backward came to both: the one that it came to first.
        (
            (bad("backward"), {PASS_OF_BAD: 33.0}),
            (bad("backward"), {PASS_OF_BAD: 33.0 + 2**-10}),
            ["a"],
        ),
        # The loss of b lies before the backward that comes to both, and after the forward of a.
        (
            (bad("backward"), {PASS_OF_BAD: 33.0}),
            (bad("backward"), {PASS_OF_BAD: 33.0 + 2**-10, "loss": math.nan}),
            ["b"],
        ),
        (
            (bad("forward"), {PASS_OF_BAD: 32.0}),
            (bad("backward"), {PASS_OF_BAD: 33.0, "loss": math.nan}),
            ["a"],
        ),
        # The loss of a is of its own pass, after the lent one.
        (
            (bad("backward"), {PASS_OF_BAD: 33.0, "loss": math.nan, LENT: 1.0}),
            (bad("backward"), {PASS_OF_BAD: 33.0 + 2**-10, "loss": math.nan}),
            ["b"],
        ),
        # What is known of a is its step only, in which the pass of b lies.
        ((None, {"loss": math.nan}), (bad(), {PASS_OF_BAD: 33.0}), ["a", "b"]),
        ((None, {"loss": math.nan}), (bad(), {PASS_OF_BAD: 30.0}), ["b"]),
        ((None, {"loss": math.nan}), (bad(), {PASS_OF_BAD: 41.0}), ["a"]),
        ((bad(), {}), (bad(), {PASS_OF_BAD: 33.0}), ["a", "b"]),
        ((bad(), {PASS_OF_BAD: 33.0}), None, ["a"]),
        (None, None, []),
    ],
)
def test_the_first_model_is_that_whose_pass_was_first(
    a: Bad | None, b: Bad | None, first: list[str], tmp_path: Path
) -> None:
    model(tmp_path, "a", a)
    model(tmp_path, "b", b)
    assert firsts(tmp_path) == [(name, 3) for name in first]


def test_ranks_whose_loops_differ_say_nothing_of_each_other(tmp_path: Path) -> None:
    model(tmp_path, "a", (bad(), {PASS_OF_BAD: 32.0}), apart=True)
    model(tmp_path, "b", (bad(), {PASS_OF_BAD: 33.0}))
    assert firsts(tmp_path) == [("a", 3), ("b", 3)]


def test_where_loops_differ_it_may_have_been_from_the_very_first_pass_on(tmp_path: Path) -> None:
    model(tmp_path, "a", (bad(), {PASS_OF_BAD: 32.0}), apart=True)
    model(tmp_path, "b", (bad(), {PASS_OF_BAD: 0.5}))
    assert firsts(tmp_path) == [("a", 3), ("b", 3)]


def test_records_without_passes_say_nothing(tmp_path: Path) -> None:
    model(tmp_path, "a", (bad(), {}), passes=False)
    model(tmp_path, "b", (bad(), {PASS_OF_BAD: 33.0}))
    assert firsts(tmp_path) == [("a", 3), ("b", 3)]


def test_before_the_first_record_there_may_have_been_passes(tmp_path: Path) -> None:
    model(tmp_path, "a", (None, {"loss": math.nan}), at=0)
    model(tmp_path, "b", (bad(step=0), {PASS_OF_BAD: 1.0}), at=0)
    assert firsts(tmp_path) == [("a", 0), ("b", 0)]


def test_of_a_step_without_a_record_it_is_not_known_when_it_was(tmp_path: Path) -> None:
    model(tmp_path, "a", (bad(step=2), {PASS_OF_BAD: 22.0}), without=2)
    model(tmp_path, "b", (bad(step=3), {PASS_OF_BAD: 0.5}))
    assert firsts(tmp_path) == [("a", 2), ("b", 3)]


def test_the_newest_attempts_are_compared(tmp_path: Path) -> None:
    for attempt in (0, 1):
        first, then = (33.0, 32.0) if attempt else (32.0, 33.0)
        model(tmp_path, "a", (bad(), {PASS_OF_BAD: first}), attempt=attempt)
        model(tmp_path, "b", (bad(), {PASS_OF_BAD: then}), attempt=attempt)
    (found,) = ddpprobe.open_models(tmp_path).first_causes()
    assert (found.model, found.anomaly.attempt) == ("b", 1)
    assert (found.began, found.ended) == (32.0, 32.0)


def test_models_are_a_mapping_from_names_to_runs_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        model(tmp_path, name)
    models = ddpprobe.open_models(tmp_path)
    assert (list(models), len(models), models.path) == (["a", "b"], 2, tmp_path)
    assert models["b"].path == tmp_path / "b"
    assert repr(models) == f"Models({str(tmp_path)!r}: a, b)"


@pytest.mark.parametrize("process", ["", "another"])
def test_runs_of_other_processes_are_not_compared(process: str, tmp_path: Path) -> None:
    model(tmp_path, "a")
    model(tmp_path, "b", process=process)
    with pytest.raises(ddpprobe.RunNotFound, match="one process"):
        ddpprobe.open_models(tmp_path)


def test_what_holds_no_models_says_what_to_give(tmp_path: Path) -> None:
    model(tmp_path, "a")
    for path in (tmp_path / "a", tmp_path / "none", "s3://bucket/job"):
        with pytest.raises(ddpprobe.RunNotFound, match=r"the run_dir that install\(\{\.\.\.\}\)"):
            ddpprobe.open_models(path)


def test_anomalies_of_the_directory_says_the_first_of_all_models_first(
    call, tmp_path: Path
) -> None:
    model(tmp_path, "a", (bad(), {PASS_OF_BAD: 33.0}))
    model(tmp_path, "b", (bad(rank=0), {PASS_OF_BAD: 32.0}))
    code, out, _ = call("anomalies", tmp_path)
    head, first, empty, of_a, *_ = out.splitlines()
    assert code == 1
    assert head == "first of all models:"
    assert first.startswith("b  PAGE  step 3 micro 0  rank 0  blocks.1.mlp:output  forward")
    assert (empty, of_a) == ("", f"a ({tmp_path / 'a'})")
    assert out.count("(first cause)") == 3  # of all, of a, of b


def test_anomalies_of_one_model_says_that_others_may_have_been_first(call, tmp_path: Path) -> None:
    for name, told in (("a", (bad(), {PASS_OF_BAD: 33.0})), ("b", None)):
        model(tmp_path, name, told)
        path = tmp_path / name / "run.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "name": f"job/{name}"}))
    where = f"one of 2 models; which was bad first: ddpprobe anomalies {tmp_path}\n"
    assert where in call("anomalies", tmp_path / "a")[2]
    assert "one of 2 models" not in call("anomalies", tmp_path / "b")[2]  # which has no first cause


def test_of_a_model_with_two_first_causes_at_once_the_first_line_is_one() -> None:
    cause = Anomaly("desync", "page", 3, 0, 1, "a", "output", "forward", True, "x", {}, True)
    two = [FirstOfModels("b", replace(cause, step=step), 1.0, 2.0) for step in (3, 4)]
    assert len(first_of_models(two)) == 2
    assert len(first_of_models([two[0], replace(two[1], model="a")])) == 3


@pytest.mark.parametrize(("rank", "one"), [(1, True), (0, False), (None, False)])
def test_the_end_of_a_process_that_trained_all_models_is_one_end(
    rank: int | None, one: bool
) -> None:
    lost = Anomaly("rank_lost", "page", 3, 0, 1, None, None, "step", True, "x", {}, True)
    ends = [FirstOfModels("a", lost, 1.0, 2.0), FirstOfModels("b", replace(lost, rank=rank), 1, 2)]
    head = first_of_models(ends)[0]
    assert head.startswith("one end, of rank 1,") is one
    assert head.startswith("which of these") is not one


def test_anomalies_of_the_directory_says_between_which_it_is_not_known(
    call, tmp_path: Path
) -> None:
    model(tmp_path, "a", (bad(), {}))
    model(tmp_path, "b", (bad(), {PASS_OF_BAD: 32.0}))
    _, out, _ = call("anomalies", tmp_path)
    head, *between = out.splitlines()[:3]
    assert head == "which of these was first is not known:"
    assert [line.split()[0] for line in between] == ["a", "b"]


def test_anomalies_as_json_holds_all_models(call, tmp_path: Path) -> None:
    model(tmp_path, "a")
    model(tmp_path, "b", (bad(), {PASS_OF_BAD: 32.0}))
    code, out, _ = call("anomalies", tmp_path, "--json")
    said = json.loads(out)
    assert code == 1
    assert (said["format_version"], said["directory"]) == (1, str(tmp_path))
    assert [(one["model"], one["step"]) for one in said["first_causes"]] == [("b", 3)]
    assert {name: len(one["anomalies"]) for name, one in said["models"].items()} == {"a": 0, "b": 1}


def test_anomalies_of_healthy_models_says_so(call, tmp_path: Path) -> None:
    model(tmp_path, "a")
    model(tmp_path, "b")
    code, out, _ = call("anomalies", tmp_path)
    assert out.splitlines()[0] == "no model has a first cause"
    assert code in {0, 4}


def test_a_folder_that_is_called_as_an_object_store_is_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = Path("s3:/bucket")
    home.mkdir(parents=True)
    for name in ("a", "b"):
        model(home, name)
    assert models_in(home) is not None
    assert models_in("s3://bucket") is None
