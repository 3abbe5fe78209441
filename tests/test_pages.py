"""What the README and the how-to pages tell a reader to type is carried out as it stands there."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from ddpprobe.cli import http_config
from ddpprobe.cli.main import _parse, main
from ddpprobe.daemon import web_config
from ddpprobe.daemon.folding import Folding

from .daemon.made_certificates import Authority
from .made_runs import NODE, Made, record
from .pages import HOME, Block, blocks, blocks_of, ddpprobe_words

# Blocks that a test of their own carries out.
ELSEWHERE = {
    ("docs/how-to/alerts", "yaml"): "tests/grafana/test_routing.py",
    ("docs/how-to/clusters", "yaml"): "tests/launch/test_clusters.py",
    ("docs/how-to/frameworks", "python"): "tests/frameworks/test_how_to.py",
    ("docs/how-to/many-runs", "sql"): "tests/store/test_overview.py",
    ("docs/how-to/notebook", "python"): "tests/test_notebook.py",
    ("docs/how-to/object-stores", "console"): "tests/store/remote/test_upload.py",
    ("docs/how-to/several-models", "python"): "tests/test_several_models_page.py",
    ("docs/how-to/several-models", ""): "tests/test_several_models_page.py",
    ("docs/tutorial/first-nan", "console"): "tests/test_tutorial.py",
    ("docs/tutorial/first-nan", "python"): "tests/test_tutorial.py",
    ("docs/tutorial/first-nan", "sh"): "tests/wheel.py",  # pip install
}
HERE = {"python", "console", "", "yaml"}
# With more than the reader's own model and loop: each block of these is a script of its own.
TRAINED = (
    "README", "docs/how-to/black-box", "docs/how-to/capture", "docs/how-to/capture-to-disk",
    "docs/how-to/cost", "docs/how-to/demo", "docs/how-to/object-stores", "docs/how-to/resume",
)  # fmt: skip
READ = (
    "docs/how-to/compare-runs", "docs/how-to/cost", "docs/how-to/many-runs", "docs/how-to/no-data",
    "docs/how-to/notebook", "docs/how-to/past-runs-in-grafana", "docs/how-to/replay",
    "docs/how-to/several-nodes", "docs/how-to/upgrade",
)  # fmt: skip
BESIDE = {"pip"}  # commands between ours that tests/wheel.py has for a subject


def test_every_block_is_carried_out_or_says_why_not() -> None:
    left = [
        (b.page, b.text)
        for b in blocks()
        if not b.reason
        and (b.page, b.kind) not in ELSEWHERE
        and (b.page, b.kind) != ("docs/how-to/tls", "yaml")
        and not (b.kind == "python" and b.page in {*TRAINED, *READ})
        and not (b.kind in {"console", ""} and b.page in READ)
    ]
    assert left == []


@pytest.mark.parametrize("block", ELSEWHERE)
def test_the_test_of_a_page_is_there_and_the_page_has_such_a_block(block) -> None:
    page, kind = block
    assert [b for b in blocks(page) if b.kind == kind and not b.reason]
    text = (HOME / ELSEWHERE[block]).read_text()
    assert ELSEWHERE[block] == "tests/wheel.py" or Path(page).name in text


def test_a_block_and_its_reason_are_found_also_below_a_list() -> None:
    page = "a\n<!-- illustration: no -->\n```sh\nx\n```\n- b\n\n  ```python\n  y\n  ```\n"
    assert blocks_of("p", page) == [
        Block("p", "sh", "x\n", "no"), Block("p", "python", "  y\n"),
    ]  # fmt: skip


COMMANDS = sorted({words for b in blocks() for words, _ in b.commands})


@pytest.mark.parametrize("command", [c for c in COMMANDS if list(ddpprobe_words(c))])
def test_every_command_has_a_verb_and_options_that_are_there(command: str) -> None:
    for words in ddpprobe_words(command):
        _parse(words)


def test_an_option_that_is_not_there_is_found() -> None:
    (words,) = ddpprobe_words("cat x | ddpprobe anomalies gpt --wrong # no")
    with pytest.raises(SystemExit):
        _parse(words)


BEFORE = """
import functools, os, sys, types
import torch
from torch import nn
import torch.nn.functional as F
import ddpprobe

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.mlp(torch.tanh(self.attn(x)))

