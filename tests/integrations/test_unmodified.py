"""`ddpprobe run`: scripts that say nothing of ddpprobe are observed as if they called install()."""

from __future__ import annotations

import inspect
import json
import signal
import sys
import sysconfig
from pathlib import Path

import ddpprobe
from ddpprobe.cli.commands import run as run_verb
from ddpprobe.cli.main import _parse

from .three_ways import PYTHON, start, the_run

PARTS = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.ModuleDict(dict(up=nn.Linear(4, 8), down=nn.Linear(8, 1)))
frozen = nn.Linear(4, 1).requires_grad_(False)
half_made = nn.Linear.__new__(nn.Linear)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    frozen(torch.randn(4, 4))
    net["down"](net["up"](torch.randn(4, 4))).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
UNUSED = "import torch; torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)"


def test_a_loop_over_the_parts_of_a_model_is_observed_beside_one_that_nobody_trains(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(PARTS)
    done = start(tmp_path, [*PYTHON, "train.py"], ["--every", "1"])
    assert done.returncode == 0, done
    run = the_run(tmp_path)
    steps = [r.step for r in run.records(0)]
    assert steps == [0, 1, 2]
    assert {"up", "down"} <= {s.fqn for s in next(run.records(0)).sites if s.kind == "output"}


def test_an_optimizer_without_training_is_told_of(tmp_path: Path) -> None:
    done = start(tmp_path / "run", [*PYTHON, "-c", UNUSED], [])
    assert done.returncode == 0
    assert "ddpprobe run: nothing was recorded: an optimizer was made" in done.stderr


SHOW = (
    "import sys, os; print([m for m in ('torch', 'ddpprobe', 'json', 'mine') if m in sys.modules], "
    "os.environ['PYTHONPATH'].split(os.pathsep)[1:], any('unmodified' in p for p in sys.path))"
)


def test_a_process_that_trains_nothing_imports_nothing_and_a_user_s_sitecustomize_runs(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import mine")
    (tmp_path / "mine.py").write_text("")
    done = start(tmp_path / "run", [*PYTHON, "-c", SHOW], [], PYTHONPATH=str(tmp_path))
    assert done.stdout == f"['mine'] {[str(tmp_path)]} False\n", done
    observed = start(tmp_path / "run", [*PYTHON, "-c", "import sitecustomize"], [], PYTHONPATH="")
    assert observed.returncode == 0  # there is one now, and it does nothing


def test_nothing_of_it_is_installed_for_processes_outside_of_the_job(tmp_path: Path) -> None:
    packages = Path(sysconfig.get_path("purelib"))
    before = sorted(path.name for path in packages.iterdir())
    show = "import sys; print([type(f).__name__ for f in sys.meta_path if type(f) is not type], "
    show += "'sitecustomize' in sys.modules)"
    inside, outside = (start(tmp_path, [*PYTHON, "-c", show], words) for words in ([], None))
    assert inside.stdout.startswith("['_Finder'"), inside
    assert "_Finder" not in outside.stdout
    assert outside.returncode == 0
    assert sorted(path.name for path in packages.iterdir()) == before


def test_an_error_in_a_user_s_sitecustomize_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import not_there")
    job = [*PYTHON, "-c", "print('on')"]
    for words in (None, []):
        done = start(tmp_path / "run", job, words, PYTHONPATH=str(tmp_path))
        assert done.stdout == "on\n"
        assert "No module named 'not_there'" in done.stderr


def test_an_interpreter_without_ddpprobe_trains_on_and_says_what_is_missing(tmp_path: Path) -> None:
    torch = tmp_path / "torch" / "optim"
    torch.mkdir(parents=True)
    for directory in (torch.parent, torch):
        (directory / "__init__.py").touch()
    (torch / "optimizer.py").write_text(
        "class Optimizer:\n    def __init__(self, lr):\n        self.lr = lr\n"
    )
    text = (
        "from torch.optim.optimizer import Optimizer; print([Optimizer(lr=n).lr for n in (1, 2)])"
    )
    other = [str(Path(sys.base_prefix) / "bin" / "python3"), "-c", text]
    done = start(tmp_path / "run", other, [], PYTHONPATH=str(tmp_path))
    assert done.stdout == "[1, 2]\n", done
    assert done.stderr.count("nothing is observed") == 1
    assert "pip install ddpprobe" in done.stderr


def test_the_job_takes_the_place_of_the_command_with_its_exit_code_and_its_signal(
    tmp_path: Path,
) -> None:
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert start(tmp_path, [*PYTHON, "-c", "raise SystemExit(7)"], []).returncode == 7
    assert start(tmp_path, [*PYTHON, "-c", kill], []).returncode == -signal.SIGKILL
    missing = start(tmp_path, ["no-such-command"], [])
    assert (missing.returncode, missing.stderr) == (
        127, "ddpprobe: cannot start no-such-command: No such file or directory\n"
    )  # fmt: skip
    nothing = start(tmp_path, [], [])
    assert nothing.returncode == 2
    assert "ddpprobe run --every 5 -- torchrun" in nothing.stderr


def test_its_options_are_the_keywords_of_install() -> None:
    words = {
        "run_dir": "runs/a", "every": "5", "include": "a.*", "exclude": "b", "capture": "c",
        "on_anomaly": "stop", "budget": "0.01", "backward": "full", "name": "n", "daemon": "none",
        "first_step": "3", "detectors": "straggler", "task": "gan", "histograms": "h",
    }  # fmt: skip
    known = set(inspect.signature(ddpprobe.install).parameters) - {"model"}
    assert set(words) == known
    flags = [(f"--{name.replace('_', '-')}", value) for name, value in words.items()]
    given = [w for flag in flags for w in flag]
    given[given.index("--detectors")] = "--without"
    args = _parse(["run", *given, "--", "python", "--every", "9"])
    assert args.command[-3:] == ["python", "--every", "9"]
    options = run_verb.options(args)
    assert json.loads(json.dumps(options)) == {
        "run_dir": str(Path("runs/a").absolute()), "every": 5, "include": ["a.*"], "exclude": ["b"],
        "capture": ["c"], "on_anomaly": "stop", "budget": 0.01, "backward": "full", "name": "n",
        "daemon": "none", "first_step": 3, "detectors": {"straggler": False}, "task": "gan",
        "histograms": ["h"],
    }  # fmt: skip
    assert run_verb.options(_parse(["run", "--", "python"])) == {}
