"""What a shell completes: verbs, options, their choices, and where runs are.

A shell that completes starts the command with `_ARGCOMPLETE` in its environment; argcomplete reads
the line from there, writes what may follow, and ends the process. Nobody else imports it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping

from ddpprobe.cli.verbs import VERBS

ASKED = "_ARGCOMPLETE"
LINE = "COMP_LINE"


def is_asked(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a shell asks how its line may go on, instead of running it."""
    return ASKED in environ


def verb_of(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the verb on the line that is to be completed; None if it has none yet."""
    words = environ.get(LINE, "").split()[1:]
    return next((word for word in words if word in VERBS), None)


def answer(parser: argparse.ArgumentParser) -> None:
    """Write what may follow, and end the process."""
    import argcomplete  # noqa: PLC0415  (nobody else waits for it)

    argcomplete.autocomplete(parser, always_complete_options="long")


def offer(action: argparse.Action, names: Iterable[str]) -> None:
    """Let a shell offer these names as the value of an option; others are taken as well."""
    known = list(names)
    action.completer = lambda **_: known  # type: ignore[attr-defined]  # argcomplete looks for it


def runs(prefix: str, **_: object) -> Iterable[str]:
    """Return the runs of the default directory, newest first, and the directories at a prefix."""
    from argcomplete.completers import DirectoriesCompleter  # noqa: PLC0415  (as above)

    from ddpprobe.errors import RunError  # noqa: PLC0415
    from ddpprobe.reader.run_directories import (  # noqa: PLC0415
        default_directory,
        run_directories,
    )

    try:
        known = [str(path) for path in run_directories(default_directory())]
    except (OSError, RunError):
        known = []
    found = [path for path in known if path.startswith(prefix)]
    there = DirectoriesCompleter()(prefix)
    return [*found, *(path for path in there if path.rstrip("/") not in known)]
