"""Whether activation checkpointing computes again what the forward computed: facts of a step.

In the backward a checkpointed block runs once more, and the gradients are right only if it then
computes the same. torch compares shapes and dtypes of the two; here some of the numbers are.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.hooks.target_facts import has_numbers
from ddpprobe.records.step import RECOMPUTED, RECOMPUTED_AT, fqn_number

OUTPUTS = 8  # that are compared in a step; they take turns
NUMBERS = 4096  # of an output that are compared, at most
MOST = 1 << 14  # outputs that are known to be computed again


@final
class Recomputation:
    """Compares some outputs of the first micro-batch with those that its backward computes again.

    Which outputs these are, the first step shows: they are compared from the next one on, and
    spread evenly over the model. Of several devices one is looked at in a step, as none is to wait
    for another. An output that a forward makes more than once is passed over, as the backward may
    compute them in another order.

    Args:
        rows: where the numbers go.
    """

    def __init__(self, rows: StepRows) -> None:
        self._rows = rows
        self._known: set[int] = set()  # slots
        self._devices: list[torch.device] = []
        self._steps = 0
        self._chosen: frozenset[int] = frozenset()
        self._kept: dict[int, Tensor | None] = {}  # by slot; None: not to be compared any more
        self._most: Tensor | None = None  # [2]: the largest difference so far, and of which module

    def begin(self) -> None:
        """Begin a step: choose what is compared in it."""
        self._kept.clear()
        self._most = None
        if self._known:
            apart = -(-len(self._known) // OUTPUTS)
            self._chosen = frozenset(sorted(self._known)[self._steps % apart :: apart])
            self._steps += 1

    def keep(self, slot: int, output: Tensor) -> None:
        """Hear of an output in a forward of the first micro-batch."""
        if slot not in self._chosen:
            return
        again = slot in self._kept
        self._kept[slot] = None if again or not has_numbers(output) else _some(output).clone()

    def compare(self, slot: int, fqn: str, output: Tensor) -> None:
        """Hear of an output that a backward of the first micro-batch computes again."""
        if len(self._known) < MOST:
            self._known.add(slot)
        before = self._kept.get(slot)
        if before is None:
            return
        self._kept[slot] = None
        now = _some(output) if has_numbers(output) else None
        if now is None or now.shape != before.shape or not self._looks_at(now.device, before):
            return
        with torch.no_grad():
            apart = (now.double() - before.double()).square().sum()
            whole = before.double().square().sum()
            share = apart / whole.clamp(min=torch.finfo(torch.float64).tiny)
            # A NaN is the business of others, who look at all elements.
            found = torch.stack((share, torch.full_like(share, fqn_number(fqn)))).nan_to_num(0.0)
            most = self._most
            self._most = found if most is None else torch.where(found[0] > most[0], found, most)

    def tell(self) -> None:
        """At the end of a step: add what differs most."""
        if self._most is not None:
            self._rows.add_scalars((RECOMPUTED, RECOMPUTED_AT), self._most)

    def _looks_at(self, device: torch.device, before: Tensor) -> bool:
        if device not in self._devices:
            self._devices.append(device)
        return device == before.device == self._devices[self._steps % len(self._devices)]


def _some(tensor: Tensor) -> Tensor:
    """Return some elements at even distances, as a view."""
    some = tensor.detach()
    while some.numel() > NUMBERS:
        largest = max(range(some.dim()), key=lambda dim: some.shape[dim])
        some = some[(slice(None),) * largest + (slice(None, None, 2),)]
    return some
