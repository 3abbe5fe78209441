"""Which buffers no step has changed, by their checksums: these alone are compared between ranks.

Running statistics follow each rank's own data, so ranks hold other ones by design. A table of
positions or frequencies is made once, and is to be the same everywhere.
"""

from __future__ import annotations

from typing import final

LOOKS = 3  # at a buffer, with one result, until it counts as constant


@final
class Constants:
    """Judges the buffers of one rank, look by look, in their order."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}  # FQN -> the first checksum, looks so far
        self._changed: set[str] = set()

    def take(self, fqn: str, word: int) -> bool:
        """Whether the checksum of a buffer has been `word` at each look, and at `LOOKS` or more."""
        first, looks = self._seen.get(fqn, (word, 0))
        self._seen[fqn] = first, looks + 1
        if word != first:
            self._changed.add(fqn)
        return fqn not in self._changed and looks + 1 >= LOOKS
