"""A hook that behaves as a guest on a stranger's model.

A bound method would break `copy.deepcopy(model)` (it drags the probe's locks along), a closure
would break `torch.save(model)` and make an EMA copy report into the probe. A `Guest` becomes a
harmless standard-library callable when its model is copied or pickled: the copy needs no ddpprobe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, final

import torch


@final
class Guest:
    """Calls `target(*args)` and returns None, whatever `target` returns: a hook must not answer.

    Args:
        target: our side; wrapped in the fuse by its owner.
    """

    __slots__ = ("_target",)

    def __init__(self, target: Callable[..., object]) -> None:
        self._target = target

    def __call__(self, *args: object) -> None:
        """Pass a hook's arguments on; inside a graph that torch.compile traces there is nothing.

        A Python side effect in a traced hook would recompile the graph on every call (measured).
        """
        if torch.compiler.is_compiling():
            return
        self._target(*args)

    def __deepcopy__(self, memo: dict[int, object]) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__  # takes anything, does nothing, returns None

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (contextlib.nullcontext(), "__exit__"))
