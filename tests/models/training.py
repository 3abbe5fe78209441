"""A model, and a user's loop that trains it for some steps on one rank."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Generator, Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 3
RATE = 1e-3


@dataclass(frozen=True)
class Architecture:
    """A model of a library, small and from random weights.

    Attributes:
        library: its package on the index; "torch" for one of torch alone.
        name: what the library calls it.
        build: makes it.
        loss: draws a batch by the generator, calls the model with it, and returns the loss.
        world: ranks; from two on under DistributedDataParallel.
    """

    library: str
    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Generator], Tensor]
    world: int = 1

    @property
    def title(self) -> str:
        """What names it in the command and in the table: the library and its name."""
        return f"{self.library} {self.name}"


@dataclass
class Trained:
    """What a training came to on this rank.

    Attributes:
        bits: digest of parameters, buffers, optimizer and random state.
        losses: of each step, as hexadecimal numbers.
    """

    bits: str = ""
    losses: list[str] = field(default_factory=list)


class Training:
    """One training on one rank, the same every time: AdamW, one micro-batch in a step."""

    def __init__(self, architecture: Architecture, rank: int) -> None:
        self._architecture, self._rank = architecture, rank
        self.losses: list[str] = []
        torch.manual_seed(1)
        self.model = architecture.build().train()
        torch.manual_seed(2 + rank)  # dropout
        np.random.seed(2 + rank)  # some models draw by it what they mask
        random.seed(2 + rank)  # or which layers they leave out
        self.called: nn.Module = self.model
        if architecture.world > 1:
            self.called = DistributedDataParallel(self.model)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.01)

    def backward(self) -> None:
        """Compute the gradients of the next step."""
        seed = 1000 * len(self.losses) + self._rank
        loss = self._architecture.loss(self.called, Generator().manual_seed(seed))
        self.losses.append(loss.item().hex())
        loss.backward()

    def update(self) -> None:
        """Let the optimizer take the step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, steps: int = STEPS) -> Trained:
        """Take all steps."""
        for _ in range(steps):
            self.backward()
            self.update()
        return self.trained()

    def trained(self) -> Trained:
        """Return what has come of it."""
        digest = hashlib.sha256()
        drawn = (torch.get_rng_state(), np.random.get_state(), random.getstate())
        state = (self.model.state_dict(), self.optimizer.state_dict(), drawn)
        for leaf in pytree.tree_leaves(state):
            digest.update(_bytes_of(leaf))
        return Trained(digest.hexdigest(), self.losses)


def _bytes_of(leaf: object) -> bytes:
    if isinstance(leaf, Tensor):
        leaf = leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode()
