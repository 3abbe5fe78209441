"""From a checked `install()` call to a place to write: run directory, attempt, journal, daemon."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ddpprobe.daemon import launch, variables
from ddpprobe.daemon.launch import DaemonKeeper
from ddpprobe.detectors.settings import Settings
from ddpprobe.rank import attempts, process_group, record_files, rendezvous, versions
from ddpprobe.rank.environment import OwnEnvironment
from ddpprobe.rank.head import Head, daemon_file
from ddpprobe.rank.interval import IntervalChannel, IntervalFile
from ddpprobe.rank.options import Checked, InstallOptions
from ddpprobe.rank.peer_watcher import PeerWatcher, Process
from ddpprobe.rank.record_files import RecordFiles, Spot
from ddpprobe.rank.rendezvous import Store
from ddpprobe.rank.scheduler import restarts_left, scheduler
from ddpprobe.records.events import JobEvent
from ddpprobe.rundir import paths, processes, roster, spool, store_url, tmpfs
from ddpprobe.rundir.orders import OrderReader
from ddpprobe.rundir.paths import DirectoryLock, RunDir
from ddpprobe.rundir.roster import Roster

logger = logging.getLogger("ddpprobe")


@dataclass
class Joined:
    """One rank's place in a run. `lock` is held by rank 0 for as long as the attempt lives.

    `refused` says why this node's daemon could not be started, `found` whether one was there, which
    may be about to end; `unlike` is of the first sampled step: scalars of what ranks differ in.
    """

    run: RunDir
    run_id: str
    attempt: int
    record_files: RecordFiles
    lock: DirectoryLock | None
    restart: Callable[[], None] | None
    node: str
    channel: IntervalChannel
    board: OrderReader
    peer_watcher: PeerWatcher
    peers: Mapping[int, Process]
    refused: str = ""
    found: bool = False
    unlike: Mapping[str, float] = field(default_factory=dict)
    _keeper: DaemonKeeper | None = None

    def start(self, is_reducing: Callable[[], bool]) -> None:
        """Let the disk thread begin, if there is one, now that this process is about to train."""
        self.record_files.start(is_reducing, self.keep_daemon)

    def watch_peers(self) -> None:
        """Let the other ranks of the node be watched."""
        self.peer_watcher.start(self.peers)

    def after_step(self) -> None:
        """Look after the daemon at the end of a sampled step, where nobody else does."""
        if self.record_files.disk_thread is None:
            self.keep_daemon()

    def close(self) -> None:
        """Close this rank's files, and leave a daemon after that tells the end.

        One that was killed since the last look would tell nobody, and Prometheus would go on
        asking for it, as if the machine was lost.
        """
        self.record_files.close()
        self.keep_daemon(last=True)

    def release(self) -> None:
        """Give the run directory back."""
        if self.lock is not None:
            self.lock.release()

    def rest(self) -> None:
        """Before a fork: have no thread of ours at work."""
        self.peer_watcher.rest()
        if self.record_files.disk_thread is not None:
            self.record_files.disk_thread.rest()

    def abandon(self) -> None:
        """In a forked child: let go of what is the parent's."""
        self.peer_watcher.abandon()
        self.record_files.abandon()
        if self.lock is not None:
            self.lock.forget()

    def keep_daemon(self, *, last: bool = False) -> None:
        """Start this node's daemon anew if it died; looks at most every five seconds.

        Args:
            last: look now, as the rank ends.
        """
        if self.restart is None:
            return
        if self._keeper is None:
            told = bool(self.refused)
            self._keeper = DaemonKeeper(
                self.run, self.node, self.restart, told=told, found=self.found
            )
        self._keeper.look(last=last)


