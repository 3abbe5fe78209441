"""What the node daemon costs: CPU and memory beside eight ranks, and a scrape at the series cap."""

from __future__ import annotations

import http.client
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks import command_line, tables
from benchmarks.memory import anonymous
from benchmarks.simulated import MODULES, PER_NODE, Model, meta
from ddpprobe.daemon import launch
from ddpprobe.daemon.server import Server
from ddpprobe.ends.anomalies import TITLES
from ddpprobe.metrics.render import Exposition
from ddpprobe.metrics.table import SERIES_LIMIT
from ddpprobe.records.node_view import NodeView, RankView
from ddpprobe.rundir import framing
from ddpprobe.rundir.heartbeat import STATES, HeartbeatWriter
from ddpprobe.rundir.journal import SEGMENT_FRAMES, JournalWriter
from ddpprobe.rundir.paths import RunDir, make_dir, node_name, write_json

EVERY, STEP_SECONDS = 10, 0.05
CPU_GOAL, SCRAPE_GOAL_MS = 0.10, 20.0
ACCEPT = {"text": "text/plain", "OpenMetrics": "application/openmetrics-text; version=1.0.0"}


class Daemon:
    """A real daemon on a run directory of its own, and eight journals that look like ranks."""

    def __init__(self, directory: Path, model: Model) -> None:
        self.run, self.model, self.steps = RunDir(make_dir(directory / "run")), model, 0
        write_json(self.run.run_json, {"run_id": "simulated", "name": "simulated"})
        node = node_name(0)
        self.journals = [
            JournalWriter(self.run.rank_journal(0, node, rank), meta(rank, PER_NODE))
            for rank in range(PER_NODE)
        ]
        self.beats = [
            HeartbeatWriter(self.run.heartbeat(0, node, rank)) for rank in range(PER_NODE)
        ]
        launch.start_daemon(
            self.run, node, head_url=None, listen="127.0.0.1:0", gather_listen=None, linger=0.0
        )
        said = launch.wait_for_daemon(self.run, node, 60.0)
        assert said is not None, self.run.daemon_file(node, "log").read_text()
        host, port = said["listen"].rsplit(":", 1)
        self.address, self.seen = (host, int(port)), psutil.Process(said["pid"])

    def step(self) -> None:
        """Do one optimizer step of all ranks: a heartbeat each, and a record if it is sampled."""
        for rank, (journal, beat) in enumerate(zip(self.journals, self.beats, strict=True)):
            beat.beat(
                step=self.steps, micro=0, state=STATES.index("forward"), steps=self.steps,
                skipped=0, sampled=self.steps // EVERY,
                phase_seconds=(0.0, 0.1, 0.2, 0.0), probe_seconds=0.01,
            )  # fmt: skip
            if self.steps % EVERY == 0:
                journal.append_record(self.model.record(rank, self.steps))
        self.steps += 1

    def backlog(self, records: int) -> None:
        """Do many steps at once, so that a block of the store is completed soon afterwards."""
        for _ in range(EVERY * records):
            self.step()

    def train(self, seconds: float) -> None:
        """Step every 50 ms for so long."""
        start = time.monotonic()
        for number in range(int(seconds / STEP_SECONDS)):
            self.step()
            time.sleep(max(0.0, start + (number + 1) * STEP_SECONDS - time.monotonic()))

    def cpu_seconds(self) -> float:
        """CPU time of the daemon so far, user and system."""
        times = self.seen.cpu_times()
        return times.user + times.system

    def close(self) -> None:
        """Say goodbye for all ranks and end it."""
        for journal, beat in zip(self.journals, self.beats, strict=True):
            journal.append_json(framing.LIFE, {"event": "closed", "status": "ok"})
            journal.close()
            beat.close()
        self.seen.terminate()
        self.seen.wait(60.0)


def shares(daemon: Daemon, seconds: float) -> tuple[float, list[float]]:
    """Return the daemon's CPU share of one core over two windows, and its memory (MiB) in each.

    Each window begins after the start (imports, first fold), which is stated apart.
    """
    found, memory = [], []
    for _ in range(2):
        before, start = daemon.cpu_seconds(), time.monotonic()
        daemon.train(seconds)
        found.append((daemon.cpu_seconds() - before) / (time.monotonic() - start))
        memory.append(anonymous(daemon.seen.pid))
    return max(memory), found


def capped_view(series: int) -> NodeView:
    """Return a head's view with more series than the cap lets through."""
    model = Model(modules=series)
    ranks = tuple(RankView(rank, rank, 1000 + rank, "cpu", up=True) for rank in range(PER_NODE))
    return NodeView(
        time.time_ns(), "simulated", "/runs/simulated", 0, node_name(0), PER_NODE, "2.13.0", "gloo",
        is_head=True, detectors=tuple(TITLES), ranks=ranks, merged=model.record(0, 1),
    )  # fmt: skip


