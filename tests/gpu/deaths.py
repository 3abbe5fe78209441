"""Part `deaths`: a rank that its device ends is named, with what the device said.

The jobs run side by side. Where there are two ranks they share one GPU, and talk by gloo.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ddpprobe
from tests.gpu.death_job import STEP
from tests.gpu.parts import Case, Context

JOB = Path(__file__).with_name("death_job.py")
HOME = JOB.parents[2]
JOB_SECONDS = 150.0
# A rank that is over may take so much longer than without the probe.
LATER_SECONDS = 15.0


@dataclass(frozen=True)
class Job:
    """One job: how it is wrapped, by how many ranks, and how the last one ends."""

    wrap: str
    ranks: int
    fault: str
    every: int
    probe: bool = True

    @property
    def name(self) -> str:
        sampled = "sampled" if self.every == 1 else "unsampled"
        without = "" if self.probe else ", without the probe"
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{self.fault}, {self.wrap}, {ranks}, {sampled}{without}"


JOBS = (
    *(Job("ddp", 2, fault, every) for fault in ("index", "memory") for every in (1, 1000)),
    Job("fsdp2", 2, "index", 1000), Job("fsdp2", 2, "memory", 1),
    Job("ddp", 1, "index", 1), Job("fsdp2", 1, "memory", 1000),
    *(Job("none", 1, "stuck", 1000, probe) for probe in (True, False)),
)  # fmt: skip
# What is to be said. Threads of torch's own abort a process whose device has failed, before or
# after its last word; what its main thread does meanwhile can make a SIGSEGV of that (seen).
ON_GPU = {
    "index": "device-side assert|SIGABRT|SIGSEGV",
    "memory": "out of memory",
    "stuck": "a bad batch",
}
DRY = {"index": "out of range", "memory": "out of memory", "stuck": "a bad batch"}


def cases() -> dict[str, Case]:
    return {"jobs": run_all}


def run_all(context: Context) -> None:
    """Run the jobs, then judge what is said of each."""
    running = [(job, *start(job, index, context)) for index, job in enumerate(JOBS)]
    until = time.monotonic() + min(JOB_SECONDS, context.seconds_left() - 20.0)
    seconds: dict[bool, float] = {}
    for job, process, log in running:
        try:
            process.wait(max(until - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            context.findings.check(job.name, holds=False, text="the job did not end")
            continue
        if job.fault == "stuck":
            seconds[job.probe] = ended(log) - raised(log)
        if job.probe:
            judge(job, context, log.with_suffix(""))
    if len(seconds) == 2:
        late = seconds[True] - seconds[False]
        text = f"{seconds[True]:.1f} s with the probe, {seconds[False]:.1f} s without"
        name = "from an exception to the end of the rank, its device stuck"
        context.findings.check(name, holds=late < LATER_SECONDS, text=text)


def start(job: Job, index: int, context: Context) -> tuple[subprocess.Popen, Path]:
    """Start a job; return its launcher, and the file of its output."""
    run = context.scratch / f"job{index}"
    backend = "nccl" if context.cuda and job.ranks == 1 and job.wrap != "none" else "gloo"
    words = [context.device, job.wrap, backend, job.fault, str(job.every), str(run) * job.probe]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(job.ranks)]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(JOB), *words]
    paths = [str(HOME), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {"DDPPROBE_LINGER": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    # A device that fails lets calls of the probe fail, too: raised, these would hide its last word.
    more["DDPPROBE_STRICT"] = "0"
    log = run.with_suffix(".log")
    with log.open("wb") as out:
        process = subprocess.Popen(
            launcher, cwd=context.scratch, stdout=out, stderr=subprocess.STDOUT,
            env={**os.environ, **more},
        )  # fmt: skip
    return process, log


def raised(log: Path) -> float:
    said = re.search(r"raises at ([\d.]+)", log.read_text())
    return float(said[1]) if said else time.time()


def ended(log: Path) -> float:
    """Return when the launcher wrote the last line, after the death of the rank."""
    return log.stat().st_mtime


def judge(job: Job, context: Context, run: Path) -> None:
    """Check who is named, and with which words."""
    pages = list(named(run))
    said = (ON_GPU if context.cuda else DRY)[job.fault]
    text = pages[0].message if pages else "no page"
    holds = (
        len(pages) == 1
        and pages[0].rank == job.ranks - 1
        and pages[0].step in (STEP - 1, STEP)  # the step that ended last, or the one under way
        and re.search(said, pages[0].message, re.IGNORECASE) is not None
    )
    context.findings.check(job.name, holds=holds, text=text[:160])
    if not holds:
        print(f"-- {job.name}", run.with_suffix(".log").read_text(), sep="\n", flush=True)


def named(run: Path) -> Iterator[ddpprobe.Anomaly]:
    """Yield what was paged of ranks that ended."""
    for told in ddpprobe.open(run).anomalies():
        if (told.detector, told.level) == ("rank_lost", "page"):
            yield told
