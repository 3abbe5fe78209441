"""Replicas of which one dies, and which torchrun starts again."""

import os

import torch
from net import Net, leave, train
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# torch leaves the addresses of a dead attempt in the agent's store, where the next one finds them.
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore(f"attempt_{attempt}", store)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters())


def die(step: int) -> None:
    """End rank 1 of the first attempt in the middle of a step."""
    if (attempt, rank, step) == ("0", 1, 4):
        os._exit(3)


train(model, optimizer, rank, die)
leave(model)
