"""Show numbers over the steps: loss and gradient norm, any scalar, or a statistic of sites.

--site takes a glob over `FQN:kind`, as `ddpprobe anomalies` prints them: `blocks.2.mlp:output`,
`blocks.*.mlp:grad_output`, `*:grad`. Without a kind it matches every kind. A site that was not
observed at a step is shown as `-`, which is not 0; why a site has no number at all is said on
stderr. A merged step that lacks ranks is marked with how many of them are not in its numbers. Long
names lose their beginning; --json has them whole.

--scalar takes a glob over the names of the numbers that each rank has of a step: `loss`, what
probe.log() was given, `grad_norm*`, `*_seconds`. Without --site and --scalar these are the loss and
the gradient's norms.

--derived takes a glob over numbers of the whole step that follow from the records: the gradient
noise scale, growth over the depth, the balance of experts. What is not known is not there.

Each of the three may be given more than once.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpprobe.cli.completion import offer
from ddpprobe.cli.names import MOST, shortened
from ddpprobe.cli.output import colours, complain, report_gaps, say, say_json, table
from ddpprobe.cli.run_argument import add_run, opened
from ddpprobe.errors import RunError
from ddpprobe.reader.derived_series import NAMES, DerivedSeries
from ddpprobe.reader.expired import in_words
from ddpprobe.reader.no_data import sampled_around, why_empty
from ddpprobe.reader.run import Run
from ddpprobe.reader.series import Scalars, Series, is_named
from ddpprobe.reader.text import UNOBSERVED, lacking, number, plain, without
from ddpprobe.records.histogram import NEAR_ZERO_RATIO
from ddpprobe.records.near_names import by_nearness
from ddpprobe.records.rank_names import numbers_text
from ddpprobe.records.step import STATS, Site

# Of the curves of a plot, on its white ground and below it; more cannot be told apart.
SHADES = ("blue", "green", "red", "cyan", "magenta", "yellow", "gray", "orange")
MOST_LINES = len(SHADES)
MARK, GAP = "▚", "   "  # of a curve, before its name; between two names
_ALONE = ("partial", "unknown")  # placements of which a row is one rank's
PLOT_SIZE = (100, 30)  # columns, lines, where the output is no terminal
STAT = "rms"
# What everybody looks at first.
HEALTH = ("loss", "grad_norm", "grad_norm_used", "grad_norm_local")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--site", metavar="GLOB", action="append", help="FQN or FQN:kind, with * and ?"
    )
    what.add_argument(
        "--scalar", metavar="GLOB", action="append",
        help=f"numbers of each rank (default: {', '.join(HEALTH)})",
    )  # fmt: skip
    derived = what.add_argument(
        "--derived",
        metavar="GLOB",
        action="append",
        nargs="?",
        const="*",
        help=f"numbers of the whole step (default: all of {', '.join(NAMES)})",
    )
    offer(derived, NAMES)
    parser.add_argument(
        "--rank", type=int, metavar="R",
        help="this rank's own rows (default: of sites all ranks merged, of scalars every rank)",
    )  # fmt: skip
    stat = parser.add_argument(
        "--stat", metavar="NAME", help=f"a statistic of sites (default: {STAT})"
    )
    offer(stat, (*STATS, NEAR_ZERO_RATIO))
    parser.add_argument(
        "--steps", type=step_range, default=slice(None), metavar="A:B", help="steps A to B-1"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--plot", action="store_true", help="plot in the terminal")


def run(args: argparse.Namespace) -> int:
    """Print the series."""
    run_ = opened(args.run)
    check_rank(run_, args.rank)
    if args.site is None and args.stat is not None:
        raise RunError("--stat is of sites: give --site GLOB as well")
    if args.derived is not None:
        return _derived(run_, args)
    if args.site is None:
        return _scalars(run_, args)
    series = run_.series(args.site, args.stat or STAT, args.rank, args.steps)
    if not len(series.steps):
        if run_.lost:  # it may well have been there
            return report_gaps(run_.lost)
        raise _no_step(run_, args)
    if args.plot:
        say(plot(_curves(series), f"{series.stat}{_lacking(series.absent)}", "--site"))
    elif args.json:
        say_json({"run": run_.name, "format_version": 1, "rank": args.rank, **as_json(series)})
    else:
        say("\n".join(table(rows(series), right=(0, 1, 3, 4))))
    if np.isnan(series.values).all(axis=0).any():
        for text in why_empty(series, run_.series(args.site, "tapped", args.rank, args.steps)):
            complain(f"ddpprobe: {plain(text)}")
    return report_gaps(run_.lost, run_.completeness().unknown())


def _scalars(run_: Run, args: argparse.Namespace) -> int:
    """Print numbers that each rank has of a step."""
    found = run_.matching_scalars(args.scalar or "*", args.rank, args.steps)
    if args.scalar is None:
        found = [s for name in HEALTH for s in found if s.name == name]
    found = [s for s in found if s.given.any()]
    if not found and run_.lost:
        return report_gaps(run_.lost)
    unmatched = [g for g in args.scalar or () if not any(is_named(s.name, g) for s in found)]
    if not run_.lost and (unmatched or not found):
        _refuse_scalars(run_, args, unmatched, nothing=not found)
    if args.plot:
        say(plot(_lines(found), ", ".join(s.name for s in found), "--scalar or --rank"))
        for text in _not_drawn(found):
            complain(f"ddpprobe: {plain(text)}")
    elif args.json:
        told = [scalars_json(s) for s in found]
        say_json({"run": run_.name, "format_version": 1, "rank": args.rank, "scalars": told})
    else:
        say("\n".join(table(scalar_rows(found), right=range(len(found) + 3))))
    return report_gaps(run_.lost, run_.completeness().unknown())


def _derived(run_: Run, args: argparse.Namespace) -> int:
    """Print numbers of whole steps."""
    if args.rank is not None:
        raise RunError("--derived is of all ranks together: leave --rank away")
    found = run_.derived(args.derived, args.steps)
    if not found:
        if run_.lost:
            return report_gaps(run_.lost)
        _refuse_steps(run_.derived(args.derived), args)
        raise RunError(
            f"no step holds what {_asked(args)} needs: the noise scale needs two ranks or more "
            "whose gradients are averaged whole, growth numbered blocks, balance numbered experts"
        )
    if args.plot:
        curves = (c for s in found for c in _by_attempt(s.name, s.attempts, s.steps, s.values))
        title = ", ".join(s.name + _lacking(s.absent) for s in found)
        say(plot(curves, title, "--derived"))
    elif args.json:
        told = [derived_json(s) for s in found]
        say_json({"run": run_.name, "format_version": 1, "derived": told})
    else:
        say("\n".join(table(derived_rows(found), right=range(len(found) + 2))))
    return report_gaps(run_.lost, run_.completeness().unknown())


def derived_rows(found: Sequence[DerivedSeries]) -> list[tuple[object, ...]]:
    """One row a step of which any of these is known: attempt, step, and the numbers.

    A further column says how many ranks a step lacks, if any step does.
    """
    cells: dict[tuple[int, int], dict[str, str]] = {}
    marks: dict[tuple[int, int], str] = {}
    for each in found:
        places = zip(each.attempts.tolist(), each.steps.tolist(), strict=True)
        for at, value, absent in zip(places, each.values, each.absent.tolist(), strict=True):
            cells.setdefault(at, {})[each.name] = number(value)
            marks[at] = without(absent)
    names = [each.name for each in found]
    mark = any(marks.values())
    rows_ = [
        (*at, *(cells[at].get(n, UNOBSERVED) for n in names), *[marks[at]] * mark)
        for at in sorted(cells)
    ]
    return [("attempt", "step", *names, *["without"] * mark), *rows_]


def derived_json(series: DerivedSeries) -> dict[str, Any]:
    """Return a number of whole steps as plain lists."""
    return {
        "name": series.name, "unit": series.unit, "attempts": series.attempts.tolist(),
        "steps": series.steps.tolist(), "values": series.values.tolist(),
        "absent": series.absent.tolist(),
    }  # fmt: skip


def scalar_rows(scalars: Sequence[Scalars]) -> list[tuple[object, ...]]:
    """One row a step and rank that gave any of these: attempt, step, rank, and the numbers."""
    cells: dict[tuple[int, int, int], dict[str, str]] = {}
    for scalar in scalars:
        places = zip(scalar.attempts.tolist(), scalar.steps.tolist(), strict=True)
        for row, (attempt, step) in enumerate(places):
            for column in np.flatnonzero(scalar.given[row]).tolist():
                at = attempt, step, scalar.ranks[column]
                cells.setdefault(at, {})[scalar.name] = _number(scalar.values[row, column])
    names = [scalar.name for scalar in scalars]
    table_ = [(*at, *(cells[at].get(n, UNOBSERVED) for n in names)) for at in sorted(cells)]
    return [("attempt", "step", "rank", *names), *table_]


def scalars_json(scalars: Scalars) -> dict[str, Any]:
    """Return a scalar as plain lists; null where it was not given, or not finite."""
    return {
        "name": scalars.name, "ranks": list(scalars.ranks),
        "attempts": scalars.attempts.tolist(), "steps": scalars.steps.tolist(),
        "values": scalars.values.tolist(), "given": scalars.given.tolist(),
    }  # fmt: skip


def _number(value: float) -> str:
    """Format a number that was given: here NaN is what a rank said."""
    return number(value) if np.isfinite(value) else str(value)


def rows(series: Series) -> list[tuple[object, ...]]:
    """One row a step and site: attempt, step, site, the statistic, and how many are non-finite.

    A further column says how many ranks a step lacks, if any step does.
    """
    some, beside = bool(series.absent.any()), series.stat != "nonfinite"
    head = ("attempt", "step", "site", series.stat, *["nonfinite"] * beside)
    out: list[tuple[object, ...]] = [(*head, "without")] if some else [head]
    names = labels(series.sites)
    for attempt, step, values, bad, absent in zip(
        series.attempts.tolist(), series.steps.tolist(), series.values.tolist(),
        series.nonfinite.tolist(), series.absent.tolist(), strict=True,
    ):  # fmt: skip
        mark = without(absent)
        for site, value, count in zip(names, values, bad, strict=True):
            row = (attempt, step, site, number(value), *[number(count)] * beside)
            out.append((*row, mark) if some else row)
    return out


def labels(sites: Sequence[Site], most: int = MOST) -> list[str]:
    """Name sites in so many characters; where the rows are one rank's, not the tensor's, say so."""
    names = shortened((plain(site) for site in sites), most)
    return [
        f"{name} ({site.placement}, one rank's)" if site.placement in _ALONE else name
        for name, site in zip(names, sites, strict=True)
    ]


def as_json(series: Series) -> dict[str, Any]:
    """Return the series as plain lists; null where nothing was observed."""
    return {
        "stat": series.stat,
        "attempts": series.attempts.tolist(),
        "steps": series.steps.tolist(),
        "absent": series.absent.tolist(),
        "series": [
            {
                "site": str(site), "fqn": site.fqn, "kind": site.kind, "leaf": site.leaf,
                "placement": site.placement, "dtype": site.dtype,
                "values": series.values[:, column].tolist(),
                "nonfinite": series.nonfinite[:, column].tolist(),
            }
            for column, site in enumerate(series.sites)
        ],
    }  # fmt: skip


Curve = tuple[str, NDArray[np.int64], NDArray[np.float64]]  # label, steps, values


def _curves(series: Series) -> Iterator[Curve]:
    """Yield a curve for each site and attempt."""
    for column, name in enumerate(labels(series.sites, _plot_size()[0] // 2)):
        values = series.values[:, column]
        yield from _by_attempt(name, series.attempts, series.steps, values)


def _lines(scalars: Iterable[Scalars]) -> Iterator[Curve]:
    """Yield a curve for each scalar, rank and attempt."""
    for scalar in scalars:
        for column, rank in enumerate(scalar.ranks):
            name = f"{plain(scalar.name)} rank {rank}"
            values = scalar.values[:, column]
            yield from _by_attempt(name, scalar.attempts, scalar.steps, values)


def _by_attempt(
    name: str, attempts: NDArray[np.int64], steps: NDArray[np.int64], values: NDArray[np.float64]
) -> Iterator[Curve]:
    for attempt in np.unique(attempts).tolist():
        here = attempts == attempt
        yield name + (f" attempt {attempt}" if attempt else ""), steps[here], values[here]


def plot(curves: Iterable[Curve], title: str, narrow: str) -> str:
    """Draw curves over the steps; what is no finite number is left out.

    Args:
        curves: to be drawn, the first `MOST_LINES` of them.
        title: what they are.
        narrow: the options that make fewer of them.
    """
    import plotext  # type: ignore[import-untyped]  # noqa: PLC0415

    width, height = _plot_size()
    known = list(curves)
    drawn = [curve for curve in known[:MOST_LINES] if np.isfinite(curve[2]).any()]
    # Below the plot: a legend within it hides a third of the curves.
    below = _flowing([name for name, _, _ in drawn], width)
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, max(10, height - 2 - len(below)))
    figure.title(title)
    figure.label("step")
    shades = iter(SHADES)
    for (_, steps, values), shade in zip(drawn, SHADES, strict=False):
        seen = np.isfinite(values)
        points = thinned(steps[seen], values[seen], 2 * width)
        marker = plotext.marker("hd", shade)
        figure.draw(figure.signal(*(part.tolist() for part in points), marker=marker).lines())
    if len(known) > MOST_LINES:
        complain(f"ddpprobe: {MOST_LINES} of {len(known)} series plotted: narrow {narrow}")
    text = str(figure.build().string()).rstrip("\n")
    for line in below:
        marked = (f"{plotext.colorize(MARK, next(shades)).string()} {name}" for name in line)
        text += "\n" + GAP.join(marked)
    return text if colours(sys.stdout) else str(plotext.uncolorize(text))


def _flowing(names: Iterable[str], width: int) -> list[list[str]]:
    """Lay names out in lines of so many columns, each after the mark of its curve."""
    lines: list[list[str]] = []
    left = -1
    for name in names:
        needs = len(MARK) + 1 + len(name)
        if not lines or left < len(GAP) + needs:
            lines.append([])
            left = width + len(GAP)
        lines[-1].append(name)
        left -= len(GAP) + needs
    return lines


def _plot_size() -> tuple[int, int]:
    return shutil.get_terminal_size(PLOT_SIZE)


def _not_drawn(scalars: Iterable[Scalars]) -> Iterator[str]:
    """Say which numbers of a plot are not finite: a curve with a gap looks like a sampled one."""
    for scalar in scalars:
        for column, rank in enumerate(scalar.ranks):
            bad = scalar.given[:, column] & ~np.isfinite(scalar.values[:, column])
            if bad.any():
                where = f"at {bad.sum()} steps, the first of them {scalar.steps[bad][0]}"
                yield f"not drawn: {scalar.name} of rank {rank} is not finite {where}"


def _lacking(absent: NDArray[np.int64]) -> str:
    said = lacking(absent)
    return f" ({said})" if said else ""


def thinned(steps: Any, values: Any, parts: int) -> tuple[Any, Any]:  # noqa: ANN401  (of NumPy)
    """Return the points that a plot of so many columns can show: each part's lowest and highest."""
    if len(steps) <= 2 * parts:
        return steps, values
    kept = [
        at[place]
        for at in np.array_split(np.arange(len(steps)), parts)
        for place in sorted({int(values[at].argmin()), int(values[at].argmax())})
    ]
    return steps[kept], values[kept]


