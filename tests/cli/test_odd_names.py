"""Names that torch allows and no UTF-8 codec or terminal bears: they work, and harm nobody."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ddpprobe
from ddpprobe.cli.main import main
from ddpprobe.metrics.labels import label_value

FIRST, SECOND = "a\ud800b\x1b[2J\n", "c\udcff\x7f\u202ed"
LINES = (
    "info RUN", "info RUN --json", "anomalies RUN", "trace RUN --site * --json", "ls RUN",
    "trace RUN --scalar *", "verify RUN",
    "report RUN -o OUT/page.html", "export RUN --format csv -o OUT/x.csv",
    "export RUN --format openmetrics -o OUT/x.om", "compare RUN RUN", "replay RUN",
    "top RUN --once",
)  # fmt: skip
BAD = {"Cc", "Cf", "Cs"}


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module(FIRST, nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        self.add_module(SECOND, nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x)
        return x


def train(path: Path) -> None:
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with ddpprobe.install(
        model, run_dir=path, every=2, daemon="none", capture=[f"{FIRST}*"]
    ) as probe:
        for step in range(8):
            loss = model(torch.ones(2, 4) * (torch.nan if step == 6 else 1)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            probe.log(**{"x\ud800\x1b": 1.0})


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    patch = pytest.MonkeyPatch()
    patch.setenv("DDPPROBE_STRICT", "1")
    path = tmp_path_factory.mktemp("odd") / "run"
    train(path)
    daemon = ["daemon", "--dir", str(path), "--linger", "0", "--wait", "0"]
    assert main([*daemon, "--listen", "127.0.0.1:0"]) == 0
    yield path
    patch.undo()


@pytest.mark.parametrize("line", LINES)
def test_every_verb_takes_a_run_whose_modules_have_odd_names(
    odd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    words = line.replace("RUN", str(odd)).replace("OUT", str(tmp_path)).split()
    assert main(words) == (1 if words[0] == "anomalies" else 0)
    said = capsys.readouterr()
    assert not {unicodedata.category(c) for c in said.out + said.err if c != "\n"} & BAD


def test_the_run_says_which_module_was_first(odd: Path) -> None:
    run = ddpprobe.open(odd)
    first = run.anomalies()[0]
    assert first.module is not None
    assert first.module.startswith(FIRST)
    (captured,) = [c for c in run.captures() if c.step == 2]
    assert any(module.startswith(FIRST) for module in captured.modules)


def test_no_control_character_reaches_an_exposition(odd: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.om"
    assert main(["export", str(odd), "--format", "openmetrics", "-o", str(out)]) == 0
    said = out.read_bytes().decode()
    assert "\\\\ud800b\\\\x1b[2J" in said
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", said)
    assert not {unicodedata.category(c) for c in said if c != "\n"} & BAD


@pytest.mark.parametrize("code", [*range(32), *range(0x7F, 0xA0), 0x202E, 0x2028, 0xD800])
def test_a_label_value_writes_out_what_cannot_be_shown(code: int) -> None:
    value = label_value(f"a{chr(code)}é")
    assert value.isprintable()
    assert value.startswith("a\\")
    assert value.endswith("é")
