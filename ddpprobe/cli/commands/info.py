"""Say what ran: ranks, topology, steps, sites, sizes, and how complete each rank's record is."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Iterator
from typing import Any

from ddpprobe.cli.output import report_gaps, say, say_json, table
from ddpprobe.cli.run_argument import add_run, opened
from ddpprobe.ends.end import RUNNING, told
from ddpprobe.reader.text import (
    UNOBSERVED,
    commit,
    per_cent,
    plain,
    size,
    span,
    steps_in_words,
    wrapping,
)
from ddpprobe.records.environment import Unlike
from ddpprobe.records.rank_names import numbers_text, ranks_text

MOST_ORDERS = MOST_NOTES = MOST_UNLIKE = 20  # lines of an attempt
MOST_UNSEALED = 4  # nodes that are named
SINGLE_RANKS = 64  # with a line each; of more those have one together of which the same is said
OWN = {"install": "install(capture=...)", "first bad module": "the first bad module"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print what is known of the run."""
    run_ = opened(args.run)
    info = run_.info()
    if args.json:
        say_json(info)
    else:
        for line in lines(info):
            say(line)
    return report_gaps(run_.lost, info["unknown"])


def lines(info: dict[str, Any]) -> Iterator[str]:
    """Lay out what `Run.info` returns: the run, then each attempt with its ranks."""
    yield from table((name, text) for name, text in _facts(info) if text)
    for attempt in info["attempts"]:
        yield ""
        sealed = ", sealed" if attempt["sealed"] else ""
        torn = f", {size(attempt['torn_bytes'])} torn off" if attempt["torn_bytes"] else ""
        steps = steps_in_words(attempt)
        yield f"attempt {attempt['attempt']}: steps {steps}{sealed}{torn}"
        if attempt["ranks"]:
            yield from table(_ranks(attempt["ranks"]), right=(0, 3, 5, 7))
            yield from _unseen(attempt["ranks"])
        yield from _said(attempt)
        if attempt["silent_ranks"]:
            yield f"ranks without a record: {numbers_text(attempt['silent_ranks'])}"
        yield from _orders(attempt["orders"], info["world_size"])


def _said(attempt: dict[str, Any]) -> Iterator[str]:
    """Say what was typed, and what the script chose and said."""
    if (command := attempt["command"]) is not None:
        yield f"command: {plain(shlex.join(command['words']))}"
        where = plain(command["directory"])
        yield f"in: {where}" + (f" (commit {commit(command)})" if commit(command) else "")
    settings = [
        f"{name} off"
        if given is None
        else " ".join([name, *(f"{k}={v}" for k, v in given.items())])
        for name, given in attempt["detectors"].items()
    ]
    if settings:
        yield f"detectors: {', '.join(settings)}"
    for unlike in attempt["unlike"][:MOST_UNLIKE]:
        ranks = {v["value"]: v["ranks"] for v in unlike["values"]}
        yield f"unlike {plain(Unlike(unlike['name'], ranks))}"
    if len(attempt["unlike"]) > MOST_UNLIKE:
        yield f"and {len(attempt['unlike']) - MOST_UNLIKE} more differ: --json has them all"
    for change in attempt["changed"][:MOST_UNLIKE]:
        name, was, now = (plain(change[key]) for key in ("name", "before", "now"))
        yield f"since the attempt before: {name}: {now}, it was {was}"
    if len(attempt["changed"]) > MOST_UNLIKE:
        yield f"and {len(attempt['changed']) - MOST_UNLIKE} more changed: --json has them all"
    if attempt["config"]:
        yield f"config: {', '.join(f'{plain(k)}={plain(v)}' for k, v in attempt['config'].items())}"
    for note in attempt["notes"][:MOST_NOTES]:
        where = f"after step {note['step']}" if note["step"] >= 0 else "before the first step"
        yield f"noted {where}: {plain(note['what'])}"
    if len(attempt["notes"]) > MOST_NOTES:
        yield f"and {len(attempt['notes']) - MOST_NOTES} notes more: --json has them all"


