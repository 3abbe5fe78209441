"""What stands in the page as text: facts of the run, its ranks, its anomalies, its captures."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from ddpprobe.ends.end import RUNNING
from ddpprobe.reader.text import (
    UNOBSERVED,
    commit,
    number,
    per_cent,
    size,
    span,
    steps_in_words,
    wrapping,
)
from ddpprobe.records.rank_names import numbers_text, ranks_joined
from ddpprobe.records.reduction_law import same_factor
from ddpprobe.report.encode import ranks_named
from ddpprobe.report.ranks import COMPARED, MOST_LISTED, differences, differs, standing_out
from ddpprobe.report.story import Story

MOST_ANOMALIES = 300
MOST_NAMED = 16
MOST_CAPTURES = 200
MOST_NOTES = 20
MOST_SAID = 8  # different texts of attempts
_OWN = ("node", "hostname", "device", "pid")


def facts(story: Story) -> list[tuple[str, str]]:
    """Return what ran, a name and a text each."""
    return [(label, text) for label, text in _facts(story) if text]


def _facts(story: Story) -> Iterator[tuple[str, str]]:
    info = story.info
    yield "run", str(info["name"])
    yield "state", _state(info)
    yield "started", when(info["created_ns"])
    ranks, nodes = info["world_size"], info["nodes"]
    yield "ranks", "" if ranks is None else f"{ranks} on {nodes} node{'' if nodes == 1 else 's'}"
    yield "wrapper, backend", ", ".join(wrapping(info))
    yield "gradients reduced to", _reduced(story)
    yield "torch", str(info["torch"] or "")
    yield "rank 0 on", str(info["hostname"] or "")
    yield "sampling", _sampling(info)
    yield "steps", steps_in_words(info)
    yield "sites", f"{info['sites']:,}"
    yield from _said(info["attempts"])
    yield "size", size(info["bytes"]["total"])
    yield "path", str(info["path"])
    yield "identity", info["identity_lost"] or ""


def _reduced(story: Story) -> str:
    """Say what the reduction made of the gradients, as far as sampled steps tell."""
    table = story.whole("reduction_factor")
    if not table.known:
        return ""
    low, high = float(np.nanmin(table.low)), float(np.nanmax(table.high))
    of_the_mean = "the mean of the ranks' own"
    if same_factor(low, high):
        return of_the_mean if same_factor(high, 1.0) else f"{number(high)} x {of_the_mean}"
    return f"{number(low)} to {number(high)} x {of_the_mean}"


def _said(attempts: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield what was typed, and what the script said and chose, of each attempt that differs."""
    told = {attempt["attempt"]: dict(_said_in(attempt)) for attempt in attempts}
    for label in dict.fromkeys(label for said in told.values() for label in said):
        yield label, _by_attempt({n: said.get(label, "") for n, said in told.items()})


def _said_in(attempt: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if (command := attempt["command"]) is not None:
        yield "command", shlex.join(command["words"])
        yield "in", command["directory"]
        yield "commit", commit(command)
    yield "config", ", ".join(f"{name}={value}" for name, value in attempt["config"].items())
    notes = attempt["notes"][:MOST_NOTES]
    yield "noted", ", ".join(f"{note['what']} ({_behind(note['step'])})" for note in notes)
    off = [name for name, given in attempt["detectors"].items() if given is None]
    yield "detectors off", ", ".join(off)


def _behind(step: int) -> str:
    return f"after step {step}" if step >= 0 else "before the first step"


def _by_attempt(texts: dict[int, str]) -> str:
    """Write texts of attempts as one; whose each is, unless all say the same, newest first."""
    whose: dict[str, list[int]] = {}
    for attempt, text in sorted(texts.items(), reverse=True):
        whose.setdefault(text, []).append(attempt)
    if len(whose) == 1:
        return next(iter(whose))
    said = [f"{_whose(numbers)}: {text}" for text, numbers in whose.items() if text]
    more = len(said) - MOST_SAID
    return "; ".join([*said[:MOST_SAID], *[f"{more} more in earlier attempts"] * (more > 0)])


def _whose(newest_first: list[int]) -> str:
    numbers = newest_first[::-1]
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 2 and last - first == len(numbers) - 1:
        return f"attempts {first}-{last}"
    shown = ", ".join(map(str, numbers[-MOST_NAMED:]))
    return f"attempt {first}" if first == last else f"attempts {shown}"


def _state(info: dict[str, Any]) -> str:
    if info["attempts"] and info["attempts"][-1]["sealed"]:
        return f"{info['state']}, sealed"
    return RUNNING if info["state"] == RUNNING else f"{info['state']}, without a seal"


def _sampling(info: dict[str, Any]) -> str:
    every, pace = info["every"], info["pace"]
    if every is None:
        return ""
    text = "every step" if every == 1 else f"every {every} steps"
    return f"{text}, now {pace['every']} by budget {pace['budget']}" if pace else text


def when(time_ns: object) -> str:
    """Write a Unix time; "" if it is none."""
    if not isinstance(time_ns, int) or not 0 < time_ns < 2**62:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_ns / 1e9))


