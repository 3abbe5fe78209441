"""Say where a run is outside of what good runs of the same job did.

For runs that need not agree in any number: other seeds, other data, another day. Of each statistic
and scalar the levels of the good runs are a range; what lies well outside of it for long is named,
the earliest first. Exits with 0 whether anything is outside or not: both are answers.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ddpprobe.cli import completion
from ddpprobe.cli.names import shortened
from ddpprobe.cli.output import complain, report_gaps, say, say_json, table
from ddpprobe.cli.progress import progress
from ddpprobe.cli.run_argument import opened
from ddpprobe.cli.several_runs import MOST, lost_of, some_of, times_allowed
from ddpprobe.errors import RunError
from ddpprobe.reader.baseline.deviations import ENOUGH, STRETCHES, Deviation, Deviations, deviations
from ddpprobe.reader.baseline.levels import LOOKS, Levels
from ddpprobe.reader.compare.run_differences import reasons, said
from ddpprobe.reader.compare.timeline import length, timeline
from ddpprobe.reader.listed_run import listed
from ddpprobe.reader.run import Run
from ddpprobe.reader.text import number, plain
from ddpprobe.records.near_names import nearest

FEWEST = 2  # good runs: one alone does not say how far healthy runs are apart


class _Differing(NamedTuple):
    """What a run was started with as none of the good ones: what it says, what each of these."""

    name: str
    own: object
    good: list[object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    for name, metavar, many, text in (
        ("run", "RUN", None, "directory of the run in question"),
        ("good", "GOOD", "+", "directories of runs that went well, two at least"),
    ):
        action = parser.add_argument(name, metavar=metavar, nargs=many, help=text)
        action.completer = completion.runs  # type: ignore[attr-defined]  # argcomplete looks for it
    parser.add_argument(
        "--sites", default="*", metavar="GLOB", help="only FQN or FQN:kind, with * and ?"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print where the run is outside; 3 if one of the stores is damaged."""
    args.good = _others(args.run, args.good)
    if len(args.good) < FEWEST:
        one = "one good run does not say how far healthy runs are apart"
        raise RunError(
            f"{one if args.good else 'no other run is named'}: name {FEWEST} good ones at least "
            f"beside {args.run}; where two runs part, ddpprobe compare says"
        )
    runs = [opened(path) for path in (args.run, *args.good)]
    mine, *others = runs
    total = sum(map(length, runs)) or None
    with progress("reading", total, silent=args.json) as bar:
        own = _levels(mine, args.sites, None, bar.advance)
        theirs = [_levels(other, args.sites, own.edges, bar.advance) for other in others]
    lost = lost_of(runs)
    found = deviations(own, theirs)
    if found.stretches < STRETCHES or not found.found:
        if lost:  # it may well have been there
            if not args.json:
                say("undecided: too little is left to compare")
            return report_gaps(lost)
        raise _nothing_found(args, runs, (own, *theirs))
    held = [each.completeness() for each in runs]
    notes = [*_doubts(args, found, others, is_live=held[0].live), *_left_out(found)]
    differing = _differing(mine, others)
    if args.json:
        say_json(as_json(args, own, found, differing, notes))
    else:
        for line in lines(found, own, len(others), differing, notes):
            say(plain(line))
    unknown = [
        f"{each.path}: {text}" for each, of in zip(runs, held, strict=True) for text in of.unknown()
    ]
    lost = lost_of(runs)
    return report_gaps(dict.fromkeys(lost), dict.fromkeys(unknown))


def _others(run: str, good: Sequence[str]) -> list[str]:
    """Return the good runs, each once, and without the run itself, which a pattern may match."""
    found = {_place(path): path for path in reversed(good)}
    if found.pop(_place(run), None) is not None:
        complain(f"ddpprobe: {plain(run)} is the run in question: it is none of the good ones")
    return list(reversed(found.values()))


def _place(path: str) -> str:
    return str(Path(path).resolve()) if Path(path).exists() else path


def _levels(
    run: Run, glob: str, edges: Sequence[int] | None, advance: Callable[[int], None]
) -> Levels:
    levels = Levels(glob, edges)
    for record in timeline(run):
        advance(1)
        levels.take(record)
    return levels


def lines(
    found: Deviations, own: Levels, others: int, differing: Sequence[_Differing],
    notes: Sequence[str],
) -> Iterator[str]:  # fmt: skip
    """Lay out the answer: the first that was outside, then all, then what may explain it."""
    outside = found.outside
    yield _verdict(found, others)
    yield (
        f"compared: {found.looks} of {own.steps} sampled steps, from {found.first} through "
        f"{found.last}; {len(found.found)} numbers, of which {len(outside)} were outside"
    )
    if found.sure < found.last:
        yield f"what began after step {found.sure} may not show yet: a level takes two stretches"
    yield from notes
    if outside:
        shown = outside[:MOST]
        names = shortened(plain(d.quantity) for d in shown)
        rows = [("since", "through", "where", "what", "this run", "the others", "times allowed")]
        rows += [
            (
                _since(d), "the end" if d.lasts else str(d.last), name, d.quantity.stat,
                _short(d.value), _range(d), times_allowed(d.excess),
            )
            for d, name in zip(shown, names, strict=True)
        ]  # fmt: skip
        yield from ("", "where it was outside, the earliest first")
        yield from table(rows, right=(0, 1, 4, 5, 6))
        if len(outside) > MOST:
            yield f"... and {len(outside) - MOST} more: --json has them all"
    if differing:
        yield from ("", "what else differs")
        theirs = (" | ".join(dict.fromkeys(map(said, d.good))) for d in differing)
        each = ((d.name, said(d.own), text) for d, text in zip(differing, theirs, strict=True))
        yield from table([("", "this run", "the others"), *each])


