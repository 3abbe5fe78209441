"""What a person mistypes is answered by a line that says what came and what to type (code 2)."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from ddpprobe.cli.commands import run as run_verb
from ddpprobe.cli.main import main
from ddpprobe.daemon.requests import MAX_GLOBS, RequestFiles
from ddpprobe.probe import install
from ddpprobe.rundir import paths

from ..made_runs import Made, record

Call = Callable[..., tuple[int, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command line; return its exit code and what it said on stderr."""

    def run(*words: object) -> tuple[int, str]:
        code = main([str(word) for word in words])
        return code, capsys.readouterr().err

    return run


@pytest.fixture
def made(tmp_path: Path) -> Path:
    run = Made(tmp_path / "run")
    run.write([record(rank, step) for step in range(3) for rank in range(2)])
    for writer in run.writers.values():
        writer.close()
    return run.path


def refused(call: Call, *words: object) -> str:
    """Return the last line on stderr of a command line that is refused."""
    code, said = call(*words)
    assert code == 2, said
    return said.splitlines()[-1]


def given(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    run_verb.add_arguments(parser)
    return parser.parse_args([*words, "--", "true"])


# As the command line has it, and as `install()` takes it.
REFUSED = {
    "every must be an integer of at least 1": (["--every", "0"], {"every": 0}),
    "--budget: expected a share": (["--budget", "2"], {"budget": 2.0}),
    "--budget: expected a share of": (["--budget", "nan"], {"budget": float("nan")}),
    "no detector 'nope'": (["--without", "nope"], {"detectors": {"nope": False}}),
    "--first-step: expected a step": (["--first-step", "-1"], {"first_step": -1}),
    "--name: expected a name": (["--name", "a/b"], {"name": "a/b"}),
    "got '..'": (["--name", ".."], {"name": ".."}),
    "got ''": (["--name", ""], {"name": ""}),
}


@pytest.mark.parametrize("says", REFUSED)
def test_a_job_does_not_begin_with_an_option_that_install_would_refuse(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str
) -> None:
    words, keywords = REFUSED[says]
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("the job begins"))
    assert says in refused(call, "run", *words, "--", "true")
    with pytest.raises(ValueError, match=r"."):
        install(nn.Linear(1, 1), run_dir=tmp_path / "none", daemon="none", **keywords)


def test_what_install_takes_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    monkeypatch.setattr(os, "execvpe", lambda *of: begun.append(of))
    words = ["--every", "5", "--budget", "0.5", "--first-step", "0", "--name", "a b"]
    run_verb.run(given([*words, "--without", "straggler", "--task", "rl"]))
    assert len(begun) == 1


@pytest.mark.parametrize(
    ("verb", "option", "values"),
    [
        ("trace", "--steps", ("1", "2")), ("trace", "--stat", ("rms", "rms")),
        ("compare", "--sites", ("a", "b")), ("report", "-o/--output", ("a", "b")),
        ("run", "--every", ("1", "2")), ("trigger", "--steps", ("2", "2")),
        ("daemon", "--dir", ("a", "b")),
    ],
)  # fmt: skip
def test_an_option_of_one_value_that_is_given_twice_is_refused(
    call: Call, verb: str, option: str, values: tuple[str, str]
) -> None:
    typed = option.partition("/")[0]
    told = (
        f"ddpprobe {verb}: error: argument {option}: given twice, and takes one value: type it once"
    )
    words = [word for value in values for word in (typed, value)]
    assert refused(call, verb, *words) == told


