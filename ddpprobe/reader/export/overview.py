"""The overview of a run from all that is held of it: as its daemon writes it when it seals the run.

The daemon's is of what the head merged and judged. This one also has what only ranks wrote down.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import BinaryIO

import numpy as np

from ddpprobe.errors import RunError
from ddpprobe.reader.export.parquet import NO_PYARROW
from ddpprobe.reader.run import Run
from ddpprobe.records.step import StepRecord
from ddpprobe.store.columns import LabelAxis, SiteAxis, encode_rows, encode_scalars
from ddpprobe.store.overview import TYPES, Overview, facts_of
from ddpprobe.store.overview_writer import write_overview

_OF_THE_NEWEST = ("world_size", "nodes", "wrapper", "torch", "hostname")  # in `Run.info`
_BATCH = 64  # records that are in memory together


def export_overview(run: Run, out: BinaryIO, advance: Callable[[int], object]) -> dict[str, int]:
    """Write the overview as Parquet; return the number of its rows and columns.

    Args:
        run: live, sealed or crashed.
        out: where to.
        advance: told the number of records that were read.

    Raises:
        RunError: pyarrow is not installed.
    """
    overview, records = Overview(), run.records()
    while batch := list(islice(records, _BATCH)):
        _take(overview, batch)
        advance(len(batch))
    attempts, endings = run.attempts(), run.endings()
    config: dict[str, str] = {}
    info = run.info()
    for told in info["attempts"]:
        config |= told["config"]
    facts = facts_of(
        {**run.identity, **{key: info[key] for key in _OF_THE_NEWEST}},
        config,
        state=endings[-1].end.state if endings else "unknown",
        attempt=attempts[-1] if attempts else 0,
        found=[a for a in run.anomalies() if a.attempt == attempts[-1]] if attempts else [],
    )
    try:
        rows = write_overview(overview.rows(facts), out)
    except ModuleNotFoundError as error:
        raise RunError(NO_PYARROW) from error
    return {"rows": rows, "columns": len(TYPES)}


def _take(overview: Overview, batch: list[StepRecord]) -> None:
    axis, names, ranks = SiteAxis(), LabelAxis[str](), LabelAxis[int]()
    rows, cells = encode_rows(batch, axis), encode_scalars(batch, names, ranks)
    steps, whole = [r.step for r in batch], [r.sampled and not r.partial for r in batch]
    overview.add_steps(np.array(steps), np.array(whole))
    overview.add_sites(axis.sites, rows["counts"], rows["values"])
    overview.add_scalars(names.labels, cells["scalars"], cells["scalar_given"] != 0)
