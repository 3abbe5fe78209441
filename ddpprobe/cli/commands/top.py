"""Watch a run while it trains: its ranks, its worst modules, its anomalies.

From a run directory (default: the newest one) or from a daemon's metrics
(http://HOST:PORT). Refreshes every 2 seconds; q or Ctrl-C ends it. Worst first; a terminal that is
too small shows the worst and sums up the rest. Where the output is no terminal, prints one look.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ddpprobe.cli.http_config import read
from ddpprobe.cli.output import report_gaps, say, say_json
from ddpprobe.cli.run_argument import add_run, opened
from ddpprobe.cli.top_frame import STYLES, Line, frame
from ddpprobe.errors import RunError
from ddpprobe.reader.live.live_from_files import RunWatch
from ddpprobe.reader.live.live_from_metrics import UrlWatch, fetch
from ddpprobe.reader.live.live_view import UNREACHABLE, LiveView

if TYPE_CHECKING:
    from rich.console import Group


REFRESH_SECONDS = 2.0
_ADDRESS = re.compile(r"([\w.-]+|\[[\da-fA-F:.]+\]):\d+(/.*)?")  # HOST:PORT of a daemon
SIZE = (100, 40)  # columns, lines, where the output is no terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser, "run directory, or http://HOST:PORT of a daemon", "RUN|URL")
    parser.add_argument(
        "--http-config", metavar="FILE", help="certificates and password for a URL (a how-to)"
    )
    parser.add_argument("--once", action="store_true", help="print one look and end")
    parser.add_argument("--json", action="store_true", help="print one look as a JSON object")


def run(args: argparse.Namespace) -> int:
    """Show a run until it is enough; 3 if what was read of its store is damaged."""
    watch = watch_of(args.run, args.http_config)
    try:
        if args.json:
            say_json({"format_version": 1, **dataclasses.asdict(_once(watch))})
        elif args.once or not (sys.stdout.isatty() and sys.stdin.isatty()):
            _print(frame(_once(watch), *shutil.get_terminal_size(SIZE)))
        else:
            _live(watch.look)
        return report_gaps(watch.lost, watch.unknown())
    finally:
        watch.close()


def watch_of(where: str, http_config: str | None = None) -> RunWatch | UrlWatch:
    """Open what is to be watched.

    Args:
        where: a run, or the URL of a daemon.
        http_config: path of a file that says how to ask a URL, see `ddpprobe.cli.http_config`.

    Raises:
        RunError: it is neither a run nor a URL, or the file is wrong; the text says what to do.
    """
    if "://" in where:
        ask = read(Path(http_config)).fetch() if http_config else fetch
        try:
            return UrlWatch(where, ask)
        except ValueError as error:
            raise RunError(str(error)) from error
    if http_config:
        raise RunError("--http-config is for a URL: https://HOST:PORT of a daemon")
    if _ADDRESS.fullmatch(where) and not Path(where).exists():
        raise RunError(f"{where}: no such directory; a daemon's address is typed http://{where}")
    return RunWatch(opened(where))


def _once(watch: RunWatch | UrlWatch) -> LiveView:
    """Look; a daemon that does not answer is worth waiting for only where somebody watches.

    Raises:
        RunError: there is nothing to see.
    """
    now = watch.look()
    if now.state.startswith(UNREACHABLE):
        raise RunError(
            f"{now.source}: {now.state}; give the address that the daemon listens on; if it "
            "speaks TLS or asks for a password, type https://HOST:PORT --http-config FILE"
        )
    return now


def _print(lines: list[Line]) -> None:
    for _, text in lines:
        say(text.rstrip())


def _live(look: Callable[[], LiveView]) -> None:
    """Draw on the whole terminal until q or Ctrl-C; leave the last look behind."""
    from rich.console import Console  # noqa: PLC0415  (only a terminal needs it)
    from rich.live import Live  # noqa: PLC0415

    console = Console()
    lines: list[Line] = []
    with (
        suppress(KeyboardInterrupt),
        _keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        due = time.monotonic()
        while True:
            lines = frame(look(), *console.size)
            live.update(_drawn(lines), refresh=True)
            due = max(due + REFRESH_SECONDS, time.monotonic())
            if pressed(due):
                break
    _print(lines)


def _drawn(lines: list[Line]) -> Group:
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    return Group(*(Text(text, STYLES[style], no_wrap=True) for style, text in lines))


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Take keys as they are pressed; yields a wait until a time, True if q was pressed."""
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def pressed(due: float) -> bool:
        while (left := due - time.monotonic()) > 0:
            if select.select([keyboard], [], [], left)[0]:
                keys = os.read(keyboard, 64)
                if not keys or b"q" in keys.lower():  # nothing: the terminal is gone
                    return True
        return False

    try:
        tty.setcbreak(keyboard)
        yield pressed
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
