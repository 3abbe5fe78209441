"""What one rank does with the head's orders: at the steps they name, the same on all ranks.

Hearing is ours and contained by the fuse. What the user has asked for, to stop or to be called, is
done after it, where an exception reaches the training loop: out of `optimizer.step()`, out of
`probe.step()`, or, where only the next forward shows that a step is over, out of that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import final

from ddpprobe.errors import AnomalyStop
from ddpprobe.records import events
from ddpprobe.records.step import Anomaly
from ddpprobe.rundir.journal import JournalWriter
from ddpprobe.rundir.orders import Order, OrderReader

MAX_REASON = 200  # characters of a reason that are kept
MAX_ASKED = 1000  # wishes of one rank that are passed on: more are a loop that never looks


@final
class OrderHandler:
    """Hears one rank's orders and follows them.

    Args:
        board: where its node's daemon shows them.
        sample: makes the steps [start, stop) sampled ones.
        capture: keeps full tensors of modules in the steps of an order, which have not begun yet.
        journal: hears of every order, and of what the user asks for.
        on_anomaly: what the user wants, whatever is ordered: "stop", or a function, which is told
            of anomalies and what it raises is the user's; anything else is neither.
    """

    def __init__(
        self, board: OrderReader, sample: Callable[[int, int], object],
        capture: Callable[[Order], object], journal: JournalWriter,
        on_anomaly: str | Callable[[Anomaly], object] = "record",
    ) -> None:  # fmt: skip
        self._board = board
        self._sample = sample
        self._capture = capture
        self._journal = journal
        self._on_anomaly = on_anomaly
        self._waiting: list[Order] = []
        self._due: list[tuple[Order, int]] = []  # and the step that is over
        self._step, self._asked = -1, 0

    def hear(self, step: int) -> None:
        """Look for orders at the end of `step`, which cannot be changed any more."""
        self._step = step
        while (order := self._board.look()) is not None:
            self._take(order, step)
        if self._waiting:
            self._due += [(order, step) for order in self._waiting if order.start <= step]
            self._waiting = [order for order in self._waiting if order.start > step]

    def act(self) -> None:
        """Do what the user has asked for, if its step is over; not to be contained.

        Raises:
            AnomalyStop: all ranks stop here.
        """
        while self._due:
            order, step = self._due.pop(0)
            anomaly = order.anomaly
            if anomaly is None:
                continue
            if order.action == "stop" and self._on_anomaly == "stop":
                raise AnomalyStop(anomaly, step)
            if order.action == "tell" and callable(self._on_anomaly):
                self._on_anomaly(anomaly)

    def ask(self, reason: str) -> None:
        """Ask the head for a capture, by way of the journal and the node's daemon."""
        if self._asked == MAX_ASKED:
            return
        self._journal.append_event(
            events.TriggerEvent(number=self._asked, step=self._step + 1, reason=reason[:MAX_REASON])
        )
        self._asked += 1

    def close(self) -> None:
        """Hear and do nothing any more."""
        self._board.close()
        self._waiting, self._due = [], []

    def _take(self, order: Order, step: int) -> None:
        # Full tensors are kept from a step's beginning on, the rest is done at its end.
        first = step + 1 if order.action == "capture" else step
        heard = events.LateOrderEvent if order.start < first else events.OrderEvent
        self._journal.append_event(
            heard(
                step=first, number=order.number, action=order.action, start=order.start,
                stop=order.stop,
            )
        )  # fmt: skip
        if order.action != "capture":
            self._waiting.append(order)
            return
        start = max(order.start, first)
        if start < order.stop:
            self._sample(start, order.stop)
            self._capture(replace(order, start=start))
