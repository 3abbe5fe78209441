"""Random deaths of real ranks, and whether what is said of each afterwards is true."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from tests.faults.campaign import VOID, Line, asked, carry_out
from tests.faults.death_plans import Plan, draw
from tests.faults.death_verdict import RIGHT, UNDECIDED, WRONG, judge
from tests.faults.zygote import Zygote

RUNS = 200  # by default
UNDECIDED_SHARE = 0.10  # of the deaths that a daemon lived through, at most


def carry(zygote: Zygote, plan_json: Mapping[str, Any], directory: Path) -> Line:
    """Carry out one plan and judge what is said of it."""
    plan = Plan(**plan_json)
    code = zygote.call("tests.faults.death_ranks:launch", plan.as_json(), str(directory))
    if code:
        return {"verdict": VOID, "why": f"the launcher ended with {code}"}
    told = json.loads((directory / "told.json").read_text())
    status, said = asked("anomalies", directory / "run")
    end = said.get("end", {})
    return _judged({"plan": plan.as_json(), "end": end, "exit": status, "told": told})


def _judged(line: Line) -> Line:
    """Return a line with the verdict on it, also one that was written by an earlier judge."""
    if line.get("verdict") == VOID:
        return line
    verdict, why = judge(Plan(**line["plan"]), line["end"])
    if not line["told"]["daemon_ended"]:
        verdict, why = WRONG, "the daemon did not end"
    return {**line, "verdict": verdict, "why": why}


def run(
    scratch: Path, results: Path, runs: int, seed: int, only: int | None = None, jobs: int = 2,
    *, unseen: bool = False,
) -> tuple[Counter[str], list[str]]:  # fmt: skip
    """Carry out `runs` deaths of a seed; return a table, and what is not as it must be.

    `unseen`: of those that are drawn only single ranks' own deaths that no daemon looked at.
    """
    drawn = map(partial(draw, seed), count() if only is None else [only])
    chosen = (plan for plan in drawn if not unseen or (plan.alone and plan.daemon != "alive"))
    plans = [plan.as_json() for plan in islice(chosen, runs)]
    lines = [_judged(line) for line in carry_out(plans, carry, scratch, results, jobs)]
    return table(lines), problems(lines)


def table(lines: list[Line]) -> Counter[str]:
    """Count the verdicts by fault and daemon, in the order of the table."""
    rows = Counter(
        f"{line['plan']['fault']}, daemon {line['plan']['daemon']}: {line['verdict']}"
        for line in lines
    )
    return Counter(dict(sorted(rows.items())))


def problems(lines: list[Line]) -> list[str]:
    """Return every wrong verdict, and every bar that was missed."""
    found = [_told(line) for line in lines if line["verdict"] not in (RIGHT, UNDECIDED)]
    watched = [line for line in lines if Plan(**line["plan"]).watched]
    undecided = [line for line in watched if line["verdict"] == UNDECIDED]
    if len(undecided) > UNDECIDED_SHARE * len(watched):
        found.append(f"{len(undecided)} of {len(watched)} undecided where the daemon lived")
    found += [f"{_told(line)} (a single rank died of its own)"
              for line in undecided if Plan(**line["plan"]).alone]  # fmt: skip
    return found


def _told(line: Line) -> str:
    plan = Plan(**line["plan"])
    return f"{plan.number} {line['verdict']}: {plan}: said {line['why']}"


def of_deaths(scratch: Path, args: argparse.Namespace) -> tuple[Counter[str], list[str]]:
    """Be the section of the command line."""
    results = args.results or Path(f"ddpprobe-runs/deaths-{args.seed}.jsonl")
    results.parent.mkdir(parents=True, exist_ok=True)
    if args.only is not None:  # again, and to be looked at
        results = scratch / "only.jsonl"
    return run(scratch, results, args.runs or RUNS, args.seed, args.only, args.jobs,
               unseen=args.unseen)  # fmt: skip
