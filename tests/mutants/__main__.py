"""`python -m tests.mutants [ROOM...]`: change the code a little, and see whether the tests notice.

A room is some files and the fast tests that are theirs: `rooms.py`. Without a word all of them are
tried, which takes many hours: `--sample 200 --seed 1` draws so many mutants of each room, and
`--minutes 30` ends after that time. What was tried is kept in `.mutants/`, as long as a function
and its tests stay as they are; the next run goes on from there.

A mutant that was killed stays so there, also if its test goes: `rm -r .mutants` begins anew.

Exits with 1 if a mutant survives that is not in `survivors.toml`, or if a room's tests notice less
than nine tenths of those that can be noticed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Collection, Mapping, Sequence

from tests.mutants.known import Known, Verdict, judge, load
from tests.mutants.rooms import ROOMS
from tests.mutants.tool import SURVIVED, UNCHECKED, Mutant, Workshop

ENOUGH = 0.9


def main(words: Sequence[str] | None = None) -> int:
    """Run; 1 if there is something to look at."""
    args = _parse(words)
    known, deadline = load(), time.monotonic() + args.minutes * 60
    bad = 0
    for name in args.rooms or ROOMS:
        verdict = _try_room(name, args, known, deadline)
        _say(name, verdict)
        bad += bool(verdict.new) or verdict.rate < ENOUGH  # 0 where nothing was tried
    return bool(bad)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m tests.mutants", description=__doc__, formatter_class=about
    )
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=", ".join(ROOMS))
    parser.add_argument("--sample", type=int, help="try so many of each room (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=6000.0, help="end after that time")
    parser.add_argument("--jobs", type=int, default=1, help="at once (default: %(default)s)")
    args = parser.parse_args(words)
    unknown = set(args.rooms) - set(ROOMS)
    if unknown:
        parser.error(f"no room {min(unknown)!r}: choose from {', '.join(ROOMS)}")
    return args


def _try_room(
    name: str, args: argparse.Namespace, known: Sequence[Known], deadline: float
) -> Verdict:
    """Try what is not known yet, and judge all that is."""
    workshop = Workshop(name, ROOMS[name])
    workshop.prepare()
    statuses = workshop.statuses()
    chosen = draw(statuses, args.sample, args.seed)
    new = judge(0, _survivors(workshop, chosen), known).new  # there may be a test for it by now
    left = [n for n in chosen if statuses[n] == UNCHECKED or n in {m.name for m in new}]
    print(f"{name}: {len(chosen)} of {len(statuses)} mutants, {len(left)} to try", flush=True)
    if left and time.monotonic() < deadline:
        workshop.try_(left, args.jobs, deadline - time.monotonic())
    tried = sum(s != UNCHECKED for n, s in workshop.statuses().items() if n in chosen)
    if tried < len(chosen):  # the time was up, or the tool ended early
        print(f"{name}: {len(chosen) - tried} were not tried, see {workshop.log}", flush=True)
    return judge(tried, _survivors(workshop, chosen), known)


def _survivors(workshop: Workshop, chosen: Collection[str]) -> list[Mutant]:
    found = {n: s for n, s in workshop.statuses().items() if n in chosen and s in SURVIVED}
    return workshop.describe(found)


def draw(statuses: Mapping[str, str], sample: int | None, seed: int) -> list[str]:
    """Return `sample` of the names, the same ones for the same seed and code; None: all."""
    names = sorted(statuses)
    if sample is None or sample >= len(names):
        return names
    return random.Random(seed).sample(names, sample)


def _say(name: str, verdict: Verdict) -> None:
    print(
        f"{name}: {verdict.killed} of {verdict.tried - len(verdict.equivalents)} killed "
        f"({verdict.rate:.0%}), {len(verdict.listed)} known survivors, "
        f"{len(verdict.equivalents)} equivalents, {len(verdict.new)} new survivors",
        flush=True,
    )
    for mutant in verdict.new:
        print(f"\n{mutant.name} ({mutant.status})")
        print("\n".join(f"  - {line}" for line in mutant.was.splitlines()))
        print("\n".join(f"  + {line}" for line in mutant.now.splitlines()))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
