"""Answers one question about a run in a fresh process without torch: `answer.py RUN WHAT`.

Prints the seconds from `ddpprobe.open` on, and the peak of the process's memory in MB, as JSON; of
what is asked of a dataset also `sum`, that of the answer's numbers.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.memory import peak
from ddpprobe.reader.run import Run, open_run
from ddpprobe.reader.verify.verify import verify
from ddpprobe.store import reader  # noqa: F401  (that a process imports it once is no query)

SITE = "blocks.3.mlp:output"
ASK: dict[str, Callable[[Run], Any]] = {
    "open": lambda _: None,
    "anomalies": Run.anomalies,
    "series": lambda run: run.series(SITE, "rms"),
    "rank series": lambda run: run.series(SITE, "rms", rank=1),
    "info": Run.info,
    "verify": verify,
}
ASK_DATASET: dict[str, Callable[[Run], Any]] = {
    "last": lambda run: run.to_xarray(chunks={}).rms.isel(step=-1).compute(),
    "lazy": lambda run: run.to_xarray(chunks={}).rms.mean("step").compute(),
    "counts": lambda run: run.to_xarray(chunks={})["counts"].sum("step").compute(),
    "eager": lambda run: run.to_xarray().rms.mean("step"),
}


def main(path: str, what: str) -> None:
    started = time.perf_counter()
    run = open_run(path)
    answer = (ASK | ASK_DATASET)[what](run)
    told = {"s": time.perf_counter() - started, "mb": peak()}
    assert run.lost == [], run.lost
    assert "torch" not in sys.modules
    if what in ASK_DATASET:
        told["sum"] = float(answer.sum())
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
