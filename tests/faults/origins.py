"""Origins of NaN and Inf in real runs, and whether what is said of each is true."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.faults.campaign import VOID, Line, asked, carry_out
from tests.faults.origin_plans import Plan, plans
from tests.faults.origin_verdict import RIGHT, UNDECIDED, judge
from tests.faults.zygote import Zygote


def carry(zygote: Zygote, plan_json: Mapping[str, Any], directory: Path) -> Line:
    """Carry out one plan and judge what is said of it."""
    code = zygote.call("tests.faults.origin_ranks:launch", plan_json, str(directory))
    if code:
        return {"verdict": VOID, "why": f"the launcher ended with {code}"}
    status, said = asked("anomalies", directory / "run")
    line = {"plan": dict(plan_json), "anomalies": said.get("anomalies", [])[:4], "exit": status}
    return _judged(line)


def _judged(line: Line) -> Line:
    """Return a line with the verdict on it, also one that was written by an earlier judge."""
    if line.get("verdict") == VOID:
        return line
    verdict, why = judge(Plan.of_json(line["plan"]), line["anomalies"], line["exit"])
    return {**line, "verdict": verdict, "why": why}


def run(
    scratch: Path, results: Path, chosen: list[Plan], jobs: int = 2
) -> tuple[Counter[str], list[str]]:
    """Carry out origins; return a table, and what is not as it must be."""
    told = [plan.as_json() for plan in chosen]
    lines = [_judged(line) for line in carry_out(told, carry, scratch, results, jobs)]
    return table(lines), problems(lines)


def table(lines: list[Line]) -> Counter[str]:
    """Count the verdicts by wrapper and sort of step, in the order of the table."""
    rows: Counter[str] = Counter()
    for line in lines:
        plan = Plan.of_json(line["plan"])
        word = "sampled" if plan.sampled else "unsampled"
        rows[f"{plan.wrap}, {word}: {line['verdict']}"] += 1
    return Counter(dict(sorted(rows.items())))


def problems(lines: list[Line]) -> list[str]:
    """Return every verdict that is wrong; the judge has none undecided where it must not be."""
    return [
        f"{line['verdict']}: {Plan.of_json(line['plan'])}: said {line['why']}"
        for line in lines
        if line["verdict"] not in (RIGHT, UNDECIDED)
    ]


def of_origins(scratch: Path, args: argparse.Namespace) -> tuple[Counter[str], list[str]]:
    """Be the section of the command line."""
    results = args.results or Path("ddpprobe-runs/origins.jsonl")
    results.parent.mkdir(parents=True, exist_ok=True)
    chosen = [p for p in plans(far=args.far) if args.only in (None, p.number)]
    if args.only is not None:  # again, and to be looked at
        results = scratch / "only.jsonl"
    return run(scratch, results, chosen[: args.runs or None], args.jobs)
