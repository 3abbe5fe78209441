"""Where torch cannot trace our hooks its graphs hold nothing of ours, and that is said."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.rank.torch_private import dynamo
from ddpprobe.testing import state_hash

# What torch's compiler imports is deprecated by torch itself.
pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act = nn.Linear(8, 8), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.inner(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Linear(4, 8), Block()
        self.more = nn.Sequential(*(Block() for _ in range(9)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.more(self.block(self.stem(x)))


Way = Callable[[Net, object], nn.Module]


def around(model: Net, backend: object) -> nn.Module:
    return torch.compile(model, backend=backend, fullgraph=True)


def in_place(model: Net, backend: object) -> nn.Module:
    model.compile(backend=backend, fullgraph=True)
    return model


def a_block(model: Net, backend: object) -> nn.Module:
    model.block.compile(backend=backend, fullgraph=True)
    return model


def blocks(model: Net, backend: object) -> nn.Module:
    for block in model.more:  # more than torch's recompile limit, all of one code
        block.compile(backend=backend, fullgraph=True)
    return model


def train(way: Way, run_dir: Path | None) -> tuple[str, list[str]]:
    """Return the hash of what was trained, and the text of each graph."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = Net()
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(str(graph.graph))
        return graph.forward

    call, optimizer = way(model, backend), torch.optim.SGD(model.parameters(), lr=0.1)
    if run_dir is not None:
        probe = ddpprobe.install(call, run_dir=run_dir, every=2, daemon="none")
    for step in range(6):
        call(torch.full((3, 4), 0.1 * step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if run_dir is not None:
        probe.close()
    return state_hash(model, optimizer), graphs


@pytest.mark.parametrize("way", [around, in_place, a_block, blocks])
def test_training_is_bit_identical_each_graph_whole_and_one_line_says_what_is_not_seen(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dynamo, "SPEAKING", False)
    monkeypatch.setattr(dynamo, "is_silent", dynamo._always)
    reset = torch.compiler.reset
    monkeypatch.setattr(torch.compiler, "reset", lambda: pytest.fail("nothing is gained by it"))
    with caplog.at_level(logging.WARNING, "ddpprobe"):
        probed = train(way, tmp_path / "r")
    monkeypatch.setattr(torch.compiler, "reset", reset)
    bits, graphs = train(way, None)
    assert probed[0] == bits
    assert len(probed[1]) <= 2 * len(graphs)  # compiled once more, as there are hooks now
    assert "ddpprobe" not in "".join(probed[1])
    said = [r.getMessage() for r in caplog.records if "with a newer torch" in r.getMessage()]
    assert len(said) == 1
