"""The page that maps hooks: it names every hook there is, and what it says to type works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules

import ddpprobe

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "hooks.md"
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# `fastai.callback.hook.__all__` of fastai 2.8, which is not installed here.
FASTAI = (
    "Hook", "hook_output", "Hooks", "hook_outputs", "dummy_eval", "model_sizes",
    "num_features_model", "has_params", "HookCallback", "total_params", "layer_info",
    "module_summary", "ActivationStats",
)  # fmt: skip


def hooks_of(where: object) -> list[str]:
    return [name for name in dir(where) if re.fullmatch(r"register_\w*hook", name)]


@pytest.mark.parametrize(
    "where", [nn.Module, modules, torch.Tensor], ids=["Module", "all", "Tensor"]
)
def test_every_hook_of_torch_is_on_the_page(where: object) -> None:
    told = set(re.findall(r"\bregister_\w+", PAGE.read_text()))
    assert hooks_of(where)
    assert set(hooks_of(where)) <= told


def test_every_name_of_fastais_hooks_is_on_the_page() -> None:
    table = PAGE.read_text().partition("## fastai")[2]
    first = {line.split("|")[1] for line in table.splitlines() if line.startswith("| `")}
    assert [name for name in FASTAI if not any(f"`{name}" in cell for cell in first)] == []


def test_what_the_page_says_can_be_typed() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    model = Net()
    names = {
        "ddpprobe": ddpprobe, "nn": nn, "model": model, "batch": torch.ones(8, 16),
        "optimizer": torch.optim.SGD(model.parameters(), 0.1), "loss_func": nn.MSELoss(),
    }  # fmt: skip
    (block,) = CODE.findall(PAGE.read_text())
    exec(block, names)
    assert names["seen"][0].stored.shape == (8, 8)
    table = names["table"]
    assert (table.num_features_model, table["layers.0"].flops) == (4, 2 * 8 * 16 * 8)
    assert (table[""].has_params, table["layers.1"].has_params) == (True, False)
    assert [row.output_shapes for row in table][-1] == ((8, 4),)
