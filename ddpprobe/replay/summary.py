"""What ran, in one dictionary: ranks and their ends, steps, what is there and what is not."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddpprobe import inside, layout
from ddpprobe.records import Anomaly, Site
from ddpprobe.replay.completeness import UNKNOWN, Completeness, RankShare
from ddpprobe.replay.endings import Death, Ending, deaths_of
from ddpprobe.replay.overlay import Overlay
from ddpprobe.replay.rank_facts import Event, RankFacts
from ddpprobe.replay.told_orders import orders_of
from ddpprobe.replay.under_way import has_daemon


def _whole(said: object, default: int) -> int:
    """Return a number of a journal as it is, if it is one that fits into 64 bits."""
    return said if isinstance(said, int) and abs(said) < 2**63 else default


def summarize(
    overlay: Overlay, identity: dict[str, Any], anomalies: list[Anomaly], held: Completeness,
    endings: list[Ending],
) -> dict[str, Any]:  # fmt: skip
    """Return what `Run.info` documents."""
    live = held.live
    attempts = [_attempt(overlay, ending, held) for ending in endings]
    first = [s["steps"]["first"] for s in attempts if s["steps"]["first"] is not None]
    last = [s["steps"]["last"] for s in attempts if s["steps"]["last"] is not None]
    deaths = [s["first_death"] for s in attempts if s["first_death"]]
    levels = Counter(a.level for a in anomalies)
    return {
        "path": str(overlay.run.path),
        "name": str(identity.get("name") or overlay.run.path.name),
        **{key: identity.get(key) for key in _IDENTITY},
        "state": endings[-1].end.state if endings else UNKNOWN,
        "end": endings[-1].end.to_json() if endings else None,
        "complete": held.complete,
        "unknown": held.unknown(),
        "attempts": attempts,
        "steps": {"first": min(first, default=None), "last": max(last, default=None)},
        "pace": attempts[-1]["pace"] if attempts else None,
        "sites": max((s["sites"] for s in attempts), default=0),
        "bytes": _sizes(overlay.run),
        "first_death": deaths[0] if deaths else None,
        "anomalies": {level: levels[level] for level in ("page", "warn", "info")},
        "uploads": _uploads(overlay.run),
        "unsealed": [] if live else _unsealed(overlay.run, attempts[-1:]),
        "lost": [str(lost) for lost in overlay.lost],
    }


def _uploads(run: layout.RunDir) -> list[dict[str, str]]:
    """Return what daemons said of uploads that ended incomplete: node, error, finish."""
    found = []
    for name in inside.names(run.path, "daemon"):
        node, _, suffix = name.rpartition(".")
        if suffix == layout.UPLOAD:
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                said = inside.parse(inside.read_regular(run.path, f"daemon/{name}"))
                told = {key: str(said[key]) for key in ("error", "finish")}
                found.append({"node": node, **told})
    return found


def _unsealed(run: layout.RunDir, attempts: list[dict[str, Any]]) -> list[dict[str, str]]:
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


def _attempt(overlay: Overlay, ending: Ending, held: Completeness) -> dict[str, Any]:
    attempt = ending.attempt
    facts = [overlay.facts(attempt, rank) for rank in overlay.ranks(attempt)]
    events = overlay.events(attempt)
    deaths = deaths_of(ending)
    shares = {s.rank: s for s in held.shares if s.attempt == attempt}
    steps = [int(step) for f in facts for step in (*f.steps[:1], *f.steps[-1:])]
    silent = sorted(set(range(overlay.world_size(attempt))) - {f.rank for f in facts})
    sealed = {e.node for e in events if e.what.get("event") == "sealed"}
    ranks = []
    for each in facts:
        share = shares[each.rank]
        told = _rank(each, share, _status(each, events, deaths, share.end))
        ranks.append({**told, **_coverage(each, events), "dropped": _dropped(each, events)})
    return {
        "attempt": attempt,
        "steps": {"first": min(steps, default=None), "last": max(steps, default=None)},
        "pace": _pace(events),
        "sites": len({key for f in facts for key in f.sites}),
        "ranks": ranks,
        "silent_ranks": silent,
        "orders": orders_of(events),
        "end": ending.end.to_json(),
        "first_death": asdict(deaths[0]) if deaths and deaths[0].first else None,
        "sealed": bool(sealed),
        "unsealed": sorted({str(f.meta["node"]) for f in facts if "node" in f.meta} - sealed),
        "torn_bytes": sum(f.torn for f in facts),
    }


def _pace(events: list[Event]) -> dict[str, Any] | None:
    """Return the last change of the interval that a budget made; None where there is no budget."""
    said = [e.what for e in events if e.what.get("event") == "budget"]
    last = max(said, key=lambda what: _whole(what.get("step"), -1), default=None)
    return last and {key: last.get(key) for key in ("step", "every", "budget", "ratio")}


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


def _coverage(facts: RankFacts, events: list[Event]) -> dict[str, Any]:
    """Return what a rank last said about the places it watches; None where it never did."""
    own = layout.rank_name(facts.rank)
    said = [e for e in events if e.source == own and e.what.get("event") == "sites"]
    last = max(said, key=lambda e: e.seq).what if said else {}
    unsupported, silent = last.get("unsupported"), last.get("silent")
    return {
        "sites_expected": last.get("expected"),
        "sites_observed": last.get("observed"),
        "unsupported": unsupported if isinstance(unsupported, dict) else {},
        "silent": [str(name) for name in silent] if isinstance(silent, list) else [],
        "steady": _steady(e.what for e in sorted(events, key=lambda e: e.seq) if e.source == own),
    }


def _steady(said: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the sites whose infinities a rank knows to do no harm, as it last said."""
    found: dict[str, dict[str, Any]] = {}
    for what in said:
        if what.get("event") == "steady" and isinstance(what.get("values"), list):
            fqn, kind, leaf = (str(what.get(key) or "") for key in ("fqn", "kind", "leaf"))
            site = str(Site(fqn, kind, leaf))
            values = [str(value) for value in what["values"]]
            found[site] = {"site": site, "values": values, "step": what.get("step")}
    return list(found.values())


