"""One planned death, carried out: ranks that train under DDP, and the launcher that looks on.

`launch` runs in a process forked for it. It forks the ranks, holds them until the daemon watches,
and once more before the step of the fault until all are there and the daemon is as the plan wants
it, lets them go, and does what a launcher does.
Everything happens in the order of events; only a hang, and the time until the launcher looks, have
a duration.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddpprobe
from ddpprobe.rundir.paths import RunDir, node_name
from tests.faults.death_plans import WAITING, Plan
from tests.faults.zygote import start_rank

HANG_SECONDS = 15.0  # until somebody loses patience, at least; ten are late
HANG_STEPS = 12  # and so many steps; ten are late
GRACE_SECONDS = 3.0  # from SIGTERM to SIGKILL
WAIT_SECONDS = 60.0  # for anything that is to come by itself
LAST_STEP = 8  # of an orderly end
INSTALLED, AT_GATE, BY_ITSELF, IN_COLLECTIVE = b"i", b"g", b"s", b"w"
NODE = node_name(0)


class LossDiverged(Exception):
    """An exception that no library knows."""


# -- a rank -----------------------------------------------------------------------------------


class _Passing(torch.autograd.Function):
    """The identity, with something that happens in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[], None]) -> Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.act()
        return grads[0], None


class _Middle(nn.Module):
    def __init__(self, at: Callable[[str], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.at = at

    def forward(self, x: Tensor) -> Tensor:
        self.at("forward")
        return _Passing.apply(self.linear(x), partial(self.at, "backward"))  # type: ignore[no-any-return]  # torch says Any


class _Rank:
    """One rank: trains, and does what the plan wants of it."""

    def __init__(self, plan: Plan, rank: int, line: socket.socket, run: Path) -> None:
        self.plan, self.rank, self.line, self.run = plan, rank, line, run
        self.step = 0

    def main(self) -> None:
        """Be the user's script."""
        plan = self.plan
        if plan.handler != "default":
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: _leave(plan.handler))
        port = int(self.line.recv(16))
        store = dist.TCPStore("127.0.0.1", port, plan.world, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=plan.world,
            timeout=timedelta(seconds=WAIT_SECONDS),
        )  # fmt: skip
        if not plan.wrapped:
            self.train()
            return
        try:
            self.train()
        except Exception as error:  # noqa: BLE001  (as scripts do that log and say 1)
            print(f"training failed: {error!r}", file=sys.stderr)
            sys.exit(1)

    def train(self) -> None:
        """Train until something happens."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), _Middle(self.at), nn.Linear(8, 1))
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
        optimizer.register_step_pre_hook(lambda *_: self.at("optimizer"))
        # Of its gradients that of the first layer is the last: after it is the reduction.
        model[0].weight.register_hook(self.before_reduction)
        auto = "none" if self.plan.daemon == "late" else "auto"
        probe = ddpprobe.install(wrapped, run_dir=self.run, every=self.plan.every, daemon=auto)
        # Not in a step: ranks that are held in one are a hang.
        self.line.send(INSTALLED)
        self.line.recv(1)
        for self.step in range(10**6):
            if self.plan.fault == "orderly" and self.step == LAST_STEP:
                break
            self.meet()
            self.at("data")
            wrapped(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            self.at("between")
        if self.plan.how != "os._exit:1":  # so workers are ended whom nobody lets say goodbye
            probe.close()
        _leave("" if self.plan.how == "return" else self.plan.how)

    def meet(self) -> None:
        """Wait before the step of the fault until the launcher lets go; be slow after it."""
        if self.step == self.plan.step:
            self.line.send(AT_GATE)
            if self.plan.phase == WAITING and self.rank == self.plan.rank:
                return  # ahead of the others, which are held
            self.line.recv(1)
        elif self.step > self.plan.step:
            time.sleep(0.002)
            if self.step == self.plan.step + 2:
                self.line.send(BY_ITSELF)

    def before_reduction(self, _grad: Tensor) -> None:
        """Tell the launcher that from here on this rank waits for the others."""
        waits = self.plan.fault == "hang" or self.plan.phase == WAITING
        if waits and self.step == self.plan.step:
            self.line.send(IN_COLLECTIVE)

    def at(self, phase: str) -> None:
        """Do what the plan wants in this phase."""
        plan = self.plan
        if (self.step, self.rank, phase) != (plan.step, plan.rank, plan.phase):
            return
        if plan.fault == "exception":
            raise _error(plan.how)
        while plan.fault == "hang" and plan.how == "sleep":
            time.sleep(WAIT_SECONDS)
        _leave(plan.how)


def _leave(how: str) -> None:
    """End this process by a function and its code ("sys.exit:3"), or by a signal."""
    function, _, code = how.partition(":")
    if function == "sys.exit":
        sys.exit(int(code))
    if function == "os._exit":
        os._exit(int(code))
    if function:
        os.kill(os.getpid(), signal.Signals[function])
        # A signal to oneself may be taken by another thread a moment later.
        while how in {"SIGTERM", "SIGABRT"}:
            time.sleep(WAIT_SECONDS)


def _error(name: str) -> Exception:
    known: dict[str, Exception] = {
        "LossDiverged": LossDiverged("the loss is 1e9"),
        "ConnectionResetError": ConnectionResetError(104, "Connection reset by peer"),
        "OSError": OSError(5, "Input/output error", "/data/shard.7"),
    }
    return known.get(name) or getattr(builtins, name)(f"planned {name}")


# -- the launcher -----------------------------------------------------------------------------


class _Launcher:
    """The parent of the ranks."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan, self.directory = plan, directory
        self.run = RunDir(directory / "run")
        self.lines: list[socket.socket] = []
        self.pids: list[int] = []
        self.fds: list[int] = []
        self.statuses: dict[int, str] = {}
        self.order: list[int] = []
        self.since = time.monotonic()

    def start(self) -> None:
        """Fork the ranks, then open the store in which they meet."""
        for rank in range(self.plan.world):
            ours, theirs = socket.socketpair()
            body = _Rank(self.plan, rank, theirs, self.run.path).main
            pid = start_rank(body, self.directory / "ranks.txt", self.plan.teardown)
            self.pids.append(pid)
            self.fds.append(os.pidfd_open(pid))
            self.lines.append(ours)
        # After the forks: it has a thread.
        self.store = dist.TCPStore("127.0.0.1", 0, self.plan.world, is_master=True,
                                   wait_for_workers=False)  # fmt: skip
        for line in self.lines:
            line.settimeout(WAIT_SECONDS)
            line.send(str(self.store.port).encode())

    def hear(self, what: bytes, ranks: Iterable[int]) -> None:
        """Wait until these ranks have said a word."""
        for rank in ranks:
            said = self.lines[rank].recv(1)
            assert said == what, f"rank {rank} said {said!r} for {what!r}"

    def let_go(self) -> None:
        """Let the ranks go on."""
        for line in self.lines:
            with contextlib.suppress(OSError):
                line.send(b"!")

    def kill(self, number: int, ranks: list[int] | None = None) -> None:
        """Send a signal to ranks that live, by default to all."""
        for rank in self.living() if ranks is None else ranks:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.fds[rank], number)

    def living(self) -> list[int]:
        """Return the ranks whose processes have not ended."""
        return [r for r in range(self.plan.world) if r not in self.order]

    def watch(self, seconds: float, until: int | None = None) -> bool:
        """Note who ends; True when so many more have, by default all; False when time is up."""
        goal = self.plan.world if until is None else len(self.order) + until
        deadline = time.monotonic() + seconds
        while len(self.order) < goal:
            poll = select.poll()
            for rank in self.living():
                poll.register(self.fds[rank], select.POLLIN)
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                return False
            ended = {fd for fd, _ in ready}
            self.order += [r for r in self.living() if self.fds[r] in ended]
            if self.plan.reaped:
                self.reap()
        return True

    def reap(self) -> None:
        """Take the wait statuses of the dead."""
        for rank in self.order:
            if rank not in self.statuses:
                _, status = os.waitpid(self.pids[rank], 0)
                self.statuses[rank] = _in_words(status)

    def end_the_rest(self) -> None:
        """Do what this launcher does when it has seen that something is wrong."""
        if self.plan.launcher == "kill":
            self.kill(signal.SIGKILL)
        elif self.plan.launcher != "idle":
            self.kill(signal.SIGTERM)
            self.watch(GRACE_SECONDS + self.plan.teardown)
        elif self.watch(WAIT_SECONDS + self.plan.teardown):
            return  # all of them by themselves
        self.kill(signal.SIGKILL)
        assert self.watch(WAIT_SECONDS), "a killed rank lives"


