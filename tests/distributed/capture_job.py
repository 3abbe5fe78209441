"""Captures on real ranks, compared with the unsharded model; prints `ok NAME` per claim on rank 0.

torchrun ... capture_job.py CLAIM...
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ddpprobe
from ddpprobe import CaptureError
from ddpprobe.testing import state_hash

CLAIMS: dict[str, Callable[[int, int], None]] = {}


def claim(check: Callable[[int, int], None]) -> Callable[[int, int], None]:
    CLAIMS[check.__name__] = check
    return check


class Block(nn.Module):
    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(d), nn.Linear(d, h)
        self.act, self.down = nn.ReLU(), nn.Linear(h, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, remat: bool | None = None) -> None:
        super().__init__()
        self.remat = remat  # None: no checkpointing; else use_reentrant
        self.embed = nn.Embedding(12, 4)
        self.blocks = nn.ModuleList(Block(4, 6) for _ in range(2))
        self.head = nn.Linear(4, 7)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h) if self.remat is None else checkpoint(block, h, use_reentrant=self.remat)
        return {"logits": self.head(h), "hidden": (h,)}


def build(remat: bool | None = None) -> Model:
    torch.manual_seed(0)
    return Model(remat)


def batch(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 12, (2 + rank, 6), generator=generator)


def loss_of(out: dict[str, object]) -> torch.Tensor:
    return out["logits"].square().sum()


def reference(x: torch.Tensor):
    """Outputs and gradients of the unsharded model, by a capture-free way of our own."""
    model, outputs, grads = build(), {}, {}

    def keep(name: str):
        def hook(module: nn.Module, args: object, output: object) -> None:
            for leaf, tensor in (
                [("", output)] if isinstance(output, torch.Tensor)
                else [("logits", output["logits"]), ("hidden.0", output["hidden"][0])]
            ):  # fmt: skip
                outputs[name, leaf] = tensor.detach().clone()
                tensor.register_hook(lambda g, key=(name, leaf): grads.update({key: g.clone()}))

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(keep(name))
    loss_of(model(x)).backward()
    return outputs, grads


def agree(mine: torch.Tensor, want: torch.Tensor, *, exact: bool = False) -> None:
    assert mine.shape == want.shape, (mine.shape, want.shape)
    if exact:
        assert torch.equal(mine, want)
    torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-6)


def refused(ask: Callable[[], object], *words: str) -> None:
    with pytest.raises(CaptureError) as error:
        ask()
    for word in words:
        assert word in str(error.value), str(error.value)


NAMES = ("embed", "blocks.0", "blocks.0.norm", "blocks.0.up", "blocks.0.act", "blocks.0.down",
         "blocks.1", "head")  # fmt: skip


def batch_is_joined(model: nn.Module, rank: int, world: int) -> None:
    with ddpprobe.capture(model, grad=True) as seen:
        loss_of(model(batch(rank))).backward()
    outputs, grads = reference(torch.cat([batch(r) for r in range(world)]))
    for name in NAMES:
        agree(seen[name].output.local(), reference(batch(rank))[0][name, ""])
        agree(seen[name].output.full(), outputs[name, ""])
        agree(seen[name].grad.full(), grads[name, ""])
    agree(seen[""].output["hidden"].full(), outputs["", "hidden.0"])
    agree(seen[""].output["logits"].full(), outputs["", "logits"])
    refused(seen[""].output.full, "choose one of", '["logits"]')
    parts = seen["head"].output.by_rank()
    assert [len(parts[r]) for r in range(world)] == [2 + r for r in range(world)]
    stats = {(s.name, s.kind, s.leaf): s for s in seen.stats()}
    for (name, leaf), want in outputs.items():
        one = stats[name, "output", leaf]
        assert one.numel == want.numel()
        assert one.ranks == tuple(range(world))
        torch.testing.assert_close(one.mean, want.mean().item(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one.std, want.std(correction=0).item(), rtol=1e-5, atol=1e-6)
        assert abs(one.near_zero - (want.abs() <= 0.05).double().mean().item()) < 0.02
        assert one.histogram.counts.sum() == want.numel()
        assert seen[name].output[leaf].stats().numel == want.numel()


@claim
def ddp(rank: int, world: int) -> None:
    batch_is_joined(DistributedDataParallel(build()), rank, world)


@claim
def fsdp2(rank: int, world: int) -> None:
    model = build()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    batch_is_joined(model, rank, world)


@claim
def fsdp1(rank: int, world: int) -> None:
    for original in (True, False):
        model = build()
        wrap = ModuleWrapPolicy({Block})
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
        sharded = FullyShardedDataParallel(
            model, auto_wrap_policy=wrap, use_orig_params=original, device_id=torch.device("cpu")
        )
        batch_is_joined(sharded, rank, world)


@claim
def hsdp(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = build()
    fully_shard(model, mesh=mesh)
    batch_is_joined(model, rank, world)


@claim
def checkpointing(rank: int, world: int) -> None:
    for reentrant in (True, False):
        model = DistributedDataParallel(build(reentrant), find_unused_parameters=False)
        with ddpprobe.capture(model, "blocks.*", grad=True, keep="all") as seen:
            loss_of(model(batch(rank))).backward()
        outputs, grads = reference(torch.cat([batch(r) for r in range(world)]))
        for name in ("blocks.0", "blocks.0.up", "blocks.1.down"):
            assert seen[name].count == 1
            agree(seen[name].output.full(), outputs[name, ""])
            agree(seen[name].grad.full(), grads[name, ""])


@claim
def conditional(rank: int, world: int) -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.even, self.odd, self.idle = (nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.odd(x) if rank % 2 else self.even(x)

    torch.manual_seed(0)
    model = Branch()
    xs = [torch.full((r + 1, 3), float(r)) for r in range(world)]
    with ddpprobe.capture(model) as seen:
        model(xs[rank])
    even = torch.cat([x for r, x in enumerate(xs) if r % 2 == 0])
    agree(seen["even"].output.full(), model.even(even).detach())
    agree(seen["odd"].output.full(), model.odd(xs[1]).detach(), exact=True)
    assert seen["odd"].output.stats().ranks == (1,)
    refused(seen["idle"].output.full, "idle.output was captured on no rank")
    if rank % 2:
        refused(seen["even"].output.local, "never ran inside the capture")


@claim
def stages(rank: int, world: int) -> None:
    """Each rank has its own modules, as in a pipeline: the names are everybody's."""
    torch.manual_seed(0)
    layers = nn.ModuleDict({f"l{r}": nn.Linear(2, 2) for r in range(world)})
    mine = nn.ModuleDict({f"l{rank}": layers[f"l{rank}"]})
    x = torch.ones(1, 2)
    with ddpprobe.capture(mine, "l*") as seen:
        mine[f"l{rank}"](x)
    assert list(seen) == [f"l{r}" for r in range(world)]
    for name in seen:
        agree(seen[name].output.full(), layers[name](x).detach())
    with ddpprobe.capture(mine, "l1") as seen:
        mine[f"l{rank}"](x)
    agree(seen["l1"].output.full(), layers["l1"](x).detach())