def _dropped(facts: RankFacts, events: list[Event]) -> dict[str, int]:
    """Return what a rank said it has lost, {reason: how many}."""
    lost: Counter[str] = Counter()
    own = layout.rank_name(facts.rank)
    for what in (e.what for e in events if e.source == own):
        if what.get("event") == "dropped":
            lost[str(what.get("reason"))] += _whole(what.get("count"), 0)
    return dict(sorted(lost.items()))


def _status(facts: RankFacts, events: list[Event], deaths: list[Death], end: str) -> str:
    own = layout.rank_name(facts.rank)
    said = [e.what for e in events if e.source == own]
    death = next((d for d in deaths if d.rank == facts.rank), None)
    closed = [what.get("status", "ok") for what in said if what.get("event") == "closed"]
    if "ok" in closed:
        return "closed"
    if death is not None:
        return f"died ({death.signal})"
    if closed:
        return "closed by an exception"
    return "no last word" if end == UNKNOWN else end


# What a run directory holds, and by which names: what else lies there is not looked at.
_PARTS = {
    inside.STORE: r"zarr\.json|attempt_\d{3,}", "manifest": r".*\.(log|lock)",
    "journal": r"\d{3,}", "heartbeat": r"\d{3,}", "captures": r"\d{3,}",
    "daemon": r"node_\d{4,}\..*|requests|token",
}  # fmt: skip


def _sizes(run: layout.RunDir) -> dict[str, int]:
    """Return the bytes of the parts of a run, and of all of them."""
    found = {part: _size_of(run.path / part, re.compile(names)) for part, names in _PARTS.items()}
    for file in (run.run_json, run.lock):
        with contextlib.suppress(OSError):
            found[file.name] = file.lstat().st_size
    told = {"store": found[inside.STORE], **{p: found[p] for p in ("manifest", "journal")}}
    return {**told, "total": sum(found.values())}


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