def step_range(text: str) -> slice:
    """Parse `A:B`, `A:`, `:B` or one step `A`.

    Raises:
        argparse.ArgumentTypeError: it is none of them.
    """
    first, colon, last = text.partition(":")
    try:
        start = int(first) if first else None
        stop = (int(last) if last else None) if colon else int(first) + 1
    except ValueError:
        msg = f"expected A:B (steps A to B-1), A:, :B or one step, got {text!r}"
        raise argparse.ArgumentTypeError(msg) from None
    if min(start or 0, stop or 0) < 0 or (start and stop is not None and stop <= start):
        msg = f"steps count from 0 and B must be greater than A, got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return slice(start, stop)


def check_rank(run_: Run, rank: int | None, attempt: int | None = None) -> None:
    """Raise RunError for a rank that left no records, in an attempt or (None) in any.

    A rank of None is all of them.
    """
    chosen = run_.attempts() if attempt is None else [attempt]
    if rank is not None and not any(run_.has_rank(rank, number) for number in chosen):
        ranks = {r for number in chosen for r in run_.ranks(number)}
        where = "this run" if attempt is None else f"attempt {attempt}"
        raise RunError(f"no rank {rank} in {where}; it has {numbers_text(ranks) or 'none'}")


def _no_step(run_: Run, args: argparse.Namespace) -> Exception:
    """Say that no step was sampled in a range, and which ones are next to it."""
    attempts = [n for n in run_.attempts() if args.rank is None or run_.has_rank(args.rank, n)]
    steps = np.unique([step for n in attempts for step in run_.sampled_steps(n, args.rank)])
    if not len(steps):
        return RunError(f"{args.run}: no step was sampled")
    gone = run_.expired_steps(args.steps)
    if gone is not None:
        return RunError(in_words(gone))
    near = sampled_around(steps, args.steps)
    reach = f"they reach from {steps[0]} to {steps[-1]}; nearest: {near}"
    return RunError(f"no sampled step in --steps; {reach}")


