"""Floating-point operations of an operator, from shapes: two for a multiplication with an addition.

Counted are matrix products, convolutions, attention and recurrent layers, as torch's own counter
(torch.utils.flop_counter) does, which lacks attention and LSTMs on the CPU. What is done element by
element is left out, and so is what a causal mask spares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

OURS = ("aten", "prims", "prim")  # namespaces of torch's own operators


def flops_of(func: object, args: Sequence[Any], out: object) -> int | None:
    """Return the operations of one call; None where there is no formula for an operator of weight.

    Args:
        func: the operator, such as `aten.addmm.default`.
        args: its positional arguments; only shapes are read.
        out: what it returned.
    """
    namespace, _, rest = str(func).partition(".")
    name = rest.partition(".")[0]
    if namespace in _FORMULAS:  # a higher-order operator has no namespace
        return _FORMULAS[namespace](args, out)
    if namespace not in OURS:
        return None if rest else 0
    if name in _FUSED:
        return None
    if name.startswith(("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_")):
        return 0 if name.endswith("backward") else _attention(args, out)
    formula = _FORMULAS.get(name)
    return formula(args, out) if formula is not None else 0


def _product(first: int) -> Callable[[Sequence[Any], object], int]:
    """Return the formula of a product of matrices [..., m, k] and [..., k, n] of the arguments."""

    def flops(args: Sequence[Any], _: object) -> int:
        left, right = args[first], args[first + 1]
        return 2 * int(left.numel()) * int(right.shape[-1])

    return flops


def _linear(args: Sequence[Any], _: object) -> int:
    return 2 * int(args[0].numel()) * int(args[1].shape[0])


def _convolution(args: Sequence[Any], out: object) -> int:
    """Each element of the output, of a transposed one of the input, meets one filter."""
    weight, transposed = args[1], len(args) > 6 and bool(args[6])
    grid = args[0] if transposed or not isinstance(out, Tensor) else out
    return 2 * int(grid.numel()) * int(math.prod(weight.shape[1:]))


def _attention(args: Sequence[Any], _: object) -> int:
    """Count q k^T and its product with v, for q, k, v [..., sequence, width]."""
    query, key, value = args[:3]
    pairs = int(math.prod(query.shape[:-1])) * int(key.shape[-2])
    return 2 * pairs * (int(query.shape[-1]) + int(value.shape[-1]))


def _recurrent(args: Sequence[Any], _: object) -> int:
    """Each step of each sequence [time, batch, width] meets every matrix of the layers."""
    flat = [t for a in args[1:5] for t in (a if isinstance(a, (list, tuple)) else [a])]
    matrices = [t for t in flat if isinstance(t, Tensor) and t.dim() == 2]
    return 2 * int(math.prod(args[0].shape[:-1])) * sum(int(t.numel()) for t in matrices)


_FUSED = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
_FORMULAS: Mapping[str, Callable[[Sequence[Any], object], int]] = MappingProxyType(
    {
        "mm": _product(0),
        "bmm": _product(0),
        "_scaled_mm": _product(0),
        "_int_mm": _product(0),
        "_grouped_mm": _product(0),
        "_scaled_grouped_mm": _product(0),
        "mv": lambda args, _: 2 * int(args[0].numel()),
        "dot": lambda args, _: 2 * int(args[0].numel()),
        "addmm": _product(1),
        "baddbmm": _product(1),
        "linear": _linear,
        "convolution": _convolution,
        "cudnn_convolution": _convolution,
        "mkldnn_rnn_layer": _recurrent,
        "_cudnn_rnn": _recurrent,
        "flex_attention": _attention,
    }
)
