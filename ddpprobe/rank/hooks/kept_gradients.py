"""Whether the gradients of the step before are still there, and are added to: a fact of a step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Protocol, final

import torch
from torch import Tensor

from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.hooks.target_facts import has_numbers
from ddpprobe.rank.owners import Owners
from ddpprobe.rank.stats.dense import local
from ddpprobe.rank.torch_private import dynamo
from ddpprobe.records.step import KEPT

FEW, MOST = 4, 64  # gradients that are looked at; of so many parameters, the first ones


class _Position(Protocol):
    micro: int
    lent: int
    owners: Owners


@final
class BackwardHook:
    """A tensor hook on an output that tells that a backward has come to it.

    Args:
        tell: called without anything.
    """

    __slots__ = ("_tell",)

    def __init__(self, tell: Callable[[], object]) -> None:
        self._tell = tell

    @dynamo.hands_back
    def __call__(self, _: Tensor | None) -> None:
        """Hear of the gradient."""
        self._tell()


@final
class KeptGradients:
    """Looks at some gradients as the first backward of a step begins, and again after it.

    Only what that has added to counts: a loop may give `.grad` another tensor, and never look at
    the old one. And only what an optimizer took that has stepped in the step before.

    Args:
        clock: tells micro-batch and optimizers.
        rows: where the number goes.
    """

    def __init__(self, clock: _Position, rows: StepRows) -> None:
        self._clock, self._rows = clock, rows
        self.begin()

    def begin(self) -> None:
        """Begin a sampled step."""
        self._micro = -1  # the one whose backward was looked at
        self._there: list[tuple[Tensor, Tensor, int]] = []  # parameter, gradient, its version
        self._norm: Tensor | None = None

    def backward_begins(self) -> None:
        """Hear that a backward comes into the model, which has added to no gradient yet."""
        micro = self._clock.micro
        if micro != self._clock.lent or micro == self._micro:
            return
        self.begin()
        self._micro = micro
        squares: list[Tensor] = []
        with torch.no_grad():
            for parameter, gradient in islice(self._of_the_step_before(), FEW):
                numbers = local(gradient)
                if has_numbers(numbers) and (not squares or squares[0].device == numbers.device):
                    squares.append(numbers.double().square().sum())
                    self._there.append((parameter, gradient, _version(gradient)))
            self._norm = torch.stack(squares).sum().sqrt() if squares else None

    def _of_the_step_before(self) -> list[tuple[Tensor, Tensor]]:
        taken = self._clock.owners.of_the_step_before(MOST)
        return [(p, p.grad) for p in taken if p.grad is not None]

    def backward_ends(self) -> None:
        """Hear that its gradients are there."""
        there, self._there = self._there, []
        if self._clock.micro == self._micro and not all(
            parameter.grad is gradient and _version(gradient) > version
            for parameter, gradient, version in there
        ):
            self._norm = None

    def tell(self) -> None:
        """At the end of a step: add the norm of what was kept; nothing if it was lent meanwhile."""
        if self._norm is not None and not self._there and self._micro == self._clock.lent:
            self._rows.add_scalar(KEPT, self._norm)
        self.begin()


def _version(tensor: Tensor) -> int:
    """Return how often what lies behind a tensor was written to."""
    return local(tensor)._version  # noqa: SLF001  (public by documentation)
