"""Runs with a fault beside good runs of other seeds, as `ddpprobe baseline` compares them.

`make bench-baseline` takes the records and results that `make bench-detection` keeps, runs each
unlisted fault without its fault (`mended.py`) at two other seeds, keeps these records beside them
(half an hour), and writes docs/baseline.md. A fault counts as seen if anything was outside at or
after the step in which it began. Healthy jobs are compared with themselves at their other seeds.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import tables
from benchmarks.detection import mended
from benchmarks.detection.__main__ import RESULTS, SWITCHES, RunFailed, record
from benchmarks.detection.fingerprint import Fingerprints
from benchmarks.detection.jobs import PLANTED, QUIET
from benchmarks.detection.kept import Kept
from benchmarks.detection.mended import MENDED
from benchmarks.detection.results import Key, Results
from ddpprobe.reader.baseline.deviations import Deviation, deviations
from ddpprobe.reader.baseline.levels import Levels
from ddpprobe.records.step import StepRecord
from tests.faults.zygote import Zygote

_DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "baseline.md"
EVERY = 10
SEEDS, GOOD = (0, 1, 2), (3, 4)
_LAUNCH = "benchmarks.detection.mended:launch"


@dataclass(frozen=True, slots=True)
class Compared:
    """A run beside good ones: what was outside of them, from the fault on if it has one.

    `by_detector`: a detector found its fault in time.
    """

    job: str
    seed: int
    outside: list[Deviation]
    by_detector: bool


def outside(run: Sequence[StepRecord], others: Sequence[Sequence[StepRecord]]) -> list[Deviation]:
    """Return what of a run is outside of the others."""
    own = _levels(run, None)
    return deviations(own, [_levels(other, own.edges) for other in others]).outside


def _levels(records: Sequence[StepRecord], edges: Sequence[int] | None) -> Levels:
    levels = Levels(edges=edges)
    for one in records:
        levels.take(one)
    return levels


class Missing(Exception):
    """A run has no record or no result yet."""


def _records(kept: Kept, key: Key) -> list[StepRecord]:
    found = kept.kept(key)
    if found is None:
        raise Missing(f"{key}: no record is kept; run make bench-detection first")
    return found[0]


def faulty(kept: Kept, good: Kept, results: Results) -> Iterator[Compared]:
    """Yield each fault beside its job without it."""
    for job in MENDED:
        others = [_records(good, Key(job, seed, EVERY)) for seed in GOOD]
        for seed in SEEDS:
            key = Key(job, seed, EVERY)
            start = PLANTED[job](seed, 0).start
            (result,) = results.of([key]) or [None]
            if result is None:
                raise Missing(f"{key}: there is no result; run make bench-detection first")
            found = outside(_records(kept, key), others)
            since = [deviation for deviation in found if deviation.last >= start]
            yield Compared(job, seed, since, bool(result.outcome.found))


def healthy(kept: Kept) -> Iterator[Compared]:
    """Yield each healthy job beside itself at its other seeds."""
    for job in QUIET:
        runs = [_records(kept, Key(job, seed, EVERY)) for seed in SEEDS]
        for seed in SEEDS:
            others = [run for other, run in zip(SEEDS, runs, strict=True) if other != seed]
            yield Compared(job, seed, outside(runs[seed], others), by_detector=False)


def run_mended(good: Kept) -> int:
    """Run what is not kept without its fault; return how many runs failed."""
    failed = 0
    directory = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with Zygote(**SWITCHES) as zygote, directory as place:
        for key in (Key(job, seed, EVERY) for seed in GOOD for job in MENDED):
            if good.kept(key) is None:
                try:
                    good.keep(key, *record(zygote, key, Path(place), _LAUNCH))
                except RunFailed as error:
                    print(error, file=sys.stderr, flush=True)
                    failed += 1
    return failed


def _share(some: int, of: int) -> str:
    return f"{some}/{of} = {100 * some / of:.0f}%" if of else "-"


def page(faults: Sequence[Compared], quiet: Sequence[Compared]) -> str:
    """Return the document."""
    spoke = [run.outside for run in quiet if run.outside]
    times = sum(all(str(d.quantity).endswith("_seconds") for d in each) for each in spoke)
    begins = {job: PLANTED[job].from_the_start for job in MENDED}
    groups = [("all of them", list(faults))]
    for text, wanted in (("that begin with the run", True), ("that begin in the middle", False)):
        groups.append((text, [run for run in faults if begins[run.job] is wanted]))
    groups.append(("that no detector finds", [run for run in faults if not run.by_detector]))
    rows = [
        (
            text, len(runs), _share(sum(run.by_detector for run in runs), len(runs)),
            _share(sum(bool(run.outside) for run in runs), len(runs)),
            _share(sum(bool(run.outside) or run.by_detector for run in runs), len(runs)),
        )
        for text, runs in groups
    ]  # fmt: skip
    header = ("faults", "runs", "found by a detector", "outside of good runs", "one or the other")
    each = [row for job in MENDED if (row := _row(job, faults))]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    measured = f"Measured on {tables.machine()}, {today}, by `make bench-baseline`."
    parts = (
        "# What good runs tell",
        f"""\
{len(faults)} runs with a fault that nobody had listed ({len(MENDED)} kinds at {len(SEEDS)} seeds,
sampled at every {EVERY}th of 300 steps), each as
[`ddpprobe baseline`](how-to/compare-runs.md#runs-that-need-not-agree) compares it with {len(GOOD)}
runs of the same job without its fault, of other seeds. Seen means that a number was outside at or
after the step in which the fault began. What the faults are:
[what the verdict finds](detection.md). {measured}""",
        tables.table(header, rows),
        f"""\
Of {len(quiet)} healthy runs, each beside the same job at two other seeds, anything was outside in
{_share(len(spoke), len(quiet))}, in {times} of them times alone, which depend on what else the
machine does. All nets are tiny: in a larger one a seed matters less.""",
        """\
## What no detector finds

In one run of three or more: in how many it was found, in how many anything was outside, and what
was so first.""",
        tables.table(("", "fault", "detectors", "good runs", "outside first"), each),
    )  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _row(job: str, faults: Sequence[Compared]) -> tuple[object, ...] | None:
    """Return the row of a fault that some run's detectors did not find; None if all did."""
    runs = [run for run in faults if run.job == job]
    found = sum(run.by_detector for run in runs)
    if found == len(runs):
        return None
    first = next((f"{_name(run.outside[0])}" for run in runs if run.outside), "-")
    seen = sum(bool(run.outside) for run in runs)
    return job, PLANTED[job].says, f"{found}/{len(runs)}", f"{seen}/{len(runs)}", first


def _name(deviation: Deviation) -> str:
    place, stat = deviation.quantity, deviation.quantity.stat
    return (
        f"`{place}` {stat}, {deviation.value:.3g} for {deviation.low:.3g} to {deviation.high:.3g}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.detection.beside_good", description=__doc__
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=_DOCUMENT, help="default: %(default)s")
    parser.add_argument("--run-only", action="store_true", help="compare nothing yet")
    asked = parser.parse_args(argv)
    code = Fingerprints()
    own = hashlib.sha256(Path(mended.__file__).read_bytes()).hexdigest()[:8]
    kept = Kept(asked.results.with_name("records"), code.of_records)
    good = Kept(asked.results.with_name("mended"), lambda job: f"{code.of_records(job)}-{own}")
    failed = run_mended(good)
    if failed or asked.run_only:
        return int(failed > 0)
    results = Results(asked.results, code.of_result)
    asked.out.write_text(page(list(faulty(kept, good, results)), list(healthy(kept))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
