"""The node daemon: one process per node and run that outlives the ranks it watches."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpprobe.daemon import counts_file, host
from ddpprobe.daemon.attempt import Attempt
from ddpprobe.daemon.counts_file import COUNTS
from ddpprobe.daemon.folding import LAST_TRIES, Folding
from ddpprobe.daemon.gather_queue import GatherQueue
from ddpprobe.daemon.liveness import ProcessWatcher
from ddpprobe.daemon.overview_job import OverviewJob
from ddpprobe.daemon.push import Pusher
from ddpprobe.daemon.snapshot import Readings, view_of
from ddpprobe.daemon.stored_journal import states_before
from ddpprobe.daemon.uploader import Uploader, destination_of, identity_of
from ddpprobe.daemon.web_config import WebConfigFile
from ddpprobe.ends.end import BAD, RUNNING, UNDECIDED
from ddpprobe.records.events import SealedEvent
from ddpprobe.records.past_counts import PastCounts
from ddpprobe.rundir import paths, targets
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.held_directory import HeldDirectory
from ddpprobe.rundir.journal import segments_of
from ddpprobe.rundir.paths import RunDir
from ddpprobe.rundir.roster import ROSTER, SECRET, Roster, Shared, secret_at
from ddpprobe.rundir.spool import clear_away
from ddpprobe.rundir.targets import TargetFile

if TYPE_CHECKING:
    from ddpprobe.daemon.server import Server
    from ddpprobe.metrics.render import Exposition
    from ddpprobe.records.node_view import NodeView

TICK_SECONDS = 0.15
RENDER_SECONDS = (1.0, 5.0)  # when something changed, and when nothing did
FOLD_SECONDS = 5.0
# After its own ranks have ended the head waits so long for what the other nodes still have to say.
OTHERS_SECONDS = 5.0
FLUSH_SECONDS = 5.0
LINGER_SECONDS = 20.0
TOLD_SECONDS = 150.0  # after an end that somebody is to be told of: a scrape a minute, and more
ERRORS_ALLOWED = 100

logger = logging.getLogger("ddpprobe")


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """What the command line says; `wait`, `linger` and `max_age` in seconds.

    `token` is a secret that all nodes share; without one each has its own (see `roster`). Without
    `linger` how the run ended decides (see `linger_of`). `web` is a file of TLS and passwords.
    `pidfd` is the number of the process that started this one, and a descriptor of it.
    """

    run: RunDir
    node: str
    listen: str
    head_url: str | None = None
    gather_listen: str | None = None
    token: str = ""
    linger: float | None = None
    wait: float = 120.0
    max_bytes: float | None = None
    max_age: float | None = None
    web: Path | None = None
    histograms: bool = False
    pidfd: tuple[int, int] | None = None


def linger_of(asked: float | None, state: str) -> float:
    """Return for how many seconds a daemon goes on serving after the end of its run.

    An alert has to be scraped, evaluated, and waited for by Alertmanager (30 s, its `group_wait`)
    before somebody is told. If the daemon is gone by then, the alert has resolved unsent.

    Args:
        asked: what the user wants; None: nothing was said.
        state: how the run ended, as `ends.end.End`.
    """
    if asked is not None:
        return asked
    return TOLD_SECONDS if state in {*BAD, UNDECIDED} else LINGER_SECONDS


class NodeDaemon:
    """Follows one attempt after the other, until the last one has ended and was sealed.

    `serve()` runs to the end in the calling thread; `stop()` ends it from a signal handler.
    """

    def __init__(self, options: DaemonOptions) -> None:
        self._options = options
        self._run, self._node = options.run, options.node
        self._directory = HeldDirectory(options.run.path)
        self._stop = threading.Event()
        self._attempt: Attempt | None = None
        self._server: Server | None = None
        self._exposition: Exposition | None = None
        self._uploader: Uploader | None = None
        self._overview: OverviewJob | None = None
        self._target_file: TargetFile | None = None
        self._noticed: Mapping[str, str] = {}
        self._label = ""  # by which its metrics tell the run from others
        url, self._web = options.head_url, WebConfigFile(options.web) if options.web else None
        self._pusher = Pusher(url, self._secret, options.node, self._web) if url else None
        self._gather_queue = GatherQueue(self._run.daemon_file(self._node, "inbox"))
        self._watcher = ProcessWatcher(options.pidfd)
        self._readings = Readings()
        self._folding = Folding(self._run, self._node, options.max_bytes, options.max_age)
        self._fuses = {name: Fuse(name, ERRORS_ALLOWED) for name in ("loop", "server", "sampler")}
        self._fuses["store"] = self._folding.fuse
        self._fuses["liveness"] = self._watcher.fuse
        if self._pusher is not None:
            self._fuses["push"] = self._pusher.fuse
        self._due = dict.fromkeys(("sample", "render", "render_idle", "target", "notices"), 0.0)
        self._due["fold"] = time.monotonic() + FOLD_SECONDS
        self._changed = True
        self._ended_at: float | None = None
        self._earlier: int | None = None  # attempts before this one are still to be counted
        self._restarts = Counter[str]()  # attempts that another one followed, by their state
        self._past = PastCounts()  # what these had counted
        self._seen_alive = self._succeeds = self._busy = self._sealed = False

    def stop(self) -> None:
        """Seal and end now; safe in a signal handler."""
        self._stop.set()

    def serve(self) -> bool:
        """Run until everything has ended, then leave no thread, file or socket open.

        Returns:
            Whether the run directory is the one that it began with.
        """
        started = time.monotonic()
        tick = self._fuses["loop"].guard(self._tick)
        self._fuses["loop"].guard(clear_away)(self._run, self._node)
        tick(started)  # how a rank dies can be seen only once it is watched; the server takes long
        self._fuses["server"].guard(self._start_server)()
        self._fuses["server"].guard(self._announce)()
        self._fuses["loop"].guard(self._start_uploader)()
        try:
            while not self._stop.is_set() and not self._over(started):
                errors = self._fuses["loop"].errors
                tick(time.monotonic())
                if self._fuses["loop"].blown:
                    logger.error("ddpprobe: the daemon's loop failed too often; it ends")
                    break
                failed = self._fuses["loop"].errors > errors
                self._stop.wait(1.0 if failed else 0.0 if self._busy else TICK_SECONDS)
            self._fuses["loop"].guard(self._finish)()
            return self._directory.is_there()
        finally:
            self._shut_down()

    def _tick(self, now: float) -> None:
        self._follow_attempts()
        attempt = self._attempt
        if attempt is not None and not attempt.closed:
            read, self._busy = attempt.poll(now)
            self._changed |= read > 0
            self._seen_alive |= any(rank.seen_alive for rank in attempt.ranks.values())
            attempt.note_acknowledged()
            self._housekeeping(attempt, now)
            if attempt.local_end(now) and self._others_are_done(attempt, now):
                self._finish()
        elif attempt is not None:
            attempt.note_late_exits()
            if self._is_due("sample", now, host.INTERVAL_SECONDS):
                self._fuses["sampler"].guard(self._sample_host)()
        if (
            attempt is not None
            and attempt.closed
            and not self._sealed
            and self._is_due("fold", now, FOLD_SECONDS)
        ):
            self._seal()
        if self._overview is not None:
            self._overview.advance()
            self._busy = not self._overview.done
        if self._server is not None and self._is_watched and self._is_due("target", now, 1.0):
            self._fuses["server"].guard(self._ask_to_be_scraped)(now)
        if self._is_due("notices", now, 1.0) and not self._notices().keys() <= self._noticed.keys():
            self._fuses["server"].guard(self._announce)()
        self._render(now)

    def _follow_attempts(self) -> None:
        """Go on to the next attempt: the ranks of the one before it are gone."""
        current = -1 if self._attempt is None else self._attempt.number
        later = [n for n in self._run.attempts() if n > current and self._has_ranks(n)]
        if not later:
            return
        if self._attempt is not None:
            self._attempt.close()
            self._fuses["server"].guard(self._remember_counts)(self._attempt, later[0])
            self._restarts[self._attempt.state] += 1
        self._attempt = Attempt(
            self._run, self._node, later[0], self._watcher, self._gather_queue, self._pusher
        )
        if current < 0:
            self._earlier = later[0]
            self._past = counts_file.read(self._run.daemon_file(self._node, COUNTS), later[0])
        self._ended_at = None
        self._overview = None
        self._changed = True
        self._open_gather()
        self._start_uploader()

    def _start_uploader(self) -> None:
        """Upload what is committed, if the run has a destination; a further attempt goes on."""
        if self._uploader is not None:
            self._uploader.go_on()
            return
        url = destination_of(identity_of(self._run))
        if url is not None:
            self._uploader = Uploader(self._run, self._node, url)
            self._fuses["upload"] = self._uploader.fuse

    def _has_ranks(self, attempt: int) -> bool:
        node = self._run.attempt_dir(attempt) / self._node
        return any(segments_of(path) for path in node.glob("rank_*"))

    def _others_are_done(self, attempt: Attempt, now: float) -> bool:
        if self._ended_at is None:
            self._ended_at = now
        waits = attempt.is_head and attempt.gather is not None and attempt.gather.waiting_for
        return not waits or now - self._ended_at > OTHERS_SECONDS

    def _finish(self) -> None:
        """End the attempt, or leave it to a later daemon if its ranks live on; seal the store."""
        if self._attempt is None or self._attempt.closed or not self._directory.is_there():
            return
        now = time.monotonic()
        if self._stop.is_set():
            self._attempt.look_once_more(now)
        self._attempt.close(ended=self._attempt.local_end(now))
        self._ended_at = now
        self._seal()
        self._changed = True
        self._due["render"] = 0.0

    def _seal(self, tries: int = 1) -> None:
        """Put everything that is left into the store; what a full disk refuses, later again."""
        unread = self._attempt.unread if self._attempt is not None else {}
        self._sealed = self._folding.seal(tries, unread)
        if self._sealed and self._attempt is not None and self._attempt.daemon_journal is not None:
            self._attempt.daemon_journal.say(SealedEvent())
        if self._sealed and self._attempt is not None and self._attempt.is_head:
            attempt, fuse = self._attempt, self._folding.fuse
            self._overview = OverviewJob(self._run, attempt.number, lambda: attempt.state, fuse)

    def _over(self, started: float) -> bool:
        now = time.monotonic()
        if not self._directory.is_there():
            logger.error("ddpprobe: %s is gone: there is nothing left to do", self._run.path)
            return True
        if self._attempt is None:
            return now - started > self._options.wait and self._is_uploaded()
        written = self._overview is None or self._overview.done
        return written and self._linger_is_over(now) and self._is_uploaded()

    def _is_uploaded(self) -> bool:
        """Whether nothing more is to be waited for; meanwhile another attempt may begin."""
        if self._uploader is None:
            return True
        self._uploader.finish()
        return self._uploader.done

    def _linger_is_over(self, now: float) -> bool:
        if self._attempt is None or not self._attempt.closed or self._ended_at is None:
            return False
        if self._attempt.awaits_restart(now):
            self._ended_at = now  # it lingers from when nobody is to come any more
            return False
        # Nobody scrapes a run that was over before a daemon began.
        ends = self._attempt.ends
        linger = linger_of(self._options.linger, RUNNING if ends is None else ends.end.state)
        return now - self._ended_at > (linger if self._is_watched else 0.0)

    @property
    def _is_watched(self) -> bool:
        """Whether a Prometheus waits for the end of this run.

        Of a run that ended before this daemon began it does if it scraped one that was killed just
        now: that one could not tell the end. Who comes later would tell of it anew.
        """
        return self._seen_alive or self._succeeds

    def _housekeeping(self, attempt: Attempt, now: float) -> None:
        if self._is_due("sample", now, host.INTERVAL_SECONDS):
            self._fuses["sampler"].guard(self._sample)(attempt)
        if attempt.may_fold and self._is_due("fold", now, FOLD_SECONDS):
            self._folding.fold(attempt.reading)

    def _sample(self, attempt: Attempt) -> None:
        self._watcher.sample()
        alive = {n: r.meta for n, r in attempt.ranks.items() if r.up}
        pids = {n: int(meta["pid"]) for n, meta in alive.items() if meta is not None}
        self._readings = Readings(
            host.read_host(self._run.path, pids.values()), host.read_ranks(pids)
        )
        if attempt.daemon_journal is not None:
            attempt.daemon_journal.sample(self._readings.host, self._readings.ranks)
        self._changed = True

    def _sample_host(self) -> None:
        """Read the node alone: its disk may get room for what waits after the end."""
        self._readings.host = host.read_host(self._run.path, ())
        self._changed = True

    def _start_server(self) -> None:
        from ddpprobe.daemon.server import Server  # noqa: PLC0415
        from ddpprobe.metrics.labels import run_label  # noqa: PLC0415
        from ddpprobe.metrics.render import Exposition  # noqa: PLC0415

        options = self._options
        server = Server(options.listen, options.gather_listen, self._web)
        try:
            self._address = server.start()
        except OSError as error:
            # No address of this machine: the other nodes, and who scrapes here, are served still.
            why = error.strerror or str(error)
            _, _, port = options.listen.rpartition(":")
            server = Server(f"127.0.0.1:{port}", options.gather_listen, self._web)
            self._address = server.start()
            server.warning = (
                f"ddpprobe: /metrics of {self._node} cannot be served at {options.listen} ({why}), "
                f"so it is at {self._address}: give an address of this machine in DDPPROBE_LISTEN"
            )
            logger.warning("%s", server.warning)
        self._server, self._exposition = server, Exposition()
        self._label = run_label(self._identity()) or self._run.path.name
        server.set_run(self._label)
        if (directory := paths.sd_dir()) is not None:
            self._succeeds = targets.was_left_just_now(directory, self._label, self._node)
        if self._pusher is not None:
            self._pusher.listen = self._address
        self._open_gather()

    def _open_gather(self) -> None:
        """Take other nodes' blocks, if this may be the head and the job has agreed on secrets."""
        if self._pusher is not None:
            return
        token = self._options.token
        listed = Roster.read(self._run.daemon_file(self._node, ROSTER))
        self._gather_queue.roster = listed
        door = Shared(token) if token else listed
        if self._server is not None and door is not None:
            self._server.set_gather_handler(self._gather_queue.take, door)

    def _secret(self) -> str:
        """Return what proves to the head who this is; it never stands on a command line."""
        return self._options.token or secret_at(self._run.daemon_file(self._node, SECRET))

    def _announce(self) -> None:
        """Say where this daemon serves; atomic, so that nobody reads half of it."""
        server, self._noticed = self._server, self._notices()
        value = {
            "pid": os.getpid(),
            "listen": self._address if server else None,
            "gather": server.gather_address if server else None,
            "scheme": server.scheme if server else None,
            "started_ns": time.time_ns(),
            "run_id": self._run_id(),
            # What the log of the training is to say as well, once each (`launch.DaemonKeeper`).
            "notices": self._noticed,
        }
        paths.write_json(self._run.daemon_file(self._node, "json"), value)

    def _notices(self) -> dict[str, str]:
        said = {
            "listen": self._server.warning if self._server else "",
            "push": self._pusher.not_let_in if self._pusher else "",
        }
        return {what: text for what, text in said.items() if text}

    def _ask_to_be_scraped(self, now: float) -> None:
        """Say where Prometheus finds this daemon, once there is something to watch."""
        directory = paths.sd_dir()
        if directory is None:
            return
        if self._target_file is None:
            scheme = self._server.scheme if self._server else "http"
            self._target_file = TargetFile(
                directory, self._label, self._node, self._address, scheme
            )
        self._target_file.keep(now)

    def _identity(self) -> Mapping[str, Any]:
        """Return what run.json says of the run, else what its ranks do."""
        return identity_of(self._run) or (self._attempt.meta if self._attempt else {})

    def _run_id(self) -> str:
        return str(self._identity().get("run_id", ""))

    def _render(self, now: float) -> None:
        attempt, server, exposition = self._attempt, self._server, self._exposition
        fast, slow = RENDER_SECONDS
        if not self._is_due("render", now, fast):
            return
        if attempt is None or server is None or exposition is None:
            return
        if self._changed or now >= self._due["render_idle"]:
            self._due["render_idle"] = now + slow
            self._changed = False
            self._fuses["server"].guard(self._publish)(attempt, server, exposition)

    def _publish(self, attempt: Attempt, server: Server, exposition: Exposition) -> None:
        earlier, self._earlier = self._earlier, None
        if earlier:  # a daemon of their own has followed them; that is read late, as it takes long
            self._restarts += states_before(self._run, earlier, self._node)
        view = self._past.over(self._view(attempt, self._losses()))
        text, openmetrics = (exposition.render(view, flag) for flag in (False, True))
        server.publish(text, openmetrics)

    def _remember_counts(self, attempt: Attempt, later: int) -> None:
        self._past.take(self._view(attempt, {}))
        counts_file.write(self._run.daemon_file(self._node, COUNTS), later, self._past)

    def _view(self, attempt: Attempt, dropped: Mapping[str, int]) -> NodeView:
        return view_of(
            attempt,
            self._readings,
            run_id=self._run_id(),
            finished=attempt.closed and (attempt.ends is None or attempt.ends.is_well),
            dropped=dropped,
            restarts=self._restarts,
            components={name: not fuse.blown for name, fuse in self._fuses.items()},
            uploader=self._uploader,
            histograms=self._options.histograms,
        )

    def _losses(self) -> Counter[str]:
        lost = Counter({"store_damaged": len(self._folding.damaged)})
        return (
            lost
            + self._gather_queue.refused
            + (self._pusher.dropped if self._pusher else Counter())
        )

    def _is_due(self, what: str, now: float, interval: float) -> bool:
        if now < self._due[what]:
            return False
        self._due[what] = now + interval
        return True

    def _shut_down(self) -> None:
        if self._pusher is not None:
            self._pusher.close(FLUSH_SECONDS)
            if self._attempt is not None:
                self._attempt.note_acknowledged()
        # Another run may lie there by now, and have a daemon of its own.
        is_there = self._directory.is_there()
        if self._attempt is not None:
            self._seal_for_good(self._attempt, is_there=is_there)
        if self._uploader is not None:
            self._uploader.close()
        if is_there:
            self._run.daemon_file(self._node, "json").unlink(missing_ok=True)
        if self._target_file is not None:
            self._target_file.remove()
        elif self._label and (directory := paths.sd_dir()) is not None:
            # A killed one's: it would be scraped in vain for an hour, as if the machine was lost.
            targets.withdraw(directory, self._label, self._node)
        self._folding.close()
        if self._server is not None:
            self._server.stop()
        self._watcher.close()
        self._directory.close()

    def _seal_for_good(self, attempt: Attempt, *, is_there: bool) -> None:
        """Seal if that failed so far, and with what was said since; or say what finishes it."""
        if is_there and attempt.closed and not self._sealed:
            self._seal(LAST_TRIES)
        if attempt.daemon_journal is not None:
            attempt.daemon_journal.close()
        if not is_there:
            return
        # The journals of ranks whose processes lived at the seal go as well.
        if attempt.closed and not (self._sealed and self._folding.seal(LAST_TRIES, attempt.unread)):
            logger.error(
                "ddpprobe: the disk refuses a part of the store; it is in journals and captures, "
                "and read from there; finish it with: ddpprobe daemon --dir %s --node %s",
                self._run.path, self._node,
            )  # fmt: skip
