"""What the other nodes pushed, on disk before it is acknowledged and until it has been merged."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddpprobe.daemon import admission, blocks
from ddpprobe.daemon.admission import Claims, KnownSites
from ddpprobe.daemon.blocks import Delivery, Refusal
from ddpprobe.daemon.requests import Request
from ddpprobe.records.events import Asking, Ended, Told
from ddpprobe.records.step import StepRecord
from ddpprobe.rundir import paths, safe_read
from ddpprobe.rundir.orders import Order, encode
from ddpprobe.rundir.roster import Roster

# Of one node, not merged yet. Beyond it the node is told to come again: its own queue is as large.
WAITING_BYTES, WAITING = 64 << 20, 4096
# Of all nodes together: who holds the secret of all of them fills no disk.
ALL_BYTES, ALL_FILES = 4 << 30, 1 << 16
# Seconds of the server's thread for one node: at once, and then per second. /metrics needs it, too.
CREDIT_SECONDS, CREDIT_RATE = 4.0, 0.25
_NODE = re.compile(r"node_\d{4,9}", re.ASCII)
_SUFFIX = ".block"
_LATER = 1000  # attempts that may be to come, where no roster says which one is next

logger = logging.getLogger("ddpprobe")


@dataclass(slots=True)
class _Peer:
    """Another node. `files`: by number, highest step in it and bytes; `wishes`: step by cause.

    `spent`: seconds of the server's thread beyond its rate, at the time `since`.
    """

    name: str
    directory: Path
    waiting: deque[Delivery] = field(default_factory=deque)
    files: dict[int, tuple[int, int]] = field(default_factory=dict)
    number: int = 0
    newest: int = -1
    wishes: dict[str, int] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    spent: float = 0.0
    since: float = field(default_factory=time.monotonic)

    @property
    def held(self) -> int:
        """Bytes of its files."""
        return sum(size for _, size in self.files.values())

    @property
    def full(self) -> bool:
        return self.held >= WAITING_BYTES or max(len(self.waiting), len(self.files)) >= WAITING

    def keep(self, block: bytes, top: int) -> None:
        """Write a block down; a disk that refuses leaves it in memory alone."""
        path = self._path(self.number)
        try:
            paths.replace_file(path, [block])
        except OSError as error:
            self.tell("disk", f"what it pushes cannot be written down: {error}")
            return
        self.files[self.number] = (top, len(block))
        self.number += 1

    def prune(self, merged: int) -> None:
        """Delete the blocks in which nothing lies behind `merged`."""
        for number in [n for n, (top, _) in self.files.items() if top <= merged]:
            self._path(number).unlink(missing_ok=True)
            del self.files[number]

    def tell(self, sort: str, why: str) -> None:
        """Say once in the log what is wrong with this node."""
        if sort not in self.told:
            self.told.add(sort)
            logger.warning("ddpprobe: %s: %s; said once, then only counted", self.name, why)

    def charge(self, seconds: float) -> None:
        """Account for time of the server's thread."""
        now = time.monotonic()
        self.spent = max(self.spent - CREDIT_RATE * (now - self.since), 0.0) + seconds
        self.since = now

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:08d}{_SUFFIX}"


