"""The argument RUN of a verb: a directory, the URL of an object store, or the newest run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ddpprobe.cli import completion
from ddpprobe.cli.output import complain
from ddpprobe.errors import RunError
from ddpprobe.reader.text import plain

if TYPE_CHECKING:
    from ddpprobe.reader.run import Run


def add_run(
    parser: argparse.ArgumentParser, what: str = "run directory", metavar: str = "RUN",
    name: str = "run",
) -> None:  # fmt: skip
    """Declare a run that may be left out: `choose` then takes the newest one."""
    text = f"{what} (default: the newest run, as `ddpprobe ls` lists them)"
    action = parser.add_argument(name, metavar=metavar, nargs="?", help=text)
    action.completer = completion.runs  # type: ignore[attr-defined]  # argcomplete looks for it


def opened(path: str) -> Run:
    """Open a run, and say on stderr if it has lost its identity.

    That is no damage of what a verdict is about, so it is no exit code; `verify` has one.

    Raises:
        RunError: it cannot be opened; the text says why.
    """
    from ddpprobe.reader.run import open_run  # noqa: PLC0415  (`--help` comes here, too)

    run = open_run(path)
    tell_identity(run)
    return run


def tell_identity(run: Run) -> None:
    """Say on stderr if a run has lost its identity, and what is not known therefore."""
    if run.identity_lost:
        complain(f"ddpprobe: {plain(run.path)}: {run.identity_lost}")


def choose(args: argparse.Namespace) -> None:
    """Put the newest run in the place of a run that was not named, and say on stderr which it is.

    Raises:
        RunError: there is no run; the text says what to give.
    """
    for glob in getattr(args, "derived", None) or ():
        if getattr(args, "run", "") is not None or not Path(glob).is_dir():
            continue
        raise RunError(
            f"--derived takes a glob over names of numbers, and {glob} is a directory: put the run "
            f"before the option, as in ddpprobe {args.verb} {glob} --derived"
        )
    left_out = [name for name in ("run", "other") if getattr(args, name, "") is None]
    if not left_out or getattr(args, "list", False):
        return
    from ddpprobe.reader.run_directories import newest  # noqa: PLC0415  (`--help` comes here, too)

    found = newest()
    for name in left_out:
        setattr(args, name, str(found))
    if "other" in left_out and Path(args.run).resolve() == found.resolve():
        raise RunError(f"{found} is the newest run itself: name the one to compare it with")
    complain(f"ddpprobe: the newest run: {plain(found)}")
