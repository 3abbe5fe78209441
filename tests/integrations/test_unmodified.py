"""`ddpprobe run`: scripts that say nothing of ddpprobe are observed as if they called install()."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import ddpprobe
from ddpprobe.cli.commands import run as run_verb
from ddpprobe.cli.main import _parse
from ddpprobe.records.step import Anomaly
from ddpprobe.rundir.paths import is_locked

from ..conftest import torchrun_in
from ..waiting import deadline

STEPS, FAULT = 12, 6
MODEL = f"""
import os, sys, torch
from torch import nn
STEPS, FAULT = {STEPS}, {FAULT}

class Bad(nn.Module):
    calls = 0
    def forward(self, x):
        self.calls += 1
        here = int(os.environ.get("RANK", 0)) == WHERE
        return x / 0 * 0 if here and self.calls == FAULT + 1 else x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.bad, self.down = nn.Linear(4, 8), Bad(), nn.Linear(8, 1)
    def forward(self, x):
        return self.down(self.bad(self.up(x)))

def train(model, rank=0):
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 4, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
"""
PLAIN = f"""{MODEL}
WHERE = 0
torch.manual_seed(0)
net = Net()
if "OWN" in os.environ:
    import ddpprobe
    ddpprobe.install(net, every=2)
print(train(net))
sys.exit(5)
"""
SPAWNED = f"""{MODEL}
WHERE = 1
import torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

def work(rank, where):
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{{where}}", rank=rank, world_size=2)
    torch.manual_seed(0)
    losses = train(DistributedDataParallel(Net()), rank)
    if rank == 0:
        print(losses)
    dist.destroy_process_group()

if __name__ == "__main__":
    store, method = os.path.abspath(f"store-{{os.getpid()}}"), os.environ.get("METHOD", "spawn")
    mp.start_processes(work, (store,), 2, start_method=method)
"""
SHARDED = f"""{MODEL}
WHERE = 1
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
torch.manual_seed(0)
losses = train(fully_shard(Net()), dist.get_rank())
if dist.get_rank() == 0:
    print(losses)