class GatherQueue:
    """Takes pushed blocks on the server's thread, hands them out on the daemon's.

    It is open for one attempt at a time. A block is written to `directory/<attempt>/<node>` before
    `take` returns, so that a head killed afterwards finds it again: what was acknowledged is not
    lost. What a node may say is checked (see `admission`), and each node has a queue of its own:
    one that says too much, or is far ahead, costs the others nothing.

    Attributes:
        roster: whose ranks are whose, if the job has agreed on it.
        refused: what was not taken, by reason.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.roster: Roster | None = None
        self.refused: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._attempt, self._over = -1, False
        self._front = self._merged = -1
        self._claims = Claims(0, (), None)
        self._sites = KnownSites()
        self._orders: list[tuple[int, bytes]] = []
        self._heard: dict[str, int] = {}
        self._left: set[str] = set()

    def others(self, attempt: int) -> list[str] | None:
        """Return the other nodes of an attempt; None if the job has not agreed on them."""
        roster = self.roster
        return sorted(roster.ranks) if roster is not None and roster.attempt == attempt else None

    def heard(self) -> dict[str, int]:
        """Return when each other node pushed last, Unix ns, but those that have said good-bye.

        One that the job has agreed on counts from the beginning: it is waited for.
        """
        with self._lock:
            return {node: at for node, at in self._heard.items() if node not in self._left}

    def open(self, attempt: int, world_size: int, own: Iterable[int], merged: int = -1) -> None:
        """Take what is pushed for an attempt, and what a killed predecessor had taken.

        Args:
            attempt: number of it; what lies here of earlier ones is deleted.
            world_size: ranks of the job.
            own: ranks of the head's node.
            merged: highest step that is merged already.
        """
        listed = None if self.roster is None else self.roster.ranks
        if self.roster is not None and self.roster.attempt != attempt:
            listed = {}  # it is another attempt's
        for path in self.directory.glob("[0-9]*"):
            if path.name.isdecimal() and int(path.name) < attempt:
                shutil.rmtree(path, ignore_errors=True)
        with self._lock:
            self._attempt, self._over = attempt, False
            self._peers, self._orders, self._sites = {}, [], KnownSites()
            self._front, self._merged = -1, merged
            self._claims = Claims(world_size, own, listed)
            self._left = set()
            self._heard = dict.fromkeys(self.others(attempt) or (), time.time_ns())
            for path in sorted(self._directory.glob("node_*")):
                self._read_back(self._peer(path.name))

    def announce(self, orders: Iterable[Order]) -> None:
        """Let the other nodes have orders, each of them after its next question."""
        with self._lock:
            self._orders += [(order.number, encode(order)) for order in orders]

    def take(self, node: str, block: bytes) -> bytes:
        """Keep one block that a node pushed; return the orders that it asks for.

        Raises:
            Refusal: the block, or what its reason names of it, is not taken.
        """
        with self._lock:
            if node in self._heard:  # also one that is told to come again
                self._heard[node] = time.time_ns()
            peer = self._welcome(node)
            self._heard[node] = time.time_ns()
        start = time.thread_time()
        try:
            said = blocks.decode(block)
            with self._lock:
                return self._take(self._peer(node), block, said)
        except Refusal as refusal:
            if refusal.status in (400, 413):
                self._refuse(peer, "block", refusal.reason)
            raise
        finally:
            peer.charge(time.thread_time() - start)

    def horizon(self, front: int) -> int:
        """Return the step where most of the job is, given that of the head's own ranks.

        That is `front`, or the step that more than half of the nodes have reached: a minority
        cannot move it, and the others go on if the head's own ranks hang.
        """
        with self._lock:
            self._front = max(self._front, front)
            return self._horizon()

    def collect(self, upto: float = math.inf) -> list[Delivery]:
        """Return what arrived since the last call, of steps up to `upto`; the rest waits here."""
        out: list[Delivery] = []
        with self._lock:
            for peer in self._peers.values():
                waiting = peer.waiting
                while waiting and not _is_ahead(waiting[0], upto):
                    out.append(waiting.popleft())
        return out

    def prune(self, merged: int) -> None:
        """Delete what is not needed any more: blocks with no step above `merged`."""
        with self._lock:
            self._merged = merged
            for peer in self._peers.values():
                peer.prune(merged)

    def discard(self) -> None:
        """Delete everything of the attempt, which has been merged to its end."""
        with self._lock:
            self._over = True
            self._peers, self._orders = {}, []
            shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def _directory(self) -> Path:
        return self.directory / f"{self._attempt:03d}"

    def _peer(self, node: str) -> _Peer:
        return self._peers.setdefault(node, _Peer(node, self._directory / node))

    def _welcome(self, node: str) -> _Peer:
        """Return who pushes, if it may now."""
        if _NODE.fullmatch(node) is None:
            raise Refusal(400, f"a node is named as in node_0001, and not {node!r:.40}")
        if self._front < 0 and not self._over:  # nobody knows yet which steps make sense
            raise Refusal(503, "the head's own ranks have not begun")
        if node not in self._peers and len(self._peers) >= max(self._claims.world_size, 1):
            raise Refusal(400, "there are more nodes than ranks")
        peer = self._peer(node)
        if peer.full:
            raise Refusal(503, "more of this node waits to be merged than it may")
        if peer.files and self._is_full():  # one of each node is taken: all of them go on
            raise Refusal(503, "more waits to be merged than all nodes together may have")
        peer.charge(0.0)
        if peer.spent > CREDIT_SECONDS:
            raise Refusal(503, "this node pushes more than the head can look at")
        return peer

    def _is_full(self) -> bool:
        peers = self._peers.values()
        if sum(len(peer.files) for peer in peers) >= ALL_FILES:
            return True
        return sum(peer.held for peer in peers) >= ALL_BYTES

    def _take(self, peer: _Peer, block: bytes, said: list[Delivery | Asking]) -> bytes:
        coming = self._attempt + _LATER if self.roster is None else self.roster.attempt
        if any(self._attempt < d.attempt <= coming for d in said):
            raise Refusal(503, "the head has not come to that attempt yet")
        good, faults = self._sift(peer, said, self._horizon())
        steps = [d.step for d in good if isinstance(d, StepRecord)]
        # What is no record is kept until the step after the last one has been merged.
        steps += [self._merged + 1 for d in good if not isinstance(d, StepRecord)]
        if max(steps, default=-1) > self._merged:
            peer.keep(block, max(steps))
        peer.waiting.extend(good)
        if faults:
            told = {"refused": faults.total(), "reason": next(iter(faults))}
            raise Refusal(409, json.dumps(told))
        asked = [d.last for d in said if isinstance(d, Asking) and d.attempt == self._attempt]
        return b"".join(frame for n, frame in self._orders if asked and n > asked[-1])

    def _sift(
        self, peer: _Peer, said: list[Delivery | Asking], horizon: float
    ) -> tuple[list[Delivery], Counter[str]]:
        """Return what of a block is taken, and how often it was refused for which reason."""
        good: list[Delivery] = []
        faults: Counter[str] = Counter()
        for delivery in said:
            if isinstance(delivery, Asking):
                continue
            if isinstance(delivery, Ended) and delivery.attempt == self._attempt:
                self._left.add(peer.name)  # be it too late for the merge
            sort, why = self._fault(peer, delivery, horizon)
            if sort:
                self._refuse(peer, sort, why)
                faults[why] += 1
                continue
            if isinstance(delivery, Request):
                if delivery.cause in peer.wishes:  # it was taken before
                    continue
                peer.wishes[delivery.cause] = delivery.step
            elif isinstance(delivery, StepRecord):
                peer.newest = max(peer.newest, delivery.step)
                self._claims.note(peer.name, delivery.ranks)
                # Who else delivers nothing is not for this node to say.
                own = tuple(r for r in delivery.missing if self._claims.hold(peer.name, [r]))
                good.append(replace(delivery, missing=own))
                continue
            good.append(delivery)
        return good, faults

    def _refuse(self, peer: _Peer, sort: str, why: str) -> None:
        self.refused[f"refused_{sort}"] += 1
        peer.tell(sort, f"what it pushes is refused: {why}")

    def _fault(self, peer: _Peer, delivery: Delivery, horizon: float) -> tuple[str, str]:
        """Return which sort of thing is wrong with it, and what; "" twice if nothing is."""
        faults = self._faults(peer, delivery, horizon)
        return next(((sort, why) for sort, why in faults if why), ("", ""))

    def _faults(self, peer: _Peer, delivery: Delivery, horizon: float) -> Iterator[tuple[str, str]]:
        """Look closer and closer; "" where nothing is wrong."""
        if delivery.attempt != self._attempt or self._over:
            yield "attempt", f"attempt {delivery.attempt} is not under way"
        yield "ranks", admission.fault_of_ranks(delivery, peer.name, self._claims)
        if isinstance(delivery, Ended):
            return
        if isinstance(delivery, Told):
            yield "fate", admission.fault_of_fate(delivery.fate, peer.name)
            return
        yield "step", admission.fault_of_step(delivery, horizon)
        if isinstance(delivery, Request):
            if delivery.cause not in peer.wishes:
                yield "wish", admission.fault_of_wish(peer.wishes.values(), delivery.step)
            return
        yield "numbers", admission.fault_of_numbers(delivery)
        if not self._sites.take(peer.name, delivery.sites):
            yield "sites", "it has named too many sites in this attempt"

    def _horizon(self) -> int:
        horizon = max(self._front, self._merged)
        if self.roster is None or not self._claims.rostered:
            return horizon
        newest = [peer.newest for peer in self._peers.values()]
        reached = sorted([self._front, *newest, *[-1] * (len(self.roster.ranks) - len(newest))])
        return max(horizon, reached[(len(reached) - 1) // 2])

    def _read_back(self, peer: _Peer) -> None:
        """Take once more what a predecessor had taken of a node: its steps were near then."""
        for name in safe_read.names(self._directory, peer.name):
            number = name.removesuffix(_SUFFIX)
            if not number.isdecimal():
                continue
            try:
                block = safe_read.read_regular(peer.directory, name)
                good, _ = self._sift(peer, blocks.decode(block), math.inf)
            except (OSError, Refusal):
                continue
            steps = [d.step for d in good if isinstance(d, StepRecord)]
            peer.files[int(number)] = (max([self._merged + 1, *steps]), len(block))
            peer.number = max(peer.number, int(number) + 1)
            peer.waiting.extend(good)


def _is_ahead(delivery: Delivery, upto: float) -> bool:
    """Whether it is a record of a later step."""
    return isinstance(delivery, StepRecord) and delivery.step > upto
