"""Merge the directories of a run's nodes, each of which had its own disk, into one.

The result is what one shared directory would hold, and every verb takes it. Each DIR is the run
directory of a node, or the URL of an object store (s3://...); the sources are only read. Every file
is held against its checksum: of one that is damaged in one source, another's is taken; what no
source holds intact is listed on stderr, and the exit code is 3. To run it again, after an
interruption or with one more node, goes on where it stopped, and ends in the same files.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ddpprobe.cli.output import complain, report_gaps, say, say_json
from ddpprobe.cli.progress import progress
from ddpprobe.errors import RunError, RunNotFound
from ddpprobe.reader.collect.job import collect, work
from ddpprobe.reader.run import open_run
from ddpprobe.reader.text import plain, size
from ddpprobe.records.rank_names import ranks_text
from ddpprobe.rundir import store_url
from ddpprobe.rundir.not_a_run import what_is_there, whole_of
from ddpprobe.rundir.paths import RUN_JSON
from ddpprobe.store.remote.cached_run import fetch_captured

if TYPE_CHECKING:
    from ddpprobe.reader.collect.report import Collected

MOST_NODES = 8  # named in a line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("dest", metavar="DEST", help="a new directory, or an earlier result")
    parser.add_argument("sources", metavar="DIR", nargs="+", help="a node's run directory, or URL")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Merge; 3 if something is damaged in all sources."""
    if store_url.is_url(args.dest):
        raise RunError(f"{args.dest}: collect writes to a directory of this machine, not to a URL")
    dest, sources = Path(args.dest), [_directory(s, silent=args.json) for s in args.sources]
    with progress("collecting", work(dest, sources), silent=args.json) as bar:
        done = collect(dest, sources, bar.advance)
    if args.json:
        say_json(
            {
                "format_version": 1, "path": args.dest, "ok": not done.damage,
                "files": done.files, "bytes": done.bytes, "ranks": done.ranks,
                "world_size": done.world_size, "unsealed": done.unsealed,
                "mended": done.mended, "damage": done.damage,
            }
        )  # fmt: skip
    else:
        _say(done, args.dest)
    for text in done.mended:
        complain(f"ddpprobe: damaged, taken from another source: {plain(text)}")
    return report_gaps(done.damage)


def _directory(source: str, *, silent: bool) -> Path:
    """Return the directory of a source: its own, or that of a copy with all that was captured.

    Raises:
        RunError: it is no run; the text says what to do.
    """
    if not store_url.is_url(source):
        path = Path(source)
        if not path.is_dir():
            what = "a file" if path.exists() else "no such directory"
            raise RunNotFound(f"{source}: {what}; give a node's run directory, or a URL")
        if not (path / RUN_JSON).exists() and whole_of(path) is not None:
            raise RunNotFound(what_is_there(path))
        return path
    with progress("fetching", None, silent=silent) as bar:
        path = open_run(source, bar.advance).path
        fetch_captured(path, None, bar.advance)
    return path


def _say(done: Collected, dest: str) -> None:
    new = f"{done.files} files written, {size(done.bytes)}" if done.files else "nothing new"
    say(f"{len(done.ranks)} of {done.world_size} ranks in {plain(dest)}: {new}")
    left = sorted({*range(done.world_size)} - {*done.ranks})
    if left:
        say(f"not there yet: {ranks_text(left)}; collect the directories of their nodes, too")
    if done.unsealed:
        nodes = ", ".join(map(plain, done.unsealed[:MOST_NODES]))
        more = len(done.unsealed) - MOST_NODES
        nodes += f" and {more} more" if more > 0 else ""
        say(f"not sealed: {nodes}; what their journals hold is read from there")
