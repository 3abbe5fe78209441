"""The nets of the benchmark, small enough for a few milliseconds a step, and their data."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

CLASSES, VOCABULARY, LENGTH, EXPERTS = 3, 16, 32, 8
PERIOD = 8  # of the text: a character is most often the one so many places before
Batch = tuple[Tensor, Tensor]


class Mlp(nn.Module):
    """2 -> 32 -> 32 -> 3; W1."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.fc1, self.act1 = nn.Linear(2, width), nn.ReLU()
        self.fc2, self.act2 = nn.Linear(width, width), nn.ReLU()
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act2(self.fc2(self.act1(self.fc1(x)))))


class Cnn(nn.Module):
    """Images of 8 x 8; W2."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.act1 = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU()
        self.conv2, self.act2 = nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.ReLU()
        self.head = nn.Linear(16 * 16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        return self.act2(self.conv2(self.act1(self.conv1(x)))).flatten(1)


class Attention(nn.Module):
    causal = True

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(h.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width)
        self.norm2, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.act, self.down = nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Two layers, d 32; W3. With `drop`, each layer is left out as often (LayerDrop)."""

    def __init__(self, width: int = 32, layers: int = 2, drop: float = 0.0) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place.weight[: x.shape[1]]
        for block in self.blocks:
            if torch.rand(()) >= self.drop:
                h = block(h)
        return self.head(self.norm(h))


class Moe(nn.Module):
    """Top-1 routing over 8 experts; W4."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.gate = nn.Linear(2, width), nn.Linear(width, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(EXPERTS)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).relu()
        weight, chosen = self.gate(h).softmax(-1).max(-1)
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(h[rows]) * weight[rows, None])
        return self.head(h + out)


class Residual(nn.Module):
    """A CNN with batch norm, whose residual branches begin at zero; W5."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), _zero(8))
            for _ in range(2)
        )
        self.head = nn.Linear(8 * 64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for branch in self.branches:
            h = h + branch(h)
        return self.head(h.relu().flatten(1))


def _zero(channels: int) -> nn.Module:
    norm = nn.BatchNorm2d(channels)
    nn.init.zeros_(norm.weight)
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), norm)


class Sigmoid(nn.Module):
    """Ten sigmoid layers; W6."""

    def __init__(self, width: int = 32, layers: int = 10) -> None:
        super().__init__()
        sizes = [2, *[width] * (layers - 1)]
        self.layers = nn.ModuleList(nn.Linear(n, width) for n in sizes)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sigmoid()
        return self.head(x)


class Rare(nn.Module):
    """A bag of rare words: most rows of the table have no gradient."""

    def __init__(self, rows: int = 5000, width: int = 16) -> None:
        super().__init__()
        self.rows = rows
        self.bag, self.head = nn.EmbeddingBag(rows, width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bag(x))


class Data:
    """What one rank reads: the task is the same on all, the samples are its own."""

    def __init__(self, seed: int, own: int) -> None:
        self.own = torch.Generator().manual_seed(own)
        task = torch.Generator().manual_seed(seed)
        self._centres = torch.tensor(
            [[math.cos(a), math.sin(a)] for a in (0.0, 2 * math.pi / 3, 4 * math.pi / 3)]
        )
        self._images = torch.randn(CLASSES, 1, 8, 8, generator=task)
        self._next = torch.rand(VOCABULARY, VOCABULARY, generator=task).pow(4)
        self._words = torch.randint(0, CLASSES, (5000,), generator=task)

    def blobs(self, size: int = 32, noise: float = 0.5) -> Batch:
        y = torch.randint(0, CLASSES, (size,), generator=self.own)
        return self._centres[y] + noise * torch.randn(size, 2, generator=self.own), y

    def images(self, size: int = 16, noise: float = 1.0) -> Batch:
        y = torch.randint(0, CLASSES, (size,), generator=self.own)
        return self._images[y] + noise * torch.randn(size, 1, 8, 8, generator=self.own), y

    def text(self, size: int = 8, length: int = LENGTH) -> Batch:
        """Return characters, and those after them: copies over a distance, with some noise."""
        first = torch.randint(0, VOCABULARY, (size, PERIOD), generator=self.own)
        whole = first.repeat(1, (length + 1) // PERIOD + 1)[:, : length + 1]
        noise = torch.rand(whole.shape, generator=self.own) < 0.1
        fresh = torch.multinomial(self._next[whole].flatten(0, 1), 1, generator=self.own)
        whole = torch.where(noise, fresh.view_as(whole), whole)
        return whole[:, :-1], whole[:, 1:]

    def words(self, rows: int, size: int = 16, bag: int = 4) -> Batch:
        x = torch.randint(0, rows, (size, bag), generator=self.own)
        return x, self._words[x[:, 0]]


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, -2), y.flatten())
