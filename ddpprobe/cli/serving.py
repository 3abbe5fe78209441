"""A past run in a throw-away Prometheus, for `export --serve`."""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpprobe.cli.local_prometheus import (
    LISTEN,
    NO_PROMETHEUS,
    PORTS_TRIED,
    is_there,
    prometheus,
)
from ddpprobe.cli.local_server import free_address, wait_for
from ddpprobe.cli.output import say, say_json, table
from ddpprobe.errors import RunError
from ddpprobe.reader.text import plain

if TYPE_CHECKING:
    from ddpprobe.reader.export.job import Job

Make = Callable[[Path], dict[str, Any]]
DASHBOARD = "ddpprobe-run"
# As Prometheus's own: how long a sample stands for what comes after it. Where steps are sampled
# more rarely than that, three of their intervals.
LOOKBACK_SECONDS = 300


def serve(job: Job, make: Make, keep: Path | None, listen: str | None, *, as_json: bool) -> None:
    """Make blocks, serve them until Ctrl-C, and leave nothing behind.

    Args:
        job: what to serve.
        make: makes the blocks in a directory and returns what they are.
        keep: a directory in which the blocks stay; None: nowhere.
        listen: HOST:PORT; None: the first free port from 9090 on.
        as_json: print one JSON object instead of text when it serves.

    Raises:
        RunError: there is no Prometheus or no promtool, or they refuse.
    """
    if not is_there():
        raise RunError(f"{NO_PROMETHEUS} on the blocks that --format blocks makes")
    address = free_address(listen or LISTEN, 1 if listen else PORTS_TRIED)
    beside = None if keep is None else keep.absolute().parent
    with tempfile.TemporaryDirectory(prefix=".ddpprobe-", dir=beside) as folder:
        home = Path(folder)
        found = make(keep or home / "data")
        if keep is not None:  # Prometheus writes beside the blocks, and merges them
            shutil.copytree(keep, home / "data", copy_function=os.link)
        config, log = home / "prometheus.yml", home / "prometheus.log"
        config.write_text("global: {}\n")
        lookback = max(LOOKBACK_SECONDS, math.ceil(3 * found["interval"]))
        flags = (
            "--storage.tsdb.retention.time=290y",  # the most it takes; less deletes old blocks
            f"--query.lookback-delta={lookback}s",
        )
        with prometheus(config, home / "data", address, log, flags) as server:
            facts = _facts(job, found, server.url)
            if as_json:
                say_json(facts)
            else:
                for line in _lines(facts):
                    say(line)
            sys.stdout.flush()
            wait_for(server)


def _facts(job: Job, found: dict[str, Any], url: str) -> dict[str, Any]:
    start, end = math.floor(found["from"]), math.ceil(found["to"])
    graph = {
        "g0.expr": f"ddpprobe_loss{{job={_quoted(job.name)}}}", "g0.tab": "0",
        "g0.range_input": f"{end - start}s",
        "g0.end_input": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(end)),
    }  # fmt: skip
    board = {"var-job": job.name, "var-run": job.label, "from": start * 1000, "to": end * 1000}
    return {
        "run": job.run.name, "format_version": 1, "url": url, "job": job.name, **found,
        "graph": f"{url}/graph?{urllib.parse.urlencode(graph)}",
        "dashboard": f"/d/{DASHBOARD}?{urllib.parse.urlencode(board)}",
    }  # fmt: skip


def _lines(facts: dict[str, Any]) -> list[str]:
    start, end = (
        time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(facts[name])) for name in ("from", "to")
    )
    rows = [
        ("Prometheus", facts["url"]),
        ("job", facts["job"]),
        ("time range", f"{start} to {end}"),
        ("a graph", facts["graph"]),
        ("Grafana", f"<your Grafana>{facts['dashboard']}"),
        ("data source", f"{facts['url']}, scrape interval {max(1, math.ceil(facts['interval']))}s"),
    ]
    served = f"{facts['samples']} samples of {facts['series']} series of {facts['run']}"
    return [plain(f"serving {served}; Ctrl-C ends it"), *table(rows)]


def _quoted(value: str) -> str:
    """Return a string of PromQL."""
    text = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'"{text}"'
