"""Replicas that are started by mp.spawn, which sets no variable."""

import sys

import torch
from net import Net, leave, train
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def work(rank: int, where: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=2)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, rank)
    leave(model)


if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), 2)
