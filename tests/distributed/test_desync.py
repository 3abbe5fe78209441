"""Replicas that should be equal are compared bit by bit on real ranks."""

from __future__ import annotations

from pathlib import Path

from ddpprobe.records.merge import disagreements, merge_all, ranks_of

SCRIPT = """
import sys, time, torch, torch.distributed as dist, ddpprobe
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
out = sys.argv[1]

def train(name, wrap, spoil=None, local=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with ddpprobe.install(wrapped, run_dir=f"{out}/{name}", every=2, daemon="none"):
        for step in range(6):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            if local:
                with wrapped.no_sync():
                    wrapped(x).square().mean().backward()
            else:
                wrapped(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if spoil and step == 3:
                spoil(wrapped)

def flip(model):
    if rank == 1:
        with torch.no_grad():
            dict(model.named_parameters())["module.2.weight"].view(-1)[5] += 1e-4

def flip_shard(model):
    if rank == 3:
        with torch.no_grad():
            p = dict(model.named_parameters())["2.weight"]
            p.to_local().view(-1)[:1] += 1e-4

train("clean", DDP)
train("ddp", DDP, flip)
train("local", DDP, local=True)
if world == 4:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "sh"))
    train("hsdp", lambda m: fully_shard(m, mesh=mesh), flip_shard)
dist.destroy_process_group()
time.sleep(0.5)
"""


def test_a_flipped_bit_is_named_with_its_ranks_and_no_healthy_run_disagrees(
    torchrun, tmp_path: Path, records_of
) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    done = torchrun([script, tmp_path], nproc=4)
    assert done.returncode == 0, done.stderr

    def merged(name: str) -> dict:
        ranks = [{r.step: r for r in records_of(tmp_path / name, rank)} for rank in range(4)]
        return {step: merge_all([r[step] for r in ranks]) for step in ranks[0]}

    clean = merged("clean")
    assert list(clean) == [0, 2, 4]
    for record in clean.values():
        assert {k for k, _ in record.digests} == {"0.weight", "0.bias", "2.weight", "2.bias"}
        assert all(held and set(held.values()) == {15} for held in record.digests.values())
    bad = merged("ddp")
    assert disagreements(bad[2].digests) == {}
    (key,) = disagreements(bad[4].digests)
    assert key == ("2.weight", "")
    groups = sorted(ranks_of(mask) for mask in bad[4].digests[key].values())
    assert groups == [(0, 2, 3), (1,)]
    # Replicas that train alone between averagings part, and it is known that they may.
    for record in merged("local").values():
        assert disagreements(record.digests)
        assert all(said["unreduced"] == 3 for said in record.scalars.values())
    assert not any("unreduced" in said for r in clean.values() for said in r.scalars.values())
    shards = merged("hsdp")
    assert disagreements(shards[2].digests) == {}
    assert {len(ranks_of(m)) for held in shards[2].digests.values() for m in held.values()} == {2}
    ((fqn, shard), *more) = disagreements(shards[4].digests)
    assert (fqn, more) == ("2.weight", [])
    assert sorted(map(ranks_of, shards[4].digests[fqn, shard].values())) == [(1,), (3,)]
