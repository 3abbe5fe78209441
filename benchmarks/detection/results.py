"""Keeps what each run has shown as a line of a file, so that a table can be made over days.

A result counts only for the code that it was measured with: `code()` is part of each line, and
lines of other code are left in the file and out of the table.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.detection.score import Outcome, Spoke

_HOME = Path(__file__).parent.parent.parent
_ONLY_SHOW = {"__main__.py", "kept.py", "report.py", "results.py"}  # they change no result
_JUDGE = {"reference.py", "rivals.py", "score.py"}  # they change what is said of a run, not the run
# They carry or show records, or judge them: that no number changes on the way is what
# tests/distributed/test_replayed.py and tests/grid hold. No job here is resumed.
_NO_ROWS = {
    *("cli", "daemon", "detectors", "ends", "inspect", "metrics", "reader", "report", "testing"),
    "rank/last_words.py", "store/earlier_attempts.py",
}  # fmt: skip


class Key(NamedTuple):
    """What is run: a job, by a seed, sampled at an interval."""

    job: str
    seed: int
    every: int


@dataclass(frozen=True, slots=True)
class Result:
    """What a run has shown.

    Attributes:
        outcome: what the probe said, judged.
        spoke: rival -> steps at which it says something.
        code: fingerprint of what was measured.
        machine: what it ran on, in words.
        date: UTC day, ISO 8601.
    """

    outcome: Outcome
    spoke: Spoke
    code: str
    machine: str
    date: str

    @property
    def key(self) -> Key:
        """Return what was run."""
        return Key(self.outcome.job, self.outcome.seed, self.outcome.every)


def code(home: Path = _HOME, *, recorded: bool = False) -> str:
    """Return a fingerprint of all that a result depends on: the probe, jobs, libraries.

    `recorded`: only of what the records of a run depend on, so not of detectors and their judges,
    nor of the daemon and the readers.
    """
    left_out = _ONLY_SHOW | _JUDGE if recorded else _ONLY_SHOW
    found = hashlib.sha256(torch.__version__.encode())
    jobs = (home / "benchmarks" / "detection").glob("*.py")
    top = home / "ddpprobe"
    probe = top.rglob("*.py")
    passed = _NO_ROWS if recorded else set()
    measured = [*(f for f in probe if passed.isdisjoint(_within(f.relative_to(top)))),
                *(f for f in jobs if f.name not in left_out),
                *(home / "benchmarks").glob("zoo.txt")]  # fmt: skip
    for file in sorted(measured):
        found.update(f"{file.relative_to(home)}\0".encode() + file.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def _within(path: Path) -> list[str]:
    """Return a path and the directories that it lies in."""
    return [path.as_posix(), *(parent.as_posix() for parent in path.parents)]


class Results:
    """The file of results; the last line of a run counts. Several processes may append to it.

    Args:
        path: of the file; it and its directory are made when there is a result.
        code: fingerprint of the code whose results count.
    """

    def __init__(self, path: Path, code: str) -> None:
        self._path, self._code = path, code
        self._found: dict[Key, Result] = {}
        self.of_other_code = 0
        for line in path.read_bytes().splitlines() if path.exists() else []:
            result = _parse(line)
            if result is None:
                continue
            if result.code == code:
                self._found[result.key] = result
            else:
                self.of_other_code += 1

    def add(self, result: Result) -> None:
        """Append a result, at once."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:  # half a line before it must not spoil this one
            file.write(b"\n" + json.dumps(asdict(result)).encode() + b"\n")
        self._found[result.key] = result

    def of(self, keys: Iterable[Key]) -> list[Result]:
        """Return the results of these runs that are there."""
        return [self._found[key] for key in keys if key in self._found]

    def missing(self, keys: Iterable[Key]) -> list[Key]:
        """Return which of these runs have no result."""
        return [key for key in keys if key not in self._found]


def _parse(line: bytes) -> Result | None:
    """Return a line's result; None for half a line, of a process that was killed, or none."""
    try:
        told = json.loads(line)
    except ValueError:
        return None
    outcome = told.pop("outcome")
    outcome.update(pages=tuple(outcome["pages"]), warns=tuple(outcome["warns"]))
    return Result(outcome=Outcome(**outcome), **told)
