"""What the clock of the steps tells the recorder, in the order of a loop."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer


class Events(Protocol):
    """The owner of a `StepClock`, as the clock sees it."""

    def forward_begins(self) -> None:
        """A training forward of the root starts; `clock.step` and `clock.micro` are set."""

    def evaluation_begins(self) -> None:
        """A forward of the root without grad starts."""

    def forward_ended(self, outputs: list[Tensor], trained: list[Tensor]) -> None:
        """It returned these tensors; `trained` are those of them with a gradient to come."""

    def forward_raised(self, error: BaseException) -> None:
        """A training forward ended in an exception."""

    def backward_computed(self) -> None:
        """All gradients of this micro-batch are there, still local."""

    def backward_ended(self) -> None:
        """All gradients of this micro-batch are there, reduced."""

    def gradients_ready(self, optimizer: Optimizer, *, by_engine: bool = False) -> None:
        """An optimizer that owns some of the parameters is about to step, or that of an engine."""

    def given_up(self, *, vanished: bool) -> bool:
        """Whether a GradScaler found inf and skipped the step.

        `vanished`: the gradients went without a step. If not because of that, an optimizer that is
        none of torch's took them, or the user threw them away.
        """

    def lent(self, until: int) -> None:
        """The micro-batches below `until` were no part of this step; what was bad in them was."""

    def step_ended(self, *, skipped: bool) -> None:
        """The step is over; called once per step."""

    def forward_is_next(self) -> None:
        """The next forward of the root begins the step `clock.step + 1`."""

    def blind(self) -> bool:
        """The optimizer steps, but no forward of the root is seen; True: look once more."""
