"""From a checked `install()` call to a place to write: run directory, attempt, journal, daemon."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from ddpprobe.daemon import launch
from ddpprobe.daemon.launch import DaemonKeeper
from ddpprobe.detectors.settings import Settings
from ddpprobe.rank import attempts, process_group, record_files, rendezvous, versions
from ddpprobe.rank.attempts import Claimed
from ddpprobe.rank.interval import IntervalChannel, IntervalFile
from ddpprobe.rank.options import Checked, InstallOptions
from ddpprobe.rank.passes import OF_THE_PROCESS
from ddpprobe.rank.peer_watcher import PeerWatcher, Process
from ddpprobe.rank.record_files import RecordFiles, Spot
from ddpprobe.rank.rendezvous import Store
from ddpprobe.rank.scheduler import restarts_left, scheduler
from ddpprobe.rank.topology import stages
from ddpprobe.records.events import JobEvent
from ddpprobe.rundir import paths, processes, roster, spool, store_url, tmpfs
from ddpprobe.rundir.orders import OrderReader
from ddpprobe.rundir.paths import DirectoryLock, RunDir
from ddpprobe.rundir.roster import Roster

DAEMON_SECONDS = 30.0  # for the head's daemon to open its port, when other nodes must know it

logger = logging.getLogger("ddpprobe")


@dataclass
class Joined:
    """One rank's place in a run. `lock` is held by rank 0 for as long as the attempt lives.

    `refused` says why this node's daemon could not be started.
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
            self._keeper = DaemonKeeper(self.run, self.node, self.restart, told=told)
        self._keeper.look(last=last)


