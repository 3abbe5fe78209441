"""Keeps the daemon's log bounded: a message that repeats itself is logged so often and no more."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

MOST = 20  # times that one message is logged
SECONDS = 600.0  # within this
MESSAGES = 1000  # that are told apart


@dataclass(slots=True)
class _Seen:
    since: float
    times: int = 0


@final
class BoundedLog(logging.Filter):
    """A filter of a handler; messages are one if they differ in their arguments only.

    The first one that is logged again says how many were not.

    Args:
        most: times that a message is logged.
        seconds: within which they are counted.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        most: int = MOST,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._most, self._seconds, self._clock = most, seconds, clock
        self._seen: dict[tuple[str, str], _Seen] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a message."""
        now, key = self._clock(), (record.name, str(record.msg))
        seen = self._seen.get(key)
        if seen is None or now - seen.since > self._seconds:
            hidden = seen.times - self._most if seen is not None else 0
            if hidden > 0:
                text = record.getMessage()
                record.msg, record.args = f"{text} (and {hidden} times before, not logged)", ()
            self._seen.pop(key, None)
            self._seen[key] = seen = _Seen(now)
            if len(self._seen) > MESSAGES:
                del self._seen[next(iter(self._seen))]
        seen.times += 1
        return seen.times <= self._most
