"""Ask a run again: its detectors with other settings, or one module from its stored inputs.

Without --step the stored records of all ranks go through the detectors again, and the verdict is
laid beside the recorded one. With --step, --module and --build that module is executed again,
forward and backward, from what a capture kept of it: does the fault repeat, and at which operator?
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ddpprobe.cli.commands.anomalies import FIELDS, row
from ddpprobe.cli.completion import offer
from ddpprobe.cli.output import report_gaps, say, say_json, table
from ddpprobe.cli.progress import progress
from ddpprobe.cli.run_argument import add_run, opened
from ddpprobe.detectors.settings import Settings, defaults, meanings, summary
from ddpprobe.detectors.suite import DETECTORS, read_settings
from ddpprobe.errors import RunError
from ddpprobe.reader.rerun_detectors import RerunResult, rerun
from ddpprobe.reader.text import plain

if TYPE_CHECKING:
    from ddpprobe.reader.reexecute.module import Execution
    from ddpprobe.reader.reexecute.op_watch import Op


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    again = parser.add_argument_group("detectors again")
    detector = again.add_argument(
        "--detector", metavar="NAME", action=_Detector, help="whose --set follow"
    )
    offer(detector, (detector.name for detector in DETECTORS))
    again.add_argument(
        "--set", metavar="KEY=VALUE", action=_Setting, dest="settings", default=[],
        help="a setting of the --detector before it",
    )  # fmt: skip
    again.add_argument("--list", action="store_true", help="list detectors, settings and defaults")
    once = parser.add_argument_group("a module again (needs torch)")
    once.add_argument("--step", type=int, metavar="N", help="the captured step")
    once.add_argument("--module", metavar="FQN", help='the captured module ("": the model)')
    once.add_argument(
        "--build", metavar="PKG.MOD:FN", help="your function that returns the model, or the module"
    )
    once.add_argument("--rank", type=int, metavar="R", help="whose capsule (default: a faulty one)")
    once.add_argument("--micro", type=int, metavar="M", help="of which micro-batch")
    once.add_argument("--call", type=int, metavar="C", help="which call in the micro-batch")
    once.add_argument("--attempt", type=int, metavar="A", help="of which start (default: the last)")
    once.add_argument("--device", metavar="D", help="cpu (default), cuda, cuda:1")
    once.add_argument("--no-float64", action="store_true", help="do not try it in float64 as well")


def run(args: argparse.Namespace) -> int:
    """Do the one or the other; 0 whatever the answer is, 3 if the store is damaged."""
    given = {"--step": args.step, "--module": args.module, "--build": args.build}
    missing = [name for name, value in given.items() if value is None]
    if args.list:
        return _list(as_json=args.json)
    if args.detector and len(missing) < len(given):
        raise RunError("--detector asks the detectors again, --step a module: one at a time")
    if len(missing) == len(given):
        _refuse_of_a_module(args)
        return _detectors(args)
    if missing:
        raise RunError(f"to execute a module again, give {' and '.join(missing)} as well")
    return _module(args)


def _refuse_of_a_module(args: argparse.Namespace) -> None:
    """Raise RunError for an option that says how a module is executed, where none is."""
    names = ("rank", "micro", "call", "attempt", "device")
    words = [f"--{name}" for name in names if getattr(args, name) is not None]
    words += ["--no-float64"] * args.no_float64
    if words:
        raise RunError(
            f"{' and '.join(words)} {'is' if len(words) == 1 else 'are'} about executing a module "
            "again: give --step, --module and --build as well; the detectors judge all ranks"
        )


class _Detector(argparse.Action):
    """Remembers the detector that the following `--set` are about."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace,
        values: str | Sequence[Any] | None, option_string: str | None = None,
    ) -> None:  # fmt: skip
        namespace.detector = values
        namespace.settings = [*namespace.settings, (values, None)]


