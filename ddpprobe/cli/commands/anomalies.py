"""Say what went wrong in a run, first cause first, then what followed from it.

One line a verdict: level, step and micro-batch, rank (- where no single rank is to blame), site,
phase, detector and its numbers; then how much of the run was judged. Exits with 1 if there is a
page among them, whatever --level shows, and with 4 if there is none, but only a part of the run is
held: then it may have been elsewhere.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ddpprobe.cli.output import DAMAGED, PAGED, report_gaps, say, say_json, table
from ddpprobe.cli.run_argument import add_run
from ddpprobe.detectors.suite import Episode, episodes
from ddpprobe.ends.judge import told
from ddpprobe.reader.run import Run, open_run
from ddpprobe.reader.text import UNOBSERVED
from ddpprobe.records.step import LEVELS

if TYPE_CHECKING:
    from ddpprobe.reader.completeness import Completeness
    from ddpprobe.reader.endings import Ending
    from ddpprobe.records.step import Anomaly

FIELDS = (
    "detector", "level", "step", "micro", "rank", "module", "kind", "phase", "first_cause",
    "message", "values", "sampled",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument(
        "--level",
        choices=LEVELS,
        default="info",
        help="show this level and those above it (default: %(default)s, which is all)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the verdicts; 3 if the store is damaged, else 1 at a page, else 4 if part is held."""
    run_ = open_run(args.run)
    found = run_.anomalies()
    shown = [a for a in found if LEVELS.index(a.level) <= LEVELS.index(args.level)]
    held = run_.completeness()
    endings = run_.endings()
    if args.json:
        end = endings[-1].end.to_json() if endings else None
        say_json({**as_json(run_.name, shown, held), "end": end})
        return _exit_code(run_, found, held)
    for line in told_ends(endings):
        say(line)
    if shown:
        for line in lines(episodes(shown)):
            say(line)
        say(judged(held, bool(run_.lost)))
    else:
        say(nothing(held, bool(run_.lost), len(found), args.level))
    return _exit_code(run_, found, held)


def _exit_code(run_: Run, found: list[Anomaly], held: Completeness) -> int:
    gaps, paged = report_gaps(run_.lost, held.unknown()), any(a.level == "page" for a in found)
    return PAGED if paged and gaps != DAMAGED else gaps


def told_ends(endings: list[Ending]) -> list[str]:
    """Say how the attempts ended that did not come to their end, newest last."""
    several = len(endings) > 1
    texts = (told(e.end.to_json(), e.attempt if several else None) for e in endings)
    return [text for text in texts if text]


def judged(held: Completeness, damaged: bool) -> str:  # noqa: FBT001
    """Say how much of the run the verdicts are about."""
    steps = _steps(held.sampled)
    if held.complete and not damaged:
        return f"judged: {steps}{' so far' if held.live else ''}"
    return f"judged: what is held, {held.held} of {steps} of all ranks"


def _steps(number: int) -> str:
    return f"{number} sampled step{'' if number == 1 else 's'}"


def nothing(held: Completeness, damaged: bool, hidden: int, level: str) -> str:  # noqa: FBT001
    """Say that nothing was found, and in how much; of what nobody saw nothing is said."""
    below = f" at level {level} or above ({hidden} below)" if hidden else ""
    steps = _steps(held.sampled)
    if held.complete and not damaged:
        return f"no anomalies{below}{' so far' if held.live else ''} in {steps}"
    if not held.held:
        return f"nothing found{below} in what is held: no sampled step of all ranks"
    return f"nothing found{below} in what is held: {held.held} of {steps} of all ranks"


def as_json(name: str, ordered: list[Anomaly], held: Completeness) -> dict[str, Any]:
    """Return the object that `--json` prints; its fields are a contract (docs/reference/cli.md)."""
    return {
        "run": name,
        "format_version": 1,
        "judged": held.to_json(),
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
