"""One script trained three ways: bare, with the line `install()`, and by `ddpprobe run`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ddpprobe
from ddpprobe.records.step import Anomaly
from ddpprobe.rundir.paths import is_locked

from ..conftest import end_tree
from ..launcher import Launcher
from ..timed import untimed
from ..waiting import deadline

SCRIPTS = Path(__file__).with_name("scripts")
STEPS, FAULT = 12, 6  # as in scripts/net.py
MADE = "# The model is made.\n"
LINE = "import ddpprobe; ddpprobe.install(model, every=2)\n"
PYTHON = [sys.executable]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
# What is in a run of a script that is told nothing of a verdict: its environment.
QUIET = {"OMP_NUM_THREADS": "1", "DDPPROBE_LINGER": "0"}

Done = subprocess.CompletedProcess[str]


def start(where: Path, command: list[str], words: list[str] | None, **more: str) -> Done:
    """Run a job in a directory: bare, or, with options, by `ddpprobe run`; its daemon has ended."""
    where.mkdir(exist_ok=True)
    job = command if words is None else [*PYTHON, "-m", "ddpprobe", "run", *words, "--", *command]
    known = {k: v for k, v in os.environ.items() if not k.startswith("DDPPROBE_")}
    done = subprocess.run(
        job, cwd=where, env={**known, **QUIET, **more}, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    wait_for_daemons(where)
    return done


def start_ranks(where: Path, nproc: int, path: str, words: list[str], **more: str) -> Done:
    """Run `torchrun SCRIPT` by `ddpprobe run`: its ranks are interpreters of their own, it is not.

    Nothing of ddpprobe happens in torchrun, which takes 2 s to import torch. So `ddpprobe run` only
    says which environment it gives to a job.
    """
    said = start(where, ["env", "-0"], words, **more)
    env = dict(line.split("=", 1) for line in said.stdout.split("\0")[:-1])
    out, err = where / "torchrun.out", where / "torchrun.err"
    options = ["--nproc-per-node", nproc]
    launcher = Launcher(options, [path], cwd=where, env=env, out=out, err=err, fresh=True)
    try:
        code = launcher.wait(120)
    finally:
        end_tree(launcher)
    wait_for_daemons(where)
    return Done([], code, out.read_text(), err.read_text())


def wait_for_daemons(where: Path) -> None:
    """Wait until the daemons of all runs of a directory have ended."""
    late = deadline(60)
    while any(map(is_locked, where.glob("ddpprobe-runs/*/daemon/*.lock"))):
        assert time.monotonic() < late, "the daemon does not end"
        time.sleep(0.02)


def script(name: str) -> str:
    """Return the path of a script as it is."""
    return str(SCRIPTS / f"train_{name}.py")


def written(where: Path, name: str, line: str) -> str:
    """Write the script with a line where its model is made; return the path."""
    where.mkdir(exist_ok=True)
    text = Path(script(name)).read_text()
    assert text.count(MADE) == 1
    path = where / "train.py"
    path.write_text(f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\n{text.replace(MADE, line)}")
    return str(path)


def place(anomaly: Anomaly) -> tuple[Any, ...]:
    """Return what makes a verdict one and the same in two runs."""
    return (
        anomaly.detector, anomaly.level, anomaly.step, anomaly.rank, anomaly.module, anomaly.kind,
        anomaly.first_cause,
    )  # fmt: skip


def the_run(where: Path) -> ddpprobe.Run:
    """Return the only run of a directory."""
    (found,) = ddpprobe.runs(where / "ddpprobe-runs")
    return ddpprobe.open(found.path)


def assert_same(
    tmp_path: Path, train: Callable[[Path, str], Done], launcher: list[str] | int, name: str,
    line: str = LINE, **more: str,
) -> dict[str, Done]:  # fmt: skip
    """Claim: a script has its own bits and exit code, and the records and verdict of `install()`.

    Args:
        tmp_path: of the test; the run by `ddpprobe run` is in `run` of it, that of the line in
            `own`.
        train: trains a script without `ddpprobe run`: (directory, path of the script).
        launcher: what starts the script; a number is that of `start_ranks`.
        name: of the script.
        line: what a script has that observes its model itself.
        more: environment of the job.

    Returns:
        How each of them ended.
    """
    where, path, words = tmp_path / "run", script(name), ["--every", "2"]
    done = {
        "bare": train(tmp_path / "bare", written(tmp_path / "bare", name, "")),
        "own": train(tmp_path / "own", written(tmp_path / "own", name, line)),
        "run": start_ranks(where, launcher, path, words, **more)
        if isinstance(launcher, int)
        else start(where, [*launcher, path], words, **more),
    }
    wait_for_daemons(tmp_path / "own")
    assert {job.returncode for job in done.values()} == {done["bare"].returncode}, done
    assert done["run"].stdout == done["own"].stdout == done["bare"].stdout != "", done
    assert done["run"].stderr.count(" is observed in ") == 1
    own, run = the_run(tmp_path / "own"), the_run(tmp_path / "run")
    verdict = [place(anomaly) for anomaly in untimed(run.anomalies())]
    assert verdict == [place(anomaly) for anomaly in untimed(own.anomalies())]
    detector, level, step, rank, module, kind, first = verdict[0]
    assert (detector, level, step, kind, first) == ("nonfinite", "page", FAULT, "output", True)
    assert module.split(".")[-1] in {"bad", "dropout"}
    facts = ("wrapper", "world_size")
    assert [run.info()[fact] for fact in facts] == [own.info()[fact] for fact in facts]
    assert rank == run.info()["world_size"] - 1
    for one in range(run.info()["world_size"]):
        # After the fault the daemon may have steps captured, as soon as it has heard of it.
        seen, expected = (
            [
                (r.step, r.sampled, sorted((s.fqn, s.kind) for s in r.sites))
                for r in each.records(one)
                if r.step <= FAULT
            ]
            for each in (run, own)
        )
        assert seen == expected
        assert [step for step, *_ in seen] == list(range(0, FAULT + 1, 2))
    return done