def launch(plan_json: dict[str, Any], directory: str, *, linger: float = 0.0) -> None:
    """Carry out a plan; write `told.json` in the directory: who ended how, and in which order."""
    plan, place = Plan(**plan_json), Path(directory)
    os.environ["DDPPROBE_LINGER"] = str(linger)
    os.environ["DDPPROBE_LISTEN"] = "127.0.0.1:0"
    os.chdir(place)
    launcher = _Launcher(plan, place)
    launcher.start()
    launcher.hear(INSTALLED, range(plan.world))
    daemon = None if plan.daemon == "late" else _daemon_that_watches(launcher)
    launcher.let_go()
    launcher.hear(AT_GATE, range(plan.world))
    _prepare(plan, daemon)
    _CARRIED[plan.fault if plan.phase != WAITING else WAITING](launcher, daemon)
    launcher.reap()
    if plan.fault != "node" and plan.daemon == "stopped" and daemon is not None:
        signal.pidfd_send_signal(daemon, signal.SIGCONT)
    if plan.daemon == "late":
        daemon = _late_daemon(launcher.run.path, place)
    ended = daemon is None or _has_ended(daemon)
    told = {"statuses": launcher.statuses, "order": launcher.order, "daemon_ended": ended}
    (place / "told.json").write_text(json.dumps(told))


