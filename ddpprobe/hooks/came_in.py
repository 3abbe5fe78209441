"""On a sampled step on the CPU: was what came into a module bad already, where its output is?

The first bad output of a step is the first that the hooks see. If the module was given something
bad, then the code between two modules may have made it, or the data were so: the input is told
instead. It is read only where an output is bad, and behind the call, so that a module which writes
into its input is not told from the code before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import nn

from ddpprobe import torch_private
from ddpprobe.hooks.eager import Clock
from ddpprobe.hooks.outputs import leaves
from ddpprobe.hooks.state_look import counts_of
from ddpprobe.hooks.step_rows import StepRows
from ddpprobe.stats.dense import local


@final
class CameIn:
    """Called behind each module's rows; tells the rows what was bad before them.

    Args:
        rows: the rows.
        clock: tells evaluations.
        then: called with the same.
    """

    def __init__(self, rows: StepRows, clock: Clock, then: Callable[..., object]) -> None:
        self._rows, self._clock, self._then = rows, clock, then
        self._count = 0  # rows that were there behind the last call

    def __call__(
        self, fqn: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any],
        output: object,
    ) -> None:  # fmt: skip
        """Look at what a module was given, if a row of its outputs is bad."""
        count, rows = min(self._count, len(self._rows)), self._rows
        self._count = len(rows)
        if rows.bad and not (torch_private.in_backward() or self._clock.evaluating):
            bad = rows.bad_ones_from(count)
            found = _first_bad_of(args, kwargs) if bad else None
            if found is not None:
                rows.came_in.update(dict.fromkeys(bad, found))
        self._then(fqn, module, args, kwargs, output)


def _first_bad_of(*given: object) -> tuple[str, tuple[int, int, int, int]] | None:
    """Return the place of the first bad tensor, and its NaN, +Inf, -Inf and elements."""
    for one in given:
        for leaf, tensor in leaves(one):
            if tensor.is_cpu and tensor.is_floating_point():
                counts = counts_of(local(tensor))
                if any(counts[:3]):
                    return leaf, counts
    return None