def attempts(story: Story) -> list[dict[str, Any]]:
    """Return a line for each start of the run."""
    return [
        {
            "attempt": a["attempt"],
            "steps": steps_in_words(a),
            "ranks": len(a["ranks"]),
            "complete": _complete(a["ranks"]),
            "silent": numbers_text(a["silent_ranks"]),
            "torn": size(a["torn_bytes"]) if a["torn_bytes"] else "",
            "sealed": "yes" if a["sealed"] else "no",
            "end": _end(a["end"]),
        }
        for a in story.info["attempts"]
    ]


def _end(end: dict[str, Any]) -> str:
    """Return how an attempt ended, and by whose fault if that is known."""
    whose = f": {ranks_joined(end['ranks'])} ({end['how']})" if end["ranks"] else ""
    return f"{end['state']}{whose}"


def ranks(story: Story) -> dict[str, Any]:
    """Return the ranks of the last attempt: `columns` to compare, `rows`, number of `hidden` ones.

    A value is (median over the run, its ratio to the median over ranks, whether it differs).
    """
    medians = {what: found for what in COMPARED if (found := _medians(story, what))}
    ratio = {what: differences(story, what) for what in medians}
    told = story.info["attempts"][-1]["ranks"] if story.info["attempts"] else []
    blamed = standing_out(story)
    ordered = sorted(told, key=lambda r: (r["rank"] not in blamed, r["rank"]))[:MOST_LISTED]
    rows = [
        {
            **{key: UNOBSERVED if rank[key] is None else rank[key] for key in _OWN},
            "rank": rank["rank"],
            "status": rank["status"],
            "steps": span(rank["first_step"], rank["last_step"]),
            "complete": per_cent(rank["completeness"]),
            "short": rank["completeness"] is not None and rank["completeness"] < 1,
            "out": rank["rank"] in blamed,
            "values": [_compared(medians[w], ratio[w], rank["rank"]) for w in medians],
        }
        for rank in sorted(ordered, key=lambda r: r["rank"])
    ]  # fmt: skip
    titles = [COMPARED[what] for what in medians]
    return {"columns": titles, "rows": rows, "hidden": len(told) - len(rows)}


def anomalies(story: Story) -> dict[str, Any]:
    """Return the first of the anomalies in order of cause, and how many are `hidden`."""
    several = len(story.info["attempts"]) > 1
    rows = [
        {
            "anomaly": a,
            "follows": bool(group.cause) and a is not group.cause,
            "attempt": a.attempt if several else None,
            "site": a.place,
            "values": ", ".join(f"{k} {number(float(v))}" for k, v in a.values.items()),
        }
        for group in story.episodes
        for a in ([group.cause] if group.cause else []) + group.followed
    ]
    shown = rows[:MOST_ANOMALIES]
    return {"rows": shown, "hidden": len(rows) - len(shown), "several": several}


def captures(story: Story) -> list[dict[str, Any]]:
    """Return a line for each of the first steps of which full tensors are kept."""
    return [
        {
            "step": c.step, "attempt": c.attempt, "ranks": len(c.ranks),
            "modules": list(c.modules), "reason": c.reason,
            "complete": "yes" if c.complete else "no", "bytes": size(c.bytes),
            "dropped": size(c.dropped) if c.dropped else "nothing",
        }
        for c in story.captures[:MOST_CAPTURES]
    ]  # fmt: skip


def unseen(story: Story) -> list[str]:
    """Say which modules never reported, and what is not supported, ranks that agree together."""
    groups: dict[str, list[int]] = {}
    told = story.info["attempts"][-1]["ranks"] if story.info["attempts"] else []
    for rank in told:
        silent = ", ".join(name or "(root)" for name in rank["silent"])
        kinds = ", ".join(f"{kind} ({n})" for kind, n in rank["unsupported"].items())
        if silent:
            groups.setdefault(f"never called: {silent}", []).append(rank["rank"])
        if kinds:
            groups.setdefault(f"not supported: {kinds}", []).append(rank["rank"])
    return [f"{ranks_named(who, len(told))}: {text}" for text, who in groups.items()]


def _medians(story: Story, what: str) -> dict[int, float]:
    table = story.numbers(what)
    out = {}
    for rank, place_ in story.labels.ranks.items():
        values = table.mean[:, place_]
        values = values[np.isfinite(values)]
        if values.size:
            out[rank] = float(np.median(values))
    return out


def _compared(
    medians: dict[int, float], ratio: dict[int, float], rank: int
) -> tuple[str, str, bool]:
    value, log2 = medians.get(rank, math.nan), ratio.get(rank, math.nan)
    times = "" if math.isnan(log2) else f"{2**log2:.2f} x"
    return (f"{value:.4g}" if math.isfinite(value) else UNOBSERVED), times, differs(ratio, rank)


def _complete(told: list[dict[str, Any]]) -> str:
    shares = [rank["completeness"] for rank in told if rank["completeness"] is not None]
    return per_cent(min(shares, default=None))
