"""A dispatch mode that leaves torch's compiler alone.

The same rules hold as in `torch_private`: a stated degradation, and nothing private anywhere else.
"""

from __future__ import annotations

import contextlib
from typing import cast

import torch

from ddpprobe.rank.torch_private import DispatchMode

_DisableFunctions = getattr(torch._C, "DisableTorchFunction", None)  # noqa: SLF001


def outside_functions() -> contextlib.AbstractContextManager[object]:
    """Context in which modes and subclasses that override torch's functions see none of ours.

    Degradation: no protection.
    """
    if _DisableFunctions is None:
        return contextlib.nullcontext()
    return cast("contextlib.AbstractContextManager[object]", _DisableFunctions())


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
    """Whether a mode's method is left as it was written, and functions can be left alone."""

    def dispatch(*_: object) -> None:
        return None

    made = type("Made", (PlainMode,), {"__torch_dispatch__": dispatch})
    with outside_functions():
        outside = not torch._C._is_torch_function_enabled()  # noqa: SLF001
    return {
        "outside_functions": outside,
        "plain_mode": made.__dict__["__torch_dispatch__"] is dispatch,
    }
