"""A run that a verb is given by the URL of an object store: fetched before the verb begins."""

from __future__ import annotations

import argparse

from ddpprobe.cli.progress import progress
from ddpprobe.errors import RunError
from ddpprobe.rundir import store_url

# What these do, or show, is where the daemon is.
BESIDE_THE_DAEMON = ("top", "trigger")


def fetch(args: argparse.Namespace) -> None:
    """Put the directory of a copy in the place of each such URL.

    Raises:
        RunError: it cannot be read; the text says what to do.
    """
    for name in ("run", "other"):
        url = getattr(args, name, None)
        if not isinstance(url, str) or not store_url.is_store(url):
            continue
        from ddpprobe.reader.run import open_run  # noqa: PLC0415  (`--help` comes here, too)

        if args.verb in BESIDE_THE_DAEMON:
            raise RunError(
                f"{url}: {args.verb} works where the run's daemon is: give the run directory there"
            )
        with progress("fetching", None, silent=getattr(args, "json", False)) as bar:
            setattr(args, name, str(open_run(url, bar.advance).path))
