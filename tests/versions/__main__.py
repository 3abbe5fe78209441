"""`make test-versions [PYTHONS=3.12] [TORCHES=2.6]`: real jobs and fast tests on each pair.

For each pair of Python and torch an environment is made, `.venv-py3.12-torch2.6`: torch as the
package index has it, which may be a build for a GPU of several GB, and the packages of
constraints.txt. In it run real jobs (ranks under torchrun: exact statistics, bit-identical
training, planted NaN named exactly, under DDP, FSDP2 and torch.compile) and the fast tests of what
touches torch. A test that needs more than an old torch can do is skipped, with that reason. Without
words it tries the pairs of `ddpprobe/rank/versions.py`. Prints a table, and exits with 1 if a pair
does not hold. An environment is removed after its row, unless KEEP=1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

from ddpprobe.rank.versions import TRIED
from tests.versions.environment import Count, Environment

JOBS = (
    "tests/distributed/test_attribution.py",
    "tests/distributed/test_exact.py",
    "tests/distributed/test_compiled_ranks.py",
)
TESTS = (
    "tests/rank/hooks",
    "tests/rank/topology",
    "tests/rank/torch_private",
    "tests/rank/test_guest_manners.py",
    "tests/rank/test_signal_handlers.py",
    "tests/rank/test_step_clock.py",
    "tests/detectors",
    "tests/inspect",
    "tests/test_probe.py",
)
HEAD = "| Python and torch | real jobs | fast tests | minutes |\n|---|---|---|---|"


def main(words: Sequence[str] | None = None) -> int:
    """Try each pair; 1 if one does not hold."""
    args = _parse(words)
    rows, good = [HEAD], True
    for python, torch in pairs(args.python, args.torch):
        row, held = try_pair(python, torch, args.jobs, keep=args.keep)
        rows.append(row)
        good &= held
        print("\n".join(rows), flush=True)  # what is known so far, if it ends here
    return int(not good)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m tests.versions", description=__doc__, formatter_class=about
    )
    parser.add_argument("--python", action="append", metavar="3.N", help="instead of all")
    parser.add_argument("--torch", action="append", metavar="2.N", help="instead of all")
    parser.add_argument("--jobs", type=int, default=2, help="at once (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="leave the environments")
    return parser.parse_args(words)


def pairs(pythons: list[str] | None, torches: list[str] | None) -> list[tuple[str, str]]:
    """Return the pairs to try: of what is named all, of what is not those that were tried."""
    return [
        (python, torch)
        for python in pythons or TRIED
        for torch in torches
        or TRIED.get(python)
        or sorted({t for ts in TRIED.values() for t in ts})
    ]


def try_pair(python: str, torch: str, jobs: int, *, keep: bool) -> tuple[str, bool]:
    """Return the row of a pair, and whether it holds."""
    began, environment = time.monotonic(), Environment(python, torch)
    try:
        environment.make()
        told = environment.told()
        counts = [environment.test(paths, jobs) for paths in (JOBS, TESTS)]
    except (LookupError, subprocess.CalledProcessError) as error:
        return f"| {python} {torch} | not made: {error} | | |", False
    finally:
        if not keep:
            environment.remove()
    for name in (n for count in counts for n in count.names):
        print(f"{told}: {name} failed", flush=True)
    return row_of(told, counts, time.monotonic() - began), all(c.good for c in counts)


def row_of(told: str, counts: Sequence[Count], seconds: float) -> str:
    """Return one row of the table."""
    return f"| {told} | {' | '.join(map(str, counts))} | {seconds / 60:.0f} |"


if __name__ == "__main__":
    sys.exit(main())
