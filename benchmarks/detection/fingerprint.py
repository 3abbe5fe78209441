"""Tells which code a run's records and its result depend on, so that no more is run again.

A job depends on the file it is written in, on those which that one imports, and on the probe: one
more file of jobs leaves the results of all others as they are.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import final

import torch

from benchmarks.detection.jobs import JOBS

_HOME = Path(__file__).parent.parent.parent
_JOBS = "benchmarks.detection"
_CARRIES_OUT = "ranks.py"  # it knows the jobs by name only
_JUDGE = ("reference.py", "rivals.py", "score.py")  # they change what is said of a run, not the run
_LIBRARIES = "benchmarks/zoo.txt"
# They carry or show records, or judge them: that no number changes on the way is what
# tests/distributed/test_replayed.py and tests/grid hold. No job here is resumed.
_NO_ROWS = {
    *("cli", "daemon", "detectors", "ends", "inspect", "metrics", "reader", "report", "testing"),
    *("rank/last_words.py", "store/earlier_attempts.py", "records/derived.py", "records/fate.py"),
    *("records/paired_rows.py", "records/reduction_law.py", "records/site_memory.py"),
}  # fmt: skip


@final
class Fingerprints:
    """The fingerprints of the jobs, by the code as it is when this is made.

    Args:
        home: the directory of the repository.
    """

    def __init__(self, home: Path = _HOME) -> None:
        self._home, self._jobs = home, home / "benchmarks" / "detection"
        self._of = cache(self._compute)
        probe = home / "ddpprobe"
        self._probe = [*probe.rglob("*.py")]
        self._recorder = [
            file for file in self._probe if _NO_ROWS.isdisjoint(_within(file.relative_to(probe)))
        ]
        all_of_it = (*self._probe, *self._jobs.glob("*.py"), home / _LIBRARIES)
        self._texts = {file: file.read_bytes() for file in all_of_it}

    def of_result(self, job: str) -> str:
        """Return the fingerprint of all that the result of a job depends on."""
        return self._of(_source(job), judged=True)

    def of_records(self, job: str) -> str:
        """Return that of what its records depend on: no detector, daemon, reader, or judge."""
        return self._of(_source(job), judged=False)

    def _compute(self, source: str, *, judged: bool) -> str:
        others = (_CARRIES_OUT, *_JUDGE) if judged else (_CARRIES_OUT,)
        files = {*self._imported(self._jobs / source), *(self._jobs / name for name in others)}
        files |= {self._home / _LIBRARIES, *(self._probe if judged else self._recorder)}
        found = hashlib.sha256(torch.__version__.encode())
        for file in sorted(files):
            found.update(f"{file.relative_to(self._home)}\0".encode() + self._texts[file] + b"\0")
        return found.hexdigest()[:16]

    def _imported(self, file: Path) -> set[Path]:
        """Return a file of jobs, and those of them that it needs."""
        found, new = set[Path](), [file]
        while new:
            file = new.pop()
            if file not in found:
                found.add(file)
                new += [file.with_name(f"{name}.py") for name in _imports(self._texts[file])]
        return found


def _source(job: str) -> str:
    """Return the name of the file that a job is written in."""
    return f"{JOBS[job].__module__.removeprefix(f'{_JOBS}.')}.py"


def _imports(text: bytes) -> Iterator[str]:
    """Yield the modules beside it that a file imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == _JOBS:
                yield from (alias.name for alias in node.names)
            elif node.module.startswith(f"{_JOBS}."):
                yield node.module.removeprefix(f"{_JOBS}.")


def _within(path: Path) -> list[str]:
    """Return a path and the directories that it lies in."""
    return [path.as_posix(), *(parent.as_posix() for parent in path.parents)]
