"""The small job on real ranks while a test looks on: what it takes to kill, starve and time it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddpprobe.rundir import paths
from ddpprobe.rundir.paths import RunDir

from ..launcher import Launcher
from ..waiting import deadline

JOB = Path(__file__).with_name("job.py")
NODE = paths.node_name(0)


class Launch:
    """`job.py` under torchrun, in a directory of its own.

    Attributes:
        path: the run directory.
        started, seconds: monotonic time of the start, and how long it ran (after `wait`).
    """

    def __init__(
        self, directory: Path, path: Path, script: Sequence[object], env: Mapping[str, str], *,
        fresh: bool,
    ) -> None:  # fmt: skip
        self.directory, self.path = paths.make_dir(directory), path
        self.run = RunDir(path)
        self.seconds = 0.0
        log = directory / "log"
        where = {"cwd": directory, "env": env, "out": log, "err": log}
        self.process = Launcher(["--nproc-per-node", 2], script, **where, fresh=fresh)
        self.started = time.monotonic()

    def wait(self, timeout: float = 60.0) -> int:
        """Return torchrun's exit code."""
        code = self.process.wait(timeout)
        self.seconds = time.monotonic() - self.started
        return code

    @property
    def log(self) -> str:
        """What the launcher and the ranks printed."""
        return (self.directory / "log").read_text()

    def until(self, condition: Callable[[], Any], timeout: float = 60.0) -> Any:
        """Return the first true value of `condition`; fail when the time is up."""
        late = deadline(timeout)
        while not (value := condition()):
            assert time.monotonic() < late, f"not within {timeout:.0f} s:\n{self.log}"
            time.sleep(0.02)
        return value

    def finished(self, rank: int) -> list[int]:
        """Return the steps that a rank reported as finished, after its `optimizer.step()`."""
        try:
            text = (self.directory / f"steps.{rank}").read_text()
        except FileNotFoundError:
            return []
        return [int(line) for line in text.split("\n")[:-1]]

    def hashes(self) -> list[str]:
        """Return each rank's hash of all training state at the end."""
        files = [self.directory / f"hash.{rank}" for rank in (0, 1)]
        return [json.loads(file.read_text()) for file in files]

    def rank(self, rank: int) -> psutil.Process:
        """Return the process of a rank that trains."""
        return psutil.Process(int((self.directory / f"steps.pid.{rank}").read_text()))

    def daemon(self) -> int | None:
        """Return the process id of the daemon that serves, None before it says so."""
        try:
            return int(json.loads(self.run.daemon_file(NODE, "json").read_bytes())["pid"])
        except FileNotFoundError:
            return None

    def wait_for_the_daemon_to_end(self, timeout: float = 60.0) -> None:
        """Return when nobody serves the run any more."""
        lock = self.run.daemon_file(NODE, "lock")
        self.until(lambda: not paths.is_locked(lock), timeout)

    def kill(self) -> None:
        """End the launcher and its ranks."""
        if self.process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for rank in psutil.Process(self.process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        rank.kill()
            self.process.kill()
        self.process.wait()


@pytest.fixture
def launch(torchrun: object, tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """Start the small job and go on: `launch("name", "--steps", 40, env={...})`.

    The job runs in `tmp_path / name`, with its run directory there or at `run_dir`; None is a job
    without a probe. `script` is what stands before its arguments. Containment is on, as everywhere
    but in this suite. (`torchrun` ends the daemons afterwards.)
    """
    started: list[Launch] = []

    def start(
        name: str,
        *arguments: object,
        run_dir: Path | None = Path("run"),
        env: Mapping[str, str] | None = None,
        script: Sequence[object] = (JOB,),
        fresh: bool = True,
    ) -> Launch:
        directory = tmp_path / name
        path = directory / (run_dir or "run")
        given = ["--steps-file", directory / "steps", "--hash", directory / "hash", *arguments]
        given += ["--out", path] if run_dir else []
        quiet = {k: v for k, v in os.environ.items() if k != "DDPPROBE_STRICT"}
        quiet |= {"DDPPROBE_LISTEN": "127.0.0.1:0", "DDPPROBE_LINGER": "0", **(env or {})}
        started.append(Launch(directory, path, [*script, *given], quiet, fresh=fresh))
        return started[-1]

    yield start
    for each in started:
        each.kill()
