"""A script that trains, in a process forked from one that has imported torch and ddpprobe.

To start Python and import both takes four seconds of CPU time, and what most of these scripts do
takes a tenth of one. The process ends as every interpreter ends: it waits for threads, calls what
`atexit` has, is taken down. What `nursery` says of its place in /proc holds here as well.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from .nursery import nursery
from .waiting import PATIENCE

# What `install` imports, and what an optimizer does at its first step.
_IMPORTED = ("torch", "torch.multiprocessing", "torch._dynamo", "ddpprobe.probe")


class Script:
    """Runs `python SCRIPT WORDS`; it may wait for the end of its standard input.

    Args:
        folder: for the script and what it prints.
        text: the script.
        words: what is in `sys.argv` after its path.
        env: what its environment has beside this one's.
    """

    def __init__(
        self, folder: Path, text: str, *words: object, env: Mapping[str, str] | None = None
    ) -> None:
        path = folder / "script.py"
        path.write_text(textwrap.dedent(text))
        self._files = folder / "script.out", folder / "script.err"
        reads, self._stdin = os.pipe()
        new = os.O_CREAT | os.O_TRUNC | os.O_WRONLY
        given = [*(os.open(file, new, 0o600) for file in self._files), reads]
        try:
            words = (path, *words)
            self._process = nursery(*_IMPORTED).start(
                [*map(str, words)], {**os.environ, **(env or {})}, *given
            )
        finally:
            for descriptor in given:
                os.close(descriptor)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal; None while it runs."""
        return self._process.poll()

    def end(self, timeout: float = 120.0) -> Self:
        """Close its standard input and wait until it has ended."""
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1
        self._process.wait(timeout * PATIENCE)
        return self

    @property
    def returncode(self) -> int | None:
        """The exit code of one that has ended."""
        return self._process.returncode

    @property
    def stdout(self) -> str:
        """What it has printed."""
        return self._files[0].read_text()

    @property
    def stderr(self) -> str:
        """What it has printed there."""
        return self._files[1].read_text()


def run(folder: Path, text: str, *words: object, env: Mapping[str, str] | None = None) -> Script:
    """Run a script with an empty standard input to its end."""
    return Script(folder, text, *words, env=env).end()
