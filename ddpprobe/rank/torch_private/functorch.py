"""Being called inside vmap, grad or jvp without becoming part of it.

The same rules hold as in `torch_private`: a stated degradation, and nothing private anywhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import cast

import torch

from ddpprobe.rank import torch_private

Context = contextlib.AbstractContextManager[object]


def outside() -> Context:
    """Context in which a new tensor belongs to no transform, although one is under way.

    Inside one, even `torch.empty` gives a wrapped tensor, which has no memory of its own and
    outlives its transform as an empty shell.

    Degradation: it is wrapped, and the fuse of the hooks blows.
    """
    if not torch_private.in_functorch():
        return contextlib.nullcontext()
    try:
        from torch._functorch import pyfunctorch  # noqa: PLC0415  (only who uses functorch has it)
    except ImportError:
        return contextlib.nullcontext()
    clear = getattr(pyfunctorch, "temporarily_clear_interpreter_stack", contextlib.nullcontext)
    return cast("Callable[[], Context]", clear)()


def self_test() -> dict[str, bool]:
    """Whether a tensor made in there is a plain one."""
    made: list[torch.Tensor] = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        with outside():
            made.append(torch.zeros(1, device="cpu"))
        return x.sum()

    torch.func.vmap(torch.func.grad(loss))(torch.ones(2, 1))
    return {"outside_functorch": not torch_private.is_functorch(made[0]) and made[0].item() == 0}