def join_run(
    store: Store,
    topic: str,
    rank: int,
    world_size: int,
    options: InstallOptions,
    check: Callable[[], Checked],
) -> tuple[Joined, Checked]:
    """Agree with the other ranks on a run directory and open this rank's files in it.

    Returns:
        This rank's place, and what `check` returned, with what the others hold of the model.

    Raises:
        InstallError: some rank refused, on every rank with the same text.
    """
    place = _Place.here(rank)
    head = Head(place.node_index, place.hostname, options, world_size, attempts.launch_of(topic))
    own = OwnEnvironment(rank)
    checked: list[Checked] = []
    parts: dict[str, Any] = {}

    def introduce() -> dict[str, Any]:
        store_url.wanted(options.run_dir)  # an error here is told to all ranks
        checked.append(check())
        facts = {**place.facts(), **checked[0].facts}
        parts.update(facts.pop("parts"))
        # All names would be much to hear from a thousand ranks: their digest, and them if need be.
        return {**facts, "model": parts[""], "environment": own.digest}

    name = rendezvous.meet(store, topic, rank, world_size)
    opened: list[Joined] = []
    try:
        plan = rendezvous.round_trip(
            store, f"{name}/plan", rank, world_size, introduce, head.decide
        )

        def open_files() -> dict[str, Any]:
            apart = _has_own_disk(plan, place)
            said = own.meta(plan["environments"])
            opened.append(_open(plan, place, world_size, head, options, checked[0].detectors, said))
            if options.budget and world_size > 1:  # then all change together what they sample
                files = opened[0].record_files
                opened[0].channel = _channel(plan, place, store, f"{name}/pace", files)
            told = {"parts": parts if plan["apart"] else {}, "node": opened[0].node, "own": apart}
            told["environment"] = said["environment"] if len(plan["environments"]) > 1 else {}
            return {**told, "refused": opened[0].refused}

        def compare(told: list[dict[str, Any]]) -> dict[str, Any]:
            head.say_where([i for i, part in enumerate(told) if part["own"]])
            return head.compare(told)

        held = rendezvous.round_trip(store, f"{name}/open", rank, world_size, open_files, compare)
    except BaseException:
        head.lock_release()
        for one in opened:
            one.record_files.give_up()
        raise
    topology = checked[0].topology
    topology.cut, topology.differ = frozenset(held["cut"]), frozenset(held["differ"])
    opened[0].unlike = own.unlike(held["unlike"])
    _tell_refused(opened[0].run, held["refused"])
    if rank == 0:
        versions.tell_untried()
        for name, meant in variables.misspelt().items():
            logger.warning("ddpprobe: nothing reads %s; did you mean %s?", name, meant)
    return opened[0], checked[0]


def _tell_refused(run: RunDir, refused: Mapping[str, str]) -> None:
    """Say on every rank, in one line, which nodes have no daemon and what to do about it."""
    if refused:
        node, why = next(iter(refused.items()))
        logger.warning(
            "ddpprobe: the daemon of %s cannot be started (%s): training goes on without it, the "
            "journals keep the records, and `ddpprobe daemon --dir %s --node %s` reads them, now "
            "or when the run is over",
            ", ".join(refused), why, run.path, node,
        )  # fmt: skip


