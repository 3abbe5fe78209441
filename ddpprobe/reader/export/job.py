"""One export: a part of a run, in one of the formats."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from ddpprobe.errors import RunError
from ddpprobe.metrics.labels import label_value, run_label
from ddpprobe.reader import long_table
from ddpprobe.reader.expired import in_words
from ddpprobe.reader.export.blocks import find_promtool, make_blocks
from ddpprobe.reader.export.openmetrics import ExportReport, OpenMetrics
from ddpprobe.reader.export.replayed_views import views
from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.run import Run
from ddpprobe.reader.selection import Selection
from ddpprobe.reader.under_way import is_live
from ddpprobe.records.node_view import NodeView
from ddpprobe.rundir.paths import RunDir, rank_name
from ddpprobe.store.manifest import Lost

Advance = Callable[[int], object]
# promtool holds all samples of a block in memory, about 150 bytes each; so a long run is cut in
# time, which also spares it to read the whole file for each of its blocks.
BLOCK_SAMPLES = 2_000_000


class Job:
    """Writes one part of a run.

    Every method returns what was written as plain values, and raises RunError if that would be
    nothing. `advance` is told the number of records read; `records` is how many there will be.
    """

    def __init__(self, run: Run, part: Selection) -> None:
        self.run, self.part = run, part
        self._merged_reader = MergedReader(RunDir(run.path))

    @property
    def name(self) -> str:
        """Label `job` of all series: a replay is told from the live job of the same name."""
        return label_value(f"replay:{self.run.name}")

    @property
    def label(self) -> str:
        """Target label `run` of all series, as a live run has it."""
        return run_label(self.run.identity) or self.name

    @property
    def lost(self) -> list[Lost]:
        """What was found damaged or missing."""
        return list(dict.fromkeys([*self.run.lost, *self._merged_reader.lost]))

    def records(self, *, of_all: bool) -> int | None:
        """Return how many records will be read, as far as the store knows; None if it does not.

        Args:
            of_all: the merged ones and each rank's, as for the metrics; else those of the table.
        """
        if self.part.steps != slice(None):
            return None
        found = 0
        for attempt in self.part.attempts(self._merged_reader):
            own = of_all or self.part.rank is not None
            names = (
                [rank_name(r) for r in self.part.ranks(self._merged_reader, attempt)] if own else []
            )
            names += ["merged"] if of_all or self.part.rank is None else []
            groups = [self._merged_reader.group(attempt, name) for name in names]
            found += sum(group.rows for group in groups if group)
        return found or None

    def openmetrics(self, out: BinaryIO, advance: Advance) -> dict[str, Any]:
        """Write one OpenMetrics file."""
        with OpenMetrics(self.name, self.label) as file:
            for view in self._views(advance):
                file.add(view)
            if not file.report.moments:
                raise self._nothing()
            file.write(out)
            return _facts(file.report)

    def blocks(self, directory: Path, advance: Advance) -> dict[str, Any]:
        """Write blocks of Prometheus below a directory that is empty or not there."""
        find_promtool()
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise RunError(f"{directory}: blocks go into a new or empty directory; name another")
        with OpenMetrics(self.name, self.label) as file:
            made = 0
            for view in self._views(advance):
                file.add(view)
                if file.held >= BLOCK_SAMPLES:
                    made += _cut(file, directory, advance)
            if not file.report.moments:
                raise self._nothing()
            made += 0 if file.is_empty else _cut(file, directory, advance)
            return {**_facts(file.report), "blocks": made}

    def csv(self, out: BinaryIO, advance: Advance) -> dict[str, Any]:
        """Write the long table as CSV."""
        from ddpprobe.reader.export.csv_file import write_csv  # noqa: PLC0415

        text = io.TextIOWrapper(out, encoding="utf-8", newline="")
        try:
            rows = write_csv(long_table.blocks(self._merged_reader, self.part, advance), text)
        finally:
            text.detach()  # which flushes; the stream is its owner's to close
        return self._counted(rows)

    def parquet(self, out: BinaryIO, advance: Advance) -> dict[str, Any]:
        """Write the long table as Parquet."""
        from ddpprobe.reader.export.parquet import write_parquet  # noqa: PLC0415

        return self._counted(
            write_parquet(long_table.blocks(self._merged_reader, self.part, advance), out)
        )

    def overview(self, out: BinaryIO, advance: Advance) -> dict[str, Any]:
        """Write a row for each site and each scalar of the whole run as Parquet."""
        from ddpprobe.reader.export.overview import export_overview  # noqa: PLC0415

        found = export_overview(self.run, out, advance)
        if not found["rows"]:
            raise self._nothing()
        return dict(found)

    def _views(self, advance: Advance) -> Iterator[NodeView]:
        live, anomalies = is_live(RunDir(self.run.path)), self.run.anomalies()
        return views(
            self._merged_reader, self.part, anomalies,
            where=self.run.where, live=live, advance=advance,
        )  # fmt: skip

    def _counted(self, rows: int) -> dict[str, Any]:
        if not rows:
            raise self._nothing()
        return {"rows": rows, "columns": len(long_table.TYPES)}

    def _nothing(self) -> RunError:
        if self.lost:
            return RunError(f"nothing to export: {self.lost[0]}", exit_code=3)
        if self.part.steps == slice(None):
            where = "" if self.part.attempt is None else f" in attempt {self.part.attempt}"
            return RunError(f"{self.run.path}: no step was recorded{where}")
        if gone := self.run.expired_steps(self.part.steps):
            return RunError(in_words(gone))
        return RunError("no recorded step in --steps; `ddpprobe info RUN` says which there are")


def _cut(file: OpenMetrics, directory: Path, advance: Advance) -> int:
    """Turn what was taken so far into blocks; return how many they are."""
    with tempfile.NamedTemporaryFile(dir=directory.parent, prefix=".ddpprobe-") as out:
        file.write(cast("BinaryIO", out))
        out.flush()
        file.clear()
        return make_blocks(Path(out.name), directory, lambda: advance(0))


def _facts(report: ExportReport) -> dict[str, Any]:
    return {
        "samples": report.samples, "series": report.series, "moments": report.moments,
        "from": report.first_ms / 1000, "to": report.last_ms / 1000,
        "interval": report.interval_ms / 1000, "moved": report.moved, "dropped": report.dropped,
    }  # fmt: skip