class Net(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name
        setattr(self, name, nn.ModuleList(Layer() for _ in range(4)))
        self.head = nn.Linear(4, 2)
    def forward(self, x):
        for layer in getattr(self, self.name):
            x = layer(x)
        return self.head(x)

class Loss(Net):  # as in the page: the model gives the loss
    def forward(self, x):
        return super().forward(x).square().mean()

class Batch(torch.Tensor):
    x = property(lambda self: self)
    indices = property(lambda self: torch.arange(2))

made = []
real = functools.partial(ddpprobe.install, daemon="none")
def install(*given, **named):
    os.environ["DDPPROBE_DIR"] = f"runs/{len(os.listdir('runs'))}"
    made.append(real(*given, **named))
    return made[-1]
ddpprobe.install = install
os.makedirs("runs")

def carry_out(page, code):
    torch.manual_seed(0)
    name = "blocks" if "blocks." in code else "layers"
    model = (Loss if "loss = model(" in code else Net)(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(2, 4).as_subclass(Batch)
    def train(steps):
        for _ in range(steps):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    names = dict(
        ddpprobe=ddpprobe, nn=nn, torch=torch, model=model, batch=batch, train=train,
        loss_of=lambda out: out.square().mean(), loader=[batch] * 3, loss=1.0, usual=0.1,
        checkpoint={"step": 7}, save_checkpoint=print,
    )
    if "probe.trigger" in code:
        names["probe"] = ddpprobe.install(model)
    exec(compile(code, page, "exec"), names)
    if made:
        train(2)
        made.pop().close()
    assert not made
    print("carried out:", page, flush=True)
"""


def test_the_code_of_the_pages_for_who_trains_runs_as_it_stands_there(torchrun) -> None:
    found = [b for b in blocks() if b.kind == "python" and b.page in TRAINED and not b.reason]
    assert {b.page for b in found} == {*TRAINED}
    script = BEFORE + "".join(f"carry_out({b.page!r}, {b.text!r})\n" for b in found)
    done = torchrun(script, nproc=0, env={"MPLBACKEND": "agg"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("carried out:") == len(found)


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = Made(tmp_path_factory.mktemp("sealed") / "run").whole(20).close()
    Folding(run, NODE, None, None).seal()
    return run.path


@pytest.fixture
def runs(sealed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the runs that the pages name, and whatever else they need."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DDPPROBE_DIR", raising=False)
    for name in ("before", "after", "gpt"):
        shutil.copytree(sealed, tmp_path / "ddpprobe-runs" / name, copy_function=linked)
    os.utime(tmp_path / "ddpprobe-runs" / "gpt" / "run.json")
    shutil.copytree(tmp_path / "ddpprobe-runs", tmp_path / "shared" / "runs", copy_function=linked)
    for node in range(2):  # each with the ranks of its own machine
        part = Made(tmp_path / f"node{node}" / "gpt", ranks=4, node=f"node_{node:04d}")
        for rank in (2 * node, 2 * node + 1):
            part.write(record(rank, step) for step in range(5))
        part.close()
    return tmp_path


def linked(file: str, there: str) -> None:
    """Give a file of a sealed run, which nothing writes to, one more name; its age is its own."""
    (shutil.copy2 if file.endswith("/run.json") else os.link)(file, there)


# What a command of ours may end with on the runs above: they have a page (1), and a site that is
# not there is asked for (2).
CODES = {"anomalies": {0, 1}, "trace": {2}, "replay": {0, 1}, "compare": {0}, "collect": {0, 4}}


def typed(command: str, runs: Path) -> list[str]:
    """Return the words of a command, with the runs of a test for those that are named there."""
    (words,) = ddpprobe_words(command)
    places = {"RUN": "ddpprobe-runs/gpt"}
    out = [places.get(w, w.replace("/shared/", f"{runs}/shared/")) for w in words]
    if out[0] == "replay":
        out[1] = "ddpprobe-runs/gpt"
    return [*out, "--once"] if out[0] == "top" else out


@pytest.mark.parametrize("page", READ)
def test_what_a_page_tells_a_reader_of_runs_to_type_works(
    page: str, runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    for block in blocks(page):
        if block.reason or (page, block.kind) in ELSEWHERE:
            continue
        if block.kind == "python" and page not in TRAINED:
            exec(block.text.replace('"/shared/', f'"{runs}/shared/'), names)
        for command, _ in block.commands if block.kind in {"console", ""} else ():
            if command.split()[0] in BESIDE or "--serve" in command:
                continue
            words = typed(command, runs)
            if words[:2] == ["collect", "gpt"] and len(words) == 3:
                shutil.rmtree(runs / "gpt")  # the page's other way to begin
            code = main(words)
            said = capfd.readouterr()
            assert code in CODES.get(words[0], {0}), (words, said)
            assert said.out or words[0] in {"trace", "export"}, words
            if words[0] == "trace":
                assert "no site matches 'blocks.0.atn'; nearest: blocks.0.mlp" in said.err
    if page.endswith("past-runs-in-grafana"):
        assert len(pd.DataFrame(names["runs"])) > 0
    if page.endswith("many-runs"):
        assert {Path(run.path).name for run in names["bad"]} == {"before", "after", "gpt"}


def test_the_configurations_of_the_page_about_tls_are_taken(tmp_path, monkeypatch) -> None:
    server, scrape, client = (b.text for b in blocks("docs/how-to/tls") if b.kind == "yaml")
    ours = Authority(tmp_path, "ca")
    for name in ("node", "prometheus"):
        ours.sign(name)
    (tmp_path / "prometheus.password").write_text("secret\n")
    path = tmp_path / "web.yml"
    path.write_text(re.sub(r"\$2y\$10\$\.\.\.", "$2y$10$" + "a" * 53, server))
    found = web_config.read(path)
    assert found.context is not None
    assert set(found.users) == {"prometheus"}
    path = tmp_path / "http.yml"
    path.write_text(client)
    said = http_config.read(path)
    said.fetch()
    (job,) = yaml.safe_load(scrape)["scrape_configs"]
    assert {name: set(job[name]) for name in ("basic_auth", "tls_config")} == {
        name: set(values) for name, values in said.scrape_config().items()
    }
