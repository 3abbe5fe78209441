"""The record of a sampled step, held back for the numbers that a script logs after the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import final


@final
class HeldRecord:
    """Sends the record of a step when everything is there that is usually logged after it.

    Many loops log after `optimizer.step()`. A record that always waited for the next forward would
    come too late: between two steps one rank may write a checkpoint for longer than the others'
    records wait for its own, and a rank killed there would lose it. So a record waits only for as
    many numbers of each name as came after a step before, and the first one for whatever comes.

    Attributes:
        waits: there is a record that can take numbers.
        is_behind: a sampled step is over, and the next forward has not begun.
    """

    def __init__(self) -> None:
        self.is_behind = False
        self._send: Callable[[], None] | None = None
        self._usual: Counter[str] | None = None  # the most that came; None: no step was over yet
        self._came: Counter[str] = Counter()

    @property
    def waits(self) -> bool:
        """Whether there is a record that can take numbers."""
        return self._send is not None

    def hold(self, send: Callable[[], None]) -> None:
        """Take the record of a step that is over.

        Args:
            send: writes it, with all that its rows hold by then; called once.
        """
        self.is_behind, self._send = True, send
        self._came.clear()
        self.take(())

    def take(self, names: Iterable[str]) -> None:
        """Note the names of numbers behind the step; the last of the usual ones sends the record.

        What comes when it was sent is waited for in the next step.
        """
        self._came.update(iter(names))  # of a mapping it would add up the numbers
        if self._send is None:
            self._learn()
        elif self._usual is not None and self._usual <= self._came:
            self.send()

    def send(self) -> None:
        """Wait no longer."""
        if self._send is not None:
            send, self._send = self._send, None
            self._learn()
            send()

    def forward_begins(self) -> None:
        """At the next training forward: what is logged from now on belongs to another step."""
        self.send()
        self.is_behind = False

    def _learn(self) -> None:
        self._usual = (self._usual or Counter()) | self._came
