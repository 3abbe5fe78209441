"""Views as one OpenMetrics file: what `/metrics` would have said, with the time of each sample.

The daemon's own `Exposition` renders each view; here its lines are given a timestamp and put in the
order that the format asks for: families one after the other, in each of them the series one after
the other, in each of those the samples ascending in time. So that memory does not grow with the
run, the samples wait in one temporary file a family until all of them are known.
"""

from __future__ import annotations

import tempfile
from array import array
from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from typing import IO, BinaryIO, Self

from ddpprobe.metrics.labels import label_value
from ddpprobe.metrics.render import Exposition
from ddpprobe.records.node_view import NodeView

# Prometheus counts in milliseconds, and cuts what it reads off to one of them, sometimes the one
# before: samples that are two apart stay two.
APART_MS = 2
PENDING = 500_000  # samples held in memory, about 60 MB
EOF = b"# EOF\n"


@dataclass(slots=True)
class ExportReport:
    """What was exported.

    Attributes:
        samples, series: their number.
        moments: times at which a node was looked at, on the node with the most of them.
        first_ms, last_ms: Unix time of the first and the last sample; 0 if there is none.
        interval_ms: from one moment of a node to the next, the median.
        moved: moments whose time was not after that of the one before, and that were put after it.
        dropped: series refused by the cap of a target, summed over the moments.
    """

    samples: int = 0
    series: int = 0
    moments: int = 0
    first_ms: int = 0
    last_ms: int = 0
    interval_ms: int = 0
    moved: int = 0
    dropped: int = 0


@dataclass(slots=True)
class _Series:
    """One series: samples that wait, and where those of before lie in the file of its family."""

    pending: list[str] = field(default_factory=list)
    places: array[int] = field(default_factory=lambda: array("q"))


class _Family:
    """One family: its HELP and TYPE lines, and the samples of its series in a file."""

    def __init__(self, about: list[str]) -> None:
        self.about = about
        self.series: dict[str, _Series] = {}
        self._spilled: IO[bytes] | None = None

    @property
    def _file(self) -> IO[bytes]:
        if self._spilled is None:
            self._spilled = tempfile.TemporaryFile()  # noqa: SIM115  (closed by its owner)
        return self._spilled

    def spill(self) -> None:
        """Move the samples that wait to the file."""
        for series in self.series.values():
            if series.pending:
                data = "\n".join(series.pending).encode()
                series.places.extend((self._file.tell(), len(data)))
                self._file.write(data)
                series.pending.clear()

    def write(self, out: BinaryIO) -> None:
        """Write the family."""
        out.write("".join(f"{line}\n" for line in self.about).encode())
        for name, series in self.series.items():
            prefix = name.encode() + b" "
            for at in range(0, len(series.places), 2):
                self._file.seek(series.places[at])
                data = self._file.read(series.places[at + 1])
                out.write(prefix + data.replace(b"\n", b"\n" + prefix) + b"\n")

    def close(self) -> None:
        """Let go of the file."""
        if self._spilled is not None:
            self._spilled.close()


class OpenMetrics:
    """Takes views and writes them as one file; a context manager.

    Args:
        job: label `job` of every series; `instance` is the node, as a scrape would label them.
        run: the target label `run`, as discovery gives it to a live run.

    Attributes:
        report: what was taken so far, over all files.
        held: samples that wait in files of families.
    """

    def __init__(self, job: str, run: str) -> None:
        self.report = ExportReport()
        self._labels = f'job="{_escaped(job)}",run="{_escaped(run)}"'
        self._expositions: dict[str, Exposition] = {}
        self._families: dict[str, _Family] = {}
        self._seen: dict[str, dict[str, _Series]] = {}
        self._last: dict[str, int] = {}
        self._moments: Counter[str] = Counter()
        self._gaps = array("q")
        self._known: set[str] = set()
        self.held = 0
        self._waiting = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for family in self._families.values():
            family.close()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was taken since it was cleared."""
        return not self._families

    def write(self, out: BinaryIO) -> None:
        """Write what was taken since it was cleared."""
        self._spill()
        self.report.interval_ms = int(median(self._gaps or (0,)))
        for family in self._families.values():
            family.write(out)
        out.write(EOF)

    def clear(self) -> None:
        """Forget what was written; what is added from now on makes another file, later in time."""
        self.__exit__(None, None, None)
        self._families, self._seen, self.held = {}, {}, 0

    def add(self, view: NodeView) -> None:
        """Take a view; they ascend in time on each node."""
        exposition = self._expositions.setdefault(view.node, Exposition())
        lines = exposition.render(view, openmetrics=True).decode().split("\n")
        stamp, seen = self._stamp(view), self._seen.setdefault(view.node, {})
        about: list[str] = []
        for line in lines:
            if line.startswith("#"):
                about = [line] if line.startswith("# HELP ") else [*about, line]
                continue
            name, _, value = line.rpartition(" ")
            if name:
                series = seen.get(name)
                if series is None:
                    series = seen[name] = self._open(about, name, view.node)
                series.pending.append(f"{value} {stamp}")
                self._waiting += 1
        self.report.dropped += exposition.refused
        if self._waiting > PENDING:
            self._spill()

    def _spill(self) -> None:
        for family in self._families.values():
            family.spill()
        self.report.samples += self._waiting
        self.held += self._waiting
        self._waiting = 0

    def _open(self, about: list[str], name: str, node: str) -> _Series:
        """Begin a series, and its family if that is new; its labels are those after a scrape."""
        family = self._families.setdefault(about[0], _Family(about))
        target = f'instance="{_escaped(node)}",{self._labels}'
        metric, _, labels = name.partition("{")
        labelled = f"{metric}{{{target},{labels}" if labels else f"{metric}{{{target}}}"
        self._known.add(labelled)
        self.report.series = len(self._known)
        return family.series.setdefault(labelled, _Series())

    def _stamp(self, view: NodeView) -> str:
        """Return the time of a view in seconds, after the one before it on its node."""
        now, last = view.time_ns // 10**6, self._last.get(view.node)
        if now < (last or 0) + APART_MS:
            now = (last or 0) + APART_MS
            self.report.moved += 1
        if last is not None:
            self._gaps.append(now - last)
        report = self.report
        report.first_ms = min(report.first_ms or now, now)
        report.last_ms = max(report.last_ms, now)
        self._last[view.node] = now
        self._moments[view.node] += 1
        report.moments = max(self._moments.values())
        return f"{now // 1000}.{now % 1000:03d}"


def _escaped(value: str) -> str:
    """Return a label value as it stands between the quotes of a line."""
    text = label_value(value)
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
