"""A real training run's modules, executed again from its store: whose fault was it?"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import ddpprobe
from ddpprobe.cli.main import main
from ddpprobe.reader.rerun_detectors import rerun
from ddpprobe.reader.under_way import has_daemon
from ddpprobe.rundir.paths import RunDir
from tests.conftest import ROOT, torchrun_in
from tests.distributed import replayed_job
from tests.distributed.replayed_job import (
    FLIP_RANK,
    FLIP_STEP,
    HEAD_RANK,
    HEAD_STEP,
    LOG_RANK,
    LOG_STEP,
    LOSS_RANK,
    LOSS_STEP,
    Mlp,
)

JOB = Path(replayed_job.__file__)
BUILD = ("--build", "tests.distributed.replayed_job:build")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of all runs of the job."""
    path = tmp_path_factory.mktemp("replayed")
    with torchrun_in(path) as torchrun:
        done = torchrun([JOB, path], env={"PYTHONPATH": str(ROOT), "DDPPROBE_LINGER": "0"})
        assert done.returncode == 0, done.stderr
        yield path


@pytest.fixture
def replay_of(runs: Path, capsys, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """Type `ddpprobe replay` of a run: exit code, output, errors."""
    monkeypatch.chdir(ROOT)

    def replay(name: str, *words: object) -> tuple[int, str, str]:
        code = main(["replay", str(runs / name), *map(str, words)])
        return (code, *capsys.readouterr())

    return replay


def test_what_was_captured_tells_a_fault_of_the_software_from_a_flipped_bit(
    runs: Path, replay_of, poll
) -> None:
    path = runs / "captured"
    poll(lambda: not has_daemon(RunDir(path)), 60)
    assert list(path.rglob("*.pack")) == []  # all of it is in the store
    replay = partial(replay_of, "captured")

    # A log of negative numbers: repeats, and is named with its line.
    code, out, err = replay("--step", LOG_STEP, "--module", "mlp", *BUILD, "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["rank"], told["verdict"], told["phase"]) == (LOG_RANK, "repeats", "forward")
    assert told["float64"] == "bad maths"
    op, line = told["first_bad_op"], told["first_bad_op"]["line"]
    assert (op["name"], op["module"]) == ("aten.log.default", "mlp")
    source, first = inspect.getsourcelines(Mlp.forward)
    assert (Path(line["file"]), line["function"]) == (JOB, "forward")
    assert source[line["number"] - first].strip() == line["text"]
    assert line["text"].startswith("h = torch.log(h)")
    assert op["inputs"][0]["low"] < 0
    assert [c["bitwise"] for c in told["compared"]] == [True]  # NaN for NaN

    # The module that was given what the log made did not make it.
    code, out, _ = replay("--step", LOG_STEP, "--module", "mlp.down", *BUILD, "--json")
    told = json.loads(out)
    assert (code, told["verdict"], told["first_bad_op"]) == (0, "came in", None)
    assert told["why"] == "an input was not finite: replay the module that made it, or mlp"

    # A bit that flipped once: not reproducible.
    words = ("--step", FLIP_STEP, "--module", "mlp", "--rank", FLIP_RANK, *BUILD)
    code, out, err = replay(*words)
    assert (code, err) == (0, "")
    first = out.splitlines()[0]
    assert first == (
        f"step {FLIP_STEP} micro 0 rank {FLIP_RANK} mlp: "
        "not reproducible: hardware, a race, or state outside of the module"
    )
    assert "1 of 18 elements of the output differ" in out

    # Everything else is what it was, dropout included.
    for step, rank in ((0, 0), (FLIP_STEP, 1 - FLIP_RANK), (LOG_STEP, 1 - LOG_RANK)):
        words = ("--step", step, "--module", "mlp", "--rank", rank, *BUILD, "--no-float64")
        told = json.loads(replay(*words, "--json")[1])
        assert (told["verdict"], told["compared"][0]["bitwise"]) == ("agrees", True)

    # What is not there is said, with what is.
    for words, says in [
        (("--step", 9, "--module", "mlp", *BUILD), "step 9 was not captured; these steps were: [0"),
        (("--step", 0, "--module", "head", *BUILD), "'head' was not captured at step 0; mlp, "),
        (("--step", 0, "--module", "mlp", "--rank", 7, *BUILD), "no capsule of rank 7; there is"),
        (("--step", 0, "--module", "mlp", "--build", f"{__name__}:no"), "no function 'no'"),
        (("--step", 0, "--module", "mlp", *BUILD, "--device", "tpu"), "--device tpu: expected cpu"),
    ]:  # fmt: skip
        code, out, err = replay(*words)
        assert (code, out) == (2, "")
        assert says in err

    # The detectors say again what they said live.
    assert rerun(ddpprobe.open(path)).identical

    # A capture that was damaged is not executed.
    (chunk,) = (path / "run.zarr").glob(f"attempt_000/captures/step_*{LOG_STEP}/t00001/value/c/0/0")
    chunk.write_bytes(chunk.read_bytes()[:-9] + b"\0" * 9)
    damaged = [replay("--step", LOG_STEP, "--module", "mlp", "--rank", r, *BUILD) for r in (0, 1)]
    assert 3 in {code for code, _, _ in damaged}


@pytest.mark.parametrize("name", ["fsdp2", "fsdp1", "fsdp1-orig"])
def test_the_rank_where_a_nan_began_keeps_the_whole_module_though_it_is_sharded(
    name: str, replay_of
) -> None:
    words = ("--step", HEAD_STEP, "--module", "head", *BUILD, "--json")
    code, out, err = replay_of(name, *words)
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["rank"], told["verdict"], told["float64"]) == (HEAD_RANK, "repeats", "bad maths")
    assert told["first_bad_op"]["line"]["text"].startswith("return torch.log(self.out(x)")
    assert [c["bitwise"] for c in told["compared"]] == [True]


@pytest.mark.parametrize("name", ["fsdp2", "fsdp1", "fsdp1-orig", "whole"])
def test_a_model_around_sharded_units_that_computes_its_loss_is_executed_whole(
    name: str, replay_of
) -> None:
    """In `whole` all ranks were asked to keep it; else its rank keeps what the backward gathers."""
    code, out, err = replay_of(name, "--step", LOSS_STEP, "--module", "", *BUILD, "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["rank"], told["module"], told["verdict"]) == (LOSS_RANK, "", "repeats")
    assert told["first_bad_op"]["line"]["text"] == "return torch.log(y.square().mean() + loss)"
    assert [c["bitwise"] for c in told["compared"]] == [True]


def test_what_the_backward_does_not_gather_is_said_with_whose_parts_are_missing(replay_of) -> None:
    code, out, err = replay_of("frozen", "--step", LOSS_STEP, "--module", "", *BUILD)
    assert (code, out) == (2, "")
    assert f"of 2 ranks only [{LOSS_RANK}] kept shards of mlp." in err
    assert "head." not in err  # that one is trained
    assert "install(..., capture='')" in err
