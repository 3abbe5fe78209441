"""The row of a sparse tensor whose indices may repeat, as if it were coalesced, without waiting.

`coalesce()` makes the host wait: how many distinct indices there are, only the device knows. Here
the sums have as many places as there are indices, and what the places beyond the distinct ones
add to a row is taken out of it again, on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddpprobe.rank.stats.dense import dense
from ddpprobe.rank.stats.device import reduce_device


def reduce_coalesced(tensor: Tensor, out: Tensor) -> None:
    """Write the row of a sparse COO tensor (any dtype), as `stats.rows` describes it.

    Args:
        tensor: plain, of layout sparse_coo.
        out: float64 [9], contiguous, on the same device.

    Raises:
        Unsupported: its values have no statistics.
    """
    sums, spare = _sums(tensor._indices(), tensor._values(), tensor.shape)  # noqa: SLF001  (public ones need a coalesced tensor)
    flat, _ = dense(sums)
    reduce_device(flat, 1, out)
    if not flat.numel():
        return
    elements = flat.numel() // len(sums)  # of an index; complex ones count twice
    out[0] -= spare * elements
    out[4] -= spare * elements
    real = flat.view(len(sums), -1).double()
    there = torch.arange(len(sums), device=flat.device) < len(sums) - spare
    kept = there[:, None] & real.isfinite()
    out[5] = torch.where(kept, real, torch.inf).amin()
    out[6] = torch.where(kept, real, -torch.inf).amax()


def _sums(indices: Tensor, values: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Add up the values of each index.

    Args:
        indices: int64 [sparse dims, n].
        values: [n, ...].
        shape: of the whole tensor.

    Returns:
        The sums [n, ...], zeros after the last of them, and how many of these there are, [].
    """
    places = indices.new_zeros(indices.shape[1])
    for dim, index in enumerate(indices):
        places = places * shape[dim] + index
    ordered, order = torch.sort(places)
    starts = torch.ones_like(ordered)
    starts[1:] = ordered[1:] != ordered[:-1]
    numbers = starts.cumsum(0) - 1
    narrow = values.is_floating_point() and values.element_size() < 4  # bytes
    parts = (values.float() if narrow else values)[order]
    sums = torch.zeros_like(parts).index_add_(0, numbers, parts).to(values.dtype)
    return sums, len(places) - 1 - numbers[-1:].sum()
