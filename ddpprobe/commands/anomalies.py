"""Say what went wrong in a run, first cause first, then what followed from it.

One line a verdict: level, step and micro-batch, rank (- where no single rank is to blame), site,
phase, detector and its numbers. Exits with 1 if there is a page among them, whatever --level shows.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ddpprobe.commands.output import UNOBSERVED, report_lost, say, say_json, table

if TYPE_CHECKING:
    from ddpprobe.detectors.suite import Episode
    from ddpprobe.records import Anomaly

LEVELS = ("page", "warn", "info")
FIELDS = (
    "detector", "level", "step", "micro", "rank", "module", "kind", "phase", "first_cause",
    "message", "values", "sampled",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument(
        "--level",
        choices=LEVELS,
        default="info",
        help="show this level and those above it (default: %(default)s, which is all)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the verdicts; 1 if one of them is a page, 3 if the store is damaged."""
    from ddpprobe.detectors.suite import episodes  # noqa: PLC0415
    from ddpprobe.replay.run import open_run  # noqa: PLC0415

    run_ = open_run(args.run)
    found = run_.anomalies()
    shown = [a for a in found if LEVELS.index(a.level) <= LEVELS.index(args.level)]
    if args.json:
        say_json(as_json(run_.name, shown))
    elif shown:
        for line in lines(episodes(shown)):
            say(line)
    else:
        say(nothing(run_.info(), len(found), args.level))
    return report_lost(run_.lost) or int(any(a.level == "page" for a in found))


def nothing(info: dict[str, Any], hidden: int, level: str) -> str:
    """Say that nothing was found, and in how much."""
    steps = sum(max((r["expected"] for r in a["ranks"]), default=0) for a in info["attempts"])
    below = f" at level {level} or above ({hidden} below)" if hidden else ""
    return f"no anomalies{below} in {steps} sampled step{'' if steps == 1 else 's'}"


def as_json(name: str, ordered: list[Anomaly]) -> dict[str, Any]:
    """Return the object that `--json` prints; its fields are a contract (docs/reference/cli.md)."""
    return {
        "run": name,
        "format_version": 1,
        "anomalies": [{field: getattr(a, field) for field in FIELDS} for a in ordered],
    }


def lines(groups: list[Episode]) -> list[str]:
    """Lay the verdicts out in columns, what followed indented below its cause."""
    rows = []
    for group in groups:
        if group.cause:
            rows.append(row(group.cause))
        rows += [row(a, "  " if group.cause else "") for a in group.followed]
    return table(rows)


def row(anomaly: Anomaly, indent: str = "") -> tuple[str, ...]:
    """Return the columns of one verdict."""
    attempt = f" attempt {anomaly.attempt}" if anomaly.attempt else ""
    cause = " (first cause)" if anomaly.first_cause else ""
    return (
        indent + anomaly.level.upper(),
        f"step {anomaly.step} micro {anomaly.micro}{attempt}",
        f"rank {UNOBSERVED if anomaly.rank is None else anomaly.rank}",
        anomaly.place or UNOBSERVED,
        anomaly.phase,
        f"{anomaly.detector}: {anomaly.message}{cause}",
    )
