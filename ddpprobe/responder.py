"""What one rank does with the head's orders: at the steps they name, the same on all ranks.

Hearing is ours and contained by the fuse. What the user has asked for, to stop or to be called, is
done behind it, where an exception reaches the training loop: out of `optimizer.step()`, out of
`probe.step()`, or, where only the next forward shows that a step is over, out of that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

from ddpprobe import codec
from ddpprobe.journal import JournalWriter
from ddpprobe.orders import Order, OrderReader
from ddpprobe.records import Anomaly

MAX_REASON = 200  # characters of a reason that are kept
MAX_ASKED = 1000  # wishes of one rank that are passed on: more are a loop that never looks


class AnomalyStop(RuntimeError):
    """`install(on_anomaly="stop")`: training stops here, on all ranks behind the same step.

    Attributes:
        anomaly: the verdict that the user wanted to stop for.
        step: the last optimizer step that was taken.
    """

    def __init__(self, anomaly: Anomaly, step: int) -> None:
        super().__init__(anomaly, step)
        self.anomaly, self.step = anomaly, step

    def __str__(self) -> str:
        found = self.anomaly
        rank = "no rank alone" if found.rank is None else f"rank {found.rank}"
        where = "unknown module" if found.module is None else found.module or "(root)"
        return (
            f"ddpprobe stopped training behind step {self.step}, as on_anomaly='stop' asks for: "
            f"{found.detector} at step {found.step}, {rank}, {where}: {found.message}"
        )


@final
class Responder:
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
        event = {"event": "trigger", "number": self._asked, "step": self._step + 1}
        self._journal.append_json(codec.LIFE, {**event, "reason": reason[:MAX_REASON]})
        self._asked += 1

    def close(self) -> None:
        """Hear and do nothing any more."""
        self._board.close()
        self._waiting, self._due = [], []

    def _take(self, order: Order, step: int) -> None:
        # Full tensors are kept from a step's beginning on, the rest is done at its end.
        first = step + 1 if order.action == "capture" else step
        late = order.start < first
        event: dict[str, Any] = {"event": "late_order" if late else "order", "step": first}
        event |= {name: getattr(order, name) for name in ("number", "action", "start", "stop")}
        self._journal.append_json(codec.LIFE, event)
        if order.action != "capture":
            self._waiting.append(order)
            return
        start = max(order.start, first)
        if start < order.stop:
            self._sample(start, order.stop)
            self._capture(replace(order, start=start))