def _death(launcher: _Launcher, _daemon: int | None) -> None:
    launcher.let_go()
    assert launcher.watch(WAIT_SECONDS, until=1), "nobody has died"
    time.sleep(launcher.plan.looks)
    launcher.end_the_rest()


def _death_while_waiting(launcher: _Launcher, _daemon: int | None) -> None:
    rank = launcher.plan.rank
    launcher.hear(IN_COLLECTIVE, [rank])
    launcher.kill(signal.SIGKILL, [rank])
    assert launcher.watch(WAIT_SECONDS, until=1), "a killed rank lives"
    time.sleep(launcher.plan.looks)
    launcher.let_go()
    launcher.end_the_rest()


def _stop(launcher: _Launcher, _daemon: int | None) -> None:
    launcher.let_go()
    launcher.hear(BY_ITSELF, range(launcher.plan.world))
    launcher.kill(signal.Signals[launcher.plan.how])
    if not launcher.watch(GRACE_SECONDS + launcher.plan.teardown):
        launcher.kill(signal.SIGKILL)  # a handler does not run inside a collective
        assert launcher.watch(WAIT_SECONDS), "a killed rank lives"


def _hang(launcher: _Launcher, _daemon: int | None) -> None:
    plan = launcher.plan
    launcher.let_go()
    others = [r for r in range(plan.world) if r != plan.rank]
    launcher.hear(IN_COLLECTIVE, others)
    # The first steps take as long as the machine and the daemon's start let them.
    step_seconds = (time.monotonic() - launcher.since) / plan.step
    looks = plan.daemon == "alive"
    time.sleep(max(HANG_SECONDS, HANG_STEPS * step_seconds) if looks else HANG_SECONDS)
    if plan.launcher == "watchdog":
        launcher.kill(signal.SIGABRT, others)
        assert launcher.watch(WAIT_SECONDS, until=len(others)), "a rank survived SIGABRT"
    launcher.end_the_rest()


def _node_loss(launcher: _Launcher, daemon: int | None) -> None:
    launcher.let_go()
    launcher.hear(BY_ITSELF, range(launcher.plan.world))
    # Held first, so that nobody sees the others go.
    launcher.kill(signal.SIGSTOP)
    if daemon is not None and launcher.plan.daemon != "dead":
        signal.pidfd_send_signal(daemon, signal.SIGKILL)
    launcher.kill(signal.SIGKILL)
    assert launcher.watch(WAIT_SECONDS), "a killed rank lives"


def _orderly_end(launcher: _Launcher, _daemon: int | None) -> None:
    launcher.let_go()
    assert launcher.watch(WAIT_SECONDS), "a rank does not end"


_CARRIED: dict[str, Callable[[_Launcher, int | None], None]] = {
    "signal": _death, "exception": _death, "exit": _death, WAITING: _death_while_waiting,
    "stop": _stop, "hang": _hang, "node": _node_loss, "orderly": _orderly_end,
}  # fmt: skip


def _prepare(plan: Plan, daemon: int | None) -> None:
    """Make of a daemon that watches one that is stopped, or dead."""
    if daemon is None:
        return
    if plan.daemon == "stopped" and plan.fault != "node":
        signal.pidfd_send_signal(daemon, signal.SIGSTOP)
    elif plan.daemon == "dead":
        signal.pidfd_send_signal(daemon, signal.SIGKILL)
        assert _has_ended(daemon), "a killed daemon lives"


def _daemon_that_watches(launcher: _Launcher) -> int:
    """Return a pidfd of the daemon, once it holds one of every rank."""
    file = launcher.run.daemon_file(NODE, "json")
    _until(file.exists, "the daemon serves")
    pid = int(json.loads(file.read_bytes())["pid"])
    fd = os.pidfd_open(pid)
    _until(lambda: set(launcher.pids) <= _held_by(pid), "the daemon watches the ranks")
    return fd


def _held_by(pid: int) -> set[int]:
    """Return the processes of which a process holds pidfds."""
    found = set()
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(OSError):  # closed in between
            found |= {
                int(line.split()[1])
                for line in path.read_text().splitlines()
                if line.startswith("Pid:")
            }
    return found


def _late_daemon(run: Path, directory: Path) -> int:
    command = [sys.executable, "-P", "-m", "ddpprobe.daemon", "--dir", str(run), "--linger", "0",
               "--listen", "127.0.0.1:0"]  # fmt: skip
    with (directory / "late.txt").open("w") as log:
        return os.pidfd_open(subprocess.Popen(command, stdout=log, stderr=log).pid)


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(WAIT_SECONDS * 1000))


def _until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_SECONDS:.0f} s: {what}"
        time.sleep(0.01)


def _in_words(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit:{code}" if code >= 0 else signal.Signals(-code).name
