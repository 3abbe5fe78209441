"""Whether the batches of an epoch come again in the next one, each at its place."""

from __future__ import annotations

FEWEST_BATCHES = 8  # of an epoch, seen; fewer are one batch in turn with another
MOST_BATCHES = 4096  # bounds the state


class SameEpochs:
    """Follows the digests of one rank's input.

    Where batches are shuffled anew, or samples augmented, none comes again at the same distance.

    Args:
        looks: sampled steps in a row whose batch came as many steps before.
    """

    def __init__(self, looks: int) -> None:
        self._looks = looks
        self._seen: dict[float, int] = {}  # digest -> the last step with it, in this order
        self._last = -1  # step
        self._distance = 0  # steps since the batch came before
        self._again = 0  # looks in a row at this distance
        self._since = 0  # the first of them

    def look(self, step: int, digest: float) -> int | None:
        """Take the input of a step; return how many steps an epoch has, if two are the same."""
        gap, self._last = step - self._last, step
        before = self._seen.pop(digest, None)
        self._seen[digest] = step
        if len(self._seen) > MOST_BATCHES:
            del self._seen[next(iter(self._seen))]
        distance = 0 if before is None else step - before
        if distance == 0 or distance < FEWEST_BATCHES * gap or distance != self._distance:
            self._again, self._since = 0, step
        self._distance = distance
        self._again += distance > 0
        whole = step - self._since + gap >= distance
        return distance if distance and whole and self._again >= self._looks else None
