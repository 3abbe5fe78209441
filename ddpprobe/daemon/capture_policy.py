"""The black box: at a page the window before it is kept, and the steps after it are captured.

Runs in the head's daemon, which alone sees what the detectors say. It speaks to the ranks in
orders (see `rundir/orders.py`), whose start lies far enough ahead for all of them to hear in time.
The board is its memory: the successor of a killed daemon finds on it what was announced.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import final

from ddpprobe.daemon.daemon_journal import DaemonJournal
from ddpprobe.daemon.requests import CAPTURE_STEPS, SCRIPT, Request, RequestFiles
from ddpprobe.daemon.suspects import MAX_MODULES, bounded, match, suspects
from ddpprobe.records import events
from ddpprobe.records.step import Anomaly
from ddpprobe.rundir.heartbeat import Heartbeat
from ddpprobe.rundir.orders import MAX_STEPS, Order, OrderBoard

# A page of one kind is captured again after so many steps, and no attempt takes more captures for
# pages than this: a NaN that stays must not fill the disk.
QUIET_STEPS = 1000
MAX_CAPTURES = 16
MAX_TRIGGERS = 64  # captures that a script asks for in one attempt
MAX_ORDERS = 512  # of one attempt, whoever asks
NEAR_STEPS = 100  # between a page without a module and the anomalies that may know it
LEAD_STEPS = 2  # a rank may be at the end of its step just now, and look before we write
# How long until every rank has heard: they look at each step; other nodes ask every second.
LEAD_SECONDS, LEAD_SECONDS_OF_NODES = 0.5, 2.5
RATE_READINGS, RATE_SECONDS = 32, 0.2
MAX_REASON = 200  # characters


@final
class CapturePolicy:
    """Announces what all ranks are to do at a page, or because somebody asks.

    Args:
        board: of the head's node.
        daemon_journal: hears of every order, refusal and pinned window.
        request_files: where command lines wait for an answer.
        on_anomaly: "stop" or "tell": announced at every page beside the capture.
        nodes: of the job.
    """

    def __init__(
        self,
        board: OrderBoard,
        daemon_journal: DaemonJournal,
        request_files: RequestFiles,
        on_anomaly: str,
        nodes: int,
    ) -> None:
        self._board, self._daemon_journal, self._request_files = (
            board,
            daemon_journal,
            request_files,
        )
        self._on_anomaly = on_anomaly
        self._outlook = _Outlook(LEAD_SECONDS if nodes == 1 else LEAD_SECONDS_OF_NODES)
        self._near: deque[Anomaly] = deque(maxlen=64)
        self._pages: list[Anomaly] = []
        self._requests: list[Request] = []
        for order in board.orders.values():
            self._tell(order)  # what a predecessor was killed after
        self.found(daemon_journal.recovered)

    def found(self, anomalies: Iterable[Anomaly]) -> None:
        """Take what the detectors found; the windows before pages are kept from here on."""
        for anomaly in anomalies:
            self._near.append(anomaly)
            if anomaly.level == "page":
                self._pages.append(anomaly)
                self._pin(anomaly)

    def ask(self, request: Request) -> None:
        """Take a wish; one that was followed before is answered again."""
        self._requests.append(request)

    def act(self, beats: Sequence[Heartbeat]) -> list[Order]:
        """Announce what is to be announced; return that. `beats`: of the ranks that live here."""
        if not beats:
            return []
        self._outlook.note(beats)
        before = self._board.last
        pages, self._pages = self._pages, []
        fresh = [
            page for page in pages if f"capture:{key(page)}" not in self._daemon_journal.settled
        ]
        if not self._capture_pages(fresh, beats) or not all(
            self._respond(page, beats) for page in pages
        ):
            self._pages = pages  # the disk refuses: again later
        self._requests = [r for r in self._requests if not self._follow(r, beats)]
        return [order for number, order in self._board.orders.items() if number > before]

    def _capture_pages(self, pages: list[Anomaly], beats: Sequence[Heartbeat]) -> bool:
        taken: list[Anomaly] = []
        for page in pages:
            why = self._refusal(page, self._outlook.step(beats))
            if why:
                self._drop(f"capture:{key(page)}", why)
            else:
                taken.append(page)
        seen = self._daemon_journal.merged
        names = [name for page in taken for name in suspects(page, self._near_to(page.step), seen)]
        if not names:  # an order without any would be one for all of them
            return True
        first = taken[0]
        causes = [f"capture:{key(page)}" for page in taken]
        reason = f"{first.detector}: {first.message}"
        done = self._capture(causes[0], reason, names, CAPTURE_STEPS, beats, first)
        for cause in causes[1:] if done else ():
            self._drop(cause, f"it is captured with {key(first)}")
        return done

    def _refusal(self, page: Anomaly, now: int) -> str:
        """Why a page gets no capture of its own, "" if it gets one."""
        captures = [o for o in self._captures() if o.anomaly is not None]
        if len(captures) >= MAX_CAPTURES:
            return f"there were {MAX_CAPTURES} captures for pages in this attempt"
        for order in captures:
            same = order.anomaly is not None and order.anomaly.detector == page.detector
            if same and now - order.start < QUIET_STEPS:
                return f"{page.detector} was captured at step {order.start}"
        return ""

    def _respond(self, page: Anomaly, beats: Sequence[Heartbeat]) -> bool:
        """Announce what the user wants to happen at a page; False if the disk refuses."""
        cause = f"{self._on_anomaly}:{key(page)}"
        stopped = any(order.action == "stop" for order in self._board.orders.values())
        if self._on_anomaly == "record" or stopped or cause in self._daemon_journal.settled:
            return True
        start = self._outlook.step(beats)
        if self._on_anomaly == "stop":  # after what is captured, or it would never be
            start = max([start, *(order.stop - 1 for order in self._captures())])
        return self._post(self._on_anomaly, start, start + 1, (), page.message, page, cause)

    def _follow(self, request: Request, beats: Sequence[Heartbeat]) -> bool:
        """Follow a request, or refuse it; False if the disk refuses."""
        cause = request.cause
        if cause not in self._daemon_journal.settled:
            seen, last = self._daemon_journal.merged, self._daemon_journal.last_step
            if request.globs:
                names = match(request.globs, seen)
            else:
                names = suspects(None, self._near_to(last), seen)
            why = _fault(request, names) or self._surfeit(request)
            if why:
                self._drop(cause, why)
            elif not self._capture(cause, request.reason, names, request.steps, beats, None):
                return False
            else:
                self._pin_steps(self._first_kept(), last, request.reason, f"pin:{cause}")
        found = [order for order in self._captures() if order.cause == cause]
        if found:
            self._request_files.answer(cause, {"order": asdict(found[0])})
        return True

    def _surfeit(self, request: Request) -> str:
        """Why a script's wish gets no capture of its own: all ranks may have asked at once."""
        if not request.of_script:
            return ""
        others = [o for o in self._captures() if o.cause.startswith(SCRIPT)]
        later = [o for o in others if o.start >= request.step]
        if later:
            return f"it is captured with order {later[0].number}"
        return f"there were {MAX_TRIGGERS} of them" if len(others) >= MAX_TRIGGERS else ""

    def _capture(
        self, cause: str, reason: str, names: Iterable[str], steps: int,
        beats: Sequence[Heartbeat], anomaly: Anomaly | None,
    ) -> bool:  # fmt: skip
        """Announce a capture after those announced before."""
        ends = [order.stop for order in self._captures()]
        start = max([self._outlook.step(beats), *ends])
        stop = start + steps
        return self._post("capture", start, stop, bounded(names), reason, anomaly, cause)

    def _post(
        self, action: str, start: int, stop: int, modules: tuple[str, ...], reason: str,
        anomaly: Anomaly | None, cause: str,
    ) -> bool:  # fmt: skip
        if len(self._board.orders) >= MAX_ORDERS and action != "stop":
            self._drop(cause, f"there were {MAX_ORDERS} orders in this attempt")
            return True
        number = self._board.last + 1
        order = Order(number, action, start, stop, modules, _cut(reason), anomaly, cause)
        try:
            if not self._board.post(order):
                return False
        except ValueError as error:  # names or numbers of a verdict that fit into no order
            self._drop(cause, str(error))
            return True
        self._tell(order)
        return True

    def _tell(self, order: Order) -> None:
        if order.cause not in self._daemon_journal.settled:
            told = {k: v for k, v in asdict(order).items() if k != "anomaly"}
            self._daemon_journal.say(events.OrderEvent(**told))
        if order.action == "capture":
            self._pin_steps(order.start, order.stop - 1, order.reason, f"{order.cause}/steps")

    def _pin(self, page: Anomaly) -> None:
        reason = f"{page.detector}: {page.message}"
        first = min(self._first_kept(), page.step)
        self._pin_steps(first, page.step, reason, f"pin:{key(page)}")

    def _pin_steps(self, first: int, last: int, reason: str, cause: str) -> None:
        if cause not in self._daemon_journal.settled and last >= 0:
            reason = _cut(reason)
            self._daemon_journal.say(
                events.PinnedEvent(first=first, last=last, cause=cause, reason=reason)
            )

    def _first_kept(self) -> int:
        """Return the first step of the window: of the last sampled ones."""
        return min(self._daemon_journal.window, default=0)

    def _drop(self, cause: str, why: str) -> None:
        if cause not in self._daemon_journal.settled:
            self._daemon_journal.say(events.OrderDroppedEvent(cause=cause, reason=why))
            self._request_files.answer(cause, {"refused": why})

    def _captures(self) -> list[Order]:
        return [order for order in self._board.orders.values() if order.action == "capture"]

    def _near_to(self, step: int) -> list[Anomaly]:
        return [other for other in self._near if abs(other.step - step) <= NEAR_STEPS]


