"""What a step costs with ddpprobe and with its peers, against the same step without.

Two ranks of torchrun on the CPU with one thread each. In each process one variant is switched on
and off in turn, block by block, and a ratio is that of two adjacent blocks, so that whatever drifts
on the machine hits both. Two repetitions are two processes. All of it takes 35 minutes.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import command_line, tables
from benchmarks.variants import PEERS, VARIANTS, Default, missing
from benchmarks.workloads import WORKLOADS

_ROOT = Path(__file__).parent.parent
_PEERS_ON = ("gpt-ddp", "resnet")
_SIMPLE = ("no-op", "item")  # what everybody writes first: on the other workloads, too
_TIMEOUT = 900.0
_HEADER = (
    "", "step without, ms", "time with / without", "fastest", "own part", "CPU time", "goal",
    "holds",
)  # fmt: skip
_TEXT = """
Two ranks, gloo, CPU, one thread each; every rank observes all modules' outputs and output gradients
and all parameters' gradients, local and reduced, as `install()` does by default. One process
switches one variant on and off, block by block, in alternating order; a ratio is that of two
adjacent blocks, each timed from its first step's start to its last one's end on the slower rank.
Shown are minimum / **median** / maximum over the pairs of each of two processes, the fastest block
with by the fastest without (what others on the machine take can only add to either), the part of
the time with that ddpprobe's own stopwatch gives to itself, as its budget counts it, and the median
ratios of CPU time, which others disturb less. Both medians must reach the goal. "No probe, against
itself" is what the method makes of no difference at all. ddpprobe is installed before each of its
blocks and closed after it, so that "without" is without. Its daemon does not run here and has a
section of its own. Other tools look at less or at more than that, each as its documents say: wandb
on rank 0 only, ActivationStats at modules with parameters only; what msprobe leaves hanging in
blocks without it is counted as the step's own, to its advantage.

Two rows are floors, which say what a goal can be on this machine. "Every tensor read once" is the
statistics' kernel on each tensor that a sampled step observes, hung up by plain hooks, and nothing
else: no rows, no watch, no file. "The hooks of an unsampled step, returning at once" are ours with
their insides switched off: what Python and autograd take to call them at all. Where a goal does not
hold and its floor does not either, it is out of reach of hooks on this machine.
"""


def measure(workload: str, variant: str, pairs: int, ranks: int = 2) -> dict[str, list[float]]:
    """Run one process group; return the ratios by clock, and the seconds of a bare step.

    Raises:
        RuntimeError: a rank failed; the text is what it said last.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(ranks), "-m", "benchmarks.blocks",
            workload, variant, str(pairs), scratch,
        ]  # fmt: skip
        settings = {"OMP_NUM_THREADS": "1", "DDPPROBE_STRICT": "1", "WANDB_SILENT": "true"}
        done = subprocess.run(
            command, cwd=_ROOT, env={**os.environ, **settings}, timeout=_TIMEOUT,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        times = Path(scratch, "times.json")
        if done.returncode or not times.exists():
            raise RuntimeError(_reason(done.stderr))
        ranks_times = json.loads(times.read_text())
    slower = {
        kind: [
            [max(clock) for clock in zip(*block, strict=True)]
            for block in zip(*(times[kind] for times in ranks_times), strict=True)
        ]
        for kind in ("off", "on")
    }
    owns = zip(*(times["own"] for times in ranks_times), strict=True)
    both = list(zip(slower["on"], slower["off"], strict=True))
    return {
        "wall": [on[0] / off[0] for on, off in both],
        "cpu": [on[1] / off[1] for on, off in both],
        "fastest": [min(on[0] for on, _ in both) / min(off[0] for _, off in both)],
        "own": [max(own) / on[0] for own, on in zip(owns, slower["on"], strict=True)],
        "seconds": [off[0] for off in slower["off"]],
    }


def fitting(workload: str) -> list[str]:
    """Return the variants that say something on this workload."""
    left_out = set() if workload in _PEERS_ON else set(PEERS) - set(_SIMPLE)
    if WORKLOADS[workload].steps < Default.EVERY:
        left_out.add("default")
    return [name for name in VARIANTS if name not in left_out]


def _reason(text: str) -> str:
    """Return the line of a traceback that says what was wrong."""
    errors = [line for line in text.splitlines() if "Error: " in line]
    return (errors or text.splitlines() or ["no output"])[0][-200:]


def _row(workload: str, variant: str, pairs: int, *, quick: bool) -> list[str]:
    """Return the row of one variant: figures, or why there are none. `quick`: one rank, once."""
    title = VARIANTS[variant][0]
    package = missing(variant)
    if package is not None:
        return [title, "", f"{package} is not installed (`make bench` does)", "", "", "", "", ""]
    try:
        found = [
            measure(workload, variant, pairs, ranks=1 if quick else 2)
            for _ in range(1 if quick else 2)
        ]
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return [title, "", f"failed: {error}", "", "", "", "", ""]
    own = [statistics.median(f["own"]) for f in found]
    worst = max(statistics.median(f["wall"]) for f in found)
    goals = dict(zip(("sampled", "unsampled"), WORKLOADS[workload].goals, strict=True))
    goal = goals.get(variant)
    return [
        title,
        ", ".join(f"{1e3 * statistics.median(f['seconds']):.3g}" for f in found),
        "; ".join(tables.spread(f["wall"]) for f in found),
        ", ".join(f"{f['fastest'][0]:.3f}" for f in found),
        "" if math.isnan(own[0]) else ", ".join(f"{part:.4f}" for part in own),
        ", ".join(f"{statistics.median(f['cpu']):.3f}" for f in found),
        "" if goal is None else f"<= {goal}",
        "" if goal is None else tables.verdict(worst, goal),
    ]


def main(argv: Sequence[str] | None = None) -> str:
    parser = command_line.parser("overhead", __doc__)
    parser.add_argument("--pairs", type=int, default=8, help="pairs of blocks in a process")
    parser.add_argument("--peer-pairs", type=int, default=3, help="the same of other tools")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="by default, what fits")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.workloads, arguments.variants, arguments.pairs = ["small-mlp"], ["sampled"], 2
    parts = [_TEXT]
    for name in arguments.workloads:
        rows = []
        for variant in arguments.variants or fitting(name):
            pairs = arguments.peer_pairs if variant in PEERS else arguments.pairs
            rows.append(_row(name, variant, pairs, quick=arguments.quick))
            print(f"{name}: {' | '.join(rows[-1])}", file=sys.stderr, flush=True)
        parts += [f"### {WORKLOADS[name].title}", tables.table(_HEADER, rows)]
    result = tables.section("Overhead of a step", "overhead", *parts)
    print(result)
    return result


if __name__ == "__main__":
    main()
