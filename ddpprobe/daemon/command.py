"""What was typed to start the ranks, and which commit lay in the directory where that was."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

import psutil

from ddpprobe.records.events import CommandEvent

MOST_WORDS, MOST_LETTERS = 256, 4096
GIT_SECONDS = 10.0  # a large work tree on a slow disk; then the commit is not known
_HIDDEN = "***"
_SECRET = re.compile(
    r"(?i)(?:^|[-_.])(?:token|secret|password|passwd|credentials?|api[-_]?key|access[-_]?key)$"
)
_GIT = [
    "git",
    "--no-optional-locks",  # no file of the work tree is written
    "-c",
    "core.fsmonitor=false",  # a repository may name a program there
    "status",
    "--porcelain=v2",
    "--branch",
    "--untracked-files=no",
    "--ignore-submodules",
]


@final
class Command:
    """Reads the command line of a process, and asks git for the commit; nobody waits for git.

    Args:
        pid: process that lives: a rank, or the torchrun that started it.
    """

    def __init__(self, pid: int) -> None:
        self._words: Sequence[str] = ()
        self._directory = ""
        self._state: tuple[str | None, bool | None] = (None, None)
        self._said = False
        try:
            process = _typed(psutil.Process(pid))
            self._directory = process.cwd()
            self._words = _without_padding(process.cmdline(), self._directory)
        except (psutil.Error, OSError):  # it ended, or its directory was deleted
            return
        self._git = threading.Thread(target=self._ask_git, name="git", daemon=True)
        self._git.start()

    def poll(self, *, over: bool = False) -> CommandEvent | None:
        """Return what is known, once: when git has answered, or all is `over`."""
        if self._said or not self._words or (self._git.is_alive() and not over):
            return None
        self._said = True
        commit, changed = self._state
        words = tuple(_hide(self._words))
        return CommandEvent(words=words, directory=self._directory, commit=commit, changed=changed)

    def _ask_git(self) -> None:
        try:
            done = subprocess.run(  # noqa: S603  (our own words)
                _GIT, cwd=self._directory, stdin=subprocess.DEVNULL, capture_output=True,
                timeout=GIT_SECONDS, check=True,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError):  # no git, no repository, too slow
            return
        self._state = _state_of(done.stdout.decode("utf-8", "replace").splitlines())


def _typed(process: psutil.Process) -> psutil.Process:
    """Return the process that a person started: a rank of `multiprocessing` has a parent."""
    while "multiprocessing" in " ".join(process.cmdline()[1:3]):
        parent = process.parent()
        if parent is None:
            break
        process = parent
    return process


def _without_padding(words: list[str], directory: str) -> list[str]:
    """Return a command line without the empty words that nobody typed.

    A process that gives itself a name, as a worker of Ray, fills what was there with zeros. What
    was typed begins with a program, and there an empty word at the end is an argument.
    """
    first = words[0] if words else ""
    if shutil.which(Path(directory) / first if os.sep in first else first):
        return words
    while words and not words[-1]:
        words.pop()
    return words


def _state_of(lines: Sequence[str]) -> tuple[str | None, bool | None]:
    """Return the commit that `git status` tells, and whether a tracked file differs from it."""
    commits = [line.split()[2] for line in lines if line.startswith("# branch.oid ")]
    if not commits or not re.fullmatch(r"[0-9a-f]{40,64}", commits[0]):
        return None, None  # "(initial)": nothing is committed yet
    return commits[0], any(not line.startswith("#") for line in lines)


def _hide(words: Sequence[str]) -> Iterator[str]:
    """Yield the words without what the name of an option, or of a variable, calls a secret."""
    letters, hidden = 0, False
    for number, word in enumerate(words):
        name, sign, _ = word.partition("=")
        secret = bool(_SECRET.search(name))
        shown = f"{name}={_HIDDEN}" if secret and sign else word
        if hidden and not word.startswith("--"):
            shown = _HIDDEN
        hidden = secret and not sign and name.startswith("-")
        letters += len(shown)
        if number >= MOST_WORDS or letters > MOST_LETTERS:
            yield "..."
            return
        yield shown