dist.destroy_process_group()
"""
PARTS = f"""{MODEL}
WHERE = 0
torch.manual_seed(0)
net = nn.ModuleDict(dict(up=nn.Linear(4, 8), down=nn.Linear(8, 1)))
frozen = Net().requires_grad_(False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    frozen(torch.randn(4, 4))
    net["down"](net["up"](torch.randn(4, 4))).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LIGHTNING = f"""{MODEL}
WHERE = 0
import warnings, logging
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel("ERROR")
import lightning

class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.losses = Net(), []
    def training_step(self, batch):
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

torch.manual_seed(0)
task = Task()
data = torch.utils.data.DataLoader(torch.randn(STEPS * 8, 4), batch_size=8)
lightning.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
).fit(task, data)
print(task.losses)
"""
UNUSED = "import torch; torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)"
PYTHON = [sys.executable]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def start(
    where: Path, command: list[str], words: list[str] | None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a job in a directory: bare, or, with options, by `ddpprobe run`; its daemon has ended."""
    where.mkdir(exist_ok=True)
    job = command if words is None else [*PYTHON, "-m", "ddpprobe", "run", *words, "--", *command]
    known = {k: v for k, v in os.environ.items() if not k.startswith("DDPPROBE_")}
    known |= {"OMP_NUM_THREADS": "1", "DDPPROBE_LINGER": "0"}
    done = subprocess.run(
        job, cwd=where, env={**known, **more}, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    late = deadline(60)
    while any(map(is_locked, where.glob("ddpprobe-runs/*/daemon/*.lock"))):
        assert time.monotonic() < late, "the daemon does not end"
        time.sleep(0.02)
    return done


def bare(where: Path, path: str, nproc: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a job without ddpprobe, in processes that are forked."""
    where.mkdir(exist_ok=True)
    with torchrun_in(where) as run:
        return run(path, nproc, more)


def script(where: Path, text: str) -> str:
    path = where / "train.py"
    path.write_text(text)
    return str(path)


def place(anomaly: Anomaly) -> tuple[Any, ...]:
    return anomaly.detector, anomaly.level, anomaly.step, anomaly.rank, anomaly.module, anomaly.kind


def test_a_plain_script_has_the_verdict_of_install_and_its_own_bits_and_exit_code(
    tmp_path: Path,
) -> None:
    path = script(tmp_path, PLAIN)
    ways = {"own": (None, {"OWN": "1"}), "run": (["--every", "2"], {}),
            "both": (["--every", "1"], {"OWN": "1"})}  # fmt: skip
    with ThreadPoolExecutor() as pool:
        jobs = {
            name: pool.submit(start, tmp_path / name, [*PYTHON, path], words, **more)
            for name, (words, more) in ways.items()
        }
        done = {"bare": bare(tmp_path / "bare", path)}
    done |= {name: job.result() for name, job in jobs.items()}
    assert {job.returncode for job in done.values()} == {5}, done
    assert len({job.stdout for job in done.values()}) == 1  # the losses, to the bit
    runs = {
        name: ddpprobe.runs(tmp_path / name / "ddpprobe-runs") for name in ("own", "run", "both")
    }
    assert {name: len(found) for name, found in runs.items()} == {"own": 1, "run": 1, "both": 1}
    opened = {name: ddpprobe.open(found[0].path) for name, found in runs.items()}
    verdicts = {name: [place(a) for a in run.anomalies()] for name, run in opened.items()}
    assert verdicts["run"][0] == ("nonfinite", "page", FAULT, 0, "bad", "output")
    assert verdicts["run"] == verdicts["own"] == verdicts["both"]
    # Behind the fault the daemon may have steps captured, as soon as it has heard of it.
    records = {
        name: [(r.step, r.sampled) for r in run.records(0) if r.step <= FAULT]
        for name, run in opened.items()
    }
    assert records["run"] == records["own"] == records["both"]  # the script's own call holds
    sites = {
        name: {(s.fqn, s.kind) for s in next(r.records(0)).sites} for name, r in opened.items()
    }
    assert sites["run"] == sites["own"]
    assert f"Net is observed in {opened['run'].path}" in done["run"].stderr
    assert "observed" not in done["both"].stderr


@pytest.mark.parametrize(
    ("text", "launcher", "nproc", "wrapper"),
    [(SPAWNED, PYTHON, 0, "ddp"), (SHARDED, TORCHRUN, 2, "fsdp2")],
    ids=["DDP by mp.spawn", "FSDP2 by torchrun"],
)
def test_ranks_of_any_launcher_are_one_run_with_their_own_bits(
    tmp_path: Path, text: str, launcher: list[str], nproc: int, wrapper: str
) -> None:
    path = script(tmp_path, text)
    observed = start(tmp_path / "run", [*launcher, path], ["--every", "1"])
    alone = bare(tmp_path / "bare", path, nproc, METHOD="fork")
    assert (alone.returncode, observed.returncode) == (0, 0), (alone, observed)
    assert observed.stdout == alone.stdout != ""
    (found,) = ddpprobe.runs(tmp_path / "run" / "ddpprobe-runs")
    run = ddpprobe.open(found.path)
    assert (run.info()["wrapper"], run.info()["world_size"]) == (wrapper, 2)
    assert [r.step for r in run.records(1)] == list(range(STEPS))
    assert place(run.anomalies()[0]) == ("nonfinite", "page", FAULT, 1, "bad", "output")


def test_a_trainer_that_calls_parts_of_the_model_is_observed_as_a_whole(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    path = script(tmp_path, LIGHTNING)
    observed = start(tmp_path / "run", [*PYTHON, path], ["--every", "1"])
    alone = bare(tmp_path / "bare", path)
    assert observed.returncode == 0, observed
    assert observed.stdout == alone.stdout != ""
    (found,) = ddpprobe.runs(tmp_path / "run" / "ddpprobe-runs")
    run = ddpprobe.open(found.path)
    assert [r.step for r in run.records(0)] == list(range(STEPS))
    module = run.anomalies()[0].module
    assert module is not None
    assert module.endswith("bad")


def test_a_loop_over_the_parts_of_a_model_is_observed_beside_one_that_nobody_trains(
    tmp_path: Path,
) -> None:
    done = start(tmp_path / "run", [*PYTHON, script(tmp_path, PARTS)], ["--every", "1"])
    assert done.returncode == 0, done
    (found,) = ddpprobe.runs(tmp_path / "run" / "ddpprobe-runs")
    run = ddpprobe.open(found.path)
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