@claim
def shapes_that_do_not_fit(rank: int, world: int) -> None:
    model = nn.Identity()
    with ddpprobe.capture(model) as seen:
        model(torch.full((2, 3 + rank), float(rank)))
    refused(seen[""].output.full, ".by_rank()", "(2, 3)")
    parts = seen[""].output.by_rank()
    assert [tuple(parts[r].shape) for r in range(world)] == [(2, 3 + r) for r in range(world)]
    agree(seen[""].output.full(dim=1), torch.cat([parts[r] for r in range(world)], 1), exact=True)
    with ddpprobe.capture(model) as seen:
        model(torch.tensor(1.0))
    refused(seen[""].output.full, ".by_rank()")


@claim
def dtypes(rank: int, world: int) -> None:
    model = nn.Identity()
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.bool,
                  torch.int64, torch.float8_e5m2):  # fmt: skip
        whole = torch.arange(world * 4).reshape(world * 2, 2).to(torch.float32).to(dtype)
        with ddpprobe.capture(model) as seen:
            model(whole[2 * rank : 2 * rank + 2])
        assert torch.equal(seen[""].output.full().to(torch.complex64), whole.to(torch.complex64))
    with ddpprobe.capture(model) as seen:
        model(torch.empty(0 if rank else 2, 3).fill_(7.0))
    agree(seen[""].output.full(), torch.full((2, 3), 7.0), exact=True)


@claim
def mistakes_are_told_to_every_rank(rank: int, world: int) -> None:
    model = build()
    refused(ddpprobe.capture(model, "bloks.*").open, "'bloks.*' matches no module", "blocks.0")
    refused(ddpprobe.capture(model, keep="all" if rank else 1).open, "keep must be the same")
    refused(ddpprobe.capture(model, every=0 if rank == 1 else 1).open, "rank 1: every must be")
    with ddpprobe.capture(model, "embed", "head") as seen:
        model(batch(rank))
    ask = seen["embed" if rank else "head"].output.full
    refused(ask, "rank 0: head.output.full", "rank 1: embed.output.full")
    assert len(seen["head"].output.full()) == sum(len(batch(r)) for r in range(world))
    with ddpprobe.capture(model, "head", copy=False) as seen:
        out = model(batch(rank))["logits"]
    if rank == 1:
        out.detach().zero_()
    refused(seen["head"].output.full, "rank 1: head.output was changed in place", "copy=True")


