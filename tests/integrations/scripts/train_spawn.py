"""Replicas that are started by mp.spawn, which sets no variable."""

import sys
import time

import torch
from net import STEPS, Net, batch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

HELD: list[torch.nn.Module] = []


def work(rank: int, where: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=2)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step, rank))
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(loss.item())
    # torch may abort or stand still where a rank takes its connections down under another's feet,
    # and where a DDP model is the last to hold them.
    HELD.append(model)
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), 2)