def _refuse_steps(anywhere: Sequence[DerivedSeries], args: argparse.Namespace) -> None:
    """Raise RunError if numbers are known at other steps than those that were asked for."""
    if anywhere:
        steps = np.unique(np.concatenate([series.steps for series in anywhere]))
        raise RunError(
            f"no step in --steps holds what {_asked(args)} needs; those that do reach from "
            f"{steps[0]} to {steps[-1]}; nearest: {sampled_around(steps, args.steps)}"
        )


def _asked(args: argparse.Namespace) -> str:
    """Name the globs of --derived."""
    return " or ".join(map(repr, args.derived))


def _refuse_scalars(
    run_: Run, args: argparse.Namespace, unmatched: Sequence[str], *, nothing: bool
) -> None:
    """Raise RunError of names that match nothing, or if there is nothing at all.

    Args:
        run_: the run.
        args: what was typed.
        unmatched: globs that match no number at the steps that were asked for.
        nothing: whether no number at all is there to be shown.
    """
    known = {s.name for s in run_.matching_scalars("*", args.rank) if s.given.any()}
    if not known:
        raise RunError(f"{args.run}: no rank has said a number of a step")
    if args.scalar is None and not known.intersection(HEALTH):
        there = ", ".join(sorted(known))
        raise RunError(f"this run has no loss and no gradient norm; --scalar takes one of {there}")
    for glob in unmatched:
        if not any(is_named(name, glob) for name in known):
            near = ", ".join(by_nearness(glob, known))
            raise RunError(f"no scalar matches {glob!r}: this run has {near}")
    if nothing:
        raise _no_step(run_, args)
