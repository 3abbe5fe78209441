"""A cell's model as its user would wrap it: sharded, checkpointed, compiled."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.grid.axes import DDP, DDP_TP, FSDP1, FSDP2, TP, Cell
from tests.grid.models import Base, Block, Spot

_DDP_OPTIONS = {
    "ddp": {}, "ddp-bucket-view": {"gradient_as_bucket_view": True},
    "ddp-static": {"static_graph": True}, "ddp-unused": {"find_unused_parameters": True},
}  # fmt: skip


@dataclass
class Wrapped:
    """`model` is called; `root` is the user's own module inside it."""

    model: nn.Module
    root: Base
    rank: int
    cell: Cell
    mesh: DeviceMesh | None = None
    recompiled: Callable[[], None] = lambda: None

    @property
    def dp_rank(self) -> int:
        """Which of the batches this rank sees."""
        if self.cell.wrapper in ("tp", "pp"):
            return 0
        return self.rank // 2 if self.cell.wrapper in TP else self.rank

    @contextlib.contextmanager
    def syncing(self, on: bool) -> Iterator[None]:
        """Reduce the gradients of the backward in here, or accumulate them locally."""
        if self.cell.wrapper in FSDP2:
            self.model.set_requires_gradient_sync(on)
        quiet = not on and self.cell.wrapper in (*DDP, *FSDP1)
        with self.model.no_sync() if quiet else contextlib.nullcontext():
            yield


def wrap(cell: Cell, root: Base, rank: int, backend: object) -> Wrapped:
    """Wrap and compile `root` as `cell` says; `backend` is what torch.compile is given."""
    mesh = _mesh(cell)
    if cell.wrapper == "pp":
        keep_stage(root, rank, cell.ranks)
    if cell.wrapper in TP:
        for module in root.modules():
            if isinstance(module, Spot):
                module.by_hook = cell.engine == "eager"
        _tensor_parallel(root, mesh if cell.wrapper == "tp" else mesh["tp"])
    _checkpointed(root, cell.memory)
    if cell.engine == "block":
        for block in _blocks(root):
            block.compile(backend=backend)
    model: nn.Module = root
    if cell.wrapper in DDP:
        if cell.engine == "whole":
            root.compile(backend=backend)
        model = DistributedDataParallel(root, **_DDP_OPTIONS[cell.wrapper])
    elif cell.wrapper == DDP_TP:
        model = DistributedDataParallel(root, device_mesh=mesh["dp"])
    elif cell.wrapper in FSDP1:
        model = _fsdp1(cell, root, mesh)
    elif cell.wrapper in FSDP2:
        _fsdp2(cell, root, mesh)
    if cell.engine == "whole" and cell.wrapper not in DDP:
        model.compile(backend=backend)
    return Wrapped(model, root, rank, cell, mesh)


@functools.cache
def _mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _mesh(cell: Cell) -> DeviceMesh | None:
    if cell.wrapper in ("hsdp", "hsdp1"):
        return _mesh_of((2, cell.ranks // 2), ("replicate", "shard"))
    if cell.wrapper in ("fsdp2-tp", DDP_TP):
        return _mesh_of((cell.ranks // 2, 2), ("dp", "tp"))
    if cell.wrapper == "tp":
        return _mesh_of((cell.ranks,), ("tp",))
    return None


def _blocks(root: Base) -> list[nn.Module]:
    return [block for block in root.blocks if block is not None]


def stage_of(part: str, ranks: int) -> int:
    """The pipeline stage that owns the module of this path: three blocks over 2 to 4 stages."""
    if part.startswith("stem"):
        return 0
    if part.startswith("head"):
        return ranks - 1
    return min(int(part.split(".")[1]), ranks - 1) if ranks < 4 else int(part.split(".")[1])


def keep_stage(root: Base, rank: int, ranks: int) -> None:
    """Take away what other pipeline stages own; what stays keeps its name."""
    for part in ("stem", "head"):
        if stage_of(part, ranks) != rank:
            setattr(root, part, None)
    for index in range(len(root.blocks)):
        if stage_of(f"blocks.{index}", ranks) != rank:
            root.blocks[index] = None


def _tensor_parallel(root: Base, mesh: DeviceMesh) -> None:
    for module in root.modules():
        if isinstance(module, Block):
            parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _checkpointed(root: Base, memory: str) -> None:
    if memory in ("checkpoint", "reentrant"):
        root.remat = memory
    wrapper = {"wrapper": checkpoint_wrapper, "offload-wrapper": offload_wrapper}.get(memory)
    if wrapper is not None:
        for index, block in enumerate(root.blocks):
            if block is not None:
                root.blocks[index] = wrapper(block)


def _fsdp1(cell: Cell, root: Base, mesh: DeviceMesh | None) -> FullyShardedDataParallel:
    options = {"use_orig_params": cell.wrapper != "fsdp1-flat", "device_id": torch.device("cpu")}
    if mesh is not None:
        options |= {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    if cell.precision == "mixed":
        options["mixed_precision"] = MixedPrecision(torch.bfloat16, torch.float32)
    if cell.memory == "cpu-offload":
        options["cpu_offload"] = CPUOffload(offload_params=True)
    if cell.model != "branches":  # a unit that not all ranks run would wait for ever
        for index, block in enumerate(root.blocks):
            root.blocks[index] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(root, **options)


def _fsdp2(cell: Cell, root: Base, mesh: DeviceMesh | None) -> None:
    options = {}
    if cell.wrapper == "fsdp2-tp":
        options["mesh"] = mesh["dp"]
    elif mesh is not None:
        options["mesh"] = mesh
    if cell.precision == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if cell.memory == "cpu-offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in _blocks(root):
        fully_shard(block, **options)
    fully_shard(root, **options)


def spots(wrapped: Wrapped, path: str) -> list[nn.Module]:
    """The Spot of this path on this rank; none if another stage owns it."""
    for name, module in wrapped.root.named_modules():
        if clean(name) == path and type(module).__name__ == "Spot":
            return [module]
    return []


_PREFIXES = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module")


def full_parameters(wrapped: Wrapped) -> dict[str, Tensor]:
    """All parameters this rank has a part of, whole, by the names of the unwrapped model."""
    fsdp1 = wrapped.cell.wrapper in FSDP1
    context = (
        FullyShardedDataParallel.summon_full_params(wrapped.model, writeback=False)
        if fsdp1
        else contextlib.nullcontext()
    )
    found = {}
    with context:
        for name, parameter in wrapped.model.named_parameters():
            value = parameter.detach()
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[clean(name)] = value.float().clone()
    return found


def clean(name: str) -> str:
    """The name without what wrappers put in."""
    return ".".join(part for part in name.split(".") if part not in _PREFIXES)


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, sharing its memory."""
    inner = parameter.detach()
    return inner.to_local() if hasattr(inner, "to_local") else inner