def scrapes(address: tuple[str, int], accept: str, number: int) -> list[float]:
    """Return ms of `number` scrapes over one kept connection."""
    connection = http.client.HTTPConnection(*address)
    found = []
    for _ in range(number):
        start = time.perf_counter()
        connection.request("GET", "/metrics", headers={"Accept": accept})
        answer = connection.getresponse()
        answer.read()
        found.append((time.perf_counter() - start) * 1e3)
        assert answer.status == 200
    connection.close()
    return found


def scrape_rows(number: int) -> list[Sequence[object]]:
    """Measure rendering and scraping at the cap, in this process: its CPU time is known exactly."""
    view, exposition, rows = capped_view(SERIES_LIMIT), Exposition(), list[Sequence[object]]()
    made = []
    for _ in range(3):
        start = time.process_time()
        text, openmetrics = (exposition.render(view, flag) for flag in (False, True))
        made.append((time.process_time() - start) * 1e3)
    lines = sum(not line.startswith(b"#") for line in text.splitlines())
    server = Server("127.0.0.1:0")
    address = server.start()
    try:
        server.publish(text, openmetrics)
        host, port = address.rsplit(":", 1)
        for name, accept in ACCEPT.items():
            scrapes((host, int(port)), accept, 3)
            for count in (number, 10 * number):
                start = time.process_time()
                took = scrapes((host, int(port)), accept, count)
                cpu = (time.process_time() - start) * 1e3 / count
                mid = statistics.median(took)
                rows.append((
                    f"{name}, {lines} series, {count} scrapes", tables.spread(took, 2),
                    f"{cpu:.2f}", f"<= {SCRAPE_GOAL_MS:.0f}", tables.verdict(mid, SCRAPE_GOAL_MS),
                ))  # fmt: skip
    finally:
        server.stop()
    rows.append((
        f"making both formats, {lines} series (once per change, not per scrape)",
        tables.spread(made, 2), tables.spread(made, 2), "", "",
    ))  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> str:
    parser = command_line.parser("daemon_cost", __doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of the two windows")
    arguments = parser.parse_args(argv)
    seconds, settle = (2.0, 2.0) if arguments.quick else (arguments.seconds, 10.0)
    model = Model(30 if arguments.quick else MODULES)
    with tempfile.TemporaryDirectory() as directory:
        daemon = Daemon(Path(directory), model)
        try:
            daemon.backlog(0 if arguments.quick else SEGMENT_FRAMES - int(2 * settle) - 10)
            daemon.train(settle)
            begun = daemon.cpu_seconds()
            memory, found = shares(daemon, seconds)
            lived = scrapes(daemon.address, ACCEPT["OpenMetrics"], 20)
        finally:
            daemon.close()
    sites = len(model.values)
    cpu = tables.table(
        ("what", "figure", "goal", "holds"),
        [
            (
                "share of one core, two windows", " / ".join(f"{share:.3f}" for share in found),
                f"<= {CPU_GOAL:.2f}", tables.verdict(max(found), CPU_GOAL),
            ),
            ("CPU until then (imports, first store)", f"{begun:.1f} s in {settle:.0f} s", "", ""),
            ("its memory (anonymous)", f"{memory:.0f} MiB", "", ""),
            ("a scrape meanwhile, ms", tables.spread(lived, 2), f"<= {SCRAPE_GOAL_MS:.0f}",
             tables.verdict(statistics.median(lived), SCRAPE_GOAL_MS)),
        ],
    )  # fmt: skip
    scraped = tables.table(
        ("`/metrics` at the cap", "ms, min / **median** / max", "CPU ms each", "goal", "holds"),
        scrape_rows(10 if arguments.quick else 50),
    )
    text = (
        f"A real daemon beside {PER_NODE} journals to which this process writes what ranks write: "
        f"{sites} sites and {len(model.parameters)} checksums a record, every {EVERY}th of steps "
        f"of {STEP_SECONDS * 1e3:.0f} ms, a heartbeat each step; read, merged, judged, stored, "
        f"served. The windows last {seconds:.0f} s each; in one a block of 256 records of each "
        "journal is stored, which is due every 128 s. A scrape sends bytes that were made "
        "beforehand (both formats, plain and gzip), so ten times as many cost the same each. "
        f"CPU per scrape includes the client's, which runs in the same process. {os.cpu_count()} "
        "cores."
    )
    result = tables.section("The daemon beside the training", "daemon_cost", text, cpu, scraped)
    print(result)
    return result


if __name__ == "__main__":
    main()
