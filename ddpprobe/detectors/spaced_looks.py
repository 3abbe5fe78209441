"""The newest looks at something, by their steps or times, never closer together than needed."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar, final

_MOST = 60  # of a span; of a short one as many as there are steps

Look = TypeVar("Look")


@final
class SpacedLooks(Generic[Look]):
    """Holds looks that are as far apart as `_MOST`, or `least`, of them fill a span.

    So a long span is bounded; who asks drops what is too old (`newest`, where nothing else counts).

    Args:
        span: steps or seconds.
        least: looks that a span must be able to hold.
    """

    def __init__(self, span: float, least: int) -> None:
        self._apart = span / max(_MOST, least)
        self._span, self._least = span, least
        self.held: deque[tuple[float, Look]] = deque()  # place and look, the oldest first

    def add(self, look: Look, place: float) -> None:
        """Take the next look, unless it is too close to the last one; its place: step or time."""
        held = self.held
        if held and place < held[-1][0]:  # a clock that was set back
            held.clear()
        if not held or place - held[-1][0] >= self._apart:
            held.append((place, look))

    def newest(self) -> list[Look] | None:
        """Drop what is older than a span needs, and return the rest; None: it is not full yet."""
        held = self.held
        while len(held) > self._least and held[-1][0] - held[1][0] >= self._span:
            held.popleft()
        full = len(held) >= self._least and held[-1][0] - held[0][0] >= self._span
        return [look for _, look in held] if full else None
