"""What is known of one rank of one attempt, and of what happened to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records import events

Steps = NDArray[np.int64]


@dataclass(slots=True)
class RankFacts:
    """What is known of one rank of one attempt.

    `steps` ascend, `sampled` [steps] says which of them were, `sites` are the keys of its sites,
    `torn` bytes of a frame that was not finished.
    """

    rank: int
    meta: dict[str, Any] = field(default_factory=dict)
    steps: Steps = field(default_factory=lambda: np.empty(0, np.int64))
    sampled: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    sites: set[tuple[str, str, str]] = field(default_factory=set)
    torn: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """A LIFE frame that makes sense: who wrote it, and what it says."""

    node: str
    source: str
    seq: int
    what: events.Event

    @property
    def rank(self) -> int | None:
        """The rank that wrote it; None: a daemon."""
        number = self.source.removeprefix("rank_")
        return int(number) if number != self.source and number.isdecimal() else None
