"""Shards, started by torchrun."""

import torch
from net import Net, leave, train
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
model = Net()
for part in (model.up, model.down, model):
    fully_shard(part)
optimizer = torch.optim.AdamW(model.parameters())
# The model is made.
train(model, optimizer, rank)
leave(model)