def test_the_options_of_a_job_are_its_own(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    def begin(_: str, words: list[str], *__: object) -> None:
        raise SystemExit(len(words))

    monkeypatch.setattr(os, "execvpe", begin)
    assert call("run", "--every", "1", "--", "true", "--every", "2", "--every", "3")[0] == 5


def test_an_object_store_is_not_listed_and_the_url_is_shown_as_it_was_typed(call: Call) -> None:
    said = "ddpprobe: s3://a/b: an object store is not listed; give the URL of a run"
    assert refused(call, "ls", "s3://a/b") == said


def test_a_directory_without_a_run_is_no_error_of_ls_as_its_help_says(
    call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("ls", tmp_path) == (0, f"ddpprobe: no run below {tmp_path}\n")
    main(["ls", "--help"])
    told = capsys.readouterr().out
    assert "A directory that holds no run is no error" in told
    assert "empty" not in told.partition("exit codes")[2]


def on_a_full_disk(*words: object) -> tuple[int, str]:
    command = [sys.executable, "-m", "ddpprobe", *map(str, words)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "words",
    [
        ("report", "RUN", "-o", "-"), ("export", "RUN", "--format", "csv"),
        ("export", "RUN", "--format", "openmetrics"), ("--help",), ("info", "--help"),
        ("daemon", "--help"), ("--version",),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_full_disk_under_standard_output_is_told_by_whatever_writes_to_it(
    made: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], unbuffered: str
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    code, said = on_a_full_disk(*(made if word == "RUN" else word for word in words))
    told = "ddpprobe: standard output takes no more: [Errno 28] No space left on device\n"
    assert code == 2
    assert said.endswith(told)
    assert "ignored" not in said


def test_without_a_buffer_a_reader_that_goes_away_is_noticed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    run = Made(tmp_path / "long", ranks=1)
    run.write([record(0, step) for step in range(700)])  # more than a pipe takes at once
    run.writers[0].close()
    command = [sys.executable, "-m", "ddpprobe", "trace", str(run.path), "--site", "*"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait() == 141


def test_more_globs_than_a_daemon_takes_are_refused_and_none_is_left_out(
    call: Call, made: Path, tmp_path: Path
) -> None:
    globs = [word for n in range(MAX_GLOBS + 1) for word in ("--module", f"m{n}")]
    assert f"is taken {MAX_GLOBS} times at most" in refused(call, "trigger", made, *globs)
    asked = {"modules": globs, "steps": 2, "reason": "r"}  # by a command of another version
    paths.write_json(tmp_path / "a.json", asked)
    assert RequestFiles(tmp_path).collect(0) == []
    assert f"{MAX_GLOBS} are the most" in (tmp_path / "a.answer").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["up", "TMP/up", "--target", "x"], "--target: expected the HOST:PORT of a daemon"),
        (["up", "TMP/up", "--listen", "x"], "--listen: cannot listen at 'x': write HOST:PORT"),
        (["up", "RUN/run.json"], "run.json: no directory; give one for the files of up"),
        (["up", "TMP/up", "--http-config", "TMP/nope"], "nope: No such file or directory; give a"),
        (["trace", "--derived", "RUN"], "put the run before the option, as in ddpprobe trace RUN"),
        (["replay", "RUN", "--rank", "1"], "--rank is about executing a module again: give --step"),
        (["replay", "RUN", "--no-float64"], "--no-float64 is about executing a module again"),
        (["replay", "RUN", "--device", "cpu"], "--device is about executing a module again"),
        (["collect", "TMP/new", "RUN/run.json"], "run.json: a file; give a node's run directory"),
        (["collect", "TMP/new", "RUN/journal"], "a part of a run; give its directory: RUN"),
        (["collect", "TMP/new", "TMP/nope"], "nope: no such directory; give a node's"),
        (["report", "RUN", "-o", "/proc/x.html"], "/proc/x.html: cannot be written ("),
        (["export", "RUN", "--format", "csv", "-o", "/proc/x"], "/proc/x: cannot be written ("),
        (["info", "a" * 5000], "cannot be looked at (File name too long): give the directory"),
        (["trace", "RUN", "--rank", "x"], "argument --rank: expected a whole number, got 'x'"),
        (["run", "--budget", "x"], "argument --budget: expected a number, got 'x'"),
        (["trace", "RUN", "--steps", "-5:"], "steps count from 0: type --steps A:B, such as"),
    ],
)
def test_the_error_says_what_was_wrong_and_what_to_type(
    call: Call, made: Path, tmp_path: Path, words: list[str], says: str
) -> None:
    def filled(text: str) -> str:
        return text.replace("RUN", str(made)).replace("TMP", str(tmp_path))

    said = refused(call, *map(filled, words))
    assert filled(says) in said
    assert "Errno" not in said
    assert not (tmp_path / "new").exists()


def test_the_message_names_no_path_twice(call: Call, tmp_path: Path) -> None:
    nope = str(tmp_path / "nope")
    assert refused(call, "up", tmp_path / "up", "--http-config", nope).count(nope) == 1


def test_the_token_is_told_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    main(["daemon", "--help"])
    assert "DDPPROBE_TOKEN, a secret that all nodes share" in " ".join(
        capsys.readouterr().out.split()
    )
