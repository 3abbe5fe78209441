"""Runs what has no result yet, and writes docs/detection.md once all is there.

`make bench-detection` may take three hours, in as many sittings as you like: `MINUTES=10` starts
nothing more after ten minutes. Each run is a line of `.bench/detection.jsonl`, and is not run again
until the code that it depends on changes (`fingerprint.py`); where detectors alone have changed, it
is judged anew by its records, which are kept beside that file (300 MB). `--quick` (`make
bench-detection QUICK=1`): one seed, 15 minutes, prints only. `--jobs U01 H05` runs some of the jobs
only. What nobody listed (`unlisted.py`, which names `set_a.py` to `set_l.py`), what is sharded
(`sharded.py`), other ways to train (`breadth.py`, `habits.py`) and the architectures (`zoo.py`)
stand in tables of their own. The architectures need transformers and timm, which the command's own
environment has (`.venv-zoo`).
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import ddpprobe
from benchmarks import tables
from benchmarks.detection.fingerprint import Fingerprints
from benchmarks.detection.jobs import JOBS, PLANTED
from benchmarks.detection.kept import Kept
from benchmarks.detection.report import EVERY, page
from benchmarks.detection.results import Key, Result, Results
from benchmarks.detection.rivals import RIVALS
from benchmarks.detection.score import Outcome, Spoke, judge_fault, judge_healthy
from ddpprobe.records.step import Anomaly, StepRecord
from tests.faults.zygote import Zygote

_HOME = Path(__file__).parent.parent.parent
_DOCUMENT = _HOME / "docs" / "detection.md"
RESULTS = _HOME / ".bench" / "detection.jsonl"
SWITCHES = {"DDPPROBE_STRICT": "1", "DDPPROBE_LINGER": "0"}  # of each job's environment
_QUICK_MINUTES = 15.0


class RunFailed(Exception):
    """A rank failed where nothing should have made it."""


def run_job(zygote: Zygote, key: Key, place: Path, kept: Kept) -> tuple[Outcome, Spoke]:
    """Run a job, if its records are not kept, and judge what is said of it.

    Raises:
        RunFailed: a rank failed where nothing should have made it.
    """
    name, seed, every = key
    found = kept.judged(key)
    if found is None:
        found = record(zygote, key, place)
        kept.keep(key, *found)
    records, said = found
    planted = PLANTED.get(name)
    if planted is not None:
        outcome = judge_fault(planted(seed, 0), seed, every, said)
    else:
        outcome = judge_healthy(name, seed, every, said)
    return outcome, {rival: rule(records) for rival, rule in RIVALS.items()}


def record(
    zygote: Zygote, key: Key, place: Path, launch: str = "benchmarks.detection.ranks:launch"
) -> tuple[list[StepRecord], list[Anomaly]]:
    """Return the records of a run, and what was said of it while it ran.

    Raises:
        RunFailed: a rank failed where nothing should have made it.
    """
    name, seed, every = key
    directory = place / f"{name}-{seed}-{every}"
    directory.mkdir()
    try:
        if zygote.call(launch, name, seed, every, str(directory)):
            raise RunFailed(f"{name}, seed {seed}, every={every} failed, see above: no result")
        run = ddpprobe.open(directory / "run")
        return list(run.records()), run.anomalies()
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # a daemon may not have ended yet


def sit(
    results: Results, kept: Path, keys: Sequence[Key], minutes: float | None, code: Fingerprints
) -> int:
    """Run what has no result; return how many runs failed.

    Args:
        results: where they go, each when it is there.
        kept: directory of the records of runs.
        keys: in this order.
        minutes: after which no more are started; None: all are.
        code: fingerprints of what is run.
    """
    begun, failed, machine = time.monotonic(), 0, tables.machine()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    records = Kept(kept, code.of_records)
    directory = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with Zygote(**SWITCHES) as zygote, directory as place:
        for key in results.missing(keys):
            if minutes is not None and time.monotonic() - begun >= 60 * minutes:
                break
            try:
                outcome, spoke = run_job(zygote, key, Path(place), records)
            except RunFailed as error:
                print(error, file=sys.stderr, flush=True)
                failed += 1
                continue
            fingerprint = code.of_result(key.job)
            if Fingerprints().of_result(key.job) != fingerprint:  # jobs are imported as they begin
                raise SystemExit("the code was changed while it was measured: start again")
            results.add(Result(outcome, spoke, fingerprint, machine, today))
            print(outcome, file=sys.stderr, flush=True)
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detection", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, 15 minutes, prints only")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 2")
    parser.add_argument("--jobs", nargs="+", help="default: all", choices=list(JOBS), metavar="JOB")
    parser.add_argument("--minutes", type=float, help="start no run behind them; 0: only the table")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="write the table there even if runs are missing")
    asked = parser.parse_args(argv)
    seeds = asked.seeds or ([0] if asked.quick else [0, 1, 2])
    jobs = asked.jobs or list(JOBS)
    minutes = _QUICK_MINUTES if asked.quick and asked.minutes is None else asked.minutes
    keys = [Key(job, seed, every) for seed in seeds for job in jobs for every in EVERY]
    code = Fingerprints()
    results = Results(asked.results, lambda job: code.of_result(job) if job in JOBS else "")
    failed = sit(results, asked.results.with_name("records"), keys, minutes, code)
    text, missing = page(results.of(keys), results.missing(keys)), results.missing(keys)
    print(text)
    if results.of_other_code:
        print(f"{asked.results} has {results.of_other_code} results of other code, not counted",
              file=sys.stderr)  # fmt: skip
    if asked.out:
        asked.out.write_text(text)
    elif not missing and not asked.quick and not asked.jobs and not asked.seeds:
        _DOCUMENT.write_text(text)
        print("what the detectors' reference says of it: python -m grafana.build", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
