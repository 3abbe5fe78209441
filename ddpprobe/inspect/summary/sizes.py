"""Inputs from their sizes alone: tensors on the meta device, which have no memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddpprobe.errors import SummaryError

Sizes = Sequence[int] | Sequence[Sequence[int]]
Dtypes = torch.dtype | Sequence[torch.dtype] | None


def inputs_of(model: nn.Module, sizes: Sizes, dtypes: Dtypes) -> tuple[Tensor, ...]:
    """Return a tensor on the meta device for each size.

    Args:
        model: of which the first floating-point parameter says the default dtype.
        sizes: one, or a list of them.
        dtypes: of all, or one for each; None: that default.

    Raises:
        SummaryError: they are no sizes, or not as many dtypes.
    """
    several = list(sizes) if isinstance(sizes, Iterable) else []
    given: list[Any] = [sizes] if _is_size(sizes) else several
    if not given or not all(map(_is_size, given)):
        raise SummaryError(
            f"input_sizes must be a size such as (8, 3, 32, 32), or a list of sizes, got {sizes!r}"
        )
    chosen = _default(model) if dtypes is None else dtypes
    own = list(chosen) if isinstance(chosen, Iterable) else []
    each = [chosen] * len(given) if isinstance(chosen, torch.dtype) else own
    if len(each) != len(given) or not all(isinstance(d, torch.dtype) for d in each):
        raise SummaryError(
            f"input_dtypes must be a torch.dtype, or one for each of the {len(given)} sizes, "
            f"got {dtypes!r}"
        )
    return tuple(
        torch.empty(tuple(size), dtype=dtype, device="meta")
        for size, dtype in zip(given, each, strict=True)
    )


def _is_size(value: object) -> bool:
    return isinstance(value, Sequence) and all(type(n) is int and n >= 0 for n in value)


def _default(model: nn.Module) -> torch.dtype:
    found = (p.dtype for p in model.parameters() if p.is_floating_point())
    return next(found, torch.get_default_dtype())
