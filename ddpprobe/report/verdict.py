"""The verdict in words: what went wrong first, and what came of it."""

from __future__ import annotations

import glob
import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import final

from ddpprobe.ends.anomalies import TITLES, is_past_forward, is_vague
from ddpprobe.ends.end import ENDED, RUNNING, told
from ddpprobe.reader.text import plain
from ddpprobe.records.step import STATE_KINDS, Anomaly
from ddpprobe.report.captured_cause import CapturedCause
from ddpprobe.report.encode import ranks_named
from ddpprobe.report.story import Story

MOST_CAUSES = 8
MOST_FOLLOWED = 6
_KINDS = {
    "input": "input", "output": "output", "grad_output": "gradient of the output",
    "grad_input": "gradient of the input", "param": "parameter",
    "grad_local": "gradient before the reduction", "grad": "gradient after the reduction",
    "buffer": "buffer", "optim_state": "state of the optimizer", "update": "change by the step",
}  # fmt: skip
_NAMED = ("parameter", "buffer")  # their own name is told, and not whose they are
_WITHOUT_ROWS = ("input", *STATE_KINDS)
_PHASES = {"forward": "in the forward pass", "backward": "in the backward pass",
           "step": "after the backward pass"}  # fmt: skip


@final
@dataclass(frozen=True, slots=True)
class Where:
    """Where it happened; None or empty where it is not known, or nobody is to blame.

    `attempt` is None where there is only one; `phase` is a word, `during` what a sentence says.
    `micro` is None where it was behind the backward; there these are empty of a rank that was lost.
    """

    step: int
    micro: int | None
    rank: int | None
    attempt: int | None
    module: str | None
    kind: str
    phase: str
    during: str


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """One first cause: a title, what the detector says, where, and what followed."""

    title: str
    level: str
    message: str
    where: Where
    commands: list[str] = field(default_factory=list)
    followed: list[str] = field(default_factory=list)
    more: int = 0
    inputs: str = ""


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """What the page says first.

    `tone` is good, warn, or bad; `headline` one sentence; `findings` the first causes; `aftermath`
    what else came of it, `alone` the first anomalies that belong to no first cause, and `commands`
    what to type to look closer at the first of them; `hidden` says how many there are beside
    `findings`, or without any beside `alone`.
    """

    tone: str
    headline: str
    findings: list[Finding]
    aftermath: list[str]
    alone: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    hidden: int = 0


def judge(story: Story) -> Verdict:
    """Find the words."""
    several = len(story.info["attempts"]) > 1
    groups, path = story.episodes, str(story.info["path"])
    captured = [*story.captured, *[None] * len(groups)]
    found = [
        _finding(path, g.cause, g.followed, kept, several=several)
        for g, kept in zip([g for g in groups if g.cause is not None], captured, strict=False)
        if g.cause is not None
    ]
    others = [a for g in groups if g.cause is None for a in g.followed]
    alone = [_line(a) for a in others]
    said = [f.message for f in found] or [a.message for a in others[:MOST_FOLLOWED]]
    tone = "bad" if found else "warn" if alone or story.lost or not story.held.complete else "good"
    return Verdict(
        tone, _headline(story, found, others), found[:MOST_CAUSES], list(_aftermath(story, said)),
        [] if found else alone[:MOST_FOLLOWED],
        [] if found or not others else _commands(path, others[0], None),
        max(0, len(found) - MOST_CAUSES if found else len(alone) - MOST_FOLLOWED),
    )  # fmt: skip


def _headline(story: Story, found: list[Finding], others: list[Anomaly]) -> str:
    if not found:
        return _without_cause(story, others)
    first = found[0].where
    what = ""
    if first.module is not None:
        of = " " if first.kind in _NAMED else " of "
        what = f": {first.kind}{of}{first.module}" if first.kind else f": {first.module}"
    rank = "" if first.rank is None else f" on rank {first.rank}"
    when = f" at step {first.step}"
    when += "" if first.attempt is None else f" of attempt {first.attempt}"
    when += "" if first.micro is None else f", micro-batch {first.micro}"
    when += f", {first.during}" if first.during else ""
    return f"{found[0].title}{what}{rank}{when}"


def _without_cause(story: Story, others: list[Anomaly]) -> str:
    """Say what is known where there is no first cause: of what nobody saw, nothing."""
    steps = f"{story.records:,} recorded step{'' if story.records == 1 else 's'}"
    if not story.records:
        if story.lost:
            return "Nothing could be read"
        return "No step was recorded yet" if story.held.live else "No step was recorded"
    pages = sum(a.level == "page" for a in others)
    weaker = len(others) - pages
    parts = [f"{pages} page{'s' * (pages > 1)} of which none is known to be the first"] * (
        pages > 0
    )
    parts += [f"{weaker} weaker anomal{'y' if weaker == 1 else 'ies'}"] * (weaker > 0)
    if pages:
        return f"{', '.join(parts)}, in {steps}"
    if story.held.complete:
        nothing = "No anomalies" if not story.lost else "Nothing found"
        return f"{', '.join(['No page', *parts]) if parts else nothing} in {steps}"
    share = f"{story.held.held:,} of {story.held.sampled:,} sampled steps of all ranks"
    nothing = ", ".join(["No page", *parts]) if parts else "Nothing found"
    return f"{nothing} in what is held: {share}"


