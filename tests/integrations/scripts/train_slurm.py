"""Replicas that `srun python train.py` starts: Slurm's variables, and no torchrun's."""

import os
import sys

import torch
from net import Net, leave, train
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group(
    "gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world_size
)
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters())
train(model, optimizer, rank)
leave(model)
