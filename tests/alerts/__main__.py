"""`python -m tests.alerts [CASE...]`: which faults reach a webhook, when, and what stays silent.

`ddpprobe up --webhook` with the default settings of Prometheus and Alertmanager, and a real job for
each case, all side by side; it takes most of an hour. The table is docs/reference/alerts.md, of
which some cases alone write their own rows anew. Exits with 1 if a fault was not told exactly once,
or silence was broken.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ..conftest import end_daemons
from .cases import CASES, FAULTS, NO_FAULTS, Case, Outcome, play
from .stage import ROOT, Stage, stage

PAGE = ROOT / "docs/reference/alerts.md"
HEAD = """\
# Alerts, played

Written by `make test-alerts`: `ddpprobe up --webhook URL` with the default settings of Prometheus
and Alertmanager (a scrape and an evaluation every 15 s, `group_wait` 30 s), one real job for each
row, all side by side. Seconds count from the fault. `Fired` is the rule in Prometheus; `notified`,
`told` (each notification in which something fires) and `resolved` are what the webhook received;
`-` is what did not happen while it was played. A row may be of a later run than its
neighbours. What an alert means is in its runbook: [the first](../runbooks/DdpprobeFirstCause.md).

"""
COLUMNS = ("What happens", "Fired after", "Notified after", "Told", "Text", "Resolved after")


def page(outcomes: Sequence[Outcome], known: str = "") -> str:
    """Return the page: a table of the faults, and one of what is none.

    Args:
        outcomes: of the cases that were played.
        known: the page as it is, whose rows hold for all others.
    """
    lines = known.splitlines(keepends=True)
    old = {case: x for case in CASES for x in lines if x.startswith(f"| {case.title} |")}
    rows = old | {outcome.case: line(row(outcome)) for outcome in outcomes}
    tables = []
    for cases in (FAULTS, NO_FAULTS):
        head = [line(COLUMNS), line(("---",) * len(COLUMNS))]
        tables.append("".join([*head, *(rows[case] for case in cases if case in rows)]))
    return f"{HEAD}## Faults\n\n{tables[0]}\n## No faults\n\n{tables[1]}"


def line(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |\n"


def row(outcome: Outcome) -> tuple[str, ...]:
    """Return the cells of a case."""
    told = "; ".join(", ".join(names) for names in outcome.told) or "nothing"
    text = outcome.trouble or outcome.text or "-"
    return (
        outcome.case.title,
        seconds(outcome.fired),
        seconds(outcome.notified),
        told,
        text.replace("|", "\\|").replace("\n", " "),
        seconds(outcome.resolved),
    )


def seconds(value: float | None) -> str:
    """Return a time in whole seconds."""
    return "-" if value is None else f"{value:.0f} s"


def played(here: Stage, case: Case, late: float) -> Outcome:
    """Play a case, whatever becomes of it, and say so."""
    try:
        outcome = play(here, case, late)
    except (Exception, pytest.fail.Exception):  # noqa: BLE001  (it is one of many)
        outcome = Outcome(case, trouble=traceback.format_exc().splitlines()[-1])
    verdict = "ok" if outcome.is_right else "WRONG"
    print(f"{time.strftime('%T')} {verdict}: {' | '.join(row(outcome))}", flush=True)
    return outcome


def main() -> int:
    """Play the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument("--minutes", type=float, default=55.0, help="for all of it")
    args = parser.parse_args()
    known = {case.name for case in CASES}
    if unknown := set(args.cases) - known:
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    chosen = [case for case in CASES if not args.cases or case.name in args.cases]
    late = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory(prefix="ddpprobe-alerts-") as folder:
        directory = Path(folder)
        try:
            with stage(directory) as here, ThreadPoolExecutor(len(chosen)) as pool:
                outcomes = list(pool.map(lambda case: played(here, case, late), chosen))
        finally:
            end_daemons(directory)
    if not args.cases or PAGE.exists():
        PAGE.write_text(page(outcomes, PAGE.read_text() if args.cases else ""))
    print(page(outcomes))
    return 0 if all(outcome.is_right for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
