"""Show the series behind a verdict: one statistic of the matching sites over the steps.

--site takes a glob over `FQN:kind`, as `ddpprobe anomalies` prints them: `blocks.2.mlp:output`,
`blocks.*.mlp:grad_output`, `*:grad`. Without a kind it matches every kind. A site that was not
observed at a step is shown as `-`, which is not 0. A merged step that lacks ranks is marked with
how many of them are not in its numbers. Long names lose their beginning; --json has them whole.
"""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ddpprobe.commands.names import MOST, shortened
from ddpprobe.commands.output import (
    complain,
    number,
    plain,
    report_gaps,
    say,
    say_json,
    table,
)  # fmt: skip

if TYPE_CHECKING:
    from ddpprobe.records import Site
    from ddpprobe.replay.run import Run
    from ddpprobe.replay.series import Series

RECENT_STEPS = 1000  # in which a site that is known to the run is looked for
MOST_LINES = 8  # in one plot: more cannot be told apart
_ALONE = ("partial", "unknown")  # placements of which a row is one rank's
PLOT_SIZE = (100, 30)  # columns, lines, where the output is no terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument(
        "--site", required=True, metavar="GLOB", help="FQN or FQN:kind, with * and ?"
    )
    parser.add_argument(
        "--rank", type=int, metavar="R", help="this rank's own rows (default: all ranks merged)"
    )
    parser.add_argument(
        "--stat", default="rms", metavar="NAME", help="a statistic (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=step_range, default=slice(None), metavar="A:B", help="steps A to B-1"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--plot", action="store_true", help="plot in the terminal")


def run(args: argparse.Namespace) -> int:
    """Print the series."""
    from ddpprobe.replay.run import open_run  # noqa: PLC0415

    run_ = open_run(args.run)
    _check_stat(args.stat)
    check_rank(run_, args.rank)
    series = run_.series(args.site, args.stat, args.rank, args.steps)
    if not len(series.steps):
        if run_.lost:  # it may well have been there
            return report_gaps(run_.lost)
        raise _nothing_found(run_, args)
    if args.plot:
        say(plot(series, colour=sys.stdout.isatty()))
    elif args.json:
        say_json({"run": run_.name, "format_version": 1, "rank": args.rank, **as_json(series)})
    else:
        say("\n".join(table(rows(series), right=(0, 1, 3, 4))))
    return report_gaps(run_.lost, run_.completeness().unknown())


def rows(series: Series) -> list[tuple[object, ...]]:
    """One row a step and site: attempt, step, site, the statistic, and how many are non-finite.

    A further column says how many ranks a step lacks, if any step does.
    """
    lacking = bool(series.absent.any())
    head = ("attempt", "step", "site", series.stat, "nonfinite")
    out: list[tuple[object, ...]] = [(*head, "without")] if lacking else [head]
    names = labels(series.sites)
    for attempt, step, values, bad, absent in zip(
        series.attempts.tolist(), series.steps.tolist(), series.values.tolist(),
        series.nonfinite.tolist(), series.absent.tolist(), strict=True,
    ):  # fmt: skip
        mark = f"{absent} rank{'' if absent == 1 else 's'}" if absent else ""
        for site, value, count in zip(names, values, bad, strict=True):
            row = (attempt, step, site, number(value), number(count))
            out.append((*row, mark) if lacking else row)
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


def plot(series: Series, *, colour: bool) -> str:
    """Draw one line a site (and attempt) over the steps; what was not observed is left out."""
    import numpy as np  # noqa: PLC0415
    import plotext  # type: ignore[import-untyped]  # noqa: PLC0415

    figure = plotext.figure
    figure.clear()
    width, height = shutil.get_terminal_size(PLOT_SIZE)
    figure.plot_size(width, max(10, height - 2))
    figure.title(f"{series.stat}{_lacking(series)}")
    figure.label("step")
    names = labels(series.sites, width // 2)
    lines = [(c, a) for c in range(len(series.sites)) for a in np.unique(series.attempts)]
    for column, attempt in lines[:MOST_LINES]:
        seen = (series.attempts == attempt) & np.isfinite(series.values[:, column])
        name = names[column] + (f" attempt {attempt}" if attempt else "")
        if seen.any():
            steps, values = thinned(series.steps[seen], series.values[seen, column], 2 * width)
            signal = figure.signal(steps.tolist(), values.tolist())
            figure.draw(signal.lines().label(name))
    if len(lines) > MOST_LINES:
        complain(f"ddpprobe: {MOST_LINES} of {len(lines)} series plotted: narrow --site")
    text = str(figure.build().string())
    return text if colour else str(plotext.uncolorize(text))


def _lacking(series: Series) -> str:
    """Say at how many of the steps ranks are not in the numbers."""
    steps = int((series.absent > 0).sum())
    most = int(series.absent.max(initial=0))
    ranks = f"{'up to ' if most > 1 else ''}{most} rank{'' if most == 1 else 's'}"
    return f" ({steps} of {len(series.steps)} steps without {ranks})" if steps else ""


def thinned(steps: Any, values: Any, parts: int) -> tuple[Any, Any]:  # noqa: ANN401  (of NumPy)
    """Return the points that a plot of so many columns can show: each part's lowest and highest."""
    import numpy as np  # noqa: PLC0415

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


def nearest(word: str, known: Iterable[str], most: int = 5) -> str:
    """Name what comes closest to a word, for an error message."""
    names = sorted(set(known))
    close = difflib.get_close_matches(word, names, most, cutoff=0.3) or names[:most]
    more = ", ..." if len(names) > len(close) else ""
    return ", ".join(close) + more


def check_rank(run_: Run, rank: int | None) -> None:
    """Raise RunError for a rank that left no records; None is all of them."""
    from ddpprobe.replay.run import RunError  # noqa: PLC0415

    ranks = sorted({r for attempt in run_.attempts() for r in run_.ranks(attempt)})
    if rank is not None and rank not in ranks:
        raise RunError(f"no rank {rank} in this run; it has {', '.join(map(str, ranks)) or 'none'}")


def _check_stat(stat: str) -> None:
    from ddpprobe.records import STATS  # noqa: PLC0415
    from ddpprobe.replay.run import RunError  # noqa: PLC0415

    if stat not in STATS:
        raise RunError(
            f"no statistic {stat!r}; nearest: {nearest(stat, STATS)}; all: {', '.join(STATS)}"
        )


def _nothing_found(run_: Run, args: argparse.Namespace) -> Exception:
    """Say whether it is the glob or the steps that match nothing."""
    from ddpprobe.replay.run import RunError  # noqa: PLC0415
    from ddpprobe.replay.series import matches  # noqa: PLC0415

    steps = run_.info()["steps"]
    if steps["last"] is None:
        return RunError(f"{args.run}: no step was sampled yet")
    # Of the newest steps only: all sites over all steps need not fit into memory.
    newest = slice(max(0, steps["last"] - RECENT_STEPS), None)
    everything = run_.series("*", "numel", args.rank, newest)
    if any(matches(site, args.site) for site in everything.sites):
        reach = f"from {steps['first']} to {steps['last']}"
        return RunError(f"no sampled step in --steps; they reach {reach}")
    names = nearest(args.site, (str(site) for site in everything.sites))
    return RunError(f"no site matches {args.site!r}; nearest: {names}")
