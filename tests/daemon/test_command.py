"""What was typed to start a job, and the commit that lay there: told once, without its secrets."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpprobe.daemon.command import Command
from ddpprobe.records.events import CommandEvent
from tests.conftest import ROOT
from tests.waiting import deadline

IDENTITY = ["-c", "user.name=n", "-c", "user.email=e@example.invalid", "-c", "commit.gpgsign=false"]
WORDS = ["train.py", "--lr=3e-4", "--api-key", "abc", "--max-tokens", "64", "--hub.token=def"]


def git(where: Path, *words: str) -> str:
    command = ["git", *IDENTITY, *words]
    return subprocess.run(command, cwd=where, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    where = tmp_path / "tree"
    where.mkdir()
    git(where, "init", "-q")
    (where / "train.py").write_text("import sys; print('runs', flush=True); sys.stdin.read()")
    git(where, "add", ".")
    git(where, "commit", "-q", "-m", "first")
    return where


@pytest.fixture
def job(tree: Path) -> Iterator[int]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, *WORDS], cwd=tree, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()  # in the middle of an exec a process has no words
        yield process.pid


def ask(command: Command) -> CommandEvent:
    late = deadline(20)
    while (said := command.poll()) is None:
        assert time.monotonic() < late
        time.sleep(0.01)
    return said


def test_the_command_is_told_without_what_its_options_call_secrets(job: int, tree: Path) -> None:
    said = ask(Command(job))
    assert said.words[1:] == (
        "train.py", "--lr=3e-4", "--api-key", "***", "--max-tokens", "64", "--hub.token=***",
    )  # fmt: skip
    assert said.directory == str(tree)


def test_a_process_that_has_named_itself_has_no_words_behind_its_name() -> None:
    name = "import sys; from tests.nursery import be_called; be_called('worker', 'x')"
    code = f"{name}; print('runs', flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    words = [sys.executable, "-c", code, *["more words"] * 9]
    with subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert ask(Command(process.pid)).words == ("worker", "x")


@pytest.mark.parametrize("program", [sys.executable, "./py"])
def test_an_empty_argument_at_the_end_is_told_as_it_was_typed(tree: Path, program: str) -> None:
    (tree / "py").symlink_to(sys.executable)
    words, pipe = [program, "train.py", "", "--tag", ""], subprocess.PIPE
    with subprocess.Popen(words, cwd=tree, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert ask(Command(process.pid)).words == tuple(words)


def test_the_commit_is_that_of_the_directory_and_changes_are_told(job: int, tree: Path) -> None:
    first = git(tree, "rev-parse", "HEAD").strip()
    (tree / "notes.txt").write_text("git does not track this file")
    assert (ask(Command(job)).commit, ask(Command(job)).changed) == (first, False)
    (tree / "train.py").write_text("another")
    assert (ask(Command(job)).commit, ask(Command(job)).changed) == (first, True)


def test_it_is_told_once(job: int) -> None:
    command = Command(job)
    ask(command)
    assert command.poll(over=True) is None


def test_without_a_commit_or_without_git_the_command_is_told_all_the_same(
    tree: Path, job: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / ".git").rename(tmp_path / "elsewhere")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    said = ask(Command(job))
    assert (said.words[1], said.commit, said.changed) == ("train.py", None, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    said = ask(Command(job))
    assert (said.words[1], said.commit) == ("train.py", None)


def test_nobody_waits_for_a_git_that_hangs(
    job: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, begun, never = tmp_path / "git", tmp_path / "begun", tmp_path / "never"
    os.mkfifo(never)
    program.write_text(f"#!/bin/sh\ntouch {begun}\nread x < {never}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    command = Command(job)
    late = deadline(20)
    while not begun.exists():
        assert time.monotonic() < late
        time.sleep(0.01)
    assert command.poll() is None
    said = command.poll(over=True)
    with never.open("w"):  # it ends
        pass
    assert said is not None
    assert (said.words[1], said.commit) == ("train.py", None)


def test_no_program_that_a_repository_names_is_started(job: int, tree: Path) -> None:
    program, mark = tree / "monitor", tree / "started"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    git(tree, "config", "core.fsmonitor", str(program))
    assert ask(Command(job)).commit is not None
    assert not mark.exists()


def test_of_a_process_that_is_gone_nothing_is_told() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    assert Command(process.pid).poll(over=True) is None