def key(anomaly: Anomaly) -> str:
    """Return the identity of an anomaly within its attempt."""
    where = (anomaly.step, anomaly.micro, anomaly.rank, anomaly.kind, anomaly.module)
    return "/".join(map(str, (anomaly.detector, *where)))


def _fault(request: Request, names: Sequence[str]) -> str:
    """Why a request cannot be followed, "" if it can."""
    if not 1 <= request.steps <= MAX_STEPS:
        return f"{request.steps} steps were asked for: it takes 1 to {MAX_STEPS}"
    if not names:
        asked = " or ".join(map(repr, request.globs))
        return f"no observed module matches {asked}" if asked else "no module was observed yet"
    if len(names) > MAX_MODULES:
        return f"{len(names)} modules match, at most {MAX_MODULES} are captured: name fewer"
    return ""


class _Outlook:
    """How far ahead a step must lie for every rank to hear of it before it begins.

    Args:
        seconds: until every rank has heard.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._readings: deque[tuple[int, int]] = deque(maxlen=RATE_READINGS)  # ns, step

    def note(self, beats: Sequence[Heartbeat]) -> None:
        """Take the ranks' heartbeats, several times a second."""
        newest = max(beats, key=lambda beat: beat.step)
        if not self._readings or newest.time_ns > self._readings[-1][0]:
            self._readings.append((newest.time_ns, newest.step))

    def step(self, beats: Sequence[Heartbeat]) -> int:
        """Return the first step that no rank can be at before it has heard."""
        newest = max(beats, key=lambda beat: beat.step)
        lead = math.ceil(self._seconds * self._rate(newest))
        return newest.step + max(lead, LEAD_STEPS)

    def _rate(self, beat: Heartbeat) -> float:
        """Steps per second: of late or since the start, whichever is more."""
        (then, first), (now, last) = self._readings[0], self._readings[-1]
        seconds, whole = (now - then) / 1e9, sum(beat.phase_seconds)
        late = (last - first) / seconds if seconds > RATE_SECONDS else 0.0
        return max(late, beat.steps / whole if whole > 0 else 0.0)


def _cut(reason: str) -> str:
    """Shorten a reason, and show that it is: half a verdict may read as another one."""
    return reason if len(reason) <= MAX_REASON else f"{reason[: MAX_REASON - 1]}…"
