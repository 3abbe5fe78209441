"""What earlier backwards of a step have left in `.grad`, where each of them was reduced.

A loop that accumulates under DDP without `no_sync` reduces what it has at every micro-batch. If a
reduction goes bad there, all sums that come after it in the step are bad, on this rank too, and no
backward of this rank made them so.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from ddpprobe.rank.hooks import lanes
from ddpprobe.rank.hooks.sweep import Sweep, is_plain, sweeps_of, total
from ddpprobe.rank.topology.describe import Topology


@final
class Carried:
    """Looks at gradients before the backward that adds to them.

    Args:
        topology: the model.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._sweeps: list[Sweep] = []
        self._reduces = False

    def backward_ends(self) -> None:
        """Note whether this backward is about to be reduced into `.grad`."""
        ddps = self._topology.ddps
        self._reduces = bool(ddps) and all(ddp.require_backward_grad_sync for _, ddp in ddps)

    def end_step(self) -> None:
        """Nothing is carried over."""
        self._reduces = False

    def look(self) -> tuple[bool, list[Tensor]]:
        """Look, at a further forward of a step.

        Returns:
            Whether the host sees that something is bad, and the largest magnitudes of what lies on
            other devices, float64 [] each.
        """
        if not self._reduces:
            return False, []
        with torch.no_grad():
            near = [sweep for sweep in self._kept() if lanes.is_near(sweep.device)]
            peaks = [sweep.peak() for sweep in self._sweeps if sweep not in near]
            bad = any(not sweep.is_clean() and _is_bad(sweep) for sweep in near)
        return bad, [peak for peak in peaks if peak is not None]

    def _kept(self) -> list[Sweep]:
        """Return sweeps over all parameters that have a gradient; mostly the same as before."""
        if not self._sweeps or any(p.grad is None for s in self._sweeps for p in s.parameters):
            parameters = [parameter for _, parameter in self._topology.leaves()]
            self._sweeps = sweeps_of(
                p for p in parameters if p.grad is not None and is_plain(p.grad)
            )
        return self._sweeps


def _is_bad(sweep: Sweep) -> bool:
    """Whether a gradient is bad, and its finite elements did not just overflow their sum."""
    gradients = [p.grad for p in sweep.parameters if p.grad is not None]
    suspects = [g for g in gradients if not math.isfinite(total(g))]
    return any(not g.isfinite().all() for g in suspects)
