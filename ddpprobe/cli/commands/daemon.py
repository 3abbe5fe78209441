"""Run the node daemon by hand or as a service; training that finds one running starts none.

The options are the daemon's own: `ddpprobe daemon --help`.
"""

from __future__ import annotations

import argparse

from ddpprobe.cli import completion
from ddpprobe.cli.verb_parser import VerbParser
from ddpprobe.daemon import __main__ as daemon


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare nothing but to a shell: what follows the verb goes to the daemon as it is."""
    if completion.is_asked():
        daemon.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Become the daemon; returns its exit code."""
    return int(daemon.main(args.rest, VerbParser) or 0)
