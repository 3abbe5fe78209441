"""Runs all jobs and writes docs/detection.md: `make bench-detection`, at most 3 hours.

`--quick` (`make bench-detection QUICK=1`): one seed, at most 15 minutes on an idle machine; prints.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import ddpprobe
from benchmarks import tables
from benchmarks.detection.faults import FAULTS
from benchmarks.detection.healthy import HEALTHY
from benchmarks.detection.rivals import RIVALS
from benchmarks.detection.score import Outcome, judge_fault, judge_healthy, wilson
from tests.faults.zygote import Zygote

EVERY = (1, 10)
_DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "detection.md"
_TITLE = """# What the verdict finds

Real jobs on 1 to 4 ranks: {faults} runs with one planted fault and {healthy} healthy ones, of
{seeds} seed(s), sampled at every step and at every 10th. Measured on {machine},
{date}, by `make bench-detection`. Step, rank, module and magnitude are drawn by seed; nothing is
announced, no setting is changed.

A fault is found if a detector that is meant for it warns or pages, within the limit (steps; at the
interval of 10 at least 5 sampled steps). `rank` and `module`: named rightly, where they are asked
for. All nets are tiny, on CPU cores, 300 steps: a floor, not a claim."""

Spoke = dict[str, list[int]]  # rival -> steps


def run_job(zygote: Zygote, name: str, seed: int, every: int, place: Path) -> tuple[Outcome, Spoke]:
    """Run a job, and judge what is said of it.

    Raises:
        RuntimeError: a rank failed where nothing should have made it.
    """
    directory = place / f"{name}-{seed}-{every}"
    directory.mkdir()
    try:
        if zygote.call("benchmarks.detection.ranks:launch", name, seed, every, str(directory)):
            raise RuntimeError(f"{name} with seed {seed} failed; see above")
        run = ddpprobe.open(directory / "run")
        said, records = run.anomalies(), list(run.records())
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # a daemon may not have ended yet
    if name in FAULTS:
        outcome = judge_fault(FAULTS[name](seed, 0), seed, every, said)
    else:
        outcome = judge_healthy(name, seed, every, said)
    return outcome, {rival: rule(records) for rival, rule in RIVALS.items()}


def report(outcomes: Sequence[tuple[Outcome, Spoke]]) -> Iterator[str]:
    """Yield the tables."""
    mine = [o for o, _ in outcomes]
    faulty = [o for o in mine if o.found is not None]
    healthy = [o for o in mine if o.found is None]
    yield "## In one table\n"
    rows = [_line("ddpprobe", mine), *(_rival_line(rival, outcomes) for rival in RIVALS)]
    header = (
        "",
        "found, every=1",
        "found, every=10",
        "spoke in healthy runs",
        "paged in healthy runs",
    )
    yield tables.table(header, rows)
    late = [o.late for o in faulty if o.late is not None]
    ranks = [o.rank for o in faulty if o.rank is not None]
    modules = [o.module for o in faulty if o.module is not None]
    yield (
        f"\nOf what was found: the rank was named rightly in {wilson(sum(ranks), len(ranks))}, the "
        f"module in {wilson(sum(modules), len(modules))}; latency in steps: median "
        f"{statistics.median(late) if late else '-'}, 90 % within {_p90(late)}.\n"
    )
    yield "## The faults\n"
    yield tables.table(
        ("", "what is planted", "limit", *(f"every={e}" for e in EVERY), "by", "rank", "module"),
        [_fault_row(name, [o for o in faulty if o.job == name]) for name in FAULTS],
    )
    yield "\n## The healthy runs\n"
    yield tables.table(
        ("", "why somebody may think it is not", "runs", "pages", "warnings"),
        [_healthy_row(name, [o for o in healthy if o.job == name]) for name in HEALTHY],
    )
    early = [o for o in faulty if o.pages or o.warns]
    told = "; ".join(f"{o.job} seed {o.seed}: {', '.join(o.pages + o.warns)}" for o in early)
    yield f"\nBefore a fault had begun, something was said in {len(early)} runs. {told}\n"


def _line(name: str, mine: Sequence[Outcome]) -> list[str]:
    found = []
    for every in EVERY:
        some = [o.found for o in mine if o.found is not None and o.every == every]
        found.append(wilson(sum(some), len(some)))
    healthy = [o for o in mine if o.found is None]
    spoke = sum(bool(o.pages or o.warns) for o in healthy)
    paged = sum(bool(o.pages) for o in healthy)
    return [name, *found, wilson(spoke, len(healthy)), wilson(paged, len(healthy))]


def _rival_line(rival: str, outcomes: Sequence[tuple[Outcome, Spoke]]) -> list[str]:
    """A rival finds a fault when it says anything behind it that it had not said before."""
    found = []
    for every in EVERY:
        hits = runs = 0
        for o, spoke in outcomes:
            if o.found is None or o.every != every:
                continue
            fault = FAULTS[o.job](o.seed, 0)
            limit = max(fault.expected.within, (1, 5)[every > 1] * every)
            runs += 1
            hits += any(fault.start <= s <= fault.start + limit for s in spoke[rival]) and not any(
                s < fault.start for s in spoke[rival]
            )
        found.append(wilson(hits, runs))
    quiet = [spoke[rival] for o, spoke in outcomes if o.found is None]
    return [rival, *found, wilson(sum(map(bool, quiet)), len(quiet)), "-"]


def _fault_row(name: str, some: Sequence[Outcome]) -> list[object]:
    fault = FAULTS[name]
    found = []
    for every in EVERY:
        of = [o for o in some if o.every == every]
        late = [o.late for o in of if o.late is not None]
        behind = f", +{round(statistics.median(late))}" if late else ""
        found.append(f"{sum(bool(o.found) for o in of)}/{len(of)}{behind}")
    named = [
        "-" if not (told := [v for o in some if (v := getattr(o, what)) is not None])
        else f"{sum(told)}/{len(told)}"
        for what in ("rank", "module")
    ]  # fmt: skip
    by = ", ".join(sorted({f"`{o.by}`" for o in some if o.by})) or "-"
    return [name, fault.says, fault.expected.within, *found, by, *named]


def _healthy_row(name: str, some: Sequence[Outcome]) -> list[object]:
    pages = [p.partition("@")[0] for o in some for p in o.pages]
    warns = [w.partition("@")[0] for o in some for w in o.warns]
    said = ", ".join(sorted({f"`{w}`" for w in warns}))
    told = f"{sum(bool(o.warns) for o in some)}{f' ({said})' if said else ''}"
    return [name, HEALTHY[name].trap, len(some), len(pages), told]


def _p90(late: Sequence[int]) -> object:
    return sorted(late)[int(0.9 * (len(late) - 1))] if late else "-"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detection", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, prints only")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 2")
    parser.add_argument("--jobs", nargs="+", help="default: all", choices=[*FAULTS, *HEALTHY])
    parser.add_argument("--out", type=Path, default=_DOCUMENT)
    asked = parser.parse_args(argv)
    seeds = asked.seeds or ([0] if asked.quick else [0, 1, 2])
    jobs = asked.jobs or [*FAULTS, *HEALTHY]
    outcomes = []
    switches = {"DDPPROBE_STRICT": "1", "DDPPROBE_LINGER": "0"}
    kept = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with Zygote(**switches) as zygote, kept as place:
        for seed in seeds:
            for name in jobs:
                for every in EVERY:
                    outcomes.append(run_job(zygote, name, seed, every, Path(place)))
                    print(outcomes[-1][0], file=sys.stderr, flush=True)
    faulty = sum(o.found is not None for o, _ in outcomes)
    title = _TITLE.format(
        faults=faulty, healthy=len(outcomes) - faulty, seeds=len(seeds), machine=tables.machine(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )  # fmt: skip
    text = "\n".join([title, "", *report(outcomes)])
    print(text)
    if not asked.quick and not asked.jobs:
        asked.out.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