def _verdict(found: Deviations, others: int) -> str:
    first, *_ = found.outside or found.found
    quantity = f"{first.quantity}, {first.quantity.stat},"
    numbers = f"{_short(first.value)} against {_range(first)}"
    if found.outside:
        where = "" if first.farthest == first.first else f" from step {first.farthest} on"
        return (
            f"outside of what {others} runs did, since step {_since(first)}: {quantity} "
            f"{numbers}{where}"
        )
    return (
        f"within what {others} runs did, in what is compared: the farthest is "
        f"{times_allowed(first.excess)} of what is allowed, at step {first.farthest}: {quantity} "
        f"{numbers}"
    )


def _since(d: Deviation) -> str:
    """Return between which sampled steps it began."""
    return f"{d.first}-{d.by}" if d.by > d.first else str(d.first)


def _range(d: Deviation) -> str:
    low, high = _short(d.low), _short(d.high)
    return low if low == high else f"{low} to {high}"


def _short(level: float) -> str:
    return "not finite" if math.isnan(level) else number(float(f"{level:.3g}"))


def _doubts(
    args: argparse.Namespace, found: Deviations, others: Sequence[Run], *, is_live: bool
) -> Iterator[str]:
    """Say what speaks against an answer: a run that is not over, a good one that is none."""
    if is_live:
        yield f"{args.run} is under way: it is compared as far as it has come"
    known = len(found.found) + len(found.added)
    for path, other, lacking, step in zip(
        args.good, others, found.lacking, found.not_finite, strict=True
    ):
        seen = listed(other.path)
        if seen.pages:
            yield f"{path} is named as a good run, and has a page: {seen.verdict}"
        elif step is not None:
            yield f"{path} is named as a good run, and is not finite from step {step} on"
        if lacking > len(found.added):
            yield f"{path} lacks {lacking} numbers that {args.run} has; {known} are compared"


def _left_out(found: Deviations) -> Iterator[str]:
    if found.resplit:
        yield (
            "not compared (the batch is split over other ranks or micro-batches): gradients "
            "before the reduction, and their norms"
        )
    for text, some in (("not in this run", found.missing), ("only in this run", found.added)):
        if some:
            yield f"{text}: {some_of(dict.fromkeys(map(str, some)))}"


def _differing(run: Run, others: Sequence[Run]) -> list[_Differing]:
    """Return what the run was started with as none of the others."""
    each = [{reason.name: reason for reason in reasons(run, other)} for other in others]
    common = set.intersection(*(set(one) for one in each))
    return [
        _Differing(name, each[0][name].a, [one[name].b for one in each]) for name in sorted(common)
    ]


def as_json(
    args: argparse.Namespace, own: Levels, found: Deviations,
    differing: Sequence[_Differing], notes: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """Return the object that `--json` prints; its fields are a contract (docs/reference/cli.md)."""
    return {
        "run": args.run,
        "good": args.good,
        "format_version": 1,
        "steps": {
            "sampled": own.steps, "compared": found.looks, "first": found.first,
            "last": found.last, "sure": found.sure,
        },
        "compared": len(found.found),
        "is_outside": bool(found.outside),
        "outside": [_deviation(d) for d in found.outside],
        "farthest": _deviation(found.found[0]),
        "resplit": found.resplit,
        "missing": [str(quantity) for quantity in found.missing],
        "added": [str(quantity) for quantity in found.added],
        "reasons": [{"name": d.name, "run": d.own, "good": d.good} for d in differing],
        "notes": list(notes),
    }  # fmt: skip


def _deviation(d: Deviation) -> dict[str, Any]:
    site = d.quantity.site
    return {
        "site": site and str(site), "fqn": site and site.fqn, "kind": site and site.kind,
        "leaf": site and site.leaf, "scalar": d.quantity.scalar or None, "stat": d.quantity.stat,
        "first": d.first, "by": d.by, "last": d.last, "lasts": d.lasts, "farthest": d.farthest,
        "value": d.value, "low": d.low, "high": d.high, "excess": d.excess,
    }  # fmt: skip


def _nothing_found(
    args: argparse.Namespace, runs: Sequence[Run], each: Sequence[Levels]
) -> Exception:
    """Say why there is nothing to compare."""
    empty = [str(run.path) for run, levels in zip(runs, each, strict=True) if not levels.steps]
    if empty:
        return RunError(f"{' and '.join(empty)}: no step was sampled that can be compared")
    if args.sites != "*":
        names = [{str(q.site) for q in levels.quantities.values()} for levels in each]
        without = [str(run.path) for run, held in zip(runs, names, strict=True) if not held]
        if without:
            known = [str(site) for run in runs for site in run.series("*", "numel").sites]
            return RunError(
                f"no site of {', '.join(without)} matches {args.sites!r} (a scalar is compared "
                f"without --sites); nearest in all of them: {nearest(args.sites, known)}"
            )
    if not set.intersection(*(set(levels.quantities) for levels in each)):
        return RunError("no site and no scalar is in all of these runs: they are of other models")
    steps = ", ".join(
        f"{run.path} {levels.steps} through step {levels.last}"
        for run, levels in zip(runs, each, strict=True)
    )
    return RunError(
        f"too few sampled steps to compare: {LOOKS + ENOUGH} at least, between the same steps in "
        f"all of them; these have {steps}"
    )
