"""Name the first step, site and statistic where two runs part.

Steps are aligned by number, sites by name and execution order. What rounding alone may do is no
difference: the tolerance follows from the dtype of each site (--rtol and --atol replace it, --exact
asks for equal bits). Exits with 0 whether the runs part or not: both are answers.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ddpprobe.cli import completion
from ddpprobe.cli.names import shortened
from ddpprobe.cli.output import report_gaps, say, say_json, table
from ddpprobe.cli.progress import progress
from ddpprobe.cli.run_argument import add_run, opened
from ddpprobe.cli.several_runs import MOST, lost_of, some_of, times_allowed
from ddpprobe.errors import RunError
from ddpprobe.reader.compare.difference import Comparison, Difference, Growth
from ddpprobe.reader.compare.run_differences import Bits, Circumstance, first_bits, reasons, said
from ddpprobe.reader.compare.runs import compare
from ddpprobe.reader.compare.site_matching import WEIGHTS
from ddpprobe.reader.compare.timeline import length
from ddpprobe.reader.compare.tolerance import Tolerance
from ddpprobe.reader.run import Run
from ddpprobe.reader.series import matches
from ddpprobe.reader.text import UNOBSERVED, number, plain
from ddpprobe.records.near_names import nearest
from ddpprobe.records.step import IN_TURN

if TYPE_CHECKING:
    from ddpprobe.records.step import Site

Answer = tuple[Comparison, tuple[int, Bits | None], list[Circumstance]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    first = parser.add_argument("run", metavar="RUN_A", help="run directory")
    first.completer = completion.runs  # type: ignore[attr-defined]  # argcomplete looks for it
    add_run(parser, "run directory", "RUN_B", "other")
    parser.add_argument(
        "--rtol", type=tolerance, metavar="R", help="relative tolerance, for every dtype"
    )
    parser.add_argument(
        "--atol", type=tolerance, default=0.0, metavar="A",
        help="added to the tolerance, in the tensor's own unit (default: 0)",
    )  # fmt: skip
    parser.add_argument("--exact", action="store_true", help="every number must be equal")
    parser.add_argument(
        "--sites", default="*", metavar="GLOB", help="only FQN or FQN:kind, with * and ?"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print where the runs part; 3 if one of the stores is damaged."""
    if args.exact and (args.rtol is not None or args.atol):
        raise RunError("--exact leaves nothing to --rtol and --atol: give one or the other")
    runs = opened(args.run), opened(args.other)
    allowed = Tolerance(args.rtol, args.atol, args.exact)
    total = sum(map(length, runs)) or None
    with progress("comparing", total, silent=args.json) as bar:
        found = compare(*runs, allowed, args.sites, bar.advance)
    lost = lost_of(runs)
    other = found.left_out.keys() - {WEIGHTS}
    if not found.steps or not (found.sites or other or any(found.alone)):
        if lost:  # it may well have been there
            return report_gaps(lost)
        raise _nothing_found(runs, found, args)
    with progress("comparing checksums", total, silent=args.json) as bar:
        bits = first_bits(*runs, bar.advance)
    answer = found, bits, reasons(*runs)
    if args.json:
        say_json(as_json(runs, allowed, answer))
    else:
        for line in lines(answer, exact=args.exact):
            say(plain(line))
    unknown = [f"{r.path}: {text}" for r in runs for text in r.completeness().unknown()]
    lost = lost_of(runs)
    return report_gaps(dict.fromkeys(lost), dict.fromkeys(unknown))


