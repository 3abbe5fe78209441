"""What rank 0 decides for all ranks at `install()`, from what each of them has said."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch

from ddpprobe.daemon import launch
from ddpprobe.rank import attempts, environment, process_group
from ddpprobe.rank.attempts import Claimed
from ddpprobe.rank.options import InstallOptions
from ddpprobe.rank.passes import OF_THE_PROCESS
from ddpprobe.rank.topology import stages
from ddpprobe.rundir import paths, roster, store_url, tmpfs
from ddpprobe.rundir.paths import DirectoryLock, RunDir
from ddpprobe.rundir.roster import Roster

DAEMON_SECONDS = 30.0  # for the head's daemon to open its port, when other nodes must know it


@final
class Head:
    """Rank 0, which decides for all.

    Args:
        node_index: of its node.
        hostname: of its machine.
        options: of `install()`.
        world_size: of the job.
        launched: what tells this start of the job from others.
    """

    def __init__(
        self, node_index: int, hostname: str, options: InstallOptions, world_size: int,
        launched: dict[str, Any],
    ) -> None:  # fmt: skip
        self._node_index, self._hostname = node_index, hostname
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
                    f"{_unequal(heard[0]['settings'], part['settings'], rank)}. They must be equal."
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
            "environments": environment.tellers([part["environment"] for part in heard]),
        }  # fmt: skip
        if self.roster is not None and self._options.starts_daemon:
            try:
                plan["head"] = self._start_head(claimed.run, self.roster)
            except (ValueError, *launch.START_ERRORS) as error:
                # Without a head the other nodes' daemons would have nobody to push to.
                plan["refused"] = str(error) or type(error).__name__
        return plan

    def compare(self, told: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what ranks differ in, and why daemons could not be started, by node."""
        digests = [part["environment"] for part in self._heard]
        unlike, numbers = environment.compare(digests, [part["environment"] for part in told])
        environment.tell(unlike)
        return {
            **stages.compare([part["parts"] for part in told]), "unlike": numbers,
            "refused": {part["node"]: part["refused"] for part in told if part["refused"]},
        }  # fmt: skip

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
            "wrapper": _wrapper(heard), "torch": torch.__version__,
            "backend": process_group.backend(), "hostname": self._hostname, **self._launched,
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
        node = paths.node_name(self._node_index)
        others.write(daemon_file(run, node, roster.ROSTER))
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


def daemon_file(run: RunDir, node: str, suffix: str) -> Path:
    """Return the path of a file of a node's daemon, in a directory that is there."""
    path = run.daemon_file(node, suffix)
    paths.make_inner(path.parent)
    return path


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


def _unequal(first: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> str:
    """Say which settings of a rank are not those of rank 0."""
    return "; ".join(
        f"{name}={first[name]!r} on rank 0, {name}={other[name]!r} on rank {rank}"
        for name in first
        if first[name] != other[name]
    )
