"""From whatever a model hands us to a dense 1-D tensor whose elements can simply be read.

No collective and no copy where a view will do: a DTensor gives its local shard, a broadcast tensor
its few real elements and how often each stands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ddpprobe.rank import torch_private

if TYPE_CHECKING:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

_EIGHT_BIT = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
    if hasattr(torch, name)
)
_PLAIN = (Tensor, torch.nn.Parameter)
_COLLECTIVES = "torch.distributed._functional_collectives"
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Unsupported(TypeError):
    """A tensor that has no statistics here; the text says which kind it is."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def local(tensor: Tensor) -> Tensor:
    """Return the plain local tensor after a DTensor or an unfinished functional collective."""
    if type(tensor) not in _PLAIN:
        if torch_private.is_a(tensor, "torch.distributed.tensor", "DTensor"):
            tensor = cast("DTensor", tensor).to_local()
        if torch_private.is_a(tensor, _COLLECTIVES, "AsyncCollectiveTensor"):
            tensor = cast("AsyncCollectiveTensor", tensor).wait()
    return tensor.detach()


def readable(tensor: Tensor) -> bool:
    """Whether the `numel` elements of `tensor` lie in memory of this process, one after the other.

    Asks what a kernel that gets an address must know; no for whatever is merely unusual.
    """
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not torch_private.is_functorch(tensor)
        and tensor.is_contiguous()
        and not tensor.is_neg()  # a bit that says: the number is not what lies there
        and tensor.untyped_storage().nbytes() > 0  # what frees memory under a tensor makes it 0
        and tensor.data_ptr() != 0
    )


def lies_on(tensor: Tensor, device: torch.device) -> bool:
    """Whether `tensor` is plain, and its elements lie on `device` one after the other."""
    return (
        type(tensor) in _PLAIN
        and tensor.device == device
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not torch_private.is_functorch(tensor)
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj())
        and not (tensor.numel() and tensor.untyped_storage().nbytes() == 0)
    )


def dense(tensor: Tensor) -> tuple[Tensor, int]:
    """Return (elements, repeats): a 1-D tensor, and how often each element stands in `tensor`.

    Floating dtypes stay what they are but fp8, which becomes float32; bool and integers become
    float64; complex numbers become their real and imaginary parts (numel doubles); sparse and
    jagged tensors give their stored values.

    Raises:
        Unsupported: meta, quantized or functorch-wrapped tensors, unknown dtypes, freed memory.
    """
    if torch_private.is_functorch(tensor):
        raise Unsupported("a tensor inside vmap, grad or jvp has no readable values")
    tensor = local(tensor)
    if tensor.is_meta or type(tensor).__name__ == "FakeTensor":
        raise Unsupported("a meta tensor has no values")
    if tensor.is_quantized:
        raise Unsupported(f"quantized dtype {tensor.dtype}")
    tensor = _stored(tensor)
    if type(tensor) is Tensor and tensor.numel() and not tensor.untyped_storage().nbytes():
        raise Unsupported("a tensor whose memory was freed")
    tensor = tensor.resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype in _EIGHT_BIT:
        tensor = tensor.float()
    elif tensor.dtype not in FLOATS:
        try:
            tensor = tensor.double()
        except (RuntimeError, NotImplementedError) as error:
            raise Unsupported(f"dtype {tensor.dtype}") from error
    flat, repeats = _flatten(tensor)
    return _in_memory(flat), repeats


def is_copy(flat: Tensor, tensor: Tensor) -> bool:
    """Whether `dense` had to copy the elements of `tensor` to give `flat`."""
    tensor = local(tensor)
    return (
        tensor.layout is not torch.strided
        or tensor.is_nested
        or flat.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    )


def _in_memory(flat: Tensor) -> Tensor:
    """Return `flat`, or a copy of it if its elements lie nowhere though they have values."""
    if type(flat) is Tensor and flat.is_cpu and flat.numel() and not flat.data_ptr():
        flat = flat.clone()  # the zeros that forward-mode differentiation does not write down
        if not flat.data_ptr():
            raise Unsupported("a functional tensor has no memory of its own")
    return flat


def _stored(tensor: Tensor) -> Tensor:
    """Return the stored values of a nested or sparse tensor; others are returned as they are."""
    if tensor.is_nested:
        return tensor.values()
    if tensor.layout == torch.sparse_coo:
        return tensor.coalesce().values()
    if tensor.is_mkldnn:
        return tensor.to_dense()
    return tensor if tensor.layout == torch.strided else tensor.values()


def _flatten(tensor: Tensor) -> tuple[Tensor, int]:
    repeats = 1
    if tensor.numel() and 0 in tensor.stride():
        # An expanded gradient (y.sum().backward()) holds one element a million times over:
        # contiguous() would allocate the million.
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0:
                repeats *= tensor.shape[dim]
                tensor = tensor.narrow(dim, 0, 1)
    if tensor.is_contiguous():
        return tensor.view(-1), repeats
    if _fills_storage(tensor):
        return tensor.as_strided((tensor.numel(),), (1,)), repeats
    return tensor.reshape(-1), repeats


def _fills_storage(tensor: Tensor) -> bool:
    """Whether the elements are a permutation of one gap-free block (transposed, channels_last)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
