"""Start a job whose script says nothing of ddpprobe, and observe what it trains.

In each process of the job that makes a torch optimizer, the model that it trains is observed from
its first training forward on, as by `ddpprobe.install(model, ...)` with the options given here. A
script that calls `install()` itself keeps its own. The job replaces this process: its exit code
and its signals are its own. Nothing is installed; only the job's environment differs.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import ddpprobe
from ddpprobe.cli.output import complain
from ddpprobe.detectors.suite import chosen
from ddpprobe.errors import RunError
from ddpprobe.rank.schedule import as_schedule
from ddpprobe.reader.text import plain
from ddpprobe.rundir.paths import RUN_OPTIONS_VARIABLE
from ddpprobe.rundir.store_url import is_run_name

SHIM = Path(ddpprobe.__file__).parent / "integrations" / "unmodified_path"
EXAMPLE = "ddpprobe run --every 5 -- torchrun --nproc-per-node 8 train.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: the keywords of `install()`, and the job."""
    parser.usage = "ddpprobe run [options] -- COMMAND ..."
    add = parser.add_argument_group("keywords of ddpprobe.install()").add_argument
    add("--run-dir", metavar="DIR", help="of this run, or the URL of an object store")
    add("--every", metavar="N", type=int, help="sample every N-th optimizer step")
    for name, what in (
        ("include", "modules to observe"), ("exclude", "modules to leave out"),
        ("capture", "modules whose full tensors are kept on every sampled step"),
        ("histograms", "modules and parameters whose histograms are kept"),
    ):  # fmt: skip
        more = "; may be given more than once"
        add(f"--{name}", metavar="GLOB", action="append", help=f"over names of {what}{more}")
    add("--on-anomaly", choices=("record", "stop"), help="what a page does")
    add("--budget", metavar="SHARE", type=float, help="what may be added to a step: 0.01 is 1 %%")
    add("--backward", choices=("output", "full"), help="which gradients of modules")
    add("--name", metavar="NAME", help="of the run")
    add("--daemon", choices=("auto", "none"), help="who starts the node daemon")
    add("--first-step", metavar="N", type=int, help="of a resumed run")
    add("--task", choices=("gan", "rl"), help="what is no fault in training of this kind")
    add(
        "--without", metavar="DETECTOR", action="append", dest="detectors",
        help="judge without it; may be given more than once",
    )  # fmt: skip
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")


def run(args: argparse.Namespace) -> int:
    """Become the job.

    Raises:
        RunError: there is no command, or an option is wrong.
    """
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise RunError(f"nothing to run: put the job after the options, such as {EXAMPLE}")
    _check(args)
    paths = [str(SHIM), *filter(None, [os.environ.get("PYTHONPATH")])]
    job = {
        **os.environ,
        RUN_OPTIONS_VARIABLE: json.dumps(options(args)),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    try:
        os.execvpe(command[0], command, job)  # noqa: S606  (what the user typed)
    except OSError as error:
        complain(f"ddpprobe: cannot start {plain(command[0])}: {plain(error.strerror)}")
        return 127 if isinstance(error, FileNotFoundError) else 126  # as a shell answers


def _check(args: argparse.Namespace) -> None:
    """Refuse what `install()` would refuse in each process, when the job has long begun.

    Without a look at `rank/options.py`, which takes torch: who starts a job may not have it.
    """
    try:
        if args.every is not None:
            as_schedule(args.every)
        chosen(dict.fromkeys(args.detectors or (), False), args.task)
    except ValueError as error:
        raise RunError(str(error)) from error
    if args.budget is not None and not 0 < args.budget < 1:
        raise RunError(
            "--budget: expected a share of the step time, between 0 and 1 (0.01: sampling may add "
            f"1 %), got {args.budget:g}"
        )
    if args.first_step is not None and args.first_step < 0:
        raise RunError(f"--first-step: expected a step, 0 or more, got {args.first_step}")
    if args.name is not None and not is_run_name(args.name):
        raise RunError(
            f"--name: expected a name of a directory, without '/' (--run-dir says where it is), "
            f"got {args.name!r}"
        )


def options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of `install()` that were given."""
    given = {
        name: value
        for name, value in vars(args).items()
        if value is not None and name not in {"verb", "rest", "command"}
    }
    if "detectors" in given:
        given["detectors"] = dict.fromkeys(given["detectors"], False)
    if "run_dir" in given and "://" not in given["run_dir"]:
        given["run_dir"] = str(Path(given["run_dir"]).absolute())
    return given
