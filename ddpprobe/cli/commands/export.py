"""Write a run in a format of others, or serve it: so the same Grafana dashboard shows a past run.

openmetrics: what /metrics would have said at each sampled step, with its time; blocks: the same as
blocks of Prometheus's database, by promtool; csv, parquet: a long table with a row for each site
of each sampled step, and for each scalar (kind `scalar`); overview: a small Parquet file with a
row for each site and each scalar of the run, to compare many runs by. --serve starts a throw-away
Prometheus on the blocks and says which time range to look at; Ctrl-C ends it and leaves nothing
behind.

Without -o the text formats go to standard output, the others into the current directory.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ddpprobe.cli.commands.trace import check_rank, step_range
from ddpprobe.cli.local_server import ends_with_sigterm
from ddpprobe.cli.output import (
    STDOUT,
    check_file,
    check_place,
    complain,
    report_gaps,
    say,
    say_json,
    stdout_bytes,
    told_of_file,
)
from ddpprobe.cli.progress import progress
from ddpprobe.cli.run_argument import add_run, opened
from ddpprobe.cli.serving import serve
from ddpprobe.errors import RunError
from ddpprobe.metrics.table import SERIES_LIMIT
from ddpprobe.reader.export.job import Job
from ddpprobe.reader.run import Run
from ddpprobe.reader.selection import EVERY_RANK, Selection
from ddpprobe.reader.text import plain, size
from ddpprobe.rundir import paths

SUFFIXES = {"openmetrics": ".om", "blocks": "-blocks", "csv": ".csv", "parquet": ".parquet",
            "overview": "-overview.parquet"}  # fmt: skip
TEXTS = ("openmetrics", "csv")
ALL = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument(
        "--format", choices=tuple(SUFFIXES), help="what to write (with --serve: blocks)"
    )
    parser.add_argument(
        "-o", "--output", metavar="PATH", help="file or, for blocks, directory; - is stdout"
    )
    parser.add_argument(
        "--rank",
        type=_rank,
        metavar="R",
        help="csv, parquet: this rank's own rows, or `all` for each rank's (default: all ranks "
        "merged); else: of the ranks' series only this one's",
    )
    parser.add_argument(
        "--steps", type=step_range, default=slice(None), metavar="A:B", help="steps A to B-1"
    )
    parser.add_argument("--attempt", type=int, metavar="N", help="one attempt (default: all)")
    parser.add_argument("--serve", action="store_true", help="start a Prometheus on the run")
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="where it listens (default: 127.0.0.1:9090 or the next free port)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object about it")


def run(args: argparse.Namespace) -> int:
    """Write what was asked for, or serve it until Ctrl-C."""
    with ends_with_sigterm():
        return _run(args)


def _run(args: argparse.Namespace) -> int:

    run_ = opened(args.run)
    _check(args)
    job, path = Job(run_, _part(run_, args)), _output(run_, args)
    if args.serve:

        def make(directory: Path) -> dict[str, Any]:
            return _noted(write(job, "blocks", directory, silent=args.json))

        keep = None if path is None else Path(path)
        serve(job, make, keep, args.listen, as_json=args.json)
        return report_gaps(job.lost, run_.completeness().unknown())
    target = None if path in (None, STDOUT) else Path(path)
    facts = {"run": run_.name, "format_version": 1, "format": args.format, "path": path}
    facts |= write(job, args.format, target, silent=args.json)
    if args.json:
        say_json(facts)
    elif target is not None:
        say(f"{plain(target)}: {summary(facts)}")
    _noted(facts)
    return report_gaps(job.lost, run_.completeness().unknown())


def write(job: Job, format_: str, target: Path | None, *, silent: bool) -> dict[str, Any]:
    """Write one format to a path (None: standard output); return what it was, with its bytes."""
    total = job.records(of_all=format_ in ("openmetrics", "blocks"))
    with progress(f"exporting {format_}", total, silent=silent) as bar:
        if format_ == "blocks":
            assert target is not None  # noqa: S101  (only the text formats go to standard output)
            found = job.blocks(target, bar.advance)
        else:
            method = {
                "openmetrics": job.openmetrics, "csv": job.csv, "parquet": job.parquet,
                "overview": job.overview,
            }  # fmt: skip
            with _opened(target) as out:
                found = method[format_](out, bar.advance)
    if target is not None:
        files = target.rglob("*") if target.is_dir() else [target]
        found["bytes"] = sum(f.stat().st_size for f in files if f.is_file())
    return found


def summary(facts: dict[str, Any]) -> str:
    """Say in a line what was written."""
    if "rows" in facts:
        what = f"{facts['rows']} rows of {facts['columns']} columns"
    else:
        what = f"{facts['samples']} samples of {facts['series']} series"
        what += f" at {facts['moments']} moments"
    many = facts.get("blocks", 0)
    blocks = f" in {many} block{'' if many == 1 else 's'}" if many else ""
    return f"{what}{blocks}, {size(facts['bytes'])}"


def _noted(facts: dict[str, Any]) -> dict[str, Any]:
    """Say on stderr what is not as it was in the run; return the facts."""
    if facts.get("dropped"):
        complain(
            f"ddpprobe: {facts['dropped']} samples of series beyond the {SERIES_LIMIT} of a node "
            "were left out, as /metrics does; --format csv or parquet has every site"
        )
    if facts.get("moved"):
        complain(
            f"ddpprobe: {facts['moved']} of {facts['moments']} moments were not later than the one "
            "before; they stand right after it"
        )
    return facts


@contextlib.contextmanager
def _opened(target: Path | None) -> Iterator[BinaryIO]:
    """Open a file that replaces an older one when it is whole; a device or a pipe as it is."""
    if target is None:
        yield stdout_bytes()
        return
    with told_of_file(target):
        if target.exists() and not target.is_file():
            with target.open("wb") as out:
                yield out
            return
        # Created with mode 0600: names of modules are nobody else's business.
        with paths.replacing(target) as fd, open(fd, "wb", closefd=False) as out:
            yield out


def _check(args: argparse.Namespace) -> None:
    """Raise RunError for options that do not go together."""
    if args.serve and args.format not in (None, "blocks"):
        raise RunError(f"--serve serves blocks, not {args.format}: leave --format out")
    if not args.serve and args.format is None:
        formats = ", ".join(SUFFIXES)
        raise RunError(f"say what to write with --format ({formats}), or --serve the run")
    if args.listen is not None and not args.serve:
        raise RunError("--listen says where --serve serves: give both")
    if args.rank == EVERY_RANK and args.format not in ("csv", "parquet"):
        raise RunError("--rank all is for csv and parquet: the metrics are of all ranks anyway")
    if args.format == "overview" and (
        args.rank is not None or args.attempt is not None or args.steps != slice(None)
    ):
        raise RunError("an overview is of the whole run: leave --rank, --steps and --attempt out")
    if args.output == STDOUT and args.format not in TEXTS:
        raise RunError(f"only {' and '.join(TEXTS)} go to standard output: give -o PATH")
    if args.json and args.format in TEXTS and args.output in (None, STDOUT):
        raise RunError("--json is about the file that is written: give -o PATH")


def _output(run_: Run, args: argparse.Namespace) -> str | None:
    """Return where to write; None is standard output, or a place that `--serve` chooses.

    Raises:
        RunError: nothing can be written there.
    """
    path: str | None = args.output
    name = "" if args.serve else f"{run_.path.resolve().name}{SUFFIXES[args.format]}"
    if path is None and not (args.serve or args.format in TEXTS):
        path = name
    if path is None or path == STDOUT:
        return path
    if args.serve or args.format == "blocks":
        check_place(Path(path))
    else:
        check_file(Path(path), name)
    return path


def _part(run_: Run, args: argparse.Namespace) -> Selection:
    attempts = run_.attempts()
    if args.attempt is not None and args.attempt not in attempts:
        known = ", ".join(map(str, attempts)) or "none"
        raise RunError(f"no attempt {args.attempt} in this run; it has {known}")
    check_rank(run_, None if args.rank == EVERY_RANK else args.rank, args.attempt)
    return Selection(args.rank, args.steps, args.attempt)


def _rank(text: str) -> int:
    if text == ALL:
        return EVERY_RANK
    if not (text.isascii() and text.isdecimal()):
        msg = f"expected a rank (0, 1, ...) or {ALL}, got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return int(text)
