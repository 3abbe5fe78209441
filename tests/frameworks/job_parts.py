"""What the jobs of several frameworks do alike: a small model, its batches, its bits, their end."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MICROS = 2  # micro-batches of a step
RANK = int(os.environ.get("LOCAL_RANK", "0"))  # all of them run on one node
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


class Net(nn.Module):
    """Returns its loss. Its parameters are cut by the partitions of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 1)
        self.fault = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).tanh()
        if self.fault:
            hidden = hidden * float("nan")
        return (self.down(hidden) - x.sum(1, keepdim=True)).pow(2).mean()


def batch(step: int, micro: int, rank: int = RANK, world: int = WORLD) -> Tensor:
    """Return what a rank trains on in a micro-batch, float32 [4, 4]: no other one has the same."""
    seed = (step * MICROS + micro) * world + rank
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))


def digest(net: nn.Module) -> str:
    """Return a digest of the bits of all parameters."""
    bits = b"".join(p.detach().view(torch.uint8).numpy().tobytes() for p in net.parameters())
    return hashlib.sha256(bits).hexdigest()


def tell(out: Path, name: str, told: dict[str, Any], rank: int = RANK) -> None:
    """Leave what a rank saw in OUT/NAME.RANK.json."""
    (out / f"{name}.{rank}.json").write_text(json.dumps(told))


def leave() -> None:
    """End the process group, if there is one; see CONTRIBUTING for the wait."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        time.sleep(0.5)
