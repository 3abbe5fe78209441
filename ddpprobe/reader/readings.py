"""What the daemons read of their hosts and of the ranks' processes, stored or only journalled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.rundir import framing
from ddpprobe.store import segments
from ddpprobe.store.manifest import Consumed

_HUGE = 1e300


@dataclass(frozen=True, slots=True)
class NodeReading:
    """One look at a node.

    Attributes:
        attempt: of the run.
        node: directory name of the node.
        time_ns: Unix time.
        host: name -> number; a `_ratio` is a share of 1, `_bytes` are bytes.
        ranks: the same of each rank's process.
    """

    attempt: int
    node: str
    time_ns: int
    host: Mapping[str, float]
    ranks: Mapping[int, Mapping[str, float]]


def read_readings(merged_reader: MergedReader, attempt: int) -> Iterator[NodeReading]:
    """Yield the readings of an attempt, node by node, each node's in the order of time."""
    # The journals first: what is folded meanwhile is in the store afterwards.
    told = list(_journalled(merged_reader, attempt))
    nodes = {n for n in merged_reader.groups(attempt) if n.startswith("node_")}
    for node in sorted(nodes | {source.node for source, _ in told}):
        group = merged_reader.group(attempt, node)
        consumed = group.consumed if group else {}
        samples: list[Mapping[str, Any] | None] = list(group.samples()) if group else []
        merged_reader.note(group)
        samples += [
            segments.json_of(frame)
            for source, frame in told
            if source.node == node and not consumed.get(source.name, Consumed()).has(frame.seq)
        ]
        found = [_reading(attempt, node, sample) for sample in samples if sample]
        yield from sorted((r for r in found if r), key=lambda r: r.time_ns)


def _journalled(
    merged_reader: MergedReader, attempt: int
) -> Iterator[tuple[segments.JournalSource, framing.Frame]]:
    for source in segments.sources_of(merged_reader.run, attempt):
        for number in segments.segments_of(source) if source.rank is None else ():
            try:
                frames = segments.read_segment(source.directory, number).frames
            except OSError:  # folded meanwhile; one that cannot be read is said by whoever needs it
                continue
            yield from ((source, frame) for frame in frames if frame.type == framing.SAMPLE)


def _reading(attempt: int, node: str, sample: Mapping[str, Any]) -> NodeReading | None:
    """Return a reading; None if it is not what a daemon writes."""
    time_ns, host, ranks = sample.get("time_ns"), sample.get("host"), sample.get("ranks")
    if not isinstance(time_ns, int) or not isinstance(host, Mapping):
        return None
    by_rank = ranks if isinstance(ranks, Mapping) else {}
    return NodeReading(
        attempt, node, time_ns, _numbers(host),
        {int(r): _numbers(v) for r, v in by_rank.items() if r.isdecimal() and isinstance(v, dict)},
    )  # fmt: skip


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    # JSON may hold integers that are no float.
    return {str(k): float(v) for k, v in found.items() if _is_number(v)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < _HUGE