def _facts(info: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "run", info["name"]
    yield "id", info["run_id"] or ""
    yield "path", info["path"]
    yield "state", info["state"]
    yield "started", _when(info["created_ns"])
    yield "topology", ", ".join(_topology(info))
    yield "sampling", _sampling(info)
    yield "overhead", _overhead(info)
    yield "steps", steps_in_words(info)
    yield "sites", str(info["sites"])
    parts = [f"{name} {size(n)}" for name, n in info["bytes"].items() if name != "total"]
    yield "size", f"{size(info['bytes']['total'])} ({', '.join(parts)})"
    yield "anomalies", ", ".join(f"{n} {level}" for level, n in info["anomalies"].items())
    yield "uploaded to", str(info["destination"] or "")
    for upload in info["uploads"]:
        why = upload["error"] or "not all groups are there"
        yield "upload", f"{upload['node']} is not done ({why}); finish with: {upload['finish']}"
    for left in info["unsealed"][:MOST_UNSEALED]:
        yield "unsealed", f"{left['node']} is not all in the store; finish with: {left['finish']}"
    if (more := len(info["unsealed"]) - MOST_UNSEALED) > 0:
        yield "unsealed", f"{more} nodes more: --json has them all"
    end = info["end"]
    yield "end", (told(end) or end["message"]) if end and end["state"] != RUNNING else ""


def _sampling(info: dict[str, Any]) -> str:
    if info["every"] is None:
        return ""
    asked, pace = f"every {_count(info['every'], 'step')}", info["pace"]
    if pace is None:
        return asked
    budget = f"budget={_known(pace['budget'])}"
    if pace["every"] == info["every"]:
        return f"{asked}, within {budget}"
    return f"{asked}, {_known(pace['every'])} from step {_known(pace['step'])} on by {budget}"


def _overhead(info: dict[str, Any]) -> str:
    """Say what ddpprobe adds to a step, as it was last measured in the run."""
    said, pace = info["overhead"], info["pace"]
    budget = "" if pace is None else f"budget {_percent(pace['budget'])}"
    if said is None:
        return budget and f"not measured yet, {budget}"
    most = f" (rank {said['rank']}, the most)" if (info["world_size"] or 0) > 1 else ""
    # Without unsampled steps, which a budget leaves, what emptied caches cost is not seen.
    least = "at least " if info["every"] == 1 and pace is None else ""
    told = f"{least}{_percent(said['ratio'])} of a step's own time{most}"
    return f"{told}, {budget}" if budget else told


def _percent(ratio: object) -> str:
    if not isinstance(ratio, int | float):
        return UNOBSERVED
    return f"{float(f'{100 * ratio:.2g}'):g} %"  # two digits, and 130 instead of 1.3e+02


def _topology(info: dict[str, Any]) -> Iterator[str]:
    if info["world_size"] is not None:
        yield f"{_count(info['world_size'], 'rank')} on {_count(info['nodes'], 'node')}"
    yield from wrapping(info)
    if info["torch"]:
        yield f"torch {info['torch']}"
    if info["hostname"]:
        yield f"rank 0 on {info['hostname']}"


def _ranks(ranks: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    yield ("rank", "node", "device", "pid", "steps", "sampled", "complete", "sites", "status")
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for rank in ranks:
        same: tuple[str, ...] = (
            span(rank["first_step"], rank["last_step"]),
            f"{rank['sampled']} of {rank['expected']}",
            per_cent(rank["completeness"]),
            _sites(rank),
            rank["status"],
        )
        alone = (*same, str(rank["rank"])) if len(ranks) <= SINGLE_RANKS else same
        groups.setdefault(alone, []).append(rank)
    for text, who in groups.items():
        places = (_all_of(who, key) for key in ("node", "device", "pid"))
        yield (numbers_text(rank["rank"] for rank in who), *places, *text[:5])


def _all_of(ranks: list[dict[str, Any]], key: str) -> str:
    """Return what ranks say of where they run: one thing, or how many they are."""
    found = {_known(rank[key]) for rank in ranks}
    return found.pop() if len(found) == 1 else f"{len(found)} of them"


def _sites(rank: dict[str, Any]) -> str:
    """Say how many of the places that a rank watches delivered data at its last sampled step."""
    expected, observed = rank["sites_expected"], rank["sites_observed"]
    return UNOBSERVED if expected is None else f"{observed} of {expected}"


def _unseen(ranks: list[dict[str, Any]]) -> Iterator[str]:
    """Name what is not observed, ranks that say the same together."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        silent, unsupported, dropped = rank["silent"], rank["unsupported"], rank["dropped"]
        texts = [
            f"never called: {', '.join(name or '(root)' for name in silent)}" if silent else "",
            f"not supported: {', '.join(f'{k} ({n})' for k, n in unsupported.items())}"
            if unsupported
            else "",
            f"lost: {'; '.join(f'{why} ({n})' for why, n in dropped.items())}" if dropped else "",
            *(
                f"infinite without harm since step {_known(one['step'])}: {one['site']} "
                f"({', '.join(one['values'])})"
                for one in rank["steady"]
            ),
        ]
        for text in filter(None, texts):
            groups.setdefault(plain(text), []).append(rank["rank"])
    for text, who in groups.items():
        yield f"{ranks_text(who)}: {text}"


def _orders(orders: list[dict[str, Any]], world: object) -> Iterator[str]:
    """List what was kept in full, or done, on whose word and by how many ranks."""
    if not orders:
        return
    rows = [("", "steps", "ranks", "kept", "modules", "why")]
    for order in orders[:MOST_ORDERS]:
        one = order["first"] == order["last"]
        steps = str(order["first"]) if one else f"{order['first']} to {order['last']}"
        kept, ranks = UNOBSERVED, order["heard"]
        if order["action"] == "capture":
            kept, ranks = (
                f"{size(order['bytes'])} at {_count(order['steps'], 'step')}",
                order["ranks"],
            )
        late = f", {len(order['late'])} heard too late" if order["late"] else ""
        modules = "all" if order["modules"] == 0 else _known(order["modules"])
        why = OWN.get(order["by"]) or f"{order['by']}: {order['reason']}"
        whose = f"{len(ranks)} of {_known(world)}{late}"
        rows.append((order["action"], steps, whose, kept, modules, why))
    yield from ("", *table(rows))
    if len(orders) > MOST_ORDERS:
        yield f"{len(orders) - MOST_ORDERS} more: --json lists them"


def _count(n: object, what: str) -> str:
    return f"{_known(n)} {what}{'' if n == 1 else 's'}"


def _known(value: object) -> str:
    return UNOBSERVED if value is None else plain(value)


def _when(time_ns: object) -> str:
    if not isinstance(time_ns, int) or not 0 <= time_ns < 2**63:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_ns / 1e9))