def tolerance(text: str) -> float:
    """Parse a tolerance: a number of at least 0.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return value


def lines(answer: Answer, *, exact: bool) -> Iterator[str]:
    """Lay out the answer: the first difference, then how it spread, then what may explain it."""
    found, bits, differing = answer
    yield _verdict(found, exact=exact)
    steps = f"{_count(found.steps, 'sampled step')} from {found.first} to {found.last}"
    yield f"compared: {steps}, {_count(found.sites, 'site')}"
    if found.differences:
        yield from _earliest(found.differences)
        yield from _grown(found.growth)
    yield from _checksums(*bits)
    if differing:
        yield from ("", "what else differs")
        yield from table([("", "A", "B"), *((r.name, said(r.a), said(r.b)) for r in differing)])
    notes = list(_notes(found))
    yield from ["", *notes] if notes else []


def _verdict(found: Comparison, *, exact: bool) -> str:
    if found.differences:
        first = found.differences[0]
        agreed = UNOBSERVED if found.agreed is None else f"step {found.agreed}"
        numbers = f"{first.stat} {' against '.join(_sides(first))}"
        before = f"agreed through {agreed}" if found.agreed is not None else "never agreed"
        return f"parted at step {first.step} in {place(first)}: {numbers} ({before})"
    if not found.sites:
        return "undecided: no site could be compared"
    if exact:
        return "no parting: every number that is compared is equal"
    if found.nearest is None:
        return "no parting: no number that is compared differs"
    near = found.nearest
    return (
        f"no parting: the largest difference is {near.excess:.3g} of what is allowed, at step "
        f"{near.step} in {place(near)}: {near.stat} {' against '.join(_sides(near))}"
    )


def place(difference: Difference) -> str:
    """Name a site, or a scalar and its rank."""
    if difference.site is not None:
        return str(difference.site)
    return (
        difference.scalar
        if difference.rank is None
        else f"{difference.scalar} of rank {difference.rank}"
    )


def _earliest(differences: list[Difference]) -> Iterator[str]:
    rows = [("step", "where", "statistic", "A", "B", "times allowed")]
    names = shortened(plain(place(p)) for p in differences[:MOST])
    rows += [
        (str(p.step), name, p.stat, *_sides(p), times_allowed(p.excess))
        for p, name in zip(differences, names, strict=False)
    ]
    yield from ("", "where they part first")
    yield from table(rows, right=(0, 3, 4, 5))
    if len(differences) > MOST:
        yield f"... and {len(differences) - MOST} more, later"


def _grown(growth: list[Growth]) -> Iterator[str]:
    if not growth:
        return
    rows = [("step", "sites apart", "loss A", "loss B", "times allowed", "at")]
    names = shortened(plain(g.worst or UNOBSERVED) for g in growth)
    rows += [
        (str(g.step), f"{g.apart} of {g.compared}", *_read(g.a, g.b), times_allowed(g.excess), name)
        for g, name in zip(growth, names, strict=True)
    ]
    yield from ("", "how far apart they are from then on")
    yield from table(rows, right=(0, 1, 2, 3, 4))


def _checksums(compared: int, first: Bits | None) -> Iterator[str]:
    if not compared:
        return
    yield ""
    if first is None:
        yield f"checksums: the bits of {_count(compared, 'parameter')} are equal at all steps"
        return
    shard = f" shard {first.shard}" if first.shard else ""
    before = f"equal through step {first.agreed}" if first.agreed is not None else "never equal"
    yield (
        f"checksums: bits differ after step {first.step} in {first.fqn}{shard} on rank "
        f"{first.rank} ({before}; {_count(compared, 'parameter')} compared)"
    )


def _notes(found: Comparison) -> Iterator[str]:
    for name, only, torn in zip("AB", found.only, found.torn, strict=True):
        if only:
            yield f"not compared: {_count(only, 'step')} that only {name} sampled"
        if torn:
            yield f"not compared: {_count(torn, 'step')} that never came to an end in {name}"
    if found.incomplete:
        yield f"a rank is missing at {_count(found.incomplete, 'compared step')}"
    for why, things in found.left_out.items():
        yield f"not compared ({why}): {some_of(things)}"
    for name, alone in zip("AB", found.alone, strict=True):
        if alone:
            yield f"only in {name}: {some_of(alone)}"
    if found.renamed:
        pairs = [f"{a} is {b}" for a, b in found.renamed]
        yield f"renamed, by their numbers: {some_of(pairs)}"
    if found.recast:
        pairs = [f"{a} {a.dtype} | {b.dtype}" for a, b in found.recast.items()]
        yield f"another dtype: {some_of(pairs)}"


def _sides(difference: Difference) -> tuple[str, str]:
    is_scalar = difference.site is None
    return (_read if is_scalar else _both)(difference.a, difference.b)


def _read(a: float | None, b: float | None) -> tuple[str, str]:
    """Format what a script gave: None is not known, and NaN is what it was."""
    texts = _both(*(math.nan if x is None else x for x in (a, b)))
    pairs = zip((a, b), texts, strict=True)
    one, two = ("nan" if x is not None and math.isnan(x) else text for x, text in pairs)
    return one, two


def _both(a: float, b: float) -> tuple[str, str]:
    """Format two numbers with so many digits that they look different if they are."""
    short = number(a), number(b)
    alike = short[0] == short[1] and a != b and not math.isnan(a + b)
    return (repr(a), repr(b)) if alike else short


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def as_json(runs: tuple[Run, Run], allowed: Tolerance, answer: Answer) -> dict[str, Any]:
    """Return the object that `--json` prints; its fields are a contract (docs/reference/cli.md)."""
    found, (compared, bits), differing = answer
    differences = [_difference(p) for p in found.differences]
    return {
        "runs": [str(r.path) for r in runs],
        "format_version": 1,
        "tolerance": {"rtol": allowed.rtol, "atol": allowed.atol, "exact": allowed.exact},
        "steps": {
            "compared": found.steps, "first": found.first, "last": found.last,
            "only": found.only, "torn": found.torn, "incomplete": found.incomplete,
        },
        "sites": found.sites,
        "parted": bool(differences),
        "agreed": found.agreed,
        "partings": differences,
        "growth": [
            {
                "step": g.step, "apart": g.apart, "compared": g.compared, "loss": [g.a, g.b],
                "worst": None if g.worst is None else str(g.worst), "excess": g.excess,
            }
            for g in found.growth
        ],
        "nearest": found.nearest and _difference(found.nearest),
        "checksums": {
            "compared": compared,
            "first": bits
            and {
                "step": bits.step, "rank": bits.rank, "fqn": bits.fqn, "shard": bits.shard,
                "agreed": bits.agreed,
            },
        },
        "reasons": [reason._asdict() for reason in differing],
        "alone": [_texts(sites) for sites in found.alone],
        "renamed": [_texts(pair) for pair in found.renamed],
        "recast": [_texts((a, a.dtype, b.dtype)) for a, b in found.recast.items()],
        "left_out": {why: _texts(things) for why, things in found.left_out.items()},
    }  # fmt: skip


def _difference(p: Difference) -> dict[str, Any]:
    site: Site | None = p.site
    return {
        "step": p.step, "site": site and str(site), "fqn": site and site.fqn,
        "kind": site and site.kind, "leaf": site and site.leaf, "dtype": site and site.dtype,
        "scalar": p.scalar or None, "rank": p.rank, "stat": p.stat, "a": p.a, "b": p.b,
        "excess": p.excess,
    }  # fmt: skip


def _texts(things: Iterable[object]) -> list[str]:
    return [str(thing) for thing in things]


def _nothing_found(runs: tuple[Run, Run], found: Comparison, args: argparse.Namespace) -> Exception:
    """Say why there is nothing to compare."""
    if found.steps:
        known = [site for r in runs for site in r.series("*", "numel").sites]
        kinds = {site.kind for site in known if matches(site, args.sites)}
        if kinds and kinds.issubset(IN_TURN):
            return RunError(
                f"{args.sites!r} matches sites of kind {', '.join(sorted(kinds))} alone, which are "
                "not compared: an optimizer turns rounding into a whole step; without --sites the "
                "checksums of parameters are"
            )
        near = nearest(args.sites, map(str, known))
        return RunError(f"no site matches {args.sites!r}; nearest: {near}")
    if any(found.torn):
        return RunError(
            "no step was sampled in both and came to its end: "
            f"{found.torn[0]} did not in A, {found.torn[1]} not in B"
        )
    empty = [str(r.path) for r, n in zip(runs, found.only, strict=True) if not n]
    if empty:
        return RunError(f"{' and '.join(empty)}: no step was sampled")
    return RunError(
        f"no step was sampled in both: {found.only[0]} only in A, {found.only[1]} only in B; "
        "give both runs the same every="
    )
