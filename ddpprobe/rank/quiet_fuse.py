"""A fuse for what enters from the training: what it calls is seen by no mode of the user's.

A hook of a tensor or of an optimizer runs inside whatever mode is active: a flop counter would
count our operators, and a mode that looks for a NaN in each result would raise for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, final

from ddpprobe.rank import torch_private
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.stopwatch import Caller

P = ParamSpec("P")
R = TypeVar("R")


@final
class QuietFuse(Fuse):
    """Guards as any fuse does, outside of the user's modes."""

    def guard(self, fn: Callable[P, R], caller: Caller = Caller.PYTHON) -> Callable[P, R | None]:
        """Wrap an entry point; the hooks of modules are outside already (`CopySafeObserver`)."""
        quiet = fn if caller is Caller.MODULE else torch_private.unseen_by_modes(fn)
        return super().guard(quiet, caller)
