"""The code of the page about frameworks runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ddpprobe

from .trained import FULL, need

pytestmark = FULL
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "frameworks.md"
BLOCK = re.compile(r"^(<!-- illustration[^\n]*\n)?```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE = {
    re.search(r"ddpprobe\.integrations\.(\w+)", block)[1]: block
    for not_run, block in BLOCK.findall(PAGE.read_text())
    if not not_run
}
NEEDS = {"huggingface": "transformers", "lightning": "lightning", "fabric": "lightning",
         "accelerate": "accelerate", "ray": "ray", "deepspeed": "deepspeed"}  # fmt: skip
# What a reader's own script has before it comes to this.
BEFORE = {
    "huggingface": """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8))
ids = torch.arange(8)
dataset = [{"input_ids": ids, "labels": ids}] * 80
""",
    "lightning": """
import torch, lightning.pytorch as pl
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.net(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
module, loader = Module(), torch.utils.data.DataLoader(torch.randn(40, 4))
""",
    "fabric": """
import torch
model = torch.nn.Linear(4, 1)
optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(20, 2, 4)
""",
}
BEFORE["accelerate"] = BEFORE["fabric"]
BEFORE["ray"] = """
import os
import torch
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
storage, batches = os.getcwd(), torch.randn(20, 2, 4)
def build():
    return torch.nn.Linear(4, 1)
"""
BEFORE["deepspeed"] = """
import os
os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
import socket, torch, deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for a minute or two
with socket.create_server(("127.0.0.1", 0)) as server:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
model = torch.nn.Linear(4, 1)
optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(80, 2, 4)
"""
AT_ONCE = 'import os\nos.environ["DDPPROBE_EVERY"] = "1"\n'


def test_there_is_code_for_each_framework() -> None:
    assert set(CODE) == set(NEEDS)


@pytest.mark.parametrize("name", NEEDS)
def test_the_code_of_the_page_leaves_a_run(name: str, torchrun, tmp_path: Path) -> None:
    need(NEEDS[name])
    done = torchrun(AT_ONCE + BEFORE[name] + CODE[name], nproc=0, timeout=240)
    assert done.returncode == 0, done.stderr
    (run,) = tmp_path.rglob("run.json")
    info = ddpprobe.open(run.parent).info()
    assert info["steps"] == {"first": 0, "last": 19}
    assert "ddpprobe" in run.parent.parent.name
