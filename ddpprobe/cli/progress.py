"""A progress bar for work that lasts: on a terminal's stderr, after a second; silent elsewhere.

    with progress("checking", total=files, silent=args.json) as bar:
        verify(run, bar.advance)

Rooms below `cli/` take the method as a plain callback, and know nothing of a terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

from ddpprobe.reader.text import plain

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

APPEARS_SECONDS = 1.0  # who waits for less than this does not wonder whether it hangs


@final
class Bar:
    """Counts what is done; draws it once that takes longer than `APPEARS_SECONDS`.

    Args:
        title: what is being done, in a word or two.
        total: units of work; None if that is not known, then the bar only says that it goes on.
        shown: False draws nothing.
    """

    def __init__(self, title: str, total: int | None, *, shown: bool) -> None:
        self._title, self._total, self._shown = title, total, shown
        self._done = 0
        self._due = time.monotonic() + APPEARS_SECONDS
        self._drawn: tuple[Progress, TaskID] | None = None

    def advance(self, n: int = 1) -> None:
        """Say that `n` more units are done."""
        self._done += n
        if self._drawn is not None:
            drawn, task = self._drawn
            drawn.update(task, completed=self._done)
        elif self._shown and time.monotonic() >= self._due:
            self._drawn = self._draw()

    def close(self) -> None:
        """Wipe the bar from the terminal."""
        if self._drawn is not None:
            self._drawn[0].stop()
            self._drawn = None

    def _draw(self) -> tuple[Progress, TaskID]:
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        words = TextColumn("{task.description}", markup=False)
        columns = (words, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        drawn = Progress(*columns, console=Console(stderr=True), transient=True)
        task = drawn.add_task(plain(self._title), total=self._total, completed=self._done)
        drawn.start()
        return drawn, task


@contextmanager
def progress(title: str, total: int | None, *, silent: bool = False) -> Iterator[Bar]:
    """Show how far some work is, while it is under way.

    Args:
        title: what is being done, in a word or two.
        total: units of work, None if that is not known.
        silent: draw nothing also on a terminal: the output is for a program (`--json`).
    """
    bar = Bar(title, total, shown=sys.stderr.isatty() and not silent)
    try:
        yield bar
    finally:
        bar.close()
