"""Say what went wrong in a run, first cause first, then what followed from it.

One line a verdict: level, step and micro-batch, rank (- where no single rank is to blame), site,
phase, detector and its numbers; then how much of the run was judged. Exits with 1 if there is a
page among them, whatever --level shows, and with 4 if there is none, but only a part of the run is
held: then it may have been elsewhere.

RUN may also be the directory that holds the runs of several models of one process: then it is said
first which of them was bad first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ddpprobe.cli.output import (
    DAMAGED,
    INCOMPLETE,
    OK,
    PAGED,
    complain,
    report_gaps,
    say,
    say_json,
    table,
)
from ddpprobe.cli.run_argument import add_run, opened, tell_identity
from ddpprobe.detectors.suite import Episode, episodes
from ddpprobe.ends.anomalies import RANK_LOST, is_past_forward, is_vague
from ddpprobe.ends.end import ENDED, RUNNING, told
from ddpprobe.reader.completeness import NOTHING_SAMPLED
from ddpprobe.reader.models import FirstOfModels, Models, models_in
from ddpprobe.reader.run import Run
from ddpprobe.reader.text import UNOBSERVED, plain
from ddpprobe.records.rank_names import ranks_text
from ddpprobe.records.step import LEVELS

if TYPE_CHECKING:
    from ddpprobe.reader.completeness import Completeness
    from ddpprobe.reader.endings import Ending
    from ddpprobe.records.step import Anomaly

FIELDS = (
    "detector", "level", "step", "micro", "rank", "module", "kind", "phase", "first_cause",
    "message", "values", "sampled",
)  # fmt: skip
_WORST = (DAMAGED, PAGED, INCOMPLETE, OK)  # exit codes: what one model has, all of them have
MOST_ALIKE = 8  # verdicts of which the same is said, with a line each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument(
        "--level",
        choices=LEVELS,
        default="info",
        help="show this level and those above it (default: %(default)s, which is all)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the verdicts; 3 if the store is damaged, else 1 at a page, else 4 if part is held."""
    models = models_in(args.run)
    if models is not None:
        return _run_models(models, args)
    run_ = opened(args.run)
    found = run_.anomalies()
    held = run_.completeness()
    _tell_of_models(run_, found)
    if args.json:
        say_json(_told(run_, found, held, args.level))
    else:
        _say(run_, found, held, args.level)
    return _exit_code(run_, found, held)


def _tell_of_models(run_: Run, found: Sequence[Anomaly]) -> None:
    """Say on stderr where a first cause is compared with those of the process's other models."""
    if "/" not in run_.name or not any(anomaly.first_cause for anomaly in found):
        return
    where = run_.path.resolve().parent
    models = models_in(where)
    if models is not None and len(models) > 1:
        command = f"ddpprobe anomalies {plain(where)}"
        complain(f"ddpprobe: one of {len(models)} models; which was bad first: {command}")


def _run_models(models: Models, args: argparse.Namespace) -> int:
    """Print which model was bad first, then the verdicts of each; the first code in `_WORST`."""
    for model in models.values():
        tell_identity(model)
    judged_ = {name: (r, r.anomalies(), r.completeness()) for name, r in models.items()}
    firsts = models.first_causes({name: found for name, (_, found, _) in judged_.items()})
    if args.json:
        each = {name: _told(*known, args.level) for name, known in judged_.items()}
        first = [{"model": one.model, **_fields(one.anomaly)} for one in firsts]
        told_ = {"format_version": 1, "directory": str(models.path), "first_causes": first}
        say_json({**told_, "models": each})
    else:
        for line in first_of_models(firsts):
            say(line)
        for name, known in judged_.items():
            say("")
            say(f"{name} ({models[name].where})")
            _say(*known, args.level)
    codes = {_exit_code(*known) for known in judged_.values()}
    return next(code for code in _WORST if code in codes)


def first_of_models(firsts: list[FirstOfModels]) -> list[str]:
    """Say which model was bad first, or between which of them it is not known."""
    if not firsts:
        return ["no model has a first cause"]
    rows = [(one.model, *row(one.anomaly)) for one in firsts]
    if len({one.model for one in firsts}) == 1:
        return ["first of all models:", *table(rows[:1])]
    first = firsts[0].anomaly
    alike = len({(one.anomaly.detector, one.anomaly.rank) for one in firsts}) == 1
    if alike and first.detector == RANK_LOST and first.rank is not None:
        return [f"one end, of rank {first.rank}, whose process trained all of these:", *table(rows)]
    return ["which of these was first is not known:", *table(rows)]


def _told(run_: Run, found: list[Anomaly], held: Completeness, level: str) -> dict[str, Any]:
    endings = run_.endings()
    end = endings[-1].end.to_json() if endings else None
    return {**as_json(run_.name, _shown(found, level), held), "end": end}


def _say(run_: Run, found: list[Anomaly], held: Completeness, level: str) -> None:
    shown = _shown(found, level)
    endings = run_.endings()
    for line in told_ends(endings, shown):
        say(line)
    if shown:
        for line in lines(episodes(shown), several=len(endings) > 1):
            say(line)
        say(judged(held, bool(run_.lost)))
    else:
        say(nothing(held, bool(run_.lost), len(found), level))


