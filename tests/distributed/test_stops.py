"""How a job whose script handles SIGTERM itself ended: of its own, or because of the signal."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ddpprobe
from ddpprobe.records.fate import Fate

from .. import conftest, prometheus_harness
from . import real_job

until = prometheus_harness.until
PATIENCE = 120.0  # seconds; nothing that is waited for can stay away

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpprobe

run, handler, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
asked = []

def on_term(*_):
    if handler == "flag":
        asked.append(True)
    elif handler == "os._exit:0":
        os._exit(0)
    elif handler == "os._exit:5":
        os._exit(5)
    else:
        sys.exit(0)

signal.signal(signal.SIGTERM, on_term)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(8, 1))
probe = ddpprobe.install(model, run_dir=run, every=1)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
while not list(Path(run).glob("daemon/*.json")):  # it is to see what happens
    time.sleep(0.01)
with Path(f"pid_{os.environ['RANK']}").open("w") as file:
    file.write(str(os.getpid()))
for step in range(steps):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    stop = torch.tensor([float(bool(asked))])
    dist.all_reduce(stop)  # all ranks stop after the same step
    if stop:
        break
    if step > 3:
        Path(f"trains_{os.environ['RANK']}").touch()
        # Between two steps most of the time, as a signal would find a job that loads its data.
        for _ in range(50 if steps > 100 else 1):
            time.sleep(0.01)
if handler == "calls":
    on_term(None, None)  # as many scripts clean up
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "script.py").write_text(SCRIPT)
    yield tmp_path
    conftest.end_daemons(tmp_path)


def end_of(folder: Path, handler: str, stops: str) -> dict[str, Any]:
    """Run it on two ranks, stop it, and return what is said of its end once all have ended.

    Args:
        folder: with the script.
        handler: what the script's own one does, see there.
        stops: who gets SIGTERM: "torchrun", "ranks", or nobody ("").
    """
    env = {"DDPPROBE_LINGER": "600", "DDPPROBE_LISTEN": "127.0.0.1:0"}
    run, steps = folder / "run", str(10**6 if stops else 10)
    job = real_job.start(["script.py", "run", handler, steps], folder, 2, env, fresh=False)
    try:
        if stops:
            assert until(lambda: all((folder / f"trains_{n}").exists() for n in range(2)), PATIENCE)
            ranks = [int((folder / f"pid_{n}").read_text()) for n in range(2)]
            for pid in [job.pid] if stops == "torchrun" else ranks:
                os.kill(pid, signal.SIGTERM)
        assert until(lambda: job.poll() is not None, PATIENCE)
        assert until(lambda: all(f.how and f.launcher for f in fates(run)), PATIENCE)
    finally:
        conftest.end_tree(job)
    status, said = real_job.ddpprobe_says("anomalies", run, "--json")
    assert (status == 1) == any(a["level"] == "page" for a in json.loads(said)["anomalies"])
    assert status != 1, said  # whatever is undecided between an end and a stop, nobody is woken
    return dict(json.loads(said)["end"])


def fates(run: Path) -> tuple[Fate, ...]:
    """Return what is known of the ranks."""
    return ddpprobe.open(run).endings()[-1].case.fates


def test_a_job_that_nobody_stopped_came_to_its_end_whatever_handler_it_has(folder: Path) -> None:
    assert end_of(folder, "sys.exit", "")["state"] == "ended"


@pytest.mark.parametrize("handler", ["sys.exit", "flag", "os._exit:0"])
def test_torchrun_that_was_told_to_end_tells_what_the_handlers_did(folder: Path, handler) -> None:
    end = end_of(folder, handler, "torchrun")
    assert (end["state"], end["ranks"]) == ("stopped", []), end


@pytest.mark.parametrize("handler", ["flag", "os._exit:5"])
def test_a_signal_to_the_ranks_alone_is_no_page_nor_an_orderly_end(folder: Path, handler) -> None:
    end = end_of(folder, handler, "ranks")
    assert end["state"] in {"unknown", "stopped"}, end
    assert end["ranks"] == []


def test_a_script_that_calls_its_handler_itself_is_not_said_to_be_stopped(folder: Path) -> None:
    assert end_of(folder, "calls", "")["state"] == "unknown"
