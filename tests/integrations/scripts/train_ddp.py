"""Replicas, started by torchrun."""

import torch
from net import Net, leave, train
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters())
# The model is made.
train(model, optimizer, rank)
leave(model)
