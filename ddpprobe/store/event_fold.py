"""Folding what is rare, and wanted at once: anomalies, readings of the host, lives and deaths."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddpprobe.records.step import Anomaly
from ddpprobe.rundir import framing, paths
from ddpprobe.rundir.framing import Frame
from ddpprobe.rundir.journal import JournalTail
from ddpprobe.store.commit import GroupWriter
from ddpprobe.store.format import attempt_key, escape
from ddpprobe.store.manifest import Consumed
from ddpprobe.store.root import Root
from ddpprobe.store.segments import JournalSource, json_of


@dataclass(slots=True)
class _Pending:
    events: list[tuple[str, int, str]] = field(default_factory=list)
    samples: list[tuple[int, str]] = field(default_factory=list)
    anomalies: list[Anomaly] = field(default_factory=list)


class EventFold:
    """Everything of one node and attempt that is no record.

    Anomalies and events are committed by the next `flush`, readings when their journal segment is
    complete. What a failing disk refused stays pending.
    """

    def __init__(
        self, run: paths.RunDir, root: Root, node: str, attempt: int, *, durable: bool
    ) -> None:
        self._run, self._root, self._attempt, self._durable = run, root, attempt, durable
        self._node_key = f"{attempt_key(attempt)}/{node}"
        self._anomaly_key = f"{attempt_key(attempt)}/anomalies"
        self._tails: dict[str, JournalTail] = {}
        self._meta: dict[str, Any] = {}
        self._pending = _Pending()
        self._ends: dict[str, int] = {}
        self._refused: dict[str, set[int]] = {}  # frames that are whole and make no sense
        self._done = dict(self._open(self._node_key).consumed)
        self._told = dict(self._open(self._anomaly_key).consumed)

    def poll(self, source: JournalSource) -> None:
        """Look at a daemon's journal, its open segment included."""
        tail = self._tails.setdefault(source.name, JournalTail(source.directory))
        for frame in tail.poll():
            self._ends[source.name] = frame.seq + 1
            self._take(source.name, frame)

    def take_life(self, source: JournalSource, frames: list[Frame], end: int) -> None:
        """Take the LIFE frames of a rank's segments, read up to `end`."""
        for frame in frames:
            self._take(source.name, frame)
        if frames:
            self._ends[source.name] = max(end, self._ends.get(source.name, 0))

    def flush(self, *, everything: bool) -> int:
        """Commit what is pending; return the number of rows. Raises OSError as a commit does."""
        rows = self._flush_anomalies() if self._pending.anomalies else 0
        behind = any(self._done.get(k, Consumed()).through < end for k, end in self._ends.items())
        if self._pending.events or (everything and behind):
            rows += self._flush_node()
        return rows

    def is_committed(self, source: JournalSource, end: int) -> bool:
        """Return whether everything below `end` of a daemon's journal is in."""
        return (
            source.name not in self._refused
            and self._done.get(source.name, Consumed()).through >= end
        )

    def close(self) -> None:
        """Close the journals."""
        for tail in self._tails.values():
            tail.close()

    def _take(self, name: str, frame: Frame) -> None:
        if frame.type == framing.ANOMALY:
            if not self._told.get(name, Consumed()).has(frame.seq):
                self._take_anomaly(name, frame)
            return
        value = (
            json_of(frame) if frame.type in {framing.META, framing.LIFE, framing.SAMPLE} else None
        )
        if value is None:
            return
        text = framing.encode_json(value).decode()
        if frame.type == framing.META:
            self._meta = self._meta or dict(value)
        elif self._done.get(name, Consumed()).has(frame.seq):
            return
        elif frame.type == framing.LIFE:
            if (name, frame.seq, text) not in self._pending.events:
                self._pending.events.append((name, frame.seq, text))
        elif type(value.get("time_ns")) is int and abs(value["time_ns"]) < 1 << 63:
            self._pending.samples.append((value["time_ns"], text))

    def _take_anomaly(self, name: str, frame: Frame) -> None:
        try:
            self._pending.anomalies.append(framing.decode_anomaly(frame.payload))
        except ValueError:  # readers say so, as long as its journal is there and not consumed
            self._refused.setdefault(name, set()).add(frame.seq)

    def _told_of(self, name: str) -> Consumed:
        """Return which frames of a journal need not be looked at for anomalies any more."""
        end, refused = self._ends[name], self._refused.get(name)
        if not refused:
            return Consumed(end)
        first = min(refused)
        return Consumed(first, frozenset(range(first, end)) - refused)

    def _flush_anomalies(self) -> int:
        group = self._open(self._anomaly_key)
        if not group.exists:
            group.define({"kind": "anomalies", "attempt": self._attempt}, {})
        found = self._pending.anomalies
        group.append("anomaly", anomaly_columns(found))
        told = {name: self._told_of(name) for name in self._tails if name in self._ends}
        self._root.prepare(self._attempt)
        group.commit(told)
        self._told |= told
        self._pending.anomalies = []
        return len(found)

    def _flush_node(self) -> int:
        group = self._open(self._node_key)
        if not group.exists:
            attrs = {"kind": "node", "attempt": self._attempt, "meta": self._meta}
            group.define(attrs, {})
        events, samples = self._pending.events, self._pending.samples
        group.append(
            "sample",
            {"sample_time": [t for t, _ in samples], "sample_json": [s for _, s in samples]},
        )
        group.append(
            "event",
            {
                "event_source": [name for name, _, _ in events],
                "event_seq": [seq for _, seq, _ in events],
                "event_json": [text for _, _, text in events],
            },
        )
        done = {name: Consumed(end) for name, end in self._ends.items()}
        self._root.prepare(self._attempt)
        group.commit(done)
        self._done |= done
        self._pending.events, self._pending.samples = [], []
        return len(events) + len(samples)

    def _open(self, key: str) -> GroupWriter:
        return GroupWriter(self._run, key, durable=self._durable)


def anomaly_columns(anomalies: list[Anomaly]) -> dict[str, list[Any]]:
    """Return the arrays over dimension `anomaly`."""
    return {
        "detector": [escape(a.detector) for a in anomalies],
        "level": [escape(a.level) for a in anomalies],
        "anomaly_step": [a.step for a in anomalies],
        "micro": [a.micro for a in anomalies],
        "rank": [-1 if a.rank is None else a.rank for a in anomalies],
        "module": [escape(a.module or "") for a in anomalies],
        "module_named": [int(a.module is not None) for a in anomalies],
        "kind": [escape(a.kind or "") for a in anomalies],
        "phase": [escape(a.phase) for a in anomalies],
        "first_cause": [int(a.first_cause) for a in anomalies],
        "message": [escape(a.message) for a in anomalies],
        "values_json": [framing.encode_json(a.values).decode() for a in anomalies],
        "sampled": [int(a.sampled) for a in anomalies],
        "attempt": [a.attempt for a in anomalies],
        "wall_time": [a.wall_time_ns for a in anomalies],
    }
