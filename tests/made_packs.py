"""Packs made without torch: a whole tensor cut for the ranks as the wrappers of torch cut it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ddpprobe.rundir import tensor_pack
from ddpprobe.rundir.paths import RunDir, node_name
from ddpprobe.rundir.tensor_pack import PackedTensor
from ddpprobe.store.captures import dtypes

Parts = dict[int, tuple[np.ndarray, Mapping[str, Any]]]  # rank -> (its tensor, its layout)
KEY = ("layers.0.mlp", "layers.0.mlp.weight", "param", "")


def whole(shape: Sequence[int], dtype: str, seed: int = 0) -> np.ndarray:
    """Return any bits: NaN payloads, infinities and negative zeros are among them."""
    rng = np.random.default_rng([seed, *shape])
    count = int(np.prod(shape)) * tensor_pack.ITEM_SIZES[dtype]
    raw = rng.integers(0, 2 if dtype == "bool" else 256, count, np.uint8)
    return raw.view(dtypes.dtype_of(dtype)).reshape(shape)


def chunk(array: np.ndarray, count: int, index: int, dim: int) -> np.ndarray:
    """Return what torch.chunk gives the rank: full pieces first, then less or nothing."""
    size = array.shape[dim]
    full = -(-size // count)
    low, high = min(index * full, size), min((index + 1) * full, size)
    return array[(slice(None),) * dim + (slice(low, high),)]


def sharded(array: np.ndarray, mesh: Sequence[int], dims: Sequence[int | None]) -> Parts:
    """Shard over a mesh: per axis the dim that it splits, None: it holds replicas."""
    ranks = range(int(np.prod(mesh)))
    axes = [["replicate", 0, 1, ""] if d is None else ["shard", d, 1, ""] for d in dims]
    layout = {
        "kind": "dtensor", "ranks": list(ranks), "mesh": list(mesh),
        "shape": list(array.shape), "axes": axes,
    }  # fmt: skip
    parts: Parts = {}
    for rank, place in enumerate(np.ndindex(*mesh)):
        local = array
        for size, at, dim in zip(mesh, place, dims, strict=True):
            local = local if dim is None else chunk(local, size, at, dim)
        parts[rank] = (local, layout)
    return parts


def flat(array: np.ndarray, ranks: int, before: int, after: int) -> Parts:
    """Cut as FSDP1 does a parameter that stands between others in the flattened one."""
    elements = array.reshape(-1)
    per_rank = -(-(before + elements.size + after) // ranks)
    parts: Parts = {}
    for rank in range(ranks):
        low, high = (min(max(per_rank * r - before, 0), elements.size) for r in (rank, rank + 1))
        start, stop = (low, high) if low < high else (0, 0)
        layout = {
            "kind": "flat", "unit": "", "start": start, "stop": stop, "shape": list(array.shape)
        }  # fmt: skip
        parts[rank] = (elements[start:stop], layout)
    return parts


def batch(array: np.ndarray, lengths: Sequence[int]) -> Parts:
    """Cut along dim 0 into parts of any lengths."""
    ends = np.cumsum(lengths)
    layout = {"kind": "batch", "dim": 0, "ranks": list(range(len(lengths)))}
    return {
        r: (array[end - n : end], layout)
        for r, (n, end) in enumerate(zip(lengths, ends, strict=True))
    }


def write(
    run: RunDir,
    tensors: Iterable[tuple[tuple[str, str, str, str], Parts]],
    *,
    step: int = 7,
    world: int | None = None,
    only: Callable[[int], bool] = lambda _: True,
    per_node: int = 1 << 20,
    attempt: int = 0,
    reason: str = "capture",
    dtype: str | None = None,
) -> None:
    """Write the packs of one step.

    Args:
        tensors: ((module, fqn, kind, leaf), parts).
        world: ranks of the job; default: those of the first tensor.
        only: which ranks deliver.
        per_node: ranks on a node.
        dtype: torch's name, if NumPy's is another.
    """
    named = list(tensors)
    ranks = range(world or len(named[0][1]))
    for rank in filter(only, ranks):
        told = []
        for (module, fqn, kind, leaf), parts in named:
            if rank in parts:
                local, layout = parts[rank]
                raw = np.frombuffer(np.ascontiguousarray(local).tobytes(), np.uint8)
                name = dtype or str(local.dtype)
                shape = tuple(local.shape)
                packed = PackedTensor(module, fqn, kind, leaf, 0, 0, name, shape, layout)
                told.append((packed, raw))
        about = {
            "class": "made.Module", "training": True, "calls": [], "state": {"weight": KEY[1]},
        }  # fmt: skip
        modules = {module: about for (module, *_), _ in named}
        header = {
            "attempt": attempt, "step": step, "rank": rank, "world_size": len(ranks),
            "wall_time_ns": 10**18 + step, "reason": reason, "dropped": 0, "modules": modules,
        }  # fmt: skip
        node = node_name(rank // per_node)
        tensor_pack.write(run.pack(attempt, node, rank, step), header, told)
