"""Of which micro-batch the backward under way is.

In most loops it is that of the last forward. In a pipeline, or where a loop computes several losses
first, forwards wait for their backward: then what those but the first returned has a hook.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import final

from torch import Tensor

from ddpprobe.rank.hooks.root import hear_gradients
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.stopwatch import Caller


@final
class Backwards:
    """The forwards of a step whose backward has not ended, in their order.

    Args:
        fuse: contains whatever goes wrong in here.
    """

    def __init__(self, fuse: Fuse) -> None:
        self._waiting: list[int] = []
        self._entered: int | None = None  # a backward has come by the hook of this one
        self._check = fuse.guard(self._enters, Caller.TENSOR)

    def follow(self, micro: int, trained: Iterable[Tensor]) -> None:
        """Take a forward into the order.

        Args:
            micro: its micro-batch.
            trained: what it returned, with a gradient to come.
        """
        if micro in self._waiting:  # another part of the model
            return
        if self._waiting:
            hear_gradients(trained, partial(self._check, micro))
        self._waiting.append(micro)

    def micro(self, last: int) -> int:
        """Return the micro-batch of the backward under way; `last`: that of the last forward."""
        if self._entered is not None:
            return self._entered
        return self._waiting[0] if self._waiting else last

    def ended(self, last: int) -> None:
        """A backward is over."""
        micro, self._entered = self.micro(last), None
        if micro in self._waiting:
            self._waiting.remove(micro)

    def end_step(self) -> None:
        """Forget forwards without a backward."""
        self._waiting.clear()
        self._entered = None

    def _enters(self, micro: int) -> None:
        # One backward of several is counted to the last of them.
        self._entered = micro if self._entered is None else max(micro, self._entered)
