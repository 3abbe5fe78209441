"""A rank of part `deaths`: trains, and the last rank ends in the given way in step 7.

torchrun ... death_job.py DEVICE WRAP BACKEND FAULT EVERY RUN (RUN "": without the probe)
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

STEP, STEPS = 7, 300
CYCLES = 10**11  # about a minute


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 64), nn.Linear(64, 100)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


def wrapped(model: nn.Module, wrap: str) -> nn.Module:
    if wrap == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if wrap == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for part in (*model.blocks, model):
            fully_shard(part)
    return model


def break_down(fault: str, tokens: torch.Tensor) -> None:
    """Bring about what is to end this rank; on a GPU the host hears of an index later."""
    if fault == "index":
        tokens[0, 0] = 1000
    elif fault == "memory" and tokens.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1e-7)
    elif fault == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory, as it were")
    elif fault == "stuck":
        if tokens.is_cuda:
            torch.cuda._sleep(CYCLES)
        print("raises at", time.time(), flush=True)
        raise ValueError("a bad batch")


def main(device: str, wrap: str, backend: str, fault: str, every: str, run: str) -> None:
    dist.init_process_group(backend)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    torch.manual_seed(0)
    model = wrapped(Model().to(device), wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if run:
        import ddpprobe

        ddpprobe.install(model, run_dir=run, every=int(every))
    for step in range(STEPS):
        drawn = torch.Generator().manual_seed(10 * step + rank)
        tokens = torch.randint(0, 100, (8, 32), generator=drawn)
        wanted = tokens.to(device)
        tokens = wanted.clone()
        if (step, rank) == (STEP, last):
            break_down(fault, tokens)
        logits = model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= STEP:  # until whoever ends the job does
            time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    main(*sys.argv[1:])
