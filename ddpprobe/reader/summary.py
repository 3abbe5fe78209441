"""What ran, in one dictionary: ranks and their ends, steps, what is there and what is not."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from ddpprobe.detectors.suite import recorded
from ddpprobe.reader.completeness import Completeness, RankShare
from ddpprobe.reader.endings import Ending, deaths_of
from ddpprobe.reader.last_beats import last_beats
from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.order_history import orders_of
from ddpprobe.reader.rank_facts import Event, RankFacts
from ddpprobe.reader.rank_status import UNKNOWN, statuses_of
from ddpprobe.reader.under_way import has_daemon
from ddpprobe.records.environment import of_metas
from ddpprobe.records.events import (
    BudgetEvent,
    CommandEvent,
    DroppedEvent,
    NoteEvent,
    SealedEvent,
    SitesEvent,
    SteadyEvent,
    TopologyEvent,
)
from ddpprobe.records.events import Event as LifeEvent
from ddpprobe.records.step import Anomaly, Site
from ddpprobe.rundir import paths, safe_read
from ddpprobe.store.newest_identity import newest_identity


def summarize(
    merged_reader: MergedReader, identity: dict[str, Any], anomalies: list[Anomaly],
    held: Completeness, endings: list[Ending],
) -> dict[str, Any]:  # fmt: skip
    """Return what `Run.info` documents."""
    live = held.live
    attempts = [_attempt(merged_reader, ending, held) for ending in endings]
    for before, now in pairwise(attempts):
        now["changed"] = _changed(before["environment"], now["environment"])
    first = [s["steps"]["first"] for s in attempts if s["steps"]["first"] is not None]
    last = [s["steps"]["last"] for s in attempts if s["steps"]["last"] is not None]
    deaths = [s["first_death"] for s in attempts if s["first_death"]]
    levels = Counter(a.level for a in anomalies)
    return {
        "path": str(merged_reader.run.path),
        "name": str(identity.get("name") or merged_reader.run.path.name),
        **{key: identity.get(key) for key in _IDENTITY},
        **(_newest(merged_reader, attempts[-1], identity) if attempts else {}),
        "state": endings[-1].end.state if endings else UNKNOWN,
        "end": endings[-1].end.to_json() if endings else None,
        "complete": held.complete,
        "unknown": held.unknown(),
        "attempts": attempts,
        "steps": {"first": min(first, default=None), "last": max(last, default=None)},
        "began": min((n for s in attempts if (n := s["began"]) is not None), default=None),
        "reached": max((n for s in attempts if (n := s["reached"]) is not None), default=None),
        "pace": attempts[-1]["pace"] if attempts else None,
        "overhead": attempts[-1]["overhead"] if attempts else None,
        "sites": max((s["sites"] for s in attempts), default=0),
        "bytes": _sizes(merged_reader.run),
        "first_death": deaths[0] if deaths else None,
        "anomalies": {level: levels[level] for level in ("page", "warn", "info")},
        "uploads": _uploads(merged_reader.run),
        "unsealed": [] if live else _unsealed(merged_reader.run, attempts[-1:]),
        "lost": [str(lost) for lost in merged_reader.lost],
    }


def _uploads(run: paths.RunDir) -> list[dict[str, str]]:
    """Return what daemons said of uploads that ended incomplete: node, error, finish."""
    found = []
    for name in safe_read.names(run.path, "daemon"):
        node, _, suffix = name.rpartition(".")
        if suffix == paths.UPLOAD:
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                said = safe_read.parse(safe_read.read_regular(run.path, f"daemon/{name}"))
                told = {key: str(said[key]) for key in ("error", "finish")}
                found.append({"node": node, **told})
    return found


def _unsealed(run: paths.RunDir, attempts: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the nodes of an ended run that nobody is going to seal: node, finish."""
    # A copy from an object store has no journals, so there is nothing to be sealed here.
    nodes = [node for told in attempts for node in told["unsealed"] if run.attempts()]
    if not nodes or has_daemon(run):
        return []
    command = f"ddpprobe daemon --dir {shlex.quote(str(run.path))} --node"
    return [{"node": node, "finish": f"{command} {shlex.quote(node)}"} for node in nodes]


_IDENTITY = (
    "run_id", "format_version", "world_size", "nodes", "wrapper", "backend", "torch", "every",
    "hostname", "created_ns", "destination",
)  # fmt: skip


