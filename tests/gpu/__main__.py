"""`make test-gpu [PART=NAME] [WHEELS=DIR] [DEVICE=cpu]`: see on a GPU what only a GPU can show.

    python tests/gpu/__main__.py [PART ...] [--wheels DIR] [--device cpu] [--results DIR]

Each part takes less than eight minutes and runs in processes of its own; without a PART all of them
run, one after the other, whatever becomes of each. Every line is on disk as soon as it is known, as
DIR/gpu-PART.json; the table at the end is DIR/gpu.json, too. DIR is $OUT, if set, or
ddpprobe-runs/gpu. It needs a Python with a CUDA build of torch and no network; what else is missing
is installed from a folder of wheels (`python -m tests.gpu.wheels`) for this command alone.

On the CPU (`--device cpu`) it is a dry run at small sizes, which shows that the command works.
Exit codes: 0 all passed, 1 something failed or took too long, 2 wrong use, 3 no CUDA device or a
package is missing.
"""

from __future__ import annotations

import argparse
import os
import sys
import types
from pathlib import Path

HOME = Path(__file__).resolve().parents[2]
# This folder has no __init__.py, so that an installed package `tests` (there are some) would hide
# it from `import`.
tests = types.ModuleType("tests")
tests.__path__ = [str(HOME / "tests")]
sys.modules["tests"] = tests
HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HOME), *(path for path in sys.path if Path(path or ".").resolve() != HERE)]

from tests.gpu import install, page, runner  # noqa: E402
from tests.gpu.findings import (  # noqa: E402
    DRY,
    NO_DEVICE,
    NO_PACKAGES,
    PASSED,
    SKIPPED,
    TABLE,
    table,
)
from tests.gpu.parts import PART_SECONDS, PARTS  # noqa: E402


def main(argv: list[str]) -> int:
    """Run the parts that are asked for."""
    args = arguments(argv)
    if args.child:
        from tests.gpu import case_process  # imports torch, which the others do without

        return case_process.run(args.parts[0], args.case, args.device, args.results, args.until)
    if args.page:
        print(*page.write(args.page), sep="\n")
        return 0
    chosen = args.parts or list(PARTS)
    with install.packages(args.wheels) as path:
        told = [
            runner.run_part(name, args.device, args.results, path, args.case, args.seconds)
            for name in chosen
        ]
    runner.write_table(args.results, told, args.device)
    print(f"\n{table(told)}\n\n{args.results / TABLE}", flush=True)
    states = {one["status"] for one in told}
    if states & {NO_DEVICE, NO_PACKAGES}:
        return 3 if states <= {NO_DEVICE, NO_PACKAGES, SKIPPED, PASSED, DRY} else 1
    return int(not states <= {PASSED, DRY, SKIPPED})


def arguments(argv: list[str]) -> argparse.Namespace:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("make test-gpu", description=__doc__, formatter_class=about)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument(
        "--case", action="append", default=[], help="only cases with this in their name"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels for what is missing")
    parser.add_argument(
        "--seconds", type=float, default=PART_SECONDS, help="of a part; default: %(default).0f"
    )
    out = os.environ.get("OUT") or HOME / "ddpprobe-runs" / "gpu"
    parser.add_argument("--results", type=Path, default=Path(out), metavar="DIR")
    parser.add_argument(
        "--page",
        type=Path,
        nargs="+",
        metavar="TABLE",
        help="run nothing, write docs/gpu.md from one gpu.json or several",
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    wrong = [] if args.child else [name for name in args.parts if name not in PARTS]
    if wrong:
        parser.error(f"no part {', '.join(wrong)}; there are {', '.join(PARTS)}")
    args.results = args.results.absolute()
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
