"""What the scripts beside this one train: a small model, one layer of which gives a NaN once."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import distributed as dist

STEPS, FAULT = 12, 6


class Bad(nn.Module):
    """Passes on what it gets, but for the step FAULT on the rank $FAULT_RANK, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        here = dist.get_rank() if dist.is_initialized() else os.environ.get("LOCAL_RANK", "0")
        self.here = str(here) == os.environ.get("FAULT_RANK")

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x / 0 * 0 if self.here and self.calls == FAULT + 1 else x


class Net(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.bad, self.down = nn.Linear(4, 8), Bad(), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.bad(self.up(x))).square().mean()


def batch(step: int, rank: int = 0) -> Tensor:
    """Return what a rank trains on at a step."""
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(1000 * rank + step))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0,
    before_step: Callable[[int], None] = lambda _: None,
) -> None:  # fmt: skip
    """Train for STEPS steps; rank 0 prints its losses."""
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step, rank))
        loss.backward()
        before_step(step)
        optimizer.step()
        if rank == 0:
            print(loss.item())
    wait_for_the_daemon()


def wait_for_the_daemon() -> None:
    """Wait for the daemon of a run in this directory: how a rank ends is known to who watches it.

    It begins its own journal when it does. A script as short as this may end before.
    """
    late = time.monotonic() + 60
    while any(Path().glob("ddpprobe-runs/*/run.json")) and time.monotonic() < late:
        if any(Path().glob("ddpprobe-runs/*/journal/*/*/daemon/*")):
            return
        time.sleep(0.02)


def leave(model: nn.Module) -> None:
    """End the process group of a model, together with the other ranks.

    torch may abort or stand still where a rank takes its connections down under another's feet, and
    where a DDP model is the last to hold them.
    """
    _held.append(model)
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)


_held: list[nn.Module] = []
