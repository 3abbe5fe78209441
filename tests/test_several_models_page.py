"""The code of the page about several models runs as it stands there, with the steps it promises."""

from __future__ import annotations

import re
from pathlib import Path

import ddpprobe
from ddpprobe.reader.run_directories import run_directories

from .pages import blocks

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "several-models.md"
# What a reader's own script has before it comes to this.
BEFORE = """
import torch
from torch import nn
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-4)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4)
noise, real, turns = lambda: torch.randn(4, 2), lambda: torch.randn(4, 4), 10
"""
BEFORE_THE_TEACHER = """
teacher, student = (nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2))
student_optimizer = torch.optim.Adam(student.parameters(), lr=1e-4)
batches = [torch.randn(4, 2) for _ in range(6)]
"""


def test_the_code_of_the_page_leaves_a_run_of_each_model_with_its_own_steps(
    torchrun, call, monkeypatch, capsys, tmp_path: Path
) -> None:
    code, taught, look = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    both = BEFORE + code + BEFORE_THE_TEACHER + taught
    done = torchrun(both, nproc=0, env={"DDPPROBE_EVERY": "1"})
    assert done.returncode == 0, done.stderr
    for model in ("student", "teacher"):
        run = ddpprobe.open(tmp_path / "ddpprobe-runs" / "distilled" / model)
        assert [record.step for record in run.records()] == list(range(6)), model
        assert [a for a in run.anomalies() if a.level != "info"] == []
    home = tmp_path / "ddpprobe-runs" / "faces"
    assert sorted(path.name for path in run_directories(home)) == ["critic", "generator"]
    for model, steps, passes in (("critic", 30, 2), ("generator", 10, 1)):
        run = ddpprobe.open(home / model)
        records = [record for record in run.records() if not record.partial]
        assert [record.step for record in records] == list(range(steps)), model
        assert {record.scalars[0]["micro_batches"] for record in records} == {passes}
        assert all("loss" in record.scalars[0] for record in records)
        assert [a for a in run.anomalies() if a.level != "info"] == []
    monkeypatch.chdir(tmp_path)
    exec(look, {"ddpprobe": ddpprobe})
    assert capsys.readouterr().out == ""  # of healthy models none was first
    (shown,) = [block for block in blocks("docs/how-to/several-models") if block.kind == ""]
    for words, _ in shown.commands:
        code, out, err = call(*words.removeprefix("ddpprobe ").split())
        assert code == 0, (words, out, err)
