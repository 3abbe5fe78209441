"""List the runs below a directory, newest first: how each ended, and what went wrong first.

A run is a line: its directory, when its newest attempt began (UTC), state, ranks, the newest step,
and the verdict of its daemon, or how much that has judged. What the daemon did not judge, because
it died or there was none, `ddpprobe anomalies RUN` judges. DIR may also be a run itself. A damaged
run is a line like any other. A directory that holds no run is no error, and said on stderr.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ddpprobe.cli.output import complain, say, say_json, table
from ddpprobe.cli.progress import progress
from ddpprobe.reader.listed_run import ListedRun, listed
from ddpprobe.reader.run_directories import default_directory, run_directories
from ddpprobe.reader.text import UNOBSERVED, plain
from ddpprobe.rundir.paths import RUN_VARIABLE, RUNS
from ddpprobe.rundir.store_url import is_url

HEAD = ("run", "began", "state", "ranks", "step", "verdict")
LEAST_VERDICT = 40  # characters of it, however narrow the terminal is


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "directory", metavar="DIR", nargs="?",
        help=f"where to look, three directories deep (default: ${RUN_VARIABLE}, else {RUNS} here)",
    )  # fmt: skip
    parser.add_argument(
        "-n", "--newest", type=_number, metavar="N", help="only the N newest (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print a line for each run; 0 whatever became of them."""
    given = args.directory
    directory = default_directory() if given is None else given if is_url(given) else Path(given)
    paths = run_directories(directory)[: args.newest]
    found = []
    with progress("looking", len(paths), silent=args.json) as bar:
        for path in paths:
            found.append(listed(path))
            bar.advance()
    if args.json:
        runs = [one.to_json() for one in found]
        say_json({"format_version": 1, "directory": str(directory), "runs": runs})
        return 0
    for line in lines(found, _width()):
        say(line)
    if not found:
        complain(f"ddpprobe: no run below {plain(directory)}")
    return 0


def lines(found: Iterable[ListedRun], width: int | None = None) -> Iterator[str]:
    """Lay runs out as a table.

    Args:
        found: as they are to be listed.
        width: of the terminal; verdicts that do not fit are cut. None: as long as they are.
    """
    runs = list(found)
    if not runs:
        return
    rows = table([HEAD[:-1], *map(_columns, runs)], right=(3, 4))
    before = max(map(len, rows))
    verdicts = [HEAD[-1], *(plain(one.verdict) for one in runs)]
    if width is not None:
        from ddpprobe.cli.top_frame import cut  # noqa: PLC0415  (rich is for terminals)

        left = max(LEAST_VERDICT, width - before - 2)
        verdicts = [cut(verdict, left) for verdict in verdicts]
    for row, verdict in zip(rows, verdicts, strict=True):
        yield f"{row.ljust(before)}  {verdict}"


def _columns(one: ListedRun) -> tuple[str, ...]:
    began = time.strftime("%Y-%m-%d %H:%M", time.gmtime(one.began_ns / 1e9))
    return (
        str(one.path),
        began if one.began_ns else UNOBSERVED,
        one.state,
        str(one.ranks or UNOBSERVED),
        UNOBSERVED if one.step is None else str(one.step),
    )


def _width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _number(text: str) -> int:
    number = int(text) if text.isascii() and text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return number
