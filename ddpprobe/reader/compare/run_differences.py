"""What else differs between two runs: bits of their parameters, and how they were started."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from ddpprobe.reader.compare.timeline import aligned, timeline
from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.run import Run
from ddpprobe.records.environment import of_metas
from ddpprobe.rundir.paths import RunDir

# Of a process, not of what it computed.
_OWN = {
    "rank", "local_rank", "node", "node_index", "attempt", "pid", "pid_start", "run_id", "name",
    "started_ns", "created_ns", "head", "head_url", "role", "format_version", "process",
    "environment", "environment_of",
}  # fmt: skip
_LOOKS = 8  # records: the first ones say which parameters have a checksum


@dataclass(frozen=True, slots=True)
class Bits:
    """The first parameter whose bits differ, by its checksum on `rank` after `step`.

    `shard` is "" for a whole parameter; `agreed` the last step before at which all were equal.
    """

    step: int
    rank: int
    fqn: str
    shard: str
    agreed: int | None


class Circumstance(NamedTuple):
    """What was different when two runs were started: its name, and what each run says of it."""

    name: str
    a: object
    b: object


def first_bits(
    a: Run, b: Run, advance: Callable[[int], None] = lambda _: None
) -> tuple[int, Bits | None]:
    """Return how many parameters (or shards) have checksums in both runs, and the first to part.

    Ranks that hold the same parameters as a lower one are left alone: the detector `desync` tells
    whether replicas agree within a run.

    Args:
        a: a run.
        b: another one.
        advance: told 1 for each record that was read.
    """
    covered: set[tuple[str, str]] = set()
    first: Bits | None = None
    for rank in sorted(set(a.ranks()) & set(b.ranks())):
        fresh = (_named(a, rank) & _named(b, rank)) - covered
        if fresh:
            covered |= fresh
            found = _first_of(a, b, rank, fresh, first, advance)
            first = found or first
    return len(covered), first


def _named(run: Run, rank: int) -> set[tuple[str, str]]:
    return {key for record in islice(timeline(run, rank), _LOOKS) for key in record.digests}


def _first_of(
    a: Run, b: Run, rank: int, keys: set[tuple[str, str]], before: Bits | None,
    advance: Callable[[int], None],
) -> Bits | None:  # fmt: skip
    """Find the first difference on one rank, if it is earlier than one that is known."""
    agreed = None
    for one, two in aligned(timeline(a, rank), timeline(b, rank)):
        advance(1)
        if one is None or two is None or not (one.digests and two.digests):
            continue
        if before is not None and one.step >= before.step:
            return None
        for key, held in one.digests.items():
            if key in keys and key in two.digests and _of(held) != _of(two.digests[key]):
                return Bits(one.step, rank, *key, agreed)
        agreed = one.step
    return None


def _of(held: Mapping[int, int]) -> set[int]:
    return set(held)


def reasons(a: Run, b: Run) -> list[Circumstance]:
    """Return what was different when the runs were started.

    What the lowest rank said of itself in the last start: topology, device, schedule, options, and
    what it ran on, as far as both say it.
    """
    one, two = _facts(a), _facts(b)
    return [
        Circumstance(name, one[name], two[name])
        for name in sorted(one.keys() & two.keys())
        if one[name] != two[name]
    ]


def _facts(run: Run) -> dict[str, Any]:
    """Return what the lowest rank said of itself, and what it runs on."""
    ranks, attempts = run.ranks(), run.attempts()
    if not ranks:
        return {}
    meta = MergedReader(RunDir(run.path)).facts(attempts[-1], ranks[0]).meta
    environments, _ = of_metas([meta])
    own = {k: v for k, v in meta.items() if k not in _OWN}
    return {**environments.get(ranks[0], {}), **own, "starts": len(attempts)}


def said(value: object) -> str:
    """Return what a run says of itself as it is printed: `-` where that is nothing."""
    if value is None or value in ("", [], {}):
        return "-"
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return ", ".join(value)
    return value if isinstance(value, str) else json.dumps(value)
