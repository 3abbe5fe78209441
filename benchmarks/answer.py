"""Answers one question about a run in a fresh process without torch: `answer.py RUN WHAT`.

Prints the seconds from `ddpprobe.open` on, and the peak of the process's memory in MB, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.memory import peak
from ddpprobe.reader.run import open_run
from ddpprobe.reader.verify.verify import verify
from ddpprobe.store import reader  # noqa: F401  (that a process imports it once is no query)

SITE = "blocks.3.mlp:output"


def main(path: str, what: str) -> None:
    started = time.perf_counter()
    run = open_run(path)
    ask: dict[str, Callable[[], Any]] = {
        "open": lambda: None,
        "anomalies": run.anomalies,
        "series": lambda: run.series(SITE, "rms"),
        "rank series": lambda: run.series(SITE, "rms", rank=1),
        "info": run.info,
        "verify": lambda: verify(run),
    }
    ask[what]()
    seconds = time.perf_counter() - started
    assert run.lost == [], run.lost
    assert "torch" not in sys.modules
    print(json.dumps({"s": seconds, "mb": peak()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
