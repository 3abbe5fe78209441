"""One step under each of several wrappers, one after the other, with and without the probe.

torchrun ... wrappers_job.py OUT CASE [CASE ...]     (OUT/CASE is the run directory of a case)

A case `whole:NAME` is one of `whole_tensors`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)  # fmt: skip
from torch.nn.parallel import DistributedDataParallel

import ddpprobe
from ddpprobe.inspect.capture.assemble import region
from ddpprobe.rank.topology import dtensor_spec
from ddpprobe.rank.topology.describe import clean, describe
from ddpprobe.rank.topology.parts import flat_parameters
from ddpprobe.testing import state_hash

MICROS, BLOCKS = 2, 2
RATE = 0.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU()
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.between(x)
        return y, y.square().mean()

    def between(self, x: Tensor) -> Tensor:
        h = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            h = h if block is None else block(h)
        return h if self.head is None else self.head(self.norm(h))


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(micro: int, group: int) -> Tensor:
    """Ids [3 + group, 6]: of the data-parallel rank `group`, so batches are uneven."""
    g = torch.Generator().manual_seed(10 * micro + group)
    return torch.randint(0, 13, (3 + group, 6), generator=g)


# ---- wrappers: each returns (model as trained, data-parallel rank, what stops the reduction)

Quiet = Callable[[], contextlib.AbstractContextManager[object]]
Wrapped = tuple[nn.Module, int, Quiet]


def plain(model: Net) -> Wrapped:
    return model, dist.get_rank(), contextlib.nullcontext


def ddp(model: Net) -> Wrapped:
    wrapped = DistributedDataParallel(model)
    return wrapped, dist.get_rank(), wrapped.no_sync


def fsdp1(strategy: str, *, own: bool, **options: object) -> Callable[[Net], Wrapped]:
    def wrap(model: Net) -> Wrapped:
        if strategy == "HYBRID_SHARD":
            options["device_mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
        given = {
            "sharding_strategy": ShardingStrategy[strategy], "use_orig_params": own,
            "device_id": torch.device("cpu"), **options,
        }  # fmt: skip
        for i, block in enumerate(model.blocks):
            model.blocks[i] = FullyShardedDataParallel(block, **given)
        wrapped = FullyShardedDataParallel(model, **given)
        return wrapped, dist.get_rank(), wrapped.no_sync

    return wrap


@contextlib.contextmanager
def unsynchronized(model: nn.Module):
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def fsdp2(model: Net, mesh: object = None, **options: object) -> Wrapped:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model, dist.get_rank(), lambda: unsynchronized(model)


def kept_gathered(model: Net) -> Wrapped:
    """A mistake: from the second step on its forward computes with the weights of the first."""
    wrapped, *rest = fsdp2(model)
    wrapped.set_reshard_after_backward(False)
    return wrapped, *rest


def hsdp(model: Net) -> Wrapped:
    return fsdp2(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))


def parallelize(model: Net, mesh: object, *, sequence: bool, local: bool) -> None:
    plan: dict[str, object] = {}
    for i in range(BLOCKS):
        plan[f"blocks.{i}.up"] = ColwiseParallel(
            input_layouts=Shard(1) if sequence else Replicate(), use_local_output=local
        )
        plan[f"blocks.{i}.down"] = RowwiseParallel(
            output_layouts=Shard(1) if sequence else Replicate()
        )
    if sequence:
        plan |= {f"blocks.{i}.norm": SequenceParallel() for i in range(BLOCKS)}
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, mesh, plan)


def tp(*, sequence: bool = False, local: bool = True) -> Callable[[Net], Wrapped]:
    def wrap(model: Net) -> Wrapped:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        parallelize(model, mesh, sequence=sequence, local=local)
        return model, 0, contextlib.nullcontext

    return wrap


def fsdp2_tp(*, sequence: bool = False) -> Callable[[Net], Wrapped]:
    def wrap(model: Net) -> Wrapped:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize(model, mesh["tp"], sequence=sequence, local=True)
        _, _, quiet = fsdp2(model, mesh["dp"])
        return model, mesh["dp"].get_local_rank(), quiet

    return wrap


def mixed(model: Net) -> Wrapped:
    """The first block under fully_shard, the rest under a DDP that leaves it alone."""
    fully_shard(model.blocks[0])
    names = [n for n, _ in model.named_parameters() if n.startswith("blocks.0.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    wrapped = DistributedDataParallel(model)

    @contextlib.contextmanager
    def quiet():
        with wrapped.no_sync(), unsynchronized(model.blocks[0]):
            yield

    return wrapped, dist.get_rank(), quiet


def checkpointed(model: Net) -> Wrapped:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    return fsdp1("FULL_SHARD", own=True)(model)


def composed(model: Net) -> Wrapped:
    """The same with torch's composable replicate() for the rest."""
    fully_shard(model.blocks[0])
    replicate(model)

    @contextlib.contextmanager
    def quiet():
        model.set_requires_gradient_sync(requires_gradient_sync=False)
        with unsynchronized(model.blocks[0]):
            yield
        model.set_requires_gradient_sync(requires_gradient_sync=True)

    return model, dist.get_rank(), quiet


class Stage(Net):
    """One of two pipeline stages: the other's modules are None, all names stay."""

    def forward(self, x: Tensor) -> Tensor:
        return self.between(x)


def pipeline(model: Net) -> Wrapped:
    model.__class__ = Stage
    if dist.get_rank() == 0:
        model.head = model.norm = model.blocks[1] = None
    else:
        model.embed = model.blocks[0] = None
    return model, 1, contextlib.nullcontext


