"""The backward under way: where it came into the model, and of which micro-batch it is."""

from __future__ import annotations

from typing import final

from ddpprobe.rank.torch_private import graph


@final
class Backward:
    """What the step clock hears of a backward until it is over.

    Attributes:
        entered: nodes of autograd's graph at which it came into the model.
        micro: the micro-batch that it is of, by the forward whose output it came to; None: not
            known. One backward of several forwards counts to the last of them.
    """

    __slots__ = ("entered", "micro")

    def __init__(self) -> None:
        self.entered: list[object] = []
        self.micro: int | None = None

    def comes_to(self, micro: int | None) -> None:
        """Hear that it comes to an output of this micro-batch; None: a graph does not know it."""
        self.entered.append(graph.current_node())
        if micro is not None:
            self.micro = max(micro, self.micro_or(0))

    def micro_or(self, last: int) -> int:
        """Return its micro-batch, or if that is not known the `last` forward's.

        Where forwards run ahead, as in a pipeline, that may be another one.
        """
        return last if self.micro is None else self.micro

    def forget(self) -> None:
        """Hear that it is over, or that another forward came before its end: it has raised."""
        self.entered.clear()
        self.micro = None