class _Setting(argparse.Action):
    """Adds a setting to those of the detector before it."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace,
        values: str | Sequence[Any] | None, option_string: str | None = None,
    ) -> None:  # fmt: skip
        if namespace.detector is None:
            parser.error(f"--set {values}: of which detector? Give --detector NAME before it")
        namespace.settings = [*namespace.settings, (namespace.detector, values)]


def _list(*, as_json: bool) -> int:

    known = {d.name: defaults(d) for d in DETECTORS}
    if as_json:
        says = {d.name: summary(d) for d in DETECTORS}
        told = {n: {"says": says[n], "settings": s} for n, s in known.items()}
        say_json({"format_version": 1, "detectors": told})
        return 0
    for detector in DETECTORS:
        say(f"{detector.name}: {summary(detector)}")
        says_of = meanings(detector)
        settings = known[detector.name].items()
        for line in table([("   ", key, value, says_of[key]) for key, value in settings]):
            say(line)
    return 0


def _detectors(args: argparse.Namespace) -> int:

    try:
        settings = read_settings(args.settings)
    except ValueError as error:
        raise RunError(str(error)) from None
    run_ = opened(args.run)
    with progress("judging", None, silent=args.json) as bar:
        found = rerun(run_, settings, bar.advance)
    if args.json:
        say_json({"run": run_.name, "format_version": 1, **_rejudged_json(found, settings)})
    else:
        for line in _rejudged_lines(found, settings):
            say(line)
    return report_gaps(run_.lost, run_.completeness().unknown())


def _rejudged_json(found: RerunResult, settings: Settings) -> dict[str, Any]:

    return {
        "settings": settings,
        "identical": found.identical,
        **{change: found.count(change) for change in ("new", "gone", "same")},
        "verdicts": [
            {
                "change": v.change,
                "attempt": v.anomaly.attempt,
                **{field: getattr(v.anomaly, field) for field in FIELDS},
            }
            for v in found.verdicts
        ],
    }


def _rejudged_lines(found: RerunResult, settings: Settings) -> list[str]:

    rows = [(v.change, *row(v.anomaly)) for v in found.verdicts]
    changed = [f"{d} {k}={v}" for d, of in settings.items() for k, v in (of or {}).items()]
    counts = ", ".join(f"{found.count(c)} {c}" for c in ("new", "gone", "same"))
    exactly = "; the recorded verdict exactly" if found.identical else ""
    return [*(table(rows) if rows else []), f"{counts} with {_with(changed)}{exactly}"]


def _with(changed: list[str]) -> str:
    return ", ".join(changed) or "the settings of every run"


def _module(args: argparse.Namespace) -> int:

    run_ = opened(args.run)
    try:
        from ddpprobe.reader.reexecute.module import Which, reexecute  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise RunError(
            "executing a module again needs torch: pip install 'ddpprobe[train]'"
        ) from None
    which = Which(args.step, args.module, args.attempt, args.rank, args.micro, args.call)
    found = reexecute(run_, which, args.build, args.device or "cpu", in_double=not args.no_float64)
    if args.json:
        say_json({"run": run_.name, "format_version": 1, **found.to_json()})
    else:
        for line in _execution_lines(found):
            say(plain(line))
    return report_gaps(run_.lost, run_.completeness().unknown())


def _execution_lines(found: Execution) -> list[str]:
    verdict = found.verdict
    lines = [f"{found.place}: {found.says}", f"  {verdict.why}"]
    if verdict.op is not None:
        lines += _op_lines(verdict.op)
    if found.in_double is not None:
        lines.append(f"  float64: {found.in_double}")
    for one in verdict.compared:
        how = "bit for bit" if one.bitwise else "within rounding" if one.within else "differs"
        lines.append(f"  {one.kind} {one.name}: {one.now}, recorded {one.recorded}: {how}")
    return lines + [f"  note: {note}" for note in verdict.notes]


def _op_lines(op: Op) -> list[str]:
    behind = f" ({op.node})" if op.node else ""
    lines = [f"  first bad operator: {op.name} in the {op.phase}{behind}"]
    if op.line is not None:
        lines.append(f"    {op.line}")
    if op.module is not None:
        lines.append(f"    in module {op.module or '(root)'}")
    lines += [f"    got   {one}" for one in op.inputs]
    return lines + [f"    gave  {one}" for one in op.outputs]