def join_run(
    store: Store,
    name: str,
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
    head = _Head(place, options, world_size, attempts.launch_of(name))
    checked: list[Checked] = []
    parts: dict[str, Any] = {}

    def introduce() -> dict[str, Any]:
        store_url.wanted(options.run_dir)  # an error here is told to all ranks
        checked.append(check())
        facts = {**place.facts(), **checked[0].facts}
        parts.update(facts.pop("parts"))
        # All names would be much to hear from a thousand ranks: their digest, and them if need be.
        return {**facts, "model": parts[""]}

    opened: list[Joined] = []
    try:
        plan = rendezvous.round_trip(
            store, f"{name}/plan", rank, world_size, introduce, head.decide
        )

        def open_files() -> dict[str, Any]:
            own = _has_own_disk(plan, place)
            opened.append(_open(plan, place, world_size, head, options, checked[0].detectors))
            if options.budget and world_size > 1:  # then all change together what they sample
                files = opened[0].record_files
                opened[0].channel = _channel(plan, place, store, f"{name}/pace", files)
            told = {"parts": parts if plan["apart"] else {}, "node": opened[0].node, "own": own}
            return {**told, "refused": opened[0].refused}

        def compare(heard: list[dict[str, Any]]) -> dict[str, Any]:
            head.say_where([i for i, part in enumerate(heard) if part["own"]])
            return _compare(heard)

        held = rendezvous.round_trip(store, f"{name}/open", rank, world_size, open_files, compare)
    except BaseException:
        head.lock_release()
        for one in opened:
            one.record_files.give_up()
        raise
    topology = checked[0].topology
    topology.cut, topology.differ = frozenset(held["cut"]), frozenset(held["differ"])
    _tell_refused(opened[0].run, held["refused"])
    if rank == 0:
        versions.tell_untried()
    return opened[0], checked[0]


def _compare(heard: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what `stages.compare` does, and why daemons could not be started, by node."""
    refused = {part["node"]: part["refused"] for part in heard if part["refused"]}
    return {**stages.compare([part["parts"] for part in heard]), "refused": refused}


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


def _tell_trouble(run: RunDir, node: str) -> None:
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


class _Head:
    """What rank 0 decides for all."""

    def __init__(
        self, place: _Place, options: InstallOptions, world_size: int, launched: dict[str, Any]
    ) -> None:
        self.place = place
        self._launched = launched
        self.lock: DirectoryLock | None = None
        self.roster: Roster | None = None
        self._options = options
        self._claimed: Claimed | None = None
        self._heard: list[dict[str, Any]] = []
        self._world_size = world_size

    def decide(self, heard: list[dict[str, Any]]) -> dict[str, Any]:
        """Make the plan from what all ranks said."""
        for rank, part in enumerate(heard):
            if part["settings"] != heard[0]["settings"]:
                raise ValueError(
                    f"ranks 0 and {rank} called ddpprobe.install() with different settings: "
                    f"{heard[0]['settings']} and {part['settings']}. They must be equal."
                )
        for glob, message in heard[0]["unmatched"].items():
            if all(glob in part["unmatched"] for part in heard):  # stages hold other modules each
                raise ValueError(message)
        nodes = sorted({part["node_index"] for part in heard})
        leaders = {n: min(r for r, p in enumerate(heard) if p["node_index"] == n) for n in nodes}
        members = _members(heard, leaders)
        claimed = self._claim(heard, nodes)
        self._claimed, self._heard = claimed, heard
        if len(nodes) > 1:
            self.roster = _roster(heard, leaders, claimed.attempt)
        plan: dict[str, Any] = {
            "run_dir": str(claimed.run.path), "identity": claimed.identity, "nodes": nodes,
            "attempt": claimed.attempt, "claim": claimed.token, "head": None,
            "leaders": {str(n): r for n, r in leaders.items()},
            "members": {str(n): m for n, m in members.items()},
            "processes": {
                str(n): {r: p["process"] for r, p in enumerate(heard) if p["node_index"] == n}
                for n in nodes
            },
            "machines": {str(n): heard[r]["machine"] for n, r in leaders.items()},
            "memory": tmpfs.token(),
            "relays": _relays(heard),
            "apart": any(part["model"] != heard[0]["model"] for part in heard), "refused": "",
            "disk": attempts.mark_disk(claimed.run) if len(nodes) > 1 else "",
            "process": OF_THE_PROCESS.token,
            # Of this attempt: what run.json says of it is of the first one.
            "every": heard[0]["every"], "wrapper": _wrapper(heard),
        }  # fmt: skip
        if self.roster is not None and self._options.starts_daemon:
            try:
                plan["head"] = self._start_head(claimed.run, self.roster)
            except (ValueError, *launch.START_ERRORS) as error:
                # Without a head the other nodes' daemons would have nobody to push to.
                plan["refused"] = str(error) or type(error).__name__
        return plan

    def say_where(self, leaders: list[int]) -> None:
        """Say where the nodes write, whose `leaders` see another disk than rank 0's."""
        given = self._options.run_dir
        relative = given is None or store_url.is_url(given) or not Path(given).is_absolute()
        moved = relative and any(part["cwd"] != self._heard[0]["cwd"] for part in self._heard)
        if self._claimed is not None:
            own = [int(self._heard[rank]["node_index"]) for rank in leaders]
            attempts.say_where(self._claimed, own, moved=moved)

    def lock_release(self) -> None:
        """Give the directory back."""
        if self.lock is not None:
            self.lock.release()

    def _claim(self, heard: list[dict[str, Any]], nodes: list[int]) -> Claimed:
        facts = {
            "format_version": paths.FORMAT_VERSION, "world_size": self._world_size,
            "nodes": len(nodes), "created_ns": time.time_ns(), "every": heard[0]["every"],
            "wrapper": _wrapper(heard), "torch": torch.__version__, "backend": backend(),
            "hostname": self.place.hostname, **self._launched,
        }  # fmt: skip
        options = self._options
        run_dir = options.run_dir or next(iter(options.beside), None)
        claimed = attempts.claim(run_dir, options.name, facts, options.model)
        self.lock = claimed.lock
        if options.model and not options.beside:
            options.beside.append(str(claimed.run.path.parent))
        return claimed

    def _start_head(self, run: RunDir, others: Roster) -> str:
        host = socket.gethostbyname(os.environ.get("MASTER_ADDR") or socket.gethostname())
        node = paths.node_name(self.place.node_index)
        others.write(_daemon_file(run, node, roster.ROSTER))
        launch.start_daemon(
            run,
            node,
            head_url=None,
            listen=self._options.listen,
            gather_listen=f"{host}:0",
            linger=None,
        )
        serving = launch.wait_for_daemon(run, node, DAEMON_SECONDS)
        if serving is None or not serving.get("gather"):
            raise ValueError(
                f"the node daemon did not open its gather port within {DAEMON_SECONDS:.0f} s; "
                f"its log is {run.daemon_file(node, 'log')}"
            )
        return f"{serving.get('scheme') or 'http'}://{serving['gather']}"


def _open(
    plan: dict[str, Any],
    place: _Place,
    world_size: int,
    head: _Head,
    options: InstallOptions,
    detectors: Settings,
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
        "device": _device(), "wrapper": plan["wrapper"],
        "backend": backend(), "torch": torch.__version__, "run_id": identity["run_id"],
        "name": identity["name"], "every": plan["every"], "started_ns": time.time_ns(),
        "head": is_head, "head_url": plan["head"],
        "restarts_left": restarts_left(os.environ),
        "on_anomaly": options.response, "include": options.include, "exclude": options.exclude,
        "detectors": detectors, "task": options.task, "process": plan["process"],
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

    gather = plan["head"].partition("://")[2] if is_head and plan["head"] else None

    def start() -> None:
        if head.roster is not None:
            head.roster.write(_daemon_file(run, node, roster.ROSTER))
        elif len(plan["nodes"]) > 1:
            roster.keep_secret(_daemon_file(run, node, roster.SECRET), place.secret)
        launch.start_daemon(
            run, node, head_url=None if is_head else plan["head"], listen=options.listen,
            gather_listen=gather, linger=None,
        )  # fmt: skip

    refused = plan["refused"]
    starter = start if leads and options.starts_daemon and not refused else None
    if starter is not None and not launch.daemon_alive(run, node):
        try:
            starter()
        except launch.START_ERRORS as error:  # tried again while training goes on
            refused = str(error) or type(error).__name__
        _tell_trouble(run, node)
    processes_here = plan["processes"][str(place.node_index)].items()
    peers = {int(r): Process(*said) for r, said in processes_here if int(r) != rank}
    return Joined(
        run, identity["run_id"], attempt, own, head.lock, starter, node, IntervalChannel(),
        board, PeerWatcher(rank, own.journal.append_event), peers, refused=refused,
    )  # fmt: skip


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


def _members(heard: list[dict[str, Any]], leaders: Mapping[int, int]) -> dict[int, int]:
    """Return how many ranks each node has, by its index; `leaders` are the first of them.

    Raises:
        ValueError: they do not follow each other, which a daemon counts its node's ranks by.
    """
    members = {n: sum(part["node_index"] == n for part in heard) for n in leaders}
    for rank, part in enumerate(heard):
        node = part["node_index"]
        if rank - leaders[node] >= members[node]:
            raise ValueError(
                f"the ranks of node {node} do not follow each other: {rank} is one of them, and "
                "one before it is not. Start them node after node: srun --distribution=block."
            )
    return members


def _relays(heard: list[dict[str, Any]]) -> list[int]:
    """Return the first rank of each machine, which tells the others; none if there is one only."""
    first: dict[tuple[int, str], int] = {}
    for rank, part in enumerate(heard):
        first.setdefault((part["node_index"], part["machine"]), rank)
    return sorted(first.values()) if len(first) > 1 else []


def _wrapper(heard: list[dict[str, Any]]) -> str:
    """What wraps the model, by what all ranks said."""
    if any(part["model"][0] != heard[0]["model"][0] for part in heard):
        return "pipeline"
    return str(heard[0]["wrapper"]) if len({part["wrapper"] for part in heard}) == 1 else "mixed"


def _roster(heard: list[dict[str, Any]], leaders: Mapping[int, int], attempt: int) -> Roster:
    """Return who may push to the head: all nodes but the one of rank 0."""
    others = [n for n, leader in leaders.items() if leader]
    name = paths.node_name
    return Roster(
        attempt,
        {
            name(n): frozenset(r for r, part in enumerate(heard) if part["node_index"] == n)
            for n in others
        },
        {name(n): str(heard[leaders[n]]["digest"]) for n in others},
    )


def _daemon_file(run: RunDir, node: str, suffix: str) -> Path:
    path = run.daemon_file(node, suffix)
    paths.make_inner(path.parent)
    return path


def backend() -> str:
    """Name of the process group's backend, "" without one."""
    return str(dist.get_backend()) if process_group.exists() else ""


def _device() -> str:
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else "cpu"
