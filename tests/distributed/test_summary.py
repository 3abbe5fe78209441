"""On real ranks a summary counts what the unsharded model has, and what lies on this rank."""

from __future__ import annotations

import json

SCRIPT = """
import json, os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP
import ddpprobe
from ddpprobe.inspect.summary.skeleton import SummaryError

dist.init_process_group("gloo")
rank = dist.get_rank()
cpu = torch.device("cpu")
tokens = torch.tensor([[1, 2, 3], [4, 0, 1]])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(5, 6), nn.LayerNorm(6)
        self.up, self.act, self.down = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(self.down(self.act(self.up(self.norm(self.embed(x))))))


class Reduces(Model):
    def forward(self, x):
        y = super().forward(x)
        dist.all_reduce(y.detach())
        return y


class Helper:
    def __init__(self, module):
        self.module = module


class Hidden(Model):  # calls its units through an object that is no module
    def __init__(self):
        super().__init__()
        self.helper = Helper(self.up)

    def forward(self, x):
        return self.down(self.helper.module(self.embed(x)))


def fsdp1(use_orig_params):
    model = Model()
    if use_orig_params:
        model.up = FSDP(model.up, use_orig_params=True, device_id=cpu)
    else:
        model.norm.bias.requires_grad_(True)
    return FSDP(model, use_orig_params=use_orig_params, device_id=cpu)


def fsdp2(kind=Model, mesh=None):
    model = kind()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    fully_shard(model.up, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh)


def tp():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(Model(), mesh, plan)


both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
models = {"plain": Model(), "ddp": DDP(Model()), "fsdp1": fsdp1(False), "fsdp1_orig": fsdp1(True),
          "fsdp2": fsdp2(), "hsdp": fsdp2(mesh=both), "tp": tp()}
gathered = models["fsdp2_after_forward"] = fsdp2()
gathered(tokens)  # its root unit stays gathered until the backward
refused = {"reduces": fsdp2(Reduces), "hidden": fsdp2(Hidden)}
if rank == 1:  # alone: a collective would wait for rank 0 forever
    found = {name: ddpprobe.summary(m, tokens).to_dict() for name, m in models.items()}
    found["text"] = str(ddpprobe.summary(models["hsdp"]))
    for name in refused:
        try:
            ddpprobe.summary(refused[name], tokens)
        except SummaryError as error:
            found[name] = str(error)
    found["sharded_local"] = sum(p.to_local().numel() for p in models["fsdp2"].parameters())
    found["orig_local"] = sum(p.numel() for p in models["fsdp1_orig"].parameters())
    found["gathered"] = sum(hasattr(p, "to_local") for p in gathered.parameters())
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)
dist.barrier()
for name, trained in (models | refused).items():  # and all of them still train, together
    optimizer = torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], lr=0.1)
    trained(tokens).sum().backward()
    optimizer.step()
dist.destroy_process_group()
time.sleep(0.5)
"""

# norm 12, embed 30 (and head, tied), up 56, down 54
WHOLE, FROZEN = 152, 6


def test_every_wrapper_gives_the_plain_models_table_and_this_ranks_part(torchrun, tmp_path) -> None:
    script = tmp_path / "summary.py"
    script.write_text(SCRIPT)
    done = torchrun([script, tmp_path / "found.json"], nproc=2)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    plain = found["plain"]
    local = {
        "plain": 152,
        "ddp": 152,
        "fsdp1": 76,
        "fsdp1_orig": found["orig_local"],
        "tp": 30 + 12 + 28 + 30,
    }
    local |= dict.fromkeys(("fsdp2", "hsdp", "fsdp2_after_forward"), found["sharded_local"])
    for name, here in local.items():
        totals = found[name]["totals"]
        assert totals["params"] == WHOLE, name
        assert totals["params_local"] == here, name
        assert totals["param_bytes_local"] == 4 * here
        assert totals["trainable"] == (WHOLE if name == "fsdp1" else WHOLE - FROZEN), name
        for row, want in zip(found[name]["rows"], plain["rows"], strict=True):
            for key in ("fqn", "type", "input_shapes", "output_shapes", "params_global", "calls"):
                assert row[key] == want[key], (name, key)
    assert found["gathered"] == 2  # only the unit below the root was sharded when it was asked
    placements = {
        name: {row["fqn"]: row["placement"] for row in found[name]["rows"]} for name in local
    }
    assert placements["plain"]["up"] == ""
    assert placements["ddp"]["up"] == "replicated over 2 ranks (DDP)"
    assert placements["fsdp1_orig"]["up"] == "flat shard over 2 ranks (FSDP1)"
    assert placements["fsdp2"]["up"] == "Shard(0) over axis 0 (2)"
    assert placements["hsdp"]["up"] == "Replicate over dp_replicate(1), Shard(0) over dp_shard(2)"
    assert placements["tp"]["up"] == "Shard(0) over tp(2)"
    assert placements["tp"]["down"] == "Shard(1) over tp(2); Replicate over tp(2)"
    assert placements["tp"]["embed"] == ""
    assert "152, " in found["text"]
    assert "on this rank" in found["text"]
    assert "failed in the root (Reduces)" in found["reduces"]
    assert "collective (c10d.allreduce_" in found["reduces"]
    assert "calls Linear through an object that is not a module" in found["hidden"]
