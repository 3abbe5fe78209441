"""Run the node daemon by hand or as a service; training that finds one running starts none.

The options are the daemon's own: `ddpprobe daemon --help`.
"""

from __future__ import annotations

import argparse

from ddpprobe.daemon.__main__ import main


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare nothing: what follows the verb goes to the daemon as it is."""


def run(args: argparse.Namespace) -> int:
    """Become the daemon; returns its exit code."""
    return int(main(args.rest) or 0)
