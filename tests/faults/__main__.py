"""`python -m tests.faults [WHAT...]`: as many kills, mutations and hostile stores as one asks for.

    syscalls    SIGKILL at every system call of the store's writer and of a journal's (--every N)
    kills       random kills of ranks and of the daemon, of real runs (--kills N)
    mutations   accidents to the files of a store with captures (--mutations N)
    hostile     runs as a stranger may send them (--oddities N of each sort)
    deaths      random deaths of real ranks, and what is said of each (--runs N)
    origins     where a NaN began, on sampled steps and others (--runs N)

Without a word all of them run, which takes an hour or two on two cores. Each prints what it has
found when it ends. Exits with 1 if anything was lost, wrong, or came about without a word.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.faults import deaths, hostile, mutations, origins, syscalls

HOME = Path(__file__).parent.parent.parent
TESTS_OF_KILLS = 3  # in tests/distributed/test_kills.py, each with so many draws
Outcome = tuple[Counter[str], list[str]]


def of_kills(scratch: Path, args: argparse.Namespace) -> Outcome:
    """Run the tests of random kills, with more draws."""
    draws = -(-args.kills // TESTS_OF_KILLS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o",
               "faulthandler_timeout=0", "--basetemp", str(scratch / "kills"),
               "tests/distributed/test_kills.py"]  # fmt: skip
    env = {**os.environ, "DDPPROBE_TEST_DRAWS": str(draws)}
    done = subprocess.run(command, cwd=HOME, env=env, check=False)
    problems = [f"pytest ended with {done.returncode}"] if done.returncode else []
    return Counter({"ranks and daemons": TESTS_OF_KILLS * draws}), problems


def of_hostile(
    scratch: Path, args: argparse.Namespace, groups: Sequence[str] = ("more", "torch")
) -> Outcome:
    """Read hostile runs in processes of their own, without torch and with it."""
    env, done, problems = {**os.environ, "PYTHONPATH": str(HOME)}, Counter[str](), []
    for group in groups:
        home = scratch / group
        home.mkdir()
        command = [sys.executable, str(HOME / "tests/faults/hostile.py"), str(home)]
        command += [str(args.oddities), str(args.seed), str(args.most), group]
        ran = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
        *failures, total = map(json.loads, ran.stdout.splitlines())
        problems += [f"{f['case']}: {'; '.join(f['problems'])}" for f in failures]
        peak = total["peak_bytes"]
        if peak > hostile.MEMORY_BYTES:
            problems.append(f"{group}: took {peak >> 20} MiB of memory")
        done[f"stores read, {group} (peak {peak >> 20} MiB)"] = total["cases"]
    return done, problems


SECTIONS = {
    "syscalls": lambda scratch, args: syscalls.kill_everywhere(scratch, args.every),
    "kills": of_kills,
    "mutations": lambda scratch, args: mutations.mutate(scratch, args.mutations, args.seed),
    "hostile": of_hostile,
    "deaths": deaths.of_deaths,
    "origins": origins.of_origins,
}


def main() -> int:
    """Run; 1 if anything was not as it must be."""
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m tests.faults", description=__doc__, formatter_class=about
    )
    parser.add_argument("what", nargs="*", metavar="WHAT", help=", ".join(SECTIONS))
    parser.add_argument("--every", type=int, default=1, help="kill at every N-th call (default: 1)")
    parser.add_argument("--kills", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--mutations", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--oddities", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--runs", type=int, default=0, help="deaths (200), origins (all)")
    parser.add_argument("--only", type=int, help="this death or origin alone, once more")
    parser.add_argument("--unseen", action="store_true",
                        help="deaths: a single rank's own, that no daemon looked at")  # fmt: skip
    parser.add_argument("--far", action="store_true",
                        help="origins: as on a device that the host cannot look into")  # fmt: skip
    parser.add_argument("--results", type=Path, help="lines; what is there is not run again")
    parser.add_argument("--jobs", type=int, default=2, help="deaths, origins at a time")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--most", type=int, default=0, help="hostile runs (default: all)")
    args = parser.parse_args()
    if unknown := set(args.what) - SECTIONS.keys():
        parser.error(f"no {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    failed = 0
    for name in args.what or SECTIONS:
        started = time.monotonic()
        # In memory where possible: what is killed here are processes, not machines.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="ddpprobe-faults-", dir=memory) as scratch:
            done, problems = SECTIONS[name](Path(scratch), args)
        rows = [*done.items(), (f"in {time.monotonic() - started:.0f} s", sum(done.values()))]
        lines = [f"{name:10} {what:40} {count:7}" for what, count in rows]
        print(*lines, *(f"{name}: {text}" for text in problems), sep="\n", flush=True)
        failed += len(problems)
    print(f"{failed} problems")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
