"""Keeps what each run has shown as a line of a file, so that a table can be made over days.

A result counts only for the code that it was measured with: its fingerprint is part of each line,
and lines of other code are left in the file and out of the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.detection.score import Outcome, Spoke


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


class Results:
    """The file of results; the last line of a run counts. Several processes may append to it.

    Args:
        path: of the file; it and its directory are made when there is a result.
        code: of the name of a job, the fingerprint of the code whose results count; "" of a job
            that there is no more.
    """

    def __init__(self, path: Path, code: Callable[[str], str]) -> None:
        self._path = path
        self._found: dict[Key, Result] = {}
        self.of_other_code = 0
        for line in path.read_bytes().splitlines() if path.exists() else []:
            result = _parse(line)
            if result is None:
                continue
            if result.code == code(result.key.job):
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
