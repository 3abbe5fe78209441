"""How long an answer takes: on a store of 100,000 sampled steps x 1,500 sites x 8 ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import command_line, large_store, tables
from benchmarks.answer import SITE

FULL, QUICK = (100_000, 1500, 8), (2_000, 300, 2)  # sampled steps, sites, ranks
WIDE, QUICK_WIDE = (512, 10_000, 8), (8, 3_000, 2)
VERIFIED = (2_000, 1500, 1)  # `verify` reads every byte: its figure is a rate
TRACED = 1000  # the last sampled steps, of which `trace` is asked
MEMORY_GOAL_MB, REPEATS = 500, 5
# Name, what is asked, seconds at most (None: no goal).
QUERIES: dict[str, tuple[str, float | None]] = {
    "open": ("`ddpprobe.open(RUN)`", None),
    "anomalies": ("first cause: `Run.anomalies()`", 1.0),
    "series": (f"one series: `Run.series('{SITE}', 'rms')`, of all ranks merged", 0.3),
    "rank series": ("the same of one rank", 0.3),
    "info": ("`Run.info()`", None),
}
COMMANDS: dict[str, tuple[list[str], float | None]] = {
    "help": (["--help"], 0.3),
    "anomalies": (["anomalies", "RUN"], 1.0),
    "trace": (["trace", "RUN", "--site", SITE, "--steps", "LAST"], None),
    "info": (["info", "RUN"], None),
}

_PROGRAM = (
    "import sys; from ddpprobe.cli.main import main; sys.exit(main())"  # what pip's script does
)
_ANSWERED = (0, 1)  # 1: there are anomalies


def _ask(path: Path, what: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.answer", str(path), what]
    return dict(json.loads(subprocess.check_output(command, text=True)))


def _queries(path: Path, repeats: int) -> list[list[str]]:
    rows = []
    for name, (text, goal) in QUERIES.items():
        found = [_ask(path, name) for _ in range(repeats)]
        seconds, memory = [f["s"] for f in found], max(f["mb"] for f in found)
        rows.append([text, tables.spread(seconds), f"{memory:.0f}", *_verdict(min(seconds), goal)])
        assert memory <= MEMORY_GOAL_MB, f"{name} takes {memory:.0f} MB"
    return rows


def _commands(path: Path, repeats: int, steps: int) -> list[list[str]]:
    rows = []
    last = f"{large_store.EVERY * (steps - TRACED)}:"
    for asked, goal in COMMANDS.values():
        seconds, words = [], [last if word == "LAST" else word for word in asked]
        for _ in range(repeats):
            given = [str(path) if word == "RUN" else word for word in words]
            command = [sys.executable, "-c", _PROGRAM, *given]
            started = time.perf_counter()
            done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - started)
            assert done.returncode in _ANSWERED, f"{words} ended with {done.returncode}"
        text = f"`ddpprobe {' '.join(words)}`"
        rows.append([text, tables.spread(seconds), "", *_verdict(min(seconds), goal)])
    return rows


def _verdict(value: float, goal: float | None) -> list[str]:
    return ["", ""] if goal is None else [f"<= {goal} s", tables.verdict(value, goal)]


def _verified(scratch: Path, shape: tuple[int, int, int]) -> str:
    steps, sites, ranks = shape
    run = large_store.make(scratch / "verified", steps=steps, sites=sites, ranks=ranks)
    size = sum(p.stat().st_size for p in run.path.rglob("*") if p.is_file())
    seconds = _ask(run.path, "verify")["s"]
    return f"`ddpprobe verify` reads and decodes {size / seconds / 1e6:.0f} MB/s of files."


def _wide(scratch: Path, shape: tuple[int, int, int]) -> str:
    """Say what the width of a model costs, in a sentence."""
    steps, sites, ranks = shape
    run = large_store.make(scratch / "wide", steps=steps, sites=sites, ranks=ranks)
    found = {name: _ask(run.path, name) for name in ("anomalies", "series", "info")}
    told = ", ".join(f"{name} {f['s']:.2f} s and {f['mb']:.0f} MB" for name, f in found.items())
    return f"Of a run of {steps:,} steps x {sites:,} sites x {ranks} ranks: {told}."


def main(argv: Sequence[str] | None = None) -> str:
    """Print and return the section."""
    arguments = command_line.parser("queries", __doc__).parse_args(argv)
    shape, repeats = (QUICK, 1) if arguments.quick else (FULL, REPEATS)
    steps, sites, ranks = shape
    with tempfile.TemporaryDirectory(prefix="ddpprobe-queries-") as scratch:
        run = large_store.make(Path(scratch) / "run", steps=steps, sites=sites, ranks=ranks)
        rows = _queries(run.path, repeats) + _commands(run.path, repeats, steps)
        rate = _verified(Path(scratch), QUICK if arguments.quick else VERIFIED)
        wide = _wide(Path(scratch), QUICK_WIDE if arguments.quick else WIDE)
    text = (
        f"A sealed run of {steps:,} sampled steps x {sites:,} sites x {ranks} ranks, its files in "
        f"the page cache; each question is put by a\nfresh process (minimum / **median** / maximum "
        f"of {repeats}; the minimum is held against the goal). A query counts from\n"
        "`ddpprobe.open` on, with the modules imported; a command from its start to its end. MB is "
        "the process's peak. Blocks\nof statistics repeat (hard links), so a cold disk is not "
        f"measured. {rate}\n{wide}"
    )
    header = ("question", "s", "MB", "goal", "holds")
    section = tables.section("The speed of the answer", "queries", text, tables.table(header, rows))
    print(section)
    return section


if __name__ == "__main__":
    main()