def _finding(
    path: str,
    cause: Anomaly,
    followed: list[Anomaly],
    captured: CapturedCause | None,
    *,
    several: bool,
) -> Finding:
    behind = cause.phase == "step"  # all micro-batches
    vague = is_vague(cause)
    where = Where(
        cause.step, None if behind else cause.micro, cause.rank, cause.attempt if several else None,
        None if cause.module is None else cause.module or "(root)",
        _KINDS.get(cause.kind or "", cause.kind or ""), "" if vague else cause.phase,
        "" if vague else _during(cause),
    )  # fmt: skip
    title = TITLES.get(cause.detector, cause.detector)
    lines = [_line(a) for a in followed[:MOST_FOLLOWED]]
    more = len(followed) - len(lines)
    commands = _commands(path, cause, captured)
    inputs = "" if captured is None else _inputs(captured)
    return Finding(title, cause.level, cause.message, where, commands, lines, more, inputs)


def _during(cause: Anomaly) -> str:
    """Say in which part of the step it was."""
    if is_past_forward(cause):
        return "after the forward pass"
    return _PHASES.get(cause.phase, cause.phase)


def _inputs(captured: CapturedCause) -> str:
    if not captured.inputs:
        return ""
    many = captured.inputs > 1
    if captured.bad:
        one = len(captured.bad) == 1
        return f"{', '.join(captured.bad)} {'was' if one else 'were'} not finite (captured)."
    return f"Its input{'s were' if many else ' was'} finite (captured)."


def _commands(path: str, cause: Anomaly, captured: CapturedCause | None) -> list[str]:
    """Return what to type to look closer; quoted for a shell, whatever the names hold."""
    run = shlex.quote(plain(path))
    if cause.module is None:
        return [f"ddpprobe anomalies {run}"]
    if cause.kind in _WITHOUT_ROWS:  # what is around it has
        owner = cause.module.rpartition(".")[0] if cause.kind in STATE_KINDS else cause.module
        site = shlex.quote(plain(glob.escape(owner) + "*"))
    elif cause.kind == "update":  # of a module; the rows are those of its parameters
        site = shlex.quote(plain(f"{glob.escape(cause.module)}*:update"))
    else:
        site = shlex.quote(plain(glob.escape(f"{cause.module}:{cause.kind}")))
    rank = "" if cause.rank is None else f" --rank {cause.rank}"
    steps = f"{max(0, cause.step - 100)}:{cause.step + 20}"
    trace = f"ddpprobe trace {run} --site {site}{rank} --steps {steps}"
    if captured is None:
        return [trace]
    module = shlex.quote(plain(captured.module))
    again = f"ddpprobe replay {run} --step {cause.step} --module {module}{rank}"
    return [trace, f"{again} --build YOUR_MODULE:FUNCTION"]


def _line(anomaly: Anomaly) -> str:
    rank = "" if anomaly.rank is None else f", rank {anomaly.rank}"
    where = f"{anomaly.place}: " if anomaly.place else ""
    return f"step {anomaly.step}{rank}: {where}{anomaly.message}"


def _aftermath(story: Story, said: Collection[str]) -> Iterator[str]:
    """Say what came of it, but not how the run ended if a message that is `said` tells it."""
    if story.loss_lost:
        _, step, ranks = story.loss_lost
        who = ranks_named(ranks, len(story.labels.ranks))
        yield f"The loss is first not finite at step {step}, on {who}."
    if story.skipped:
        yield f"The optimizer skipped {story.skipped} step{'s' if story.skipped > 1 else ''}."
    several = len(story.info["attempts"]) > 1
    for attempt in story.info["attempts"]:
        text = told(attempt["end"], attempt["attempt"] if several else None)
        if text and attempt["end"]["message"] not in said:
            yield f"{text}."
    yield from _last_step(story, several=several)


def _last_step(story: Story, *, several: bool) -> Iterator[str]:
    """Say how far the newest attempt came: a rank may be further than its last sampled step.

    An attempt before it may have come further, and the next one then began again further back.
    """
    if not story.info["attempts"]:
        return
    newest = story.info["attempts"][-1]
    shares = [s for s in story.held.shares if s.attempt == newest["attempt"]]
    steps = [n for n in (newest["steps"]["last"], *(s.reached for s in shares)) if n is not None]
    if newest["steps"]["last"] is None and all(s.began is None for s in shares):
        return  # before its first step it may say that it is in it
    last, whole = max(steps), f"attempt {newest['attempt']}" if several else "the run"
    if story.info["state"] == RUNNING:
        yield f"{whole.capitalize()} is under way, at step {last}."
    elif several and story.info["state"] == ENDED:
        yield f"{whole.capitalize()} came to its end, at step {last}."
    else:
        yield f"The last step{f' of {whole}' if several else ''} is {last}."
