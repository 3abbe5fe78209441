"""What a rank runs on is seen without an import, and told by one of those that have the same."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import ddpprobe
from ddpprobe.cli.commands.info import lines
from ddpprobe.rank import environment, frames
from ddpprobe.rank.environment import OwnEnvironment, compare, look, tell, tellers
from ddpprobe.records.environment import SCALAR

SCRIPT = """\
import os, sys, types
import torch
import torch.distributed as dist
from torch import nn
import ddpprobe

dist.init_process_group("gloo")
rank = dist.get_rank()
decoder = types.ModuleType("decoder")
decoder.__version__ = "0.9" if rank == int(os.environ["OTHER"]) else "1.2"
sys.modules["decoder"] = decoder
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
ddpprobe.install(model, run_dir=sys.argv[1], every=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 4)).pow(2).mean().backward()
    optimizer.step()
"""


@pytest.fixture
def script(monkeypatch, tmp_path: Path) -> Path:
    """Be a process whose script lies in a directory of its own, and runs elsewhere."""
    (tmp_path / "code").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    main = types.ModuleType("__main__")
    main.__file__ = str(tmp_path / "code" / "train.py")
    Path(main.__file__).write_text("lr = 0.1")
    monkeypatch.setitem(sys.modules, "__main__", main)
    return Path(main.__file__)


def load(monkeypatch, name: str, path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    module = types.ModuleType(name)
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, name, module)


def own_files() -> dict[str, str]:
    return {name: value for name, value in look().items() if name.startswith("code/")}


def test_libraries_are_those_that_are_loaded_and_nothing_is_imported() -> None:
    before = set(sys.modules)
    found = look()
    assert set(sys.modules) == before
    assert found["python"] == platform.python_version()
    assert (found["torch"], found["numpy"]) == (torch.__version__, np.__version__)
    assert not found.keys() & sys.stdlib_module_names


def test_a_module_that_loads_when_it_is_asked_is_not_asked(monkeypatch) -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise AssertionError(name)

    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    monkeypatch.setitem(sys.modules, "none", None)
    monkeypatch.setitem(sys.modules, "odd", object())
    assert not {"lazy", "none", "odd"} & look().keys()


def test_switches_and_variables_are_told(monkeypatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.delenv("NCCL_PROTO", raising=False)
    before = look()
    assert (before["NCCL_ALGO"], before["NCCL_PROTO"]) == ("Ring", "-")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    now = look()
    assert [name for name in now if now[name] != before[name]] == ["cudnn.benchmark"]


def test_what_is_no_text_and_what_is_long_is_told_as_far_as_it_can_be(monkeypatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "a" * 99 + os.fsdecode(b"\xff"))
    (value,) = (value for name, value in look().items() if name == "NCCL_ALGO")
    assert value.endswith(r"aaa\udcff")
    assert len(value.encode()) == environment.LONGEST


def test_the_precision_of_products_may_be_set_in_two_ways(monkeypatch) -> None:
    def refuse() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    assert look()["matmul precision"] == "set in two ways"


def test_the_scripts_own_files_are_those_beside_it_and_where_it_runs(script, monkeypatch) -> None:
    top = script.parent.parent
    load(monkeypatch, "models.gpt", script.parent / "models" / "gpt.py")
    load(monkeypatch, "data", top / "elsewhere" / "data.py")
    load(monkeypatch, "far", top / "far.py")
    load(monkeypatch, "bought", script.parent / "venv" / "site-packages" / "bought.py")
    assert set(own_files()) == {"code/train.py", "code/models/gpt.py", "code/data.py"}


def test_a_python_beside_the_script_is_not_its_own(script, monkeypatch) -> None:
    stdlib = script.parent / "env" / "lib" / "python3"
    monkeypatch.setattr(frames, "_STDLIB", f"{stdlib}/")
    load(monkeypatch, "json", stdlib / "json" / "__init__.py")
    assert set(own_files()) == {"code/train.py"}


def test_what_is_loaded_later_is_seen_by_the_next_probe(script, monkeypatch) -> None:
    assert set(own_files()) == {"code/train.py"}
    monkeypatch.setitem(sys.modules, "late", types.SimpleNamespace(__version__="3"))
    load(monkeypatch, "data", script.parent / "data.py")
    assert set(own_files()) == {"code/train.py", "code/data.py"}
    assert look()["late"] == "3"


def test_another_line_of_the_script_is_another_environment(script) -> None:
    before, was = own_files(), OwnEnvironment(0).digest
    script.write_text("lr = 0.01")
    assert own_files() != before
    assert OwnEnvironment(0).digest != was
    script.unlink()
    assert own_files() == {}


def test_a_script_behind_a_link_is_found_with_what_it_imports(script, monkeypatch) -> None:
    link = script.parent.parent / "elsewhere" / "link.py"
    link.symlink_to(script)
    sys.modules["__main__"].__file__ = str(link)
    load(monkeypatch, "models", script.parent / "models.py")
    assert set(own_files()) == {"code/link.py", "code/models.py"}


def test_at_home_and_at_the_root_nothing_is_the_scripts_own(script, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(script.parent))
    monkeypatch.chdir("/")
    assert own_files() == {}


def test_how_many_files_are_read_is_bounded(script, monkeypatch) -> None:
    monkeypatch.setattr(environment, "MOST_FILES", 2)
    for name in "abc":
        load(monkeypatch, name, script.parent / f"{name}.py")
    assert set(own_files()) == {"code/a.py", "code/b.py"}


def test_a_look_that_fails_leaves_an_environment_of_which_nothing_is_known(monkeypatch) -> None:
    def fail() -> dict[str, str]:
        raise ZeroDivisionError

    monkeypatch.setattr(environment, "look", fail)
    monkeypatch.delenv("DDPPROBE_STRICT", raising=False)
    own = OwnEnvironment(0)
    assert own.meta({own.digest: 0}) == {"environment": {}, "environment_of": 0}


def test_the_lowest_of_those_that_have_the_same_tells_it(monkeypatch) -> None:
    assert tellers(["a", "b", "a", "b", "c"]) == {"a": 0, "b": 1, "c": 4}
    assert len(tellers([str(rank) for rank in range(1000)])) == environment.MOST_TOLD
    own = OwnEnvironment(2)
    told = own.meta({own.digest: 2})
    assert told == {"environment": look(), "environment_of": 2}
    assert json.loads(json.dumps(told)) == told
    assert own.meta({own.digest: 0}) == {"environment": {}, "environment_of": 0}
    assert own.meta({"other": 0}) == {"environment": {}, "environment_of": None}


def test_each_rank_is_told_whose_value_it_has() -> None:
    told = [{"numpy": "1.26"}, {"numpy": "2.1"}, {}, {"numpy": "2.1", "wandb": "1"}]
    found, numbers = compare(["a", "b", "b", "c"], told)
    assert [d.name for d in found] == ["numpy"]
    assert numbers == {"numpy": {"a": 1, "b": 0, "c": 0}}
    own = OwnEnvironment(0)
    own.__dict__["digest"] = "a"
    assert own.unlike(numbers) == {f"{SCALAR}numpy": 1.0}
    assert compare(["a", "a"], [{}, {}]) == ([], {})


def test_of_many_differences_the_first_are_marked_and_said(caplog) -> None:
    one, two = ({f"m{i:02}": version for i in range(20)} for version in ("1", "2"))
    found, numbers = compare(["a", "b"], [one, two])
    assert (len(found), len(numbers)) == (20, environment.MOST_DIFFERENCES)
    with caplog.at_level(logging.WARNING):
        tell(found)
        tell([])
    (line,) = caplog.messages
    assert line.startswith("ddpprobe: ranks run on unlike software: m00: 1 on rank 0, 2 on rank 1;")
    assert line.endswith("; and 4 more")


@pytest.mark.parametrize("other", [1, 9])
def test_ranks_that_differ_are_named_in_the_log_the_run_and_a_verdict(
    torchrun, tmp_path: Path, other: int
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = torchrun([tmp_path / "train.py", tmp_path / "run"], 3, {"OTHER": str(other)})
    assert done.returncode == 0, done.stderr
    run = ddpprobe.open(tmp_path / "run")
    (attempt,) = run.info()["attempts"]
    assert attempt["environment"]["torch"] == torch.__version__
    assert "code/train.py" in attempt["environment"]
    said = [a for a in run.anomalies() if a.detector == "environment"]
    if other == 9:
        assert (attempt["unlike"], said) == ([], [])
        assert "unlike software" not in done.stderr
        return
    values = [{"value": "1.2", "ranks": [0, 2]}, {"value": "0.9", "ranks": [1]}]
    assert attempt["unlike"] == [{"name": "decoder", "values": values}]
    assert "unlike decoder: 1.2 on ranks 0, 2, 0.9 on rank 1" in list(lines(run.info()))
    assert "unlike software: decoder: 1.2 on ranks 0, 2, 0.9 on rank 1" in done.stderr
    (warn,) = said
    assert (warn.level, warn.step, warn.rank) == ("warn", 0, 1)
    assert "rank 1 differs from ranks 0, 2 in what they run on: decoder;" in warn.message
