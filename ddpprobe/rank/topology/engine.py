"""What an engine tells that reduces the gradients of a model and steps it behind torch's back.

DeepSpeed's ZeRO is one: its optimizer knows flat pieces of the parameters and none of the
parameters, and takes what is in `.grad` away. So where torch's hooks say nothing, or the wrong
thing, the engine is asked. Who knows an engine makes one of these (`integrations/deepspeed.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer


class EngineGradient(NamedTuple):
    """What this rank has of the reduced gradient of a parameter.

    `elements` [n] are those of the flattened parameter from `start` on; no other rank has them.
    """

    parameter: nn.Parameter
    elements: Tensor
    start: int


class Engine(Protocol):
    """An engine around one model, which keeps the parameters equal on all ranks."""

    @property
    def wrapper(self) -> str:
        """What it is called as `Topology.wrapper`."""

    @property
    def optimizer(self) -> Optimizer:
        """It steps the pieces of this rank."""

    def gradients(self) -> Iterator[EngineGradient]:
        """Yield what there is between the last backward of a step and its end."""

    def listen(
        self, ready: Callable[[], object], over: Callable[[bool], object],
        act: Callable[[], object],
    ) -> None:  # fmt: skip
        """Have each step told.

        Args:
            ready: called when the gradients are reduced, before they are clipped or used.
            over: called when the step is over, with whether it was skipped.
            act: called after that; what it raises is meant for the training loop.
        """

    def mute(self) -> None:
        """Tell no more, and leave the engine as it was."""
