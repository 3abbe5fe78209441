"""A frozen encoder that torch computes in one go is computed so with a probe, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ddpprobe
from ddpprobe.rank.hooks import fast_path
from ddpprobe.rank.hooks.fast_path import fused, inside_layers

STEPS, LENGTH = 4, 37
PADDED = torch.arange(LENGTH)[None] >= torch.tensor([LENGTH // 2, LENGTH])[:, None]


class Head(nn.Module):
    """A head on the features of a frozen encoder, or a model that is looked at in between."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.frozen = frozen
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.encoder.requires_grad_(not frozen)
        self.head = nn.Linear(32, 3)

    def train(self, mode: bool = True) -> Head:
        super().train(mode)
        self.encoder.train(mode and not self.frozen)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=PADDED))


def trained(run: Path | None, *, frozen: bool, **options: object) -> list[Tensor]:
    torch.manual_seed(0)
    model = Head(frozen=frozen).train()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    probe = run and ddpprobe.install(model, run_dir=run, every=1, daemon="none", **options)
    found = []
    for step in range(STEPS):
        x = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        model.eval()
        with torch.no_grad():  # amid the step: hooks hang on the model
            found += [loss.detach(), model(x)]
        model.train()
        optimizer.step()
        optimizer.zero_grad()
    if probe:
        probe.close()
    return [*found, *model.state_dict().values()]


@pytest.mark.parametrize(
    ("frozen", "options"),
    [
        (True, {}),
        (False, {}),
        (True, {"backward": "full"}),
        (False, {"backward": "full"}),
        (True, {"capture": "encoder.*"}),
    ],
)
def test_it_is_trained_and_looked_at_to_the_same_bits(
    frozen: bool, options: dict[str, str], tmp_path: Path
) -> None:
    alone = trained(None, frozen=frozen)
    beside = trained(tmp_path, frozen=frozen, **options)
    assert all(map(torch.equal, alone, beside))


def test_layers_without_rows_are_told_and_everything_else_has_them(
    tmp_path: Path, records_of
) -> None:
    trained(tmp_path, frozen=True)
    (first, *_) = records_of(tmp_path)
    outputs = {site.fqn for site in first.sites if site.kind == "output"}
    assert outputs == {"", "encoder", "head"}
    rank = ddpprobe.open(tmp_path).info()["attempts"][-1]["ranks"]
    assert rank[0]["unsupported"] == {fast_path.REASON: 2}
    assert rank[0]["silent"] == []


def test_layers_that_train_or_carry_hooks_anyway_are_observed(tmp_path: Path, records_of) -> None:
    trained(tmp_path, frozen=False)
    (first, *_) = records_of(tmp_path)
    assert "encoder.layers.0.linear1" in {s.fqn for s in first.sites if s.kind == "output"}
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    layers = inside_layers(nn.Sequential(layer).modules())
    assert layers == dict.fromkeys(layer.modules(), layer)
    assert not fused([layer])
    assert layer.linear1 in fused([layer.eval()])
    layer.linear1.register_forward_hook(lambda *_: None)
    assert not inside_layers([layer])
    assert not inside_layers([nn.TransformerEncoderLayer(8, 2)])