def _tell_namespace(run: RunDir, node: str) -> None:
    """Say what may end the daemon of this node before its work is done."""
    if trouble := processes.namespace_trouble():
        logger.warning(
            "ddpprobe: the node daemon runs beside the training, but %s. What it has not stored "
            "then stays in the journals: `ddpprobe daemon --dir %s --node %s` finishes it",
            trouble, run.path, node,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Place:
    rank: int
    node_index: int
    hostname: str
    memory: tmpfs.Tmpfs
    secret: str

    @classmethod
    def here(cls, rank: int) -> _Place:
        """Read torchrun's variables, else Slurm's; without them all ranks are on one node."""
        env = os.environ
        node = env.get("GROUP_RANK", env.get("SLURM_NODEID", "0"))
        return cls(rank, int(node), socket.gethostname(), record_files.look(), roster.new_secret())

    @property
    def machine(self) -> str:
        """What all who share this rank's memory have in common, and nobody else."""
        return f"{self.hostname} {self.memory.identity}"

    def facts(self) -> dict[str, Any]:
        try:
            directory = str(Path.cwd())
        except OSError:  # it was deleted
            directory = ""
        said = {"node_index": self.node_index, "machine": self.machine, "cwd": directory}
        said["process"] = astuple(Process.own())
        return {**said, "digest": roster.digest(self.secret)}  # the secret is nobody else's


def _open(
    plan: dict[str, Any],
    place: _Place,
    world_size: int,
    head: Head,
    options: InstallOptions,
    detectors: Settings,
    environment: Mapping[str, Any],
) -> Joined:
    rank = place.rank
    run, identity, attempt = RunDir(Path(plan["run_dir"])), plan["identity"], plan["attempt"]
    node = paths.node_name(place.node_index)
    leads = plan["leaders"][str(place.node_index)] == rank
    is_head = plan["leaders"][str(place.node_index)] == 0
    paths.make_dir(run.path)
    if leads:
        attempts.arrive(run, node, identity, attempt, plan["claim"])
        spool.clear_away(run, node)
    meta = {
        "rank": rank, "local_rank": rank - plan["leaders"][str(place.node_index)],
        "world_size": world_size,
        "local_world_size": plan["members"][str(place.node_index)], "node": node,
        "node_index": place.node_index, "attempt": attempt, "pid": os.getpid(),
        "pid_start": processes.own_start(), "hostname": place.hostname,
        "device": _device(), "wrapper": plan["wrapper"], "backend": process_group.backend(),
        "torch": torch.__version__, "run_id": identity["run_id"],
        "name": identity["name"], "every": plan["every"], "started_ns": time.time_ns(),
        "head": is_head, "head_url": plan["head"],
        "restarts_left": restarts_left(os.environ),
        **options.told(), "detectors": detectors, "process": plan["process"], **environment,
    }  # fmt: skip
    own = RecordFiles(Spot(run, attempt, node, rank), meta, plan["memory"], place.memory.refused)
    if job := scheduler(os.environ):
        own.journal.append_event(JobEvent(scheduler=job))
    # The daemon, which runs beside the rank that leads the node, shows orders in its own memory.
    far = plan["machines"][str(place.node_index)] != place.machine
    try:
        board = OrderReader(own.shared(run.orders(attempt, node), far=far))
    except OSError:
        own.give_up()
        raise

    share_secrets = partial(
        _share_secrets, run, node, head.roster, place.secret if len(plan["nodes"]) > 1 else None
    )

    def start() -> None:
        share_secrets()
        gather = plan["head"].partition("://")[2] if is_head and plan["head"] else None
        launch.start_daemon(
            run, node, head_url=None if is_head else plan["head"], listen=options.listen,
            gather_listen=gather, linger=None,
        )  # fmt: skip

    refused = plan["refused"]
    starter = start if leads and options.starts_daemon and not refused else None
    found = starter is not None and launch.daemon_alive(run, node)
    if starter is not None:
        # That of the attempt before goes on, with what the ranks agree on now.
        refused = _trouble(share_secrets if found else starter)
        if not found:
            _tell_namespace(run, node)
    processes_here = plan["processes"][str(place.node_index)].items()
    peers = {int(r): Process(*said) for r, said in processes_here if int(r) != rank}
    return Joined(
        run, identity["run_id"], attempt, own, head.lock, starter, node, IntervalChannel(),
        board, PeerWatcher(rank, own.journal.append_event), peers, refused=refused, found=found,
    )  # fmt: skip


def _share_secrets(run: RunDir, node: str, others: Roster | None, secret: str | None) -> None:
    """Leave the node's daemon what proves who it is: to the head those of all, and its own."""
    if others is not None:
        others.write(daemon_file(run, node, roster.ROSTER))
    elif secret is not None:
        roster.keep_secret(daemon_file(run, node, roster.SECRET), secret)


def _trouble(act: Callable[[], object]) -> str:
    """Return why a daemon cannot be started or told, "" if it is; training tries again."""
    try:
        act()
    except launch.START_ERRORS as error:
        return str(error) or type(error).__name__
    return ""


def _has_own_disk(plan: dict[str, Any], place: _Place) -> bool:
    """Whether this rank's node, which it leads, does not see the head's directory."""
    leads = plan["leaders"][str(place.node_index)] == place.rank
    run = RunDir(Path(plan["run_dir"]))
    return leads and bool(plan["disk"]) and not attempts.is_shared(run, plan["disk"])


def _channel(
    plan: dict[str, Any], place: _Place, store: Store, name: str, own: RecordFiles
) -> IntervalChannel:
    """Open this rank's way to hear what all ranks are to do.

    Raises:
        ValueError, OSError: there is none.
    """
    path = RunDir(Path(plan["run_dir"])).pace(plan["attempt"], paths.node_name(place.node_index))
    line = rendezvous.StoreChannel(store, name) if place.rank in plan["relays"] else None
    return IntervalChannel(IntervalFile(own.shared(path)), line)


def _device() -> str:
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else "cpu"