def _newest(
    merged_reader: MergedReader, told: dict[str, Any], identity: dict[str, Any]
) -> dict[str, Any]:
    """Return what the newest attempt, which `_attempt` has `told`, knows better than run.json."""
    events = merged_reader.events(told["attempt"])
    wrappers = (e.what.wrapper for e in events if isinstance(e.what, TopologyEvent))
    world = {"world_size": merged_reader.world_size(told["attempt"])}
    meta = {**merged_reader.rank_meta(told["attempt"]), **world}
    metas = [{**meta, **{key: rank[key] for key in _OWN}} for rank in told["ranks"]]
    return newest_identity(identity, metas or [world], wrappers)


_OWN = ("rank", "node", "hostname")  # of one rank


def _attempt(merged_reader: MergedReader, ending: Ending, held: Completeness) -> dict[str, Any]:
    attempt = ending.attempt
    facts = [merged_reader.facts(attempt, rank) for rank in merged_reader.ranks(attempt)]
    events = merged_reader.events(attempt)
    deaths = deaths_of(ending)
    shares = {s.rank: s for s in held.shares if s.attempt == attempt}
    steps = [int(step) for f in facts for step in (*f.steps[:1], *f.steps[-1:])]
    silent = sorted(set(range(merged_reader.world_size(attempt))) - {f.rank for f in facts})
    sealed = {e.node for e in events if isinstance(e.what, SealedEvent)}
    unsealed = sorted({str(f.meta["node"]) for f in facts if "node" in f.meta} - sealed)
    said, ranks, statuses = _said(events), list[dict[str, Any]](), statuses_of(ending)
    beats = last_beats(merged_reader.run, attempt)
    for each in facts:
        share = shares[each.rank]
        own = said.get(paths.rank_name(each.rank), [])
        told = _rank(each, share, statuses[each.rank])
        ratio = beats[each.rank][1].overhead_ratio if each.rank in beats else math.nan
        overhead = ratio if math.isfinite(ratio) else None  # it has not said any
        lost = {"dropped": _dropped(own), "overhead_ratio": overhead}
        ranks.append({**told, **_coverage(own), **lost})
    return {
        "attempt": attempt,
        "steps": {"first": min(steps, default=None), "last": max(steps, default=None)},
        "began": min((n for s in shares.values() if (n := s.began) is not None), default=None),
        "reached": max((n for s in shares.values() if (n := s.reached) is not None), default=None),
        "pace": _pace(events),
        "overhead": _overhead(ranks),
        "sites": len({key for f in facts for key in f.sites}),
        "ranks": ranks,
        "silent_ranks": silent,
        "orders": orders_of(events),
        "end": ending.end.to_json(),
        "first_death": asdict(deaths[0]) if deaths and deaths[0].first else None,
        **_notes(events),
        "command": _command(events),
        **_environment(facts),
        "changed": [],
        "detectors": recorded(merged_reader.rank_meta(attempt).get("detectors")),
        "sealed": bool(sealed) and not unsealed,
        "unsealed": unsealed,
        "torn_bytes": sum(f.torn for f in facts),
    }


def _notes(events: list[Event]) -> dict[str, Any]:
    """Return what the script said: `notes`, each once, and `config`, of each name the last."""
    said = [e.what for e in events if isinstance(e.what, NoteEvent)]
    notes = sorted({(note.step, note.what) for note in said if note.what})
    config: dict[str, str] = {}
    for note in sorted(said, key=lambda note: note.step):
        config |= note.config
    return {"notes": [{"step": step, "what": what} for step, what in notes], "config": config}


def _command(events: list[Event]) -> dict[str, Any] | None:
    """Return what was typed to start the attempt; None if no daemon saw it alive."""
    said = (e.what for e in events if isinstance(e.what, CommandEvent))
    first = next(said, None)
    return None if first is None else asdict(first)


def _environment(facts: list[RankFacts]) -> dict[str, Any]:
    """Return what the lowest rank runs on, and in what ranks differ, with the ranks of each."""
    environments, found = of_metas(f.meta for f in facts)
    return {
        "environment": environments[min(environments)] if environments else {},
        "unlike": [
            {"name": name, "values": [{"value": v, "ranks": ranks} for v, ranks in by.items()]}
            for name, by in found
        ],
    }


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[dict[str, str]]:
    """Return what an attempt runs on and the one before it did not; as far as both tell it."""
    return [
        {"name": name, "before": before[name], "now": now[name]}
        for name in sorted(before.keys() & now.keys())
        if before[name] != now[name]
    ]


