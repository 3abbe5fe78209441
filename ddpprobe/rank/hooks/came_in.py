"""On a sampled step on the CPU: was what came into a module bad already, where its output is?

The first bad output of a step is the first that the hooks see. If the module was given something
bad, then the code between two modules may have made it, or the data were so: the input is told
instead. It is read only where an output is bad, and after the call, so that a module which writes
into its input is not told from the code before it. On a device nothing is read for that: there it
is known only whether the input is a tensor that has a row.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ddpprobe.rank.hooks.outputs import leaves
from ddpprobe.rank.hooks.pending_rows import CameIn
from ddpprobe.rank.hooks.state_look import counts_of
from ddpprobe.rank.stats.dense import local


def numbers_in(*given: object) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) of what is floating in a module's args and kwargs."""
    for one in given:
        for leaf, tensor in leaves(one):
            if tensor.is_floating_point():
                yield leaf, tensor


def first_bad_of(*given: object) -> CameIn | None:
    """Return the first bad tensor of a module's args and kwargs that the host can read."""
    for leaf, tensor in numbers_in(*given):
        if tensor.is_cpu:
            counts = counts_of(local(tensor))
            if any(counts[:3]):
                return leaf, counts
    return None
