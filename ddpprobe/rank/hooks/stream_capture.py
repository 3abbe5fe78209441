"""While a CUDA graph is captured nothing of ours may run on the device.

What a hook launches there is not computed, but becomes a part of the user's graph: every replay
would write into the probe's memory, which means something else by then. And to wait for an event,
or only to ask whether it is over, ends the capture with an error in the user's code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, final

import torch

from ddpprobe.rundir.fuse import Fuse, logger
from ddpprobe.rundir.stopwatch import Caller

P = ParamSpec("P")
R = TypeVar("R")


def is_captured() -> bool:
    """Whether the current stream is being captured; without CUDA in use, one look at a bool."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@functools.cache
def warn(what: str) -> None:
    """Say once that `what` goes into a CUDA graph."""
    logger.warning(
        "ddpprobe: %s captured in a CUDA graph, whose replays call no hooks: what is in it is not "
        "observed. Train some steps without the graph to see it.",
        what,
    )


@final
class _Outside(Fuse):
    """Guards as another fuse does, and calls nothing while a CUDA graph is captured."""

    def __init__(self, fuse: Fuse, skipped: Callable[[], object]) -> None:
        super().__init__(fuse.component)
        self._fuse, self._skipped = fuse, skipped

    def guard(self, fn: Callable[P, R], caller: Caller = Caller.PYTHON) -> Callable[P, R | None]:
        guarded, skipped = self._fuse.guard(fn, caller), self._fuse.guard(self._skipped)

        @functools.wraps(fn)
        def outside(*args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                captures = torch.cuda.is_current_stream_capturing()
            except RuntimeError:  # the device has failed: the training will hear of it
                return None
            if captures:
                skipped()
                return None
            return guarded(*args, **kwargs)

        return outside


def outside_capture(fuse: Fuse, skipped: Callable[[], object]) -> Fuse:
    """Return a fuse for hooks that work on the device: in a capture they do nothing.

    Args:
        fuse: contains what goes wrong in them.
        skipped: called instead of a hook.

    Where CUDA is not in use yet it is `fuse` itself: to be called in the model's first forward.
    """
    return _Outside(fuse, skipped) if torch.cuda.is_initialized() else fuse