def _pace(events: list[Event]) -> dict[str, Any] | None:
    """Return the last change of the interval that a budget made; None where there is no budget."""
    said = [e.what for e in events if isinstance(e.what, BudgetEvent)]
    last = max(said, key=lambda what: what.step, default=None)
    return None if last is None else asdict(last)


def _overhead(ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the largest overhead of a rank, and whose it is; None if no rank has said any."""
    said = [(r["overhead_ratio"], r["rank"]) for r in ranks if r["overhead_ratio"] is not None]
    if not said:
        return None
    ratio, rank = max(said, key=lambda one: (one[0], -one[1]))
    return {"ratio": ratio, "rank": rank}


def _rank(facts: RankFacts, share: RankShare, status: str) -> dict[str, Any]:
    meta = facts.meta
    return {
        "rank": facts.rank,
        **{key: meta.get(key) for key in ("local_rank", "node", "hostname", "device", "pid")},
        "status": status,
        "first_step": int(facts.steps[0]) if len(facts.steps) else None,
        "last_step": int(facts.steps[-1]) if len(facts.steps) else None,
        "sampled": share.held,
        "expected": share.sampled,
        "completeness": share.held / share.sampled if share.sampled else None,
    }


def _said(events: list[Event]) -> dict[str, list[LifeEvent]]:
    """Return what each of those that write a journal said, by its name, in its order."""
    said: dict[str, list[LifeEvent]] = {}
    for event in sorted(events, key=lambda e: e.seq):
        said.setdefault(event.source, []).append(event.what)
    return said


def _coverage(said: list[LifeEvent]) -> dict[str, Any]:
    """Return what a rank last said about the places it watches; None where it never did."""
    last = next((what for what in reversed(said) if isinstance(what, SitesEvent)), None)
    return {
        "sites_expected": last and last.expected,
        "sites_observed": last and last.observed,
        "unsupported": dict(last.unsupported) if last else {},
        "silent": list(last.silent) if last else [],
        "steady": _steady(said),
    }


def _steady(said: list[LifeEvent]) -> list[dict[str, Any]]:
    """Return the sites whose infinities a rank knows to do no harm, as it last said."""
    found: dict[str, dict[str, Any]] = {}
    for what in said:
        if isinstance(what, SteadyEvent):
            site = str(Site(what.fqn, what.kind, what.leaf))
            found[site] = {"site": site, "values": list(what.values), "step": what.step}
    return list(found.values())


def _dropped(said: list[LifeEvent]) -> dict[str, int]:
    """Return what a rank said it has lost, {reason: how many}."""
    lost: Counter[str] = Counter()
    for what in said:
        if isinstance(what, DroppedEvent):
            lost[what.reason] += what.count
    return dict(sorted(lost.items()))


# What a run directory holds, and by which names: what else lies there is not looked at.
_PARTS = {
    safe_read.STORE: r"zarr\.json|attempt_\d{3,}", safe_read.MANIFESTS: r".*\.(log|lock)",
    "journal": r"\d{3,}", "heartbeat": r"\d{3,}", "captures": r"\d{3,}",
    "daemon": r"node_\d{4,}\..*|requests|token",
}  # fmt: skip


def _sizes(run: paths.RunDir) -> dict[str, int]:
    """Return the bytes of the parts of a run, and of all of them."""
    sizes = {part: _size_of(run.path / part, re.compile(names)) for part, names in _PARTS.items()}
    for file in (run.run_json, run.lock):
        with contextlib.suppress(OSError):
            sizes[file.name] = file.lstat().st_size
    return {
        "store": sizes[safe_read.STORE], "manifest": sizes[safe_read.MANIFESTS],
        "journal": sizes["journal"], "total": sum(sizes.values()),
    }  # fmt: skip


def _size_of(part: Path, names: re.Pattern[str]) -> int:
    """Return the bytes of what lies in a part of the run under such names; 0 of a link."""
    if part.is_symlink():
        return 0
    return sum(_size(entry) for entry in _entries(part) if names.fullmatch(entry.name))


def _size(entry: os.DirEntry[str]) -> int:
    """Return the bytes of a file, or of all below a directory; of a link those of the link."""
    if entry.is_dir(follow_symlinks=False):
        return sum(map(_size, _entries(entry.path)))
    try:
        return entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0  # folded meanwhile


def _entries(path: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
