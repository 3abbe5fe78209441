"""Check every file of a run against its checksum, and the journals against the store.

Exits with 3 if something that was written down cannot be read any more; each such thing is listed
on stderr. A frame that a death tore off in the middle was never acknowledged, and is no damage.
"""

from __future__ import annotations

import argparse

from ddpprobe.cli.output import report_gaps, say, say_json
from ddpprobe.cli.progress import progress
from ddpprobe.cli.run_argument import add_run
from ddpprobe.reader.run import open_run
from ddpprobe.reader.text import plain
from ddpprobe.reader.verify.verify import verify, work


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Check everything; 3 if anything is damaged."""
    run_ = open_run(args.run)
    with progress("checking", work(run_), silent=args.json) as bar:
        report = verify(run_, bar.advance)
    if args.json:
        say_json(
            {
                "run": run_.name, "format_version": 1, "ok": report.ok,
                "files": report.files, "frames": report.frames, "notes": report.notes,
                "damage": [
                    {"where": lost.where, "steps": lost.steps, "why": lost.why}
                    for lost in report.damage
                ],
            }
        )  # fmt: skip
    else:
        for note in report.notes:
            say(f"note: {plain(note)}")
        found = f"{len(report.damage)} damaged or missing" if report.damage else "all intact"
        checked = f"{report.files} files of the store and {report.frames} journal frames"
        say(f"{found}: {checked} checked")
    return report_gaps(report.damage, run_.completeness().unknown())
