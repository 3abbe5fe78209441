"""Models of torch alone."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

from tests.models.training import Architecture

WIDTH = 8


def _small() -> nn.Module:
    block = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(inplace=True), nn.Dropout(0.1))
    return nn.Sequential(block, nn.LayerNorm(16), nn.Linear(16, WIDTH))


def _of_vectors(model: nn.Module, draw: Generator) -> Tensor:
    x = torch.randn(4, WIDTH, generator=draw)
    return (model(x) - x).square().mean()


def _transformer() -> nn.Module:
    return nn.Transformer(16, 2, 2, 2, 32, batch_first=True)


def _of_two_sequences(model: nn.Module, draw: Generator) -> Tensor:
    x = torch.randn(4, 6, 16, generator=draw)
    return (model(x, x[:, :5]) - x[:, 1:]).square().mean()


class Recurrent(nn.Module):
    """Predicts the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.layers = nn.LSTM(WIDTH, 16, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(16, 11)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.layers(self.words(x))
        return self.head(hidden)


def _of_words(model: nn.Module, draw: Generator) -> Tensor:
    x = torch.randint(0, 11, (4, 6), generator=draw)
    return nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


MODELS = (
    Architecture("torch", "Sequential", _small, _of_vectors),
    Architecture("torch", "Sequential, two ranks", _small, _of_vectors, world=2),
    Architecture("torch", "Transformer", _transformer, _of_two_sequences),
    Architecture("torch", "LSTM", Recurrent, _of_words),
)