@claim
def a_rank_that_does_not_ask_is_named(rank: int, world: int) -> None:
    model = build()
    with ddpprobe.capture(model, "head", timeout=2.0) as seen:
        model(batch(rank))
    if rank != 1:
        started = time.monotonic()
        refused(seen["head"].output.full, "rank 1 of", "did not call head.output.full", "2 s")
        assert time.monotonic() - started < 10
    else:
        time.sleep(3)
        refused(seen["head"].output.full, "rank 1 of")
    assert len(seen["head"].output.full()) == sum(len(batch(r)) for r in range(world))
    if rank != 1:
        refused(ddpprobe.capture(model, timeout=2.0).open, "rank 1 of", "ddpprobe.capture(...)")
    else:
        time.sleep(3)
        refused(ddpprobe.capture(model, timeout=2.0).open, "rank 1 of")
    dist.barrier()
    total = torch.ones(1)
    dist.all_reduce(total)  # the training's own group is untouched
    assert total == world


@claim
def statistics_only(rank: int, world: int) -> None:
    model = build()
    with ddpprobe.capture(model, "blocks.*", grad=True, keep="stats", range=(-2.0, 2.0)) as seen:
        for _ in range(3 + rank):
            loss_of(model(batch(rank))).backward()
    history = seen["blocks.0"].output.history()
    assert len(history) == 2 + world
    sizes = [len(batch(r)) * 6 * 4 for r in range(world)]
    for call, stats in enumerate(history):
        assert stats.numel == sum(n for r, n in enumerate(sizes) if call < 3 + r)
    assert seen["blocks.0"].output.stats().calls == 2 + world
    assert seen["blocks.0"].grad.stats().numel == sum(n * (3 + r) for r, n in enumerate(sizes))
    mine = seen["blocks.0"].output.stats(local=True)
    assert (mine.numel, mine.ranks) == (sizes[rank] * (3 + rank), (rank,))
    refused(seen["blocks.0"].output.full, 'keep="stats" keeps no tensors')


@claim
def tensor_parallel(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    x = batch(5)
    outputs, grads = reference(x)
    for sequence in (False, True):
        model = build()
        plan: dict[str, object] = {}
        for i in range(2):
            plan[f"blocks.{i}.up"] = ColwiseParallel()
            plan[f"blocks.{i}.down"] = RowwiseParallel()
            if sequence:
                plan[f"blocks.{i}.norm"] = SequenceParallel(use_local_output=False)
                plan[f"blocks.{i}.up"] = ColwiseParallel(input_layouts=Shard(1))
                plan[f"blocks.{i}.down"] = RowwiseParallel(output_layouts=Shard(1))
        layout = Shard(1) if sequence else Replicate()
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=layout)
        plan["head"] = ColwiseParallel(input_layouts=layout, output_layouts=Replicate())
        parallelize_module(model, mesh, plan)
        with ddpprobe.capture(model, grad=True) as seen:
            loss_of(model(x)).backward()
        told = ["embed", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head",
                "blocks.0.act"]  # fmt: skip
        for name in told + (["blocks.0.norm"] if sequence else []):
            agree(seen[name].output.full(), outputs[name, ""])
            agree(seen[name].grad.full(), grads[name, ""])
            stats = seen[name].output.stats()
            assert (stats.numel, stats.placement in ("sharded", "replicated")) == (
                outputs[name, ""].numel(), True), name  # fmt: skip
            torch.testing.assert_close(stats.norm, outputs[name, ""].norm().item())
        block = seen["blocks.0"]
        if sequence:  # a sum of two plain shards: nobody tells
            refused(block.output.full, "shards of it", ".full(tp=-1)")
            refused(lambda b=block: b.output.full(tp="replicated"), "not replicated")
            assert block.output.stats().placement == "unknown"
        else:
            assert block.output.stats().placement == "replicated"
            assert block.grad.stats().numel == grads["blocks.0", ""].numel()
        said = 1 if sequence else None
        agree(block.output.full(tp=said), outputs["blocks.0", ""])
        agree(block.grad.full(tp=said), grads["blocks.0", ""])
        # the very tensor that `head` made is what the model returns
        agree(seen[""].output["logits"].full(), outputs["", "logits"])
        agree(seen[""].grad["logits"].full(), grads["", "logits"])


