"""Runs real daemons and plain processes in the place of ranks, and reads back what they left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ddpprobe.records.step import Anomaly, StepRecord
from ddpprobe.rundir import framing
from ddpprobe.rundir.journal import JournalTail
from ddpprobe.rundir.paths import RunDir, make_dir, node_name, write_json
from ddpprobe.store.reader import StoredGroup

from ..nursery import Child, nursery
from ..waiting import deadline

RANK = Path(__file__).parent / "rank_process.py"
PATIENT = RANK.with_name("patient_daemon.py")
TOKEN = "a-secret-of-this-run"
Process = subprocess.Popen[Any] | Child


class Harness:
    """One run directory with its processes; every one of them is ended by `close`.

    They are forked (`nursery`), but for those that a command begins (`prefix`).

    Attributes:
        patient: its daemons wait for slow ranks and nodes as long as it takes.
    """

    patient = False

    def __init__(self, directory: Path) -> None:
        self.run = RunDir(make_dir(directory / "run"))
        write_json(self.run.run_json, {"run_id": "test-run", "name": "test", "format_version": 1})
        make_dir(self.run.path / "daemon")
        self.processes: list[Process] = []
        self.acks: dict[tuple[int, int], Path] = {}

    def rank(self, rank: int, world: int = 2, network: str | None = None, **spec: Any) -> Process:
        """Start a rank, in a network of `ip netns`; `rank_process` says what `spec` may say."""
        spec = {"steps": 40, "delay": 0.02, "local_world_size": world, **spec}
        spec |= {"run": str(self.run.path), "rank": rank, "world_size": world}
        ack = self.run.path / f"ack_{spec.get('attempt', 0)}_{rank}"
        self.acks[spec.get("attempt", 0), rank] = ack
        with ack.open("w") as out:
            words = [str(RANK), json.dumps(spec)]
            return self._start((), words, out.fileno(), 2, network=network)

    def daemon(
        self,
        node: int = 0,
        *extra: str,
        prefix: Sequence[str] = (),
        network: str | None = None,
        linger: float = 0.0,
        token: str | None = TOKEN,
        run: RunDir | None = None,
    ) -> Process:
        """Start a daemon in the foreground of this test."""
        words = [str(PATIENT)] if self.patient else ["-m", "ddpprobe.daemon"]
        words += ["--dir", str((run or self.run).path), "--node", node_name(node)]
        words += ["--linger", str(linger), *extra]
        if "--listen" not in extra:
            words += ["--listen", "127.0.0.1:0"]
        log = (self.run.path / f"daemon_{node}.txt").open("a")
        with log:
            env = {} if token is None else {"DDPPROBE_TOKEN": token}
            return self._start(prefix, words, log.fileno(), log.fileno(), env, network)

    def log(self, node: int = 0) -> str:
        """Return what the node's daemons printed."""
        return (self.run.path / f"daemon_{node}.txt").read_text()

    def acked(self, rank: int, attempt: int = 0) -> list[int]:
        """Return the steps a rank has in its journal."""
        text = self.acks[attempt, rank].read_text()
        return [int(line) for line in text.split("\n")[:-1]]

    def journal_of(self, rank: int, node: int = 0, attempt: int = 0) -> bytes:
        """Return what a rank's journal holds now, as it is."""
        directory = self.run.rank_journal(attempt, node_name(node), rank)
        return b"".join(path.read_bytes() for path in sorted(directory.glob("*.wal")))

    def said(self, node: int = 0) -> dict[str, Any] | None:
        """Return what the node's daemon says of itself, None before it does."""
        with contextlib.suppress(FileNotFoundError):
            return dict(json.loads(self.run.daemon_file(node_name(node), "json").read_bytes()))
        return None

    def metrics(self, node: int = 0) -> str:
        """Scrape the node's daemon; "" while it has nothing to say."""
        said = self.said(node)
        try:
            with urllib.request.urlopen(f"http://{said['listen']}/metrics") as answer:  # type: ignore[index]
                return str(answer.read().decode())
        except (urllib.error.URLError, TypeError):
            return ""

    def frames(self, node: int = 0, attempt: int = 0) -> list[tuple[int, Any]]:
        """Return (type, decoded payload) of what is in a daemon's journal."""
        tail = JournalTail(self.run.daemon_journal(attempt, node_name(node)))
        out: list[tuple[int, Any]] = []
        for frame in tail.poll():
            match frame.type:
                case framing.RECORD:
                    out.append((frame.type, framing.decode_record(frame.payload, tail.tables)))
                case framing.ANOMALY:
                    out.append((frame.type, framing.decode_anomaly(frame.payload)))
                case framing.META | framing.LIFE | framing.SAMPLE:
                    out.append((frame.type, frame.json()))
        tail.close()
        return out

    def until_merged(
        self, wanted: Callable[[StepRecord], bool], timeout: float = 20.0
    ) -> list[StepRecord]:
        """Wait until the head's journal has such a record; return those that it has by then.

        What it holds is read once: at every look it would take longer than what is waited for.
        """
        tail = JournalTail(self.run.daemon_journal(0, node_name(0)))
        found: list[StepRecord] = []

        def look() -> bool:
            for frame in tail.poll():
                if frame.type == framing.RECORD:
                    record = framing.decode_record(frame.payload, tail.tables)
                    found.extend([record] if wanted(record) else [])
            return bool(found)

        with contextlib.closing(tail):
            wait(look, timeout)
        return found

    def life(self, event: str, node: int = 0, attempt: int = 0) -> list[Mapping[str, Any]]:
        """Return LIFE events of one sort, in the order of the sealed store."""
        group = StoredGroup(self.run, f"attempt_{attempt:03d}/{node_name(node)}")
        stored = [e for source, _, e in group.events() if source == "daemon"]
        return [e for e in stored if e.get("event") == event]

    def merged_steps(self, attempt: int = 0) -> list[int]:
        """Return the merged steps as they are in the sealed store, row by row."""
        group = StoredGroup(self.run, f"attempt_{attempt:03d}/merged")
        return [step for step, _ in group.steps()]

    def anomalies(self, attempt: int = 0) -> list[Anomaly]:
        """Return the anomalies of the sealed store."""
        return StoredGroup(self.run, f"attempt_{attempt:03d}/anomalies").anomalies()

    def close(self) -> None:
        """Kill and reap what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _start(
        self, prefix: Sequence[str], words: Sequence[str], out: int, err: int,
        env: Mapping[str, str] | None = None, network: str | None = None,
    ) -> Process:  # fmt: skip
        env = {**os.environ, "DDPPROBE_STRICT": "1", **(env or {})}
        if prefix:
            process: Process = subprocess.Popen(
                [*prefix, sys.executable, "-P", *words], env=env, stdin=subprocess.DEVNULL,
                stdout=out, stderr=err,
            )  # fmt: skip
        else:
            process = nursery().start(words, env, out, err, network=network)
        self.processes.append(process)
        return process


@contextlib.contextmanager
def stopped(ranks: Sequence[Process]) -> Iterator[None]:
    """Hold processes where they are: what is written meanwhile they read whole."""
    for rank in ranks:
        rank.send_signal(signal.SIGSTOP)
    wait(lambda: {psutil.Process(r.pid).status() for r in ranks} == {psutil.STATUS_STOPPED})
    yield
    for rank in ranks:
        rank.send_signal(signal.SIGCONT)


def wait(condition: Callable[[], Any], timeout: float = 20.0) -> Any:
    """Return the first true value of `condition`; AssertionError when the time is up."""
    late = deadline(timeout)
    while not (value := condition()):
        assert time.monotonic() < late, f"not within {timeout:.0f} s"
        time.sleep(0.05)  # a look is a scrape, or reads a journal
    return value


def kill(process: Process) -> None:
    """Kill -9 and reap."""
    process.send_signal(signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def harness(directory: Path) -> Iterator[Harness]:
    """Return a harness that cleans up."""
    made = Harness(directory)
    try:
        yield made
    finally:
        made.close()
