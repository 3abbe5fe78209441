"""The notebook of the documents, and the page beside it, can be run from first to last."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

import ddpprobe

from .made_runs import Made
from .notebook import NOTEBOOK, executed

CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def kinds(notebook: nbformat.NotebookNode) -> list[list[list[str]]]:
    """Return of each cell with code what each of its outputs is: text, picture, table."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [[sorted(out.get("data", [out.output_type])) for out in cell.outputs] for cell in cells]


def test_every_cell_runs_and_shows_what_the_committed_one_shows(
    tmp_path: Path, poll: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DDPPROBE_DIR", raising=False)
    found, told = executed(tmp_path), nbformat.read(NOTEBOOK, as_version=4)
    assert kinds(found) == kinds(told)
    assert [["image/png", "text/plain"]] in kinds(found)
    texts = [out.data["text/plain"] for cell in found.cells for out in cell.get("outputs", [])]
    assert any(text.startswith("('nonfinite', 'page'") for text in texts)
    assert "True" in texts  # the lazy dataset gave the number of the one in memory
    daemons = tmp_path / "ddpprobe-runs" / "notebook" / "daemon"
    poll(lambda: not list(daemons.glob("*.json")), timeout=60)  # the run's own has ended


def test_what_the_page_says_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DDPPROBE_DIR", raising=False)
    Made(tmp_path / "ddpprobe-runs" / "gpt").whole(20).close()
    names: dict[str, Any] = {}
    blocks = CODE.findall(NOTEBOOK.with_suffix(".md").read_text())
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)
    assert names["run"].name == "made"
    assert names["ds"].rms.chunks is not None  # the last one is lazy
    assert len(names["df"]) == 20 * (3 + 2 * 2)


TRAIN = """
import torch, ddpprobe
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
probe = ddpprobe.install(model, run_dir=NAME, every=1, daemon="none")
for step in range(20):
    loss = model(torch.randn(8, 4)).square().mean()
    if NAME == "broken" and step == 10:
        raise ValueError("the data are bad")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_cell_that_raises_ends_the_run_only_if_it_was_training(tmp_path: Path) -> None:
    """One before the run, and one between the training and its close, are none of its business."""
    sources = [
        "a typo", f"NAME = 'whole'{TRAIN}", "model.wieght", "probe.close()",
        f"NAME = 'broken'{TRAIN}", "probe.close()",
    ]  # fmt: skip
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    done = executed(tmp_path, nbformat.v4.new_notebook(cells=cells), allow_errors=True)
    raised = [[out.ename for out in c.outputs if out.output_type == "error"] for c in done.cells]
    assert raised == [["SyntaxError"], [], ["AttributeError"], [], ["ValueError"], []]
    ends = {name: ddpprobe.open(tmp_path / name).info()["end"] for name in ("whole", "broken")}
    assert {name: end["state"] for name, end in ends.items()} == {
        "whole": "ended", "broken": "crashed",
    }  # fmt: skip
    assert "ValueError: the data are bad" in ends["broken"]["message"]
