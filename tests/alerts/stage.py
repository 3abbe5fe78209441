"""`ddpprobe up` with a webhook, and jobs beside it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from ddpprobe.cli import stack_files
from ddpprobe.metrics.labels import run_label
from ddpprobe.rundir.paths import RunDir

from ..launcher import Launcher
from ..prometheus_harness import Prometheus, until
from .receiver import Receiver

JOB = Path(__file__).with_name("job.py")
ROOT = Path(__file__).parents[2]
ENDS = ROOT / "tests/forked_rank.py"
Replace = Mapping[str, Callable[[str], str]]  # a path in the stack, and what makes it another
# `up`, with the files of the package somewhere else: {stack} and the words after it.
_UP = """\
import sys
from pathlib import Path
from ddpprobe.cli import stack_files
from ddpprobe.cli.main import main
stack_files._stack = lambda: Path(sys.argv[1])
sys.exit(main(["up", *sys.argv[2:]]))
"""


class Job:
    """One launch of `job.py`, or several one after the other in one run directory.

    Attributes:
        path: the run directory.
        directory: beside it, where the job is told what to do.
    """

    def __init__(self, directory: Path, env: Mapping[str, str]) -> None:
        self.directory, self.path, self._env = directory, directory / directory.name, env
        directory.mkdir()
        self.launchers: list[Launcher | subprocess.Popen[bytes]] = []

    def launch(self, nproc: int, *words: object) -> Launcher:
        """Start it with so many ranks."""
        log = self.directory / f"log.{len(self.launchers)}"
        where = {"cwd": self.directory, "env": self._env, "out": log, "err": log}
        script = [JOB, "--out", self.path, "--dir", self.directory,
                  "--name", self.directory.name, *words]  # fmt: skip
        launcher = Launcher(["--nproc-per-node", nproc], script, **where, fresh=False)
        self.launchers.append(launcher)
        return launcher

    @property
    def run(self) -> str:
        """The target label `run`; "" before it is known."""
        with contextlib.suppress(OSError, ValueError):
            return run_label(json.loads((self.path / "run.json").read_bytes()))
        return ""

    @property
    def at(self) -> int:
        """The step of the fault."""
        return int((self.directory / "at").read_text())

    def tell(self, word: str) -> None:
        """Tell the job to go wrong (`fault`) or to end (`end`)."""
        (self.directory / word).touch()

    def rank(self, rank: int) -> psutil.Process:
        """Return the process of a rank."""
        return psutil.Process(int((self.directory / f"pid.{rank}").read_text()))

    def daemon(self, node: str = "node_0000") -> psutil.Process:
        """Return the daemon of a node."""
        said = json.loads(RunDir(self.path).daemon_file(node, "json").read_bytes())
        return psutil.Process(int(said["pid"]))

    def log(self) -> str:
        """Return what it printed."""
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("log.*")))

    def launch_node(self, node: int, port: int, *words: object) -> None:
        """Start one of two nodes, with a rank; they meet at a port of this machine."""
        options = [
            "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1",
            "--master-addr=127.0.0.1", f"--master-port={port}",
        ]  # fmt: skip
        script = [ENDS, JOB, "--out", self.path, "--dir", self.directory]
        script += ["--name", self.directory.name, *words]
        with (self.directory / f"log.{node}").open("wb") as log:
            self.launchers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.launcher", *options, *map(str, script)],
                    env={**self._env, "PYTHONPATH": str(ROOT)}, cwd=self.directory,
                    stdout=log, stderr=log,
                )
            )  # fmt: skip

    def kill(self) -> None:
        """End whatever is left of it."""
        for launcher in self.launchers:
            if launcher.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    for rank in psutil.Process(launcher.pid).children(recursive=True):
                        with contextlib.suppress(psutil.NoSuchProcess):
                            rank.kill()
                launcher.kill()
            launcher.wait()


class Stage:
    """A directory with an `up` that runs, a webhook, and the jobs that were started there."""

    def __init__(self, directory: Path, prometheus: str, receiver: Receiver) -> None:
        self.directory, self.receiver = directory, receiver
        self.prometheus = object.__new__(Prometheus)
        self.prometheus.url = prometheus
        self.jobs: list[Job] = []

    def job(self, name: str) -> Job:
        """Return a job of a name, not started yet."""
        quiet = {k: v for k, v in os.environ.items() if k != "DDPPROBE_STRICT"}
        quiet |= {
            "DDPPROBE_SD_DIR": str(self.directory / "announced"),
            "DDPPROBE_LISTEN": "127.0.0.1:0",
        }
        self.jobs.append(Job(self.directory / name, quiet))
        return self.jobs[-1]

    def samples(self, job: Job, expr: str) -> list[tuple[dict[str, str], float]]:
        """Return an instant query in which %s is the selector of a job's run; [] without a run."""
        return self.prometheus.now(expr.replace("%s", f'run="{job.run}"')) if job.run else []

    def is_scraped(self, job: Job, ranks: int) -> bool:
        """Whether Prometheus has seen these ranks train."""
        found = self.samples(job, "count(ddpprobe_steps_total{%s} > 2)")
        return bool(found) and found[0][1] == ranks


@contextlib.contextmanager
def stage(directory: Path, changed: Replace | None = None) -> Iterator[Stage]:
    """Run `up --webhook` in a directory, on the files of the package or such as are made of them.

    Args:
        directory: a new one, where all of it lies.
        changed: what to make of a file of the stack, by its path there.
    """
    stack = directory / "package"
    shutil.copytree(stack_files._stack(), stack)
    shutil.copytree(stack_files._runbooks(stack_files._stack()), stack / stack_files.RUNBOOKS,
                    dirs_exist_ok=True)  # fmt: skip
    for name, change in (changed or {}).items():
        path = stack / name
        path.write_text(change(path.read_text()))
    (directory / "announced").mkdir()
    said = directory / "up.out"
    with Receiver() as receiver, said.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", _UP, stack, directory / "up", "--json",
             "--listen", "127.0.0.1:0", "--webhook", receiver.url],
            stdout=out, stderr=subprocess.STDOUT,
            env={**os.environ, "DDPPROBE_SD_DIR": str(directory / "announced")},
        )  # fmt: skip
        here = None
        try:
            ready = until(
                lambda: said.read_text().endswith("}\n") or process.poll() is not None, 60
            )
            assert ready, "up is not ready"
            assert process.poll() is None, said.read_text()
            facts: dict[str, Any] = json.loads(said.read_text())
            here = Stage(directory, facts["url"], receiver)
            yield here
        finally:
            for job in here.jobs if here else ():
                job.kill()
            process.send_signal(signal.SIGTERM)
            process.wait(60)
