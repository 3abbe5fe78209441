"""A dispatch mode that leaves torch's compiler alone.

The same rules hold as in `torch_private`: a stated degradation, and nothing private anywhere else.
"""

from __future__ import annotations

from ddpprobe.rank.torch_private import DispatchMode


class PlainMode(DispatchMode):
    """Sees every operator; for processes that compile nothing while it does.

    Torch hides a mode's method from the compiler, whose import takes 1.4 s (measured).

    Degradation: it is imported with the first operator.
    """

    supports_higher_order_operators = True  # such as flex_attention

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def self_test() -> dict[str, bool]:
    """Whether a mode's method is left as it was written."""

    def dispatch(*_: object) -> None:
        return None

    made = type("Made", (PlainMode,), {"__torch_dispatch__": dispatch})
    return {"plain_mode": made.__dict__["__torch_dispatch__"] is dispatch}
