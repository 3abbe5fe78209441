"""A hook that does nothing in copies and pickles of the model that it hangs on.

A bound method would break `copy.deepcopy(model)` (it drags the probe's locks along), a closure
would break `torch.save(model)` and make an EMA copy report into the probe. A `CopySafeObserver`
becomes a harmless standard-library callable when its model is copied or pickled: the copy needs no
ddpprobe.

On a module that is compiled itself a copy-safe hook runs as plain Python, before or after the
graph. On a module *inside* a graph it would be traced, and a Python side effect there recompiles
the graph on every call (measured): so it does nothing there, and `compiled.Resident` stands in for
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, final

import torch
from torch.utils.hooks import RemovableHandle

from ddpprobe.rank import torch_private
from ddpprobe.rank.torch_private import dynamo


class CopySafeHook:
    """What may sit in a module's tables of hooks: copies and pickles of it do nothing.

    Args:
        target: our side; wrapped in the fuse by its owner.
    """

    __slots__ = ("_target",)

    def __init__(self, target: Callable[..., object]) -> None:
        self._target = target

    def __deepcopy__(self, memo: dict[int, object]) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__  # takes anything, does nothing, returns None

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (contextlib.nullcontext(), "__exit__"))


@final
class CopySafeObserver(CopySafeHook):
    """Calls `target(*args)` and returns None, whatever `target` returns: a hook must not answer.

    Args:
        target: as for `CopySafeHook`.
        takes: number of arguments that a hook with kwargs is given. torch goes over the hooks that
            there were when the call began, and asks before each whether it takes kwargs: one that
            was taken off meanwhile, by another hook or another thread, is called without them, and
            is not to be heard. 0: any number.
    """

    __slots__ = ("_takes",)

    def __init__(self, target: Callable[..., object], takes: int = 0) -> None:
        super().__init__(target)
        self._takes = takes

    @dynamo.run_as_python
    def __call__(self, *args: object) -> None:
        """Pass a hook's arguments on."""
        if self._takes and len(args) != self._takes:
            return
        if not torch.compiler.is_compiling():
            with torch_private.outside_modes():  # selective checkpointing counts operations
                self._target(*args)


def take_off(handles: list[RemovableHandle]) -> None:
    """Take hooks off, and forget their handles."""
    for handle in handles:
        handle.remove()
    handles.clear()
