"""Write one self-contained HTML page: verdict, timeline, heat map module x step, ranks, hosts.

The page holds its data and its scripts and opens no connection; any browser shows it, by mail too.
Names of modules and hosts are in it: share it as you would share the run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ddpprobe.cli.output import (
    STDOUT,
    check_file,
    report_gaps,
    say,
    say_json,
    stdout_bytes,
    told_of_file,
)
from ddpprobe.cli.progress import progress
from ddpprobe.cli.run_argument import add_run, opened
from ddpprobe.errors import RunError
from ddpprobe.reader.text import plain, size
from ddpprobe.report.page import render
from ddpprobe.report.story import gather


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE.html",
        help="the page to write (default: the name of RUN's directory with .html, here); - is "
        "stdout",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Write the page; 3 if the store is damaged, and then the page says what is lost."""
    run_ = opened(args.run)
    path = args.output or Path(f"{run_.path.resolve().name}.html")
    to_stdout = str(path) == STDOUT
    if to_stdout and args.json:
        raise RunError("--json is about the file that is written: give -o FILE.html")
    if not to_stdout:
        check_file(path, "report.html")
    with progress("reading", None, silent=args.json) as bar:
        story = gather(run_, bar.advance)
    page = render(story).encode(errors="backslashreplace")  # a module may be named "\ud800"
    if to_stdout:
        stdout_bytes().write(page)
        return report_gaps(run_.lost, story.held.unknown())
    with told_of_file(path):
        path.write_bytes(page)
    if args.json:
        say_json(
            {
                "run": run_.name, "format_version": 1, "file": str(path), "bytes": len(page),
                "records": story.records, "anomalies": len(story.anomalies), "lost": story.lost,
            }
        )  # fmt: skip
    else:
        say(f"{plain(path)}: {size(len(page))}; open it in a browser")
    return report_gaps(run_.lost, story.held.unknown())