def run_pipeline(model: nn.Module) -> None:
    stage = PipelineStage(model, dist.get_rank(), 2, torch.device("cpu"))
    ids = torch.cat([batch(micro, 1) for micro in range(MICROS)])
    schedule = ScheduleGPipe(
        stage, MICROS, loss_fn=lambda y, _: y.square().mean(), scale_grads=False
    )
    if dist.get_rank() == 0:
        schedule.step(ids)
    else:
        schedule.step(target=ids)


def handmade(model: Net) -> Wrapped:
    """Stages that are alike in all but their values, and no wrapper to tell."""
    torch.manual_seed(dist.get_rank())
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model, 0, contextlib.nullcontext


BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES: dict[str, Callable[[Net], Wrapped]] = {
    "ddp": ddp,
    "fsdp1": fsdp1("FULL_SHARD", own=False),
    "fsdp1-own": fsdp1("FULL_SHARD", own=True),
    "fsdp1-grad-op": fsdp1("SHARD_GRAD_OP", own=False),
    "fsdp1-grad-op-own": fsdp1("SHARD_GRAD_OP", own=True),
    "fsdp1-no-shard": fsdp1("NO_SHARD", own=False),
    "fsdp1-no-shard-own": fsdp1("NO_SHARD", own=True),
    "fsdp1-hybrid": fsdp1("HYBRID_SHARD", own=False),
    "fsdp1-hybrid-own": fsdp1("HYBRID_SHARD", own=True),
    "fsdp1-bf16": fsdp1("FULL_SHARD", own=True, mixed_precision=BF16),
    "fsdp1-checkpoint": checkpointed,
    "fsdp2": fsdp2,
    "fsdp2-bf16": lambda model: fsdp2(model, mp_policy=MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
    "fsdp2-kept": kept_gathered,
    "hsdp": hsdp,
    "tp": tp(),
    "tp-dtensor": tp(local=False),
    "tp-sequence": tp(sequence=True),
    "fsdp2-tp": fsdp2_tp(),
    "fsdp2-tp-sequence": fsdp2_tp(sequence=True),
    "mixed": mixed,
    "mixed-composed": composed,
    "pipeline": pipeline,
    "handmade": handmade,
}  # fmt: skip


def train(case: str, out: Path | None, *, before: bool) -> str:
    """Two steps; returns the hash of all training state on this rank."""
    model = build()
    options = {"run_dir": out, "every": 1, "daemon": "none"}
    if case == "pipeline":
        options["include"] = ["embed", "blocks*", "norm", "head"]  # each is on one stage only
    probe = ddpprobe.install(model, **options) if out and before else None
    wrapped, group, quiet = CASES[case](model)
    if out and not before:
        probe = ddpprobe.install(wrapped, **options)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=RATE, momentum=0.9)
    for _ in range(2):
        for micro in range(MICROS if case != "pipeline" else 0):
            with contextlib.nullcontext() if micro == MICROS - 1 else quiet():
                wrapped(batch(micro, group))[1].backward()
        if case == "pipeline":
            run_pipeline(wrapped)
        optimizer.step()
        optimizer.zero_grad()
    if probe is not None:
        probe.close()
    check_regions(wrapped)
    return state_hash(wrapped, optimizer)


def check_regions(wrapped: nn.Module) -> None:
    """Every shard is the region of the whole parameter that ddpprobe says it is."""
    for name, parameter in wrapped.named_parameters():
        if isinstance(parameter, DTensor):
            laid, whole = dtensor_spec.of(parameter), parameter.full_tensor()
            here = region(laid, laid.coordinate(dist.get_rank()))
            mine = whole[torch.meshgrid(*here, indexing="ij")]
            assert torch.equal(mine, parameter.to_local()), name
    held = [(p.fqn, p.tensor.clone(), p.spec) for p in flat_parameters(describe(wrapped))]
    if not held:
        return
    with FullyShardedDataParallel.summon_full_params(wrapped):
        whole = {clean(n): p.detach().clone() for n, p in wrapped.named_parameters()}
    covered: Counter[str] = Counter()
    for fqn, part, lies in held:
        assert lies["shape"] == list(whole[fqn].shape)
        assert torch.equal(whole[fqn].flatten()[lies["start"] : lies["stop"]], part), fqn
        covered[fqn] += part.numel()
    assert set(covered) == set(whole)


def whole_tensor_case(case: str, out: Path) -> bool:
    from tests.distributed import whole_tensors

    return whole_tensors.train(case, None) == whole_tensors.train(case, out / case)


def main() -> None:
    warnings.simplefilter("ignore")  # torch deprecates parts of what is tested here
    dist.init_process_group("gloo")
    out, cases = Path(sys.argv[1]), sys.argv[2:]
    same = {}
    for case in cases:
        if case.startswith("whole:"):
            same[case] = [whole_tensor_case(case.removeprefix("whole:"), out / "whole")]
            continue
        bare = train(case, None, before=False)
        same[case] = [bare == train(case, out / case, before=False)]
        if case in ("ddp", "fsdp1", "fsdp1-own", "fsdp2", "tp"):
            same[case].append(bare == train(case, out / f"{case}-before", before=True))
    (out / f"same.{dist.get_rank()}").write_text(json.dumps(same))
    dist.destroy_process_group()
    time.sleep(0.5)  # torch with gloo aborts now and then when it exits right after a DDP run


if __name__ == "__main__":
    main()
