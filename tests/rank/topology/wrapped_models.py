"""Small models under every wrapper, on any rank of a world of four that is not there.

torch's fake process group answers at once and sends nothing. So the parts of a model are those of
the rank it is told to be; gradients that a wrapper would reduce are put in their place by hand.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, debug, placement_types
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from ...older_torch import cuts_uneven_strides

RANKS = range(4)
CPU = torch.device("cpu")
HIDDEN = 6 if cuts_uneven_strides() else 8  # rows that are tensor-parallel, then sharded
# Each rank keeps its part of what it has, instead of what rank 0 sends. Torch 2.6 knows only that:
# see `_keep_own_part`.
WITHOUT_RANK_0: dict[str, None] = (
    {"src_data_rank": None}
    if "src_data_rank" in inspect.signature(parallelize_module).parameters
    else {}
)


@contextlib.contextmanager
def on_rank(rank: int) -> Iterator[None]:
    """Be this rank of four."""
    # What DTensor remembers holds the mesh of another rank, which is equal to that of this one.
    _forget_shardings()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(RANKS))
    try:
        with warnings.catch_warnings(), _keep_own_part():
            warnings.simplefilter("ignore")  # FSDP1 is deprecated, and warns of CPUs
            yield
    finally:
        dist.destroy_process_group()


def _forget_shardings() -> None:
    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()
    else:  # an older torch, with one cache only
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()


@contextlib.contextmanager
def _keep_own_part() -> Iterator[None]:
    """Answer the scatter with which torch 2.6 deals out a tensor; else nothing is written."""
    if WITHOUT_RANK_0:
        yield
        return

    def keep(output: Tensor, parts: list[Tensor], over: DeviceMesh, mesh_dim: int = 0) -> None:
        output.copy_(parts[over.get_local_rank(mesh_dim)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement_types, "mesh_scatter", keep)
        yield


def net(*, frozen: bool = True) -> nn.Sequential:
    """Return a model of uneven sizes and unequal elements; layer 2 is there twice, 4 is frozen."""
    model = nn.Sequential(
        nn.Linear(4, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
    )
    start = 1.0
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(torch.arange(start, start + parameter.numel()).view_as(parameter))
        start += parameter.numel()
    model[4].requires_grad_(not frozen)
    model.add_module("tied", model[2])
    return model


def mesh(*shape: int) -> DeviceMesh:
    """Return the ranks as a mesh; of two dims the second is "inner"."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def split(model: nn.Module, over: DeviceMesh) -> nn.Module:
    """Make layers 0 and 2 tensor-parallel."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, over, plan, **WITHOUT_RANK_0)


def sharded(model: nn.Module, over: DeviceMesh) -> nn.Module:
    """Shard layer 0 and the rest by FSDP2."""
    fully_shard(model[0], mesh=over)
    return fully_shard(model, mesh=over)


def ddp_of_a_part() -> nn.Module:
    """Return a model of which only layer 2 is reduced."""
    model = net()
    model[2] = DistributedDataParallel(model[2])
    model.tied = model[2]
    return model


def flat(**how: object) -> nn.Module:
    """Return the model under FSDP1."""
    return FullyShardedDataParallel(net(), device_id=CPU, use_orig_params=True, **how)


def flattened() -> nn.Module:
    """Return the model under FSDP1, whose own parameters are gone. It freezes all or nothing."""
    return FullyShardedDataParallel(net(frozen=False), device_id=CPU)


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "none": net,
    "ddp": lambda: DistributedDataParallel(net()),
    "ddp of a part": ddp_of_a_part,
    "fsdp2": lambda: sharded(net(), mesh(4)),
    "hsdp": lambda: sharded(net(), mesh(2, 2)),
    "tp": lambda: split(net(), mesh(4)),
    "tp of pairs": lambda: split(net(), mesh(2, 2)["inner"]),
    "fsdp2+tp": lambda: sharded(split(net(), (m := mesh(2, 2))["inner"]), m["outer"]),
    "fsdp1": flat,
    "fsdp1 flattened": flattened,
    "fsdp1 whole": lambda: flat(sharding_strategy=ShardingStrategy.NO_SHARD),
    "fsdp1 hybrid": lambda: flat(
        device_mesh=mesh(2, 2), sharding_strategy=ShardingStrategy.HYBRID_SHARD
    ),
}


def whole() -> dict[str, Tensor]:
    """Return the parameters by their names, as one process would have them."""
    return {name: p.detach() for name, p in net().named_parameters()}


def put_gradients(model: nn.Module) -> None:
    """Give each parameter that is trained a gradient of twice its own value."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = _twice(parameter.detach())


def _twice(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor * 2
    # Of a strided shard torch 2.6 makes a plain one when it multiplies.
    return DTensor.from_local(
        tensor.to_local() * 2, tensor.device_mesh, tensor.placements, run_check=False,
        shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip
