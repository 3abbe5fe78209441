"""Shards, started by torchrun."""

import torch
from net import STEPS, Net, batch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
model = Net()
for part in (model.up, model.down, model):
    fully_shard(part)
optimizer = torch.optim.AdamW(model.parameters())
# The model is made.
for step in range(STEPS):
    optimizer.zero_grad()
    loss = model(batch(step, rank))
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(loss.item())
dist.destroy_process_group()
