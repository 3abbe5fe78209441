"""A run that a verb is given by the URL of an object store: fetched before the verb begins."""

from __future__ import annotations

import argparse

from ddpprobe.cli.progress import progress
from ddpprobe.cli.verbs import HERE, VERBS
from ddpprobe.errors import RunError
from ddpprobe.rundir import store_url


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

        if VERBS[args.verb].run == HERE:
            raise RunError(
                f"{url}: {args.verb} works where the run's daemon is: give the run directory there"
            )
        with progress("fetching", None, silent=getattr(args, "json", False)) as bar:
            setattr(args, name, str(open_run(url, bar.advance).path))
