"""One attempt on one node: its ranks, followed to their end, and the merge of what they write."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

from ddpprobe.daemon.capture_policy import CapturePolicy
from ddpprobe.daemon.command import Command
from ddpprobe.daemon.daemon_journal import DaemonJournal
from ddpprobe.daemon.ends import Ends
from ddpprobe.daemon.first_cause import FirstCause
from ddpprobe.daemon.gather_queue import GatherQueue
from ddpprobe.daemon.liveness import Exit, ProcessWatcher
from ddpprobe.daemon.local_rank import LocalRank
from ddpprobe.daemon.push import Pusher
from ddpprobe.daemon.requests import Request, RequestFiles
from ddpprobe.daemon.spool_carrier import SpoolCarrier
from ddpprobe.detectors.suite import default_suite, recorded
from ddpprobe.ends.end import ENDED, RUNNING, STOPPED
from ddpprobe.records.events import Ended, Told
from ddpprobe.records.gather import Gather
from ddpprobe.records.step import Anomaly, StepRecord
from ddpprobe.rundir import heartbeat, paths
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.journal import segments_of
from ddpprobe.rundir.journal_tail import RankTail
from ddpprobe.rundir.orders import OrderBoard
from ddpprobe.rundir.paths import RunDir
from ddpprobe.rundir.processes import own_start, torchrun_of
from ddpprobe.store.earlier_attempts import earlier

# A node gives up on a slow rank before the head gives up on the node.
NODE_GRACE_SECONDS = 3.0
HEAD_GRACE_SECONDS = 5.0
# A rank that torchrun started wrote its META when the others did, or never will.
ABSENT_SECONDS = 10.0
# After the last of its ranks torchrun ends in a second or two. So long its exit code is waited for
# where it decides; a later one counts as well, while the daemon is there.
LAUNCHER_SECONDS = 10.0
# So long a torchrun may take to start ranks again: it waits so long for nodes (`join_timeout`).
RESTART_SECONDS = 600.0
_LAUNCHER = -1  # in the place of a rank's number
# A backlog (a daemon that starts late, a run opened afterwards) is merged while it is read.
RECORDS_PER_LOOK = 64
MAX_PENDING = 512


class Attempt:
    """Follows the ranks of one attempt on this node.

    Args:
        run: the run directory.
        node: this node's name.
        number: of the attempt.
        watcher: notices deaths.
        gather_queue: what other nodes push, if this may be the head.
        pusher: the way to the head, if this is not.
    """

    def __init__(
        self,
        run: RunDir,
        node: str,
        number: int,
        watcher: ProcessWatcher,
        gather_queue: GatherQueue,
        pusher: Pusher | None,
    ) -> None:
        self.run, self.node, self.number = run, node, number
        self.ranks: dict[int, LocalRank] = {}
        self.meta: Mapping[str, Any] = {}
        self.daemon_journal: DaemonJournal | None = None
        self.ends: Ends | None = None
        self.gather: Gather | None = None
        self.closed = False
        self._board: OrderBoard | None = None
        self._capture_policy: CapturePolicy | None = None
        self._first_cause: FirstCause | None = None
        self._request_files = RequestFiles(run.requests)
        self._spool_carrier = SpoolCarrier(run, number, node)
        self._watcher, self._gather_queue, self._pusher = watcher, gather_queue, pusher
        self._changed_at = time.monotonic()
        self._launcher: Exit | None = None
        self._over_at: float | None = None
        self._command: Command | None = None
        self._judging = Fuse("judging", sys.maxsize)

    @property
    def unread_since(self) -> float | None:
        """Since when a rank has written what is not read (monotonic seconds); None: nothing is."""
        since = [at for r in self.ranks.values() if (at := r.unread_since) is not None]
        return None if self.closed else min(since, default=None)

    @property
    def is_head(self) -> bool:
        """Whether this node merges all others'."""
        return bool(self.meta.get("head", False))

    @property
    def state(self) -> str:
        """How it ended, as far as is known now, as `ends.end.End`."""
        return self.ends.end.state if self.ends is not None else RUNNING

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return int(self.meta.get("world_size", 0))

    @property
    def local_ranks(self) -> list[int]:
        """Ranks that belong to this node: torchrun numbers them without a gap."""
        first = int(self.meta["rank"]) - int(self.meta["local_rank"])
        return list(range(first, first + int(self.meta["local_world_size"])))

    @property
    def nodes_expected(self) -> int | None:
        """Nodes of the job; None on a node that is not the head, or as long as it is not known."""
        if not self.is_head:
            return None
        others = self._gather_queue.others(self.number)
        if others is not None:
            return 1 + len(others)
        # Started by hand, without a roster, the nodes are taken to be alike.
        return -(-self.world_size // max(len(self.local_ranks), 1))

    @property
    def node_blocks(self) -> dict[str, int]:
        """When each other node pushed last (Unix ns), until it says that its ranks have ended."""
        return self._gather_queue.heard() if self.is_head else {}

    def poll(self, now: float) -> tuple[int, bool]:
        """Read what is new and merge what is complete.

        Returns the number of records read, and whether there is more to read right away.
        """
        self._discover(now)
        self._collect_exits()
        everybody = self.ranks.values()
        read, more = 0, False
        if self.gather is None or self.gather.pending < MAX_PENDING:
            for rank in everybody:
                count = self._read(rank, now)
                read, more = read + count, more or count == RECORDS_PER_LOOK
        self._note_command()
        self._look_at_ends(over=False)
        if self.gather is None:
            return read, more
        read += self._collect(self.gather, now, self._upto(more=more))
        for number, rank in self.ranks.items():
            rank.note_unread(now)
            if rank.ended:
                self.gather.mark_dead(number)
        self._take_merged(self.gather.ready(now))
        self._look_at_causes(now)
        self._carry_orders()
        return read, more

    def look_once_more(self, now: float) -> None:
        """Take in who has ended by now, and their last words, before somebody ends this daemon.

        What ends a job ends its daemon in the same moment, and nobody may come after it.
        """
        self._watcher.look()
        while self.poll(now)[1] and all(rank.exit is not None for rank in self.ranks.values()):
            pass  # there is more to read, and nobody writes any more

    def local_end(self, now: float) -> bool:
        """Whether every rank of this node has ended, as far as one can know."""
        if not self.ranks or not all(rank.is_over(now) for rank in self.ranks.values()):
            return False
        self._over_at = self._over_at or now
        if self._awaits_launcher and now - self._over_at < LAUNCHER_SECONDS:
            return False
        everybody = bool(self.meta) and set(self.local_ranks) <= set(self.ranks)
        return everybody or now - self._changed_at > ABSENT_SECONDS

    def awaits_restart(self, now: float) -> bool:
        """Whether the torchrun of this node's ranks may start them again after their bad end.

        It lives, and has restarts left; at most for `RESTART_SECONDS` after the last of them.
        """
        may = self._has_one_launcher and self._launcher is None and self.meta.get("restarts_left")
        failed = self.state not in {RUNNING, ENDED, STOPPED}
        return bool(may) and failed and now - (self._over_at or now) < RESTART_SECONDS

    def close(self, *, ended: bool = True) -> None:
        """Merge what is left, tell the head, and close every file.

        With `ended` the attempt is over, and so is the detectors' stream; otherwise a later daemon
        goes on with it.
        """
        if self.closed:
            return
        self.closed = True
        now = time.monotonic()
        self._collect_exits()
        ends = [(rank, rank.last_to_read) for rank in self.ranks.values()]
        while sum(self._read(rank, now) for rank, end in ends if rank.tail.read_to < end):
            self._take_merged(self.gather.ready(now) if self.gather is not None else [])
        if self.gather is not None:
            # What is ahead of this node's ranks is a later daemon's, if there is one.
            self._collect(self.gather, now, math.inf if ended else self._upto(more=False))
        self._look_at_ends(over=ended)
        self._note_command(over=True)
        for rank in self.ranks.values():
            rank.tail.close()
        if self.gather is None or self.daemon_journal is None:
            return
        self._take_merged(self.gather.drain())
        self._close_orders()
        if not ended:
            return
        self.daemon_journal.last_beats(
            {n: r.beat for n, r in self.ranks.items() if r.beat is not None}
        )
        if self.is_head:
            self._gather_queue.discard()
        elif self._pusher is not None:
            self._pusher.say(Ended(self.number, tuple(self.local_ranks)))
        self._act_on(self.daemon_journal.finish())
        self._look_at_causes(now)

    @property
    def may_fold(self) -> bool:
        """Whether the store may take closed journal segments over, which deletes them.

        All their records must have been merged first, or, on a node that is not the head, have
        been acknowledged by it: a daemon killed now has a successor, which reads the journals.
        """
        if self.daemon_journal is None:
            return False
        done = self.daemon_journal.last_step if self.is_head else self.daemon_journal.pushed
        return all(rank.tail.closed_top <= done for rank in self.ranks.values())

    @property
    def reading(self) -> dict[tuple[int, int], int]:
        """The journal segment of each rank that is being read."""
        tails = [rank.tail for rank in self.ranks.values()]
        return {(self.number, tail.rank): tail.segment for tail in tails}

    @property
    def unread(self) -> dict[tuple[int, int], int]:
        """The first journal segment of each rank that a later daemon has to read, for a seal.

        It is the one that was being read when this attempt was left, as a rank that lives may have
        closed it since, or all of them where not all of their records have been taken over.
        """
        done = -1
        if self.daemon_journal is not None:
            done = self.daemon_journal.last_step if self.is_head else self.daemon_journal.pushed
        tails = [rank.tail for rank in self.ranks.values() if rank.exit is None]
        return {
            (self.number, tail.rank): tail.segment if tail.closed_top <= done else 0
            for tail in tails
        }

    def note_late_exits(self) -> None:
        """Write down how ranks ended that lived on after the end of the attempt."""
        self._collect_exits()
        for rank in self.ranks.values():
            rank.spent |= rank.exit is not None
        self._look_at_ends(over=True)
        self._look_at_causes(time.monotonic())

    def note_acknowledged(self) -> None:
        """Write down how far the head has taken over this node's records."""
        if self._pusher is not None and self.daemon_journal is not None:
            attempt, step = self._pusher.acknowledged
            if attempt == self.number:
                self.daemon_journal.acknowledged(step)

    def losses(self) -> Counter[str]:
        """Records and frames of this attempt that were lost, by reason."""
        lost = Counter[str]()
        for rank in self.ranks.values():
            lost += rank.tail.facts.dropped
            lost["damaged"] += rank.tail.damaged
        if self.gather is not None:
            lost["late"] += self.gather.late
            lost["set_aside"] += self.gather.set_aside + self._judging.errors
        if self.daemon_journal is not None:
            lost += self.daemon_journal.losses()
        return +lost

    def _discover(self, now: float) -> None:
        directory = self.run.attempt_dir(self.number) / self.node
        for path in sorted(directory.glob("rank_*")):
            digits = path.name.removeprefix("rank_")
            new = digits.isdecimal() and int(digits) not in self.ranks
            if new and segments_of(path):  # without one it was folded into the store before
                self.ranks[int(digits)] = LocalRank(RankTail(path, int(digits)))
                self._changed_at = now

    def _read(self, rank: LocalRank, now: float) -> int:
        over = rank.exit is not None  # asked first: what is read now includes its last words
        self._spool_carrier.carry(rank.tail.rank, now, over=over)
        beat = heartbeat.read(self.run.heartbeat(self.number, self.node, rank.tail.rank))
        lags = self._spool_carrier.lags(rank.tail.rank, now)
        records = rank.tail.read(RECORDS_PER_LOOK)
        rank.beat = beat or rank.beat
        self._watch(rank)
        if self.gather is None and (meta := rank.meta) is not None:
            self._begin(meta)
        for record in records:
            if self.gather is not None and record.attempt == self.number:
                self.gather.add(record, now)
        rank.spent = over and not lags and len(records) < RECORDS_PER_LOOK
        if rank.tail.facts.closed and rank.closed_at is None:
            rank.closed_at = now
        if beat is not None and len(records) < RECORDS_PER_LOOK and not lags:
            rank.compare(beat)
        return len(records)

    def _begin(self, meta: Mapping[str, Any]) -> None:
        """Set up the merge, now that a rank has said how large the job is."""
        self.meta = meta
        own = {k: meta[k] for k in ("node", "node_index", "attempt", "hostname", "head")}
        own |= {"world_size": meta["world_size"], "run_id": meta["run_id"], "role": "daemon"}
        directory = self.run.daemon_journal(self.number, self.node)
        own |= {"pid": os.getpid(), "pid_start": own_start()}
        judging = default_suite(recorded(meta.get("detectors")), partial(earlier, self.run))
        self.daemon_journal = DaemonJournal(directory, own, judging)
        way = None if self.is_head or self._pusher is None else self._pusher.say
        self.ends = Ends(self.number, self.node, self.world_size, self.daemon_journal, way)
        self._board = OrderBoard(self.run.orders(self.number, self.node))
        if self.is_head:
            nodes = self.nodes_expected or 1
            asked = str(meta.get("on_anomaly", "record"))
            self._capture_policy = CapturePolicy(
                self._board, self.daemon_journal, self._request_files, asked, nodes
            )
            last = self.daemon_journal.last_step
            self._gather_queue.open(self.number, self.world_size, self.local_ranks, last)
            self._gather_queue.announce(self._board.orders.values())
            self.gather = Gather(range(self.world_size), HEAD_GRACE_SECONDS, after=last)
            self._first_cause = FirstCause(self.daemon_journal, range(self.world_size))
        else:
            if self._pusher is not None and meta.get("head_url"):
                self._pusher.redirect(str(meta["head_url"]))  # a restarted job has a new head
            after = self.daemon_journal.pushed
            self.gather = Gather(self.local_ranks, NODE_GRACE_SECONDS, judges=False, after=after)

    def _upto(self, *, more: bool) -> float:
        """Return the step up to which other nodes are heard now.

        A step of which nobody here knows must not come out of the gather: what the others say of
        those before it would be late. So they are heard up to where this node's ranks are; while
        there is more to read of these, up to what was read; and without end once these have ended.
        """
        ranks = self.ranks.values()
        read = max((rank.tail.facts.last_step for rank in ranks), default=-1)
        beats = [rank.beat.step for rank in ranks if rank.beat is not None]
        horizon = self._gather_queue.horizon(max([read, *beats])) if self.is_head else -1
        if more or (self.gather is not None and self.gather.pending >= MAX_PENDING):
            return read
        return math.inf if all(rank.ended for rank in ranks) else horizon

    def _collect(self, gather: Gather, now: float, upto: float) -> int:
        """Take over what other nodes pushed, of steps up to `upto`."""
        if not self.is_head:
            return 0
        deliveries = self._gather_queue.collect(upto)
        for delivery in deliveries:
            if isinstance(delivery, Ended):
                for rank in delivery.ranks:
                    gather.mark_dead(rank)
            elif isinstance(delivery, Request):
                self._ask(delivery)
            elif isinstance(delivery, Told):
                if self.ends is not None:
                    self.ends.hear(delivery.fate)
            else:
                gather.add(delivery, now, final=True)
        return len(deliveries)

    def _take_merged(self, merged: list[StepRecord]) -> None:
        """Judge merged steps, on the head; elsewhere push them to it."""
        if not merged or self.daemon_journal is None:
            return
        judge = self._judging.guard(self._judge)
        for record in merged:
            if self.is_head and self._is_for_readers(record):
                continue
            if self.is_head:
                judge(self.daemon_journal, record)
            elif self._pusher is not None:
                self._pusher.push(record)
        if self.is_head:
            self._gather_queue.prune(self.daemon_journal.last_step)

    def _judge(self, daemon_journal: DaemonJournal, record: StepRecord) -> None:
        """Write a merged record down and judge it; what fails for one step is no other's."""
        self._act_on(daemon_journal.take(record))

    def _is_for_readers(self, record: StepRecord) -> bool:
        """Whether to leave a step unmerged: nobody will push what lies here of the other nodes.

        A daemon that comes when all is over (to finish what a killed one left) would say for good
        that those ranks were missing. Readers merge what no daemon has, from all ranks.
        """
        if not record.missing or any(rank.seen_alive for rank in self.ranks.values()):
            return False
        top = self.run.attempt_dir(self.number)
        others = set(record.missing) - set(self.local_ranks)
        return any(list(top.glob(f"node_*/{paths.rank_name(rank)}")) for rank in others)

    def _carry_orders(self) -> None:
        """Take wishes to the head and its orders to the ranks."""
        if self._board is None:
            return
        for number, rank in self.ranks.items():
            triggers, rank.tail.facts.triggers = rank.tail.facts.triggers, []
            for event in triggers:
                self._ask(Request.of_rank(self.number, number, event))
        if self._capture_policy is not None:
            for request in self._request_files.collect(self.number):
                self._ask(request)
            live = [rank for rank in self.ranks.values() if rank.up or rank.elsewhere]
            beats = [rank.beat for rank in live if rank.beat is not None and not rank.ended]
            self._gather_queue.announce(self._capture_policy.act(beats))
        elif self._pusher is not None:
            for order in self._pusher.ask(self.number, self._board.last):
                self._board.post(order)

    def _act_on(self, found: list[Anomaly]) -> None:
        """Let the head order a capture or a stop because of what was found."""
        if self._capture_policy is not None:
            self._capture_policy.found(found)

    def _close_orders(self) -> None:
        if self._board is not None:
            self._board.close()
        if self._pusher is not None:
            self._pusher.ask_no_more()

    def _ask(self, request: Request) -> None:
        if self._capture_policy is not None:
            self._capture_policy.ask(request)
        elif self._pusher is not None:
            self._pusher.say(request.wish())

    def _watch(self, rank: LocalRank) -> None:
        """Watch its process as soon as it is known, before anything takes time: it may end."""
        if rank.watched or (meta := rank.meta) is None or rank.elsewhere:
            return
        rank.watched = True
        key, pid = (self.number, rank.tail.rank), int(meta["pid"])
        rank.seen_alive = self._watcher.watch(key, pid, meta["pid_start"])
        rank.launcher = torchrun_of(pid) if rank.seen_alive else None
        if meta["head"] and self._command is None and rank.seen_alive:
            self._command = Command(rank.launcher or pid)
        others = [r.launcher for r in self.ranks.values() if r is not rank]
        if rank.launcher is not None and rank.launcher not in others:
            self._watcher.watch((self.number, _LAUNCHER), rank.launcher, None)

    def _note_command(self, *, over: bool = False) -> None:
        if self._command is not None and self.daemon_journal is not None:
            said = self._command.poll(over=over)
            if said is not None:
                self.daemon_journal.say(said)

    def _collect_exits(self) -> None:
        for gone in self._watcher.exits():
            attempt, number = gone.key
            # Those of an attempt that was given up are nobody's: its end is known.
            if attempt == self.number and number == _LAUNCHER:
                self._launcher = gone
            elif attempt == self.number:
                self.ranks[number].exit = gone

    def _look_at_ends(self, *, over: bool) -> None:
        if self.ends is not None:
            launcher = self._launcher if self._has_one_launcher else None
            self.ends.look(self.ranks, launcher, over=over)

    def _look_at_causes(self, now: float) -> None:
        if self._first_cause is None or self.gather is None or self.ends is None:
            return
        running = self.ends.end.state == RUNNING
        look = self._judging.guard(self._first_cause.look)
        look(now, self.gather, running=running, over=self.closed)

    @property
    def _has_one_launcher(self) -> bool:
        """Whether one torchrun started all ranks of this node."""
        pids = {rank.launcher for rank in self.ranks.values()}
        return len(pids) == 1 and None not in pids

    @property
    def _awaits_launcher(self) -> bool:
        awaits = self.ends is not None and self.ends.awaits_launcher
        return awaits and self._has_one_launcher and self._launcher is None
