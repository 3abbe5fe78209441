"""What can go wrong with a job, and what must wake nobody: each as a case that is played."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from ..prometheus_harness import until
from .stage import Job, Stage

STEPS = 300  # of training before anything happens: detectors and rules have learnt what is usual
Act = Callable[[Stage, Job], None]


def nothing(here: Stage, job: Job) -> None:
    """Let it train."""


def two_ranks(here: Stage, job: Job) -> None:
    """Start it on one node."""
    job.launch(2, "--fault", job.directory.name, "--sleep", SLEEP)


def two_nodes(here: Stage, job: Job) -> None:
    """Start it on two nodes, of one rank each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for node in range(2):
        job.launch_node(node, port, "--sleep", SLEEP)


def tell(here: Stage, job: Job) -> None:
    """Let it do what it was started for."""
    job.tell("fault")


def end(here: Stage, job: Job) -> None:
    """Let it end well."""
    job.tell("end")


def kill_a_rank(here: Stage, job: Job) -> None:
    """kill -9, of one rank."""
    job.rank(1).kill()


def kill_all_ranks(here: Stage, job: Job) -> None:
    """kill -9, of all ranks before any of them can see another one die."""
    ranks = [job.rank(number) for number in range(2)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for rank in ranks:
            rank.send_signal(number)


def kill_a_rank_and_start_again(here: Stage, job: Job) -> None:
    """kill -9 of one rank, and the job is started again, as a scheduler does.

    Not by torchrun's --max-restarts: with gloo the ranks that it starts anew do not find each other
    now and then (torch 2.13, without ddpprobe as well), and then the run is lost indeed.
    """
    kill_a_rank(here, job)
    job.launchers[-1].wait(600)
    two_ranks(here, job)


def stop_a_rank(here: Stage, job: Job) -> None:
    """SIGSTOP, of one rank: it hangs, and so do the others."""
    job.rank(1).send_signal(signal.SIGSTOP)


def lose_a_node(here: Stage, job: Job) -> None:
    """Let nothing of a node be left, all at once."""
    launcher = psutil.Process(job.launchers[1].pid)
    lost = [launcher, *launcher.children(recursive=True), job.daemon("node_0001")]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in lost:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def stop_from_outside(here: Stage, job: Job) -> None:
    """SIGTERM to the launcher, as a scheduler ends a job."""
    psutil.Process(job.launchers[-1].pid).terminate()


def rescale(here: Stage, job: Job) -> None:
    """Stop it, and start it again with one rank more."""
    stop_from_outside(here, job)
    job.launchers[-1].wait(600)
    job.launch(3, "--sleep", SLEEP)
    until(lambda: here.is_scraped(job, 3), 60)


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        name: of the job, and of its `--fault`.
        title: as the table calls it.
        act: what is done to the job once it is watched and has trained for a while.
        alert: what must be told, once; "" for nothing.
        minutes: until it must be told, or for how long nothing may be.
        start: how it is started.
    """

    name: str
    title: str
    act: Act
    alert: str = ""
    minutes: float = 6.0
    start: Act = two_ranks


SLEEP = 0.5  # seconds of a step; seventeen jobs share a small machine
FAULTS = (
    Case("nan", "a NaN on one rank", tell, "FirstCause"),
    Case("explode", "an explosion on one rank", tell, "FirstCause"),
    Case("killed", "a dead rank (kill -9)", kill_a_rank, "RunLost"),
    Case("massacre", "all ranks dead at once (kill -9)", kill_all_ranks, "RunLost"),
    Case("hung", "a hung rank (SIGSTOP)", stop_a_rank, "Stuck"),
    Case("vanished", "a vanished node", lose_a_node, "TargetDown", start=two_nodes),
    Case("lost", "a lost module", tell, "CoverageLost", 10),
    Case("desync", "a rank that went apart", tell, "FirstCause", 10),
    Case("overflow", "a chronic overflow", tell, "ChronicOverflow", 30),
    Case("straggler", "a straggler", tell, "Straggler", 20),
)
# What is no fault; of a restart there is one warning.
NO_FAULTS = (
    Case("healthy", "a healthy run", nothing, minutes=25),
    Case("short", "its start and end", end, minutes=10),
    Case("stopped", "stopped from outside (SIGTERM)", stop_from_outside, minutes=10),
    Case("rescaled", "a planned rescale (2 to 3 ranks)", rescale, minutes=10),
    Case("evaluation", "an evaluation in pause()", tell, minutes=10),
    Case("checkpoint", "a checkpoint of two minutes", tell, minutes=10),
    Case("restarted", "a restart after a death", kill_a_rank_and_start_again, "Restarted", 6),
)
CASES = FAULTS + NO_FAULTS


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
        case: the case.
        fired: seconds until the rule fired; None if it did not.
        notified: seconds until the first notification.
        told: names of the alerts of each notification in which one fires.
        text: the summary that came first.
        resolved: seconds until a notification said that it is over; None if none did.
        trouble: why the case could not be played; "" if it could.
    """

    case: Case
    fired: float | None = None
    notified: float | None = None
    told: tuple[tuple[str, ...], ...] = ()
    text: str = ""
    resolved: float | None = None
    trouble: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it was told once, or nothing where nothing was to be told."""
        names = (("Ddpprobe" + self.case.alert,),) if self.case.alert else ()
        return not self.trouble and self.told == names


def play(here: Stage, case: Case, until_time: float) -> Outcome:
    """Play a case to its end.

    Args:
        here: where.
        case: which.
        until_time: monotonic seconds at which all must be over.
    """
    job = here.job(case.name)
    case.start(here, job)
    trained = f"min(ddpprobe_steps_total{{%s}}) >= {STEPS}"
    if not wait(lambda: here.samples(job, trained), until_time):
        return Outcome(case, trouble=f"it does not train: {job.log()[-300:]}")
    began = time.time()
    case.act(here, job)
    late = min(until_time, time.monotonic() + 60 * case.minutes)
    wait(lambda: case.alert and here.receiver.firing(job.run), late)
    # What would be told twice is told with the next notification of the group, or at the end.
    wait(lambda: False, min(until_time, time.monotonic() + 60 * AFTER_MINUTES))
    job.tell("end")
    wait(lambda: False, min(until_time, time.monotonic() + 60 * AFTER_MINUTES))
    firing = here.receiver.firing(job.run)
    over = [n.time for n in here.receiver.of(job.run) if n.resolved and not n.firing]
    since = here.prometheus.between(
        f'ALERTS{{alertstate="firing",run="{job.run}"}}', began - 60, time.time()
    )
    first = min((float(series["values"][0][0]) for series in since), default=None)
    return Outcome(
        case,
        None if first is None else first - began,
        firing[0].time - began if firing else None,
        tuple(tuple(n.names) for n in firing),
        firing[0].firing[0]["summary"] if firing else "",
        over[0] - began if over else None,
    )


AFTER_MINUTES = 6.0  # more than Alertmanager's group_interval


def wait(condition: Callable[[], object], late: float) -> object:
    """Return the first true value of a condition, or a false one when it is too late."""
    while time.monotonic() < late:
        with contextlib.suppress(OSError):  # a busy machine answers the next time
            if value := condition():
                return value
        time.sleep(1)
    return None
