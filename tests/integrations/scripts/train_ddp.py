"""Replicas, started by torchrun."""

import torch
from net import STEPS, Net, batch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(Net())
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