def _shown(found: list[Anomaly], level: str) -> list[Anomaly]:
    return [a for a in found if LEVELS.index(a.level) <= LEVELS.index(level)]


def _exit_code(run_: Run, found: list[Anomaly], held: Completeness) -> int:
    gaps, paged = report_gaps(run_.lost, held.unknown()), any(a.level == "page" for a in found)
    return PAGED if paged and gaps != DAMAGED else gaps


def told_ends(endings: list[Ending], shown: Sequence[Anomaly] = ()) -> list[str]:
    """Say how the attempts ended that did not come to their end, and after them the newest.

    What a verdict that is `shown` below says as well is not said twice.
    """
    several = len(endings) > 1
    below = {(a.attempt, a.message) for a in shown}
    texts = []
    for each in endings:
        end = each.end.to_json()
        if (each.attempt, each.end.message) in below:
            end["message"] = f"{each.end.state}, see below"
        texts.append(told(end, each.attempt if several else None))
    if any(texts) and not texts[-1] and endings[-1].end.state in {ENDED, RUNNING}:
        texts[-1] = f"attempt {endings[-1].attempt}: {endings[-1].end.message}"
    return [plain(text) for text in texts if text]


def judged(held: Completeness, damaged: bool) -> str:  # noqa: FBT001
    """Say how much of the run the verdicts are about."""
    steps = _steps(held.sampled)
    if held.complete and not damaged:
        return f"judged: {steps}{' so far' if held.live else ''}"
    return f"judged: what is held, {held.held} of {steps} of all ranks"


def _steps(number: int) -> str:
    return f"{number} sampled step{'' if number == 1 else 's'}"


def nothing(held: Completeness, damaged: bool, hidden: int, level: str) -> str:  # noqa: FBT001
    """Say that nothing was found, and in how much; of what nobody saw nothing is said."""
    below = f" at level {level} or above ({hidden} below)" if hidden else ""
    steps = _steps(held.sampled)
    if held.complete and not damaged:
        return f"no anomalies{below}{' so far' if held.live else ''} in {steps}"
    if held.empty and not damaged:
        return NOTHING_SAMPLED
    if not held.held:
        return f"nothing found{below} in what is held: no sampled step of all ranks"
    return f"nothing found{below} in what is held: {held.held} of {steps} of all ranks"


def as_json(name: str, ordered: list[Anomaly], held: Completeness) -> dict[str, Any]:
    """Return the object that `--json` prints; its fields are a contract (docs/reference/cli.md)."""
    return {
        "run": name,
        "format_version": 1,
        "judged": held.to_json(),
        "anomalies": [_fields(a) for a in ordered],
    }


def _fields(anomaly: Anomaly) -> dict[str, Any]:
    return {field: getattr(anomaly, field) for field in FIELDS}


def lines(groups: list[Episode], *, several: bool) -> list[str]:
    """Lay the verdicts out in columns, what followed indented below its cause.

    `several`: the run has more than one attempt.
    """
    rows = []
    for group in groups:
        if group.cause:
            rows.append(row(group.cause, several=several))
        indent = "  " if group.cause else ""
        for alike in _alike(group.followed):
            if len(alike) <= MOST_ALIKE:
                rows += [row(a, indent, several=several) for a in alike]
            else:
                level, step, _, *where, text = row(alike[0], indent, several=several)
                who = ranks_text(a.rank for a in alike if a.rank is not None)
                rows.append((level, step, who, *where, f"{text} ({len(alike) - 1} more alike)"))
    return table(rows)


def _key(a: Anomaly) -> object:
    """Return what verdicts have in common that say the same of a rank each."""
    text = a.message.replace(f"rank {a.rank} ", "", 1)
    place = (a.level, a.attempt, a.step, a.micro, a.place, a.phase, a.first_cause)
    return place, a.detector, text, id(a) if a.rank is None else None


def _alike(found: Sequence[Anomaly]) -> Iterator[list[Anomaly]]:
    """Return verdicts in groups of which the same is said of a rank each, in their order."""
    groups: dict[object, list[Anomaly]] = {}
    for a in found:
        groups.setdefault(_key(a), []).append(a)
    for a in found:  # few of which the same is said stay where they are
        alike = groups[_key(a)]
        if len(alike) <= MOST_ALIKE:
            yield [a]
        elif a is alike[0]:
            yield alike


def _phase(anomaly: Anomaly) -> str:
    if is_vague(anomaly):
        return UNOBSERVED  # the message says where
    return "after forward" if is_past_forward(anomaly) else anomaly.phase


def row(anomaly: Anomaly, indent: str = "", *, several: bool = False) -> tuple[str, ...]:
    """Return the columns of one verdict; `several`: the run has more than one attempt."""
    attempt = f" attempt {anomaly.attempt}" if anomaly.attempt or several else ""
    cause = " (first cause)" if anomaly.first_cause else ""
    return (
        indent + anomaly.level.upper(),
        f"step {anomaly.step} micro {anomaly.micro}{attempt}",
        f"rank {UNOBSERVED if anomaly.rank is None else anomaly.rank}",
        anomaly.place or UNOBSERVED,
        _phase(anomaly),
        f"{anomaly.detector}: {anomaly.message}{cause}",
    )
