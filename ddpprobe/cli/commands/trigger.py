"""Capture the next steps of a live run in full, on all ranks, and keep the window before them.

Asks the daemon beside rank 0, so it is typed on that machine (or on any that shares its disk), and
waits until the steps are announced. Without --module the modules under suspicion are captured.
"""

from __future__ import annotations

import argparse
import secrets
import time
from pathlib import Path
from typing import Any

from ddpprobe.cli.output import say, say_json
from ddpprobe.cli.run_argument import add_run, opened
from ddpprobe.daemon.requests import MAX_GLOBS
from ddpprobe.errors import RunError
from ddpprobe.reader.text import plain
from ddpprobe.reader.under_way import is_live
from ddpprobe.rundir import paths, safe_read

STEPS = 2
POLL_SECONDS = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser, "run directory of a live run")
    parser.add_argument(
        "--module", metavar="GLOB", action="append", default=[], dest="modules",
        help="over names of observed modules; may be given more than once, "
        f"{MAX_GLOBS} times at most",
    )  # fmt: skip
    parser.add_argument(
        "--steps", metavar="K", type=int, default=STEPS, help=f"how many (default {STEPS})"
    )
    parser.add_argument(
        "--reason", metavar="TEXT", default="asked for", help="kept with what is captured"
    )
    parser.add_argument(
        "--timeout", metavar="S", type=float, default=20.0, help="for the answer (default 20)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Ask, wait, and print the steps; 2 if the run is not live, or the daemon refuses."""
    if len(args.modules) > MAX_GLOBS:
        raise RunError(
            f"--module was given {len(args.modules)} times, and is taken {MAX_GLOBS} times at "
            "most: one glob, such as 'blocks.*', names many modules"
        )
    run_ = opened(args.run)
    home = paths.RunDir(run_.path)
    if not is_live(home):
        raise RunError(
            f"{args.run} is not live here: rank 0 of it does not run on this machine. Only "
            "a run that goes on can be captured; type this beside its rank 0"
        )
    request = paths.make_inner(home.requests) / f"{secrets.token_hex(8)}.json"
    asked = {"modules": args.modules, "steps": args.steps, "reason": args.reason}
    paths.write_json(request, asked)
    try:
        answer = _wait(request.with_suffix(".answer"), args.timeout)
    finally:
        request.unlink(missing_ok=True)
        request.with_suffix(".answer").unlink(missing_ok=True)
    if answer is None:
        raise RunError(
            f"no answer within {args.timeout:g} s: the run has no daemon at its rank 0, or it is "
            "far behind. `ddpprobe daemon --dir RUN` starts one"
        )
    if "order" not in answer:
        raise RunError(str(answer.get("refused", "the answer makes no sense")))
    _tell(run_.name, answer["order"], as_json=args.json)
    return 0


def _tell(name: str, order: dict[str, Any], *, as_json: bool) -> None:
    first, last = order["start"], order["stop"] - 1
    if as_json:
        facts = {"steps": [first, last], "modules": order["modules"]}
        say_json({"run": name, "format_version": 1, **facts})
        return
    say(f"steps {first} to {last} are captured in full, on all ranks:")
    for module in order["modules"]:
        say(f"  {plain(module) or '(root)'}")


def _wait(path: Path, timeout: float) -> dict[str, Any] | None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            answer = safe_read.parse(path.read_bytes())
        except FileNotFoundError:
            time.sleep(POLL_SECONDS)
            continue
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) else {}
    return None