class Gated(nn.Module):
    """Multiplies what every tensor-parallel rank holds by what each one has a shard of."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.mix, self.up = nn.Linear(4, 6), nn.Linear(6, 6 * world)
        self.down = nn.Linear(6 * world, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.mix(x)
        return self.down(h * self.up(h))


@claim
def a_gradient_that_is_each_rank_s_own_is_no_replica(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = Gated(world)
    plan = {
        "mix": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(), "down": RowwiseParallel(),
    }  # fmt: skip
    parallelize_module(model, mesh, plan)
    with ddpprobe.capture(model, grad=True) as seen:
        model(torch.ones(5, 4)).square().sum().backward()
    own = seen["mix"]
    assert own.output.stats().placement == "replicated"
    assert own.output.full().shape == (5, 6)
    assert len({float(part.sum()) for part in own.grad.by_rank().values()}) == world
    refused(own.grad.full, "torch does not tell", ".by_rank()")
    refused(lambda: own.grad.full(tp="replicated"), "not replicated")
    assert own.grad.stats().placement == "unknown"
    after = seen["down"]  # after the place where the two meet
    assert after.grad.stats().placement == "replicated"
    agree(after.grad.full(), 2 * after.output.full(), exact=True)


@claim
def fsdp2_over_tensor_parallel(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    model = build()
    plan: dict[str, object] = {}
    for i in range(2):
        plan[f"blocks.{i}.up"], plan[f"blocks.{i}.down"] = ColwiseParallel(), RowwiseParallel()
    parallelize_module(model, mesh["tp"], plan)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    replica = mesh.get_local_rank("dp")
    with ddpprobe.capture(model, grad=True) as seen:
        loss_of(model(batch(replica))).backward()
    outputs, grads = reference(torch.cat([batch(0), batch(1)]))
    for name in ("blocks.0.up", "blocks.0.down", "blocks.1.up"):
        agree(seen[name].output.full(), outputs[name, ""])
        agree(seen[name].grad.full(), grads[name, ""])
        assert seen[name].output.stats().numel == outputs[name, ""].numel()
    agree(seen["blocks.0.act"].output.full(), outputs["blocks.0.act", ""])
    plain = build()
    for name in ("up", "down"):  # their weights lie in strided and uneven shards
        weight = model.blocks[0].get_submodule(name).weight
        with ddpprobe.capture(probe := nn.Identity()) as other:
            probe(weight)
        want = plain.blocks[0].get_submodule(name).weight
        agree(other[""].output.full(), want.detach(), exact=True)
    agree(seen["embed"].output.full(), outputs["embed", ""])
    agree(seen["blocks.1"].grad.full(), grads["blocks.1", ""])
    assert seen["blocks.1"].output.stats().numel == outputs["blocks.1", ""].numel()


@claim
def dtensors_of_any_layout(rank: int, world: int) -> None:
    model = nn.Identity()
    whole = torch.randn(7, 5, 3, generator=torch.Generator().manual_seed(0))
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    for placements in (
        (Shard(0), Shard(2)), (Shard(1), Shard(1)), (Replicate(), Shard(1)),
        (Shard(2), Replicate()), (Replicate(), Replicate()),
    ):  # fmt: skip
        spread = distribute_tensor(whole, mesh, placements)
        with ddpprobe.capture(model) as seen:
            model(spread)
        assert torch.equal(seen[""].output.full(), whole), placements
        assert seen[""].output.stats().numel == whole.numel(), placements
    part = DTensor.from_local(whole * (rank + 1), mesh, (Partial(), Partial()))
    with ddpprobe.capture(model) as seen:
        model(part)
    agree(seen[""].output.full(), part.full_tensor())
    assert seen[""].output.stats().placement == "partial"
    part = DTensor.from_local(whole * (rank + 1), mesh, (Replicate(), Partial("avg")))
    with ddpprobe.capture(model) as seen:
        model(part)
    mean = sum(whole * (r + 1) for r in range(world // 2)) / (world // 2)
    agree(seen[""].output.full(), mean)


@claim
def training_is_bit_identical(rank: int, world: int) -> None:
    def train(wrap: str, *, captured: bool) -> str:
        model: nn.Module = build(remat=True if wrap == "remat" else None)
        if wrap == "fsdp2":
            fully_shard(model)
        else:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(rank)
        for _ in range(6):
            if captured:
                with ddpprobe.capture(model, grad=True, input=True) as seen:
                    loss_of(model(batch(rank))).backward()
                seen["head"].output.full()
            else:
                loss_of(model(batch(rank))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_hash(model, optimizer)

    for wrap in ("ddp", "fsdp2", "remat"):
        assert train(wrap, captured=True) == train(wrap, captured=False), wrap


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for name in sys.argv[1:]:
        CLAIMS[name](rank, world)
        dist.barrier()
        if rank == 0:
            print("ok", name, flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)  # torch with gloo aborts now and then when it exits right after a DDP run


if __name__ == "__main__":
    main()
