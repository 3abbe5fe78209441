"""What install() promises of jobs: a restart is a second attempt, two jobs do not meet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import ddpprobe

from .. import conftest, prometheus_harness
from ..waiting import is_gone
from . import real_job

ROOT = Path(__file__).parent.parent.parent


until = prometheus_harness.until
start, said, scrape = real_job.start, real_job.said, real_job.scrape

FINISHED = "ddpprobe_job_finished 1.0"
AWAITED = "ddpprobe_restart_awaited 1.0"
SMALL = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpprobe

run, fate = sys.argv[1:]
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
again = Path(run + ".left").exists()
if os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":
    dist.init_process_group("gloo")
else:
    # torch leaves the addresses of a dead attempt in the agent's store, where the next finds them.
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(f"attempt_{attempt}", dist.TCPStore(host, port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
while attempt == "1" and not Path(run + ".go").exists():  # a restart that takes long
    time.sleep(0.01)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
ddpprobe.install(model, run_dir=run, every=1)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
while not list(Path(run).glob("daemon/*.json")):  # it is to see what happens
    time.sleep(0.01)
for step in range(20):
    if (fate, step) == ("alone", 10) and not again:
        while rank == 0:  # its launcher ends it, of which no rank has failed: it counts no restart
            time.sleep(0.01)
        Path(run + ".left").touch()
        sys.exit(1)
    if (attempt, rank, step) == ("0", 1, 10):
        if fate == "exits":
            sys.exit(1)
        if fate == "raises":
            raise RuntimeError("a fault of the user's")
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    while (fate, step) == ("waits", 10) and not Path(run + ".go").exists():
        time.sleep(0.01)
    time.sleep(0.02)
dist.destroy_process_group()
time.sleep(0.5)
"""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A folder with a small script; what runs there is ended."""
    (tmp_path / "small.py").write_text(SMALL)
    yield tmp_path
    conftest.end_daemons(tmp_path)


@pytest.mark.parametrize("fate", ["exits", "raises"])
def test_an_elastic_restart_is_a_second_attempt_of_the_same_daemon(small: Path, fate: str) -> None:
    run, env = small / "run", {"DDPPROBE_LINGER": "30", "DDPPROBE_LISTEN": "127.0.0.1:0"}
    script = [small / "small.py", run, fate]
    job = start(script, small, 2, env, "--max-restarts=1", fresh=False)
    try:
        assert until(lambda: bool(said(run)))
        daemon = psutil.Process(said(run)["pid"])
        assert until(lambda: AWAITED in scrape(said(run)["listen"]))
        shown = scrape(said(run)["listen"])
        assert 'ddpprobe_job_state{state="crashed"} 1.0' in shown
        (small / "run.go").touch()
        assert job.wait(60) == 0, (small / "torchrun.out").read_text()
        assert until(lambda: FINISHED in scrape(said(run)["listen"]))
        assert AWAITED not in scrape(said(run)["listen"])
        daemon.terminate()
        assert until(lambda: is_gone(daemon))
    finally:
        conftest.end_tree(job)
    found = ddpprobe.open(run)
    assert found.attempts() == [0, 1]
    assert {r.attempt for r in found.records()} == {0, 1}
    assert [r.step for r in found.records(attempt=1)] == list(range(20))
    assert [r.step for r in found.records(attempt=0)][:10] == list(range(10))
    assert max(r.step for r in found.records(attempt=0)) <= 10
    assert [r.ranks for r in found.records(attempt=1)] == [(0, 1)] * 20
    deaths = found.deaths()
    assert {d.attempt for d in deaths} == {0}
    how = {"exits": "exit:1", "raises": "RuntimeError"}[fate]  # an exception is told by its name
    assert (deaths[0].rank, deaths[0].signal, deaths[0].first) == (1, how, True)
    [page] = [a for a in found.anomalies() if a.level == "page"]
    assert (page.attempt, page.detector, page.rank) == (0, "rank_lost", 1)
    assert [a["sealed"] for a in found.info()["attempts"]] == [True, True]
    assert (run / "daemon/node_0000.log").read_text().count("serving http://") == 1


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_a_restart_on_two_nodes_is_a_second_attempt_of_both_daemons(
    small: Path, rendezvous: str
) -> None:
    """The ranks agree on new secrets; with c10d each node has a restart count of its own."""
    run, port = small / "run", str(real_job.free_port())
    env = {"DDPPROBE_LINGER": "1", "DDPPROBE_LISTEN": "127.0.0.1:0"}
    if rendezvous == "c10d":
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        common = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    else:
        common = ["--master-addr", "127.0.0.1", "--master-port", port]
    (small / "run.go").touch()
    options = ["--nnodes", "2", "--max-restarts", "2", *common]
    own = [[] if rendezvous == "c10d" else ["--node-rank", str(node)] for node in range(2)]
    script = [small / "small.py", run, "alone" if rendezvous == "c10d" else "exits"]
    jobs = [
        start(script, small / f"node{node}", 1, env, *options, *own[node], fresh=False)
        for node in range(2)
    ]
    try:
        assert [job.wait(120) for job in jobs] == [0, 0], [
            (small / f"node{node}/torchrun.out").read_text() for node in range(2)
        ]
        assert until(lambda: ddpprobe.open(run).info()["attempts"][-1]["sealed"])
    finally:
        for job in jobs:
            conftest.end_tree(job)
    found = ddpprobe.open(run)
    assert found.attempts() == [0, 1]
    [page] = [a for a in found.anomalies() if a.level == "page"]
    assert (page.attempt, page.detector, page.rank) == (0, "rank_lost", 1)
    merged = list(found._merged_reader.daemon_records(1))  # by the head, of what both have told
    assert [(r.step, r.ranks, r.missing) for r in merged] == [(n, (0, 1), ()) for n in range(20)]
    told = "".join((small / f"node{node}/torchrun.out").read_text() for node in range(2))
    assert "lacks this node" not in told


def test_two_jobs_on_one_node_take_two_ports_and_clean_runs_raise_nothing(small: Path) -> None:
    runs = [small / "first", small / "second"]
    env = {"DDPPROBE_LINGER": "0", "DDPPROBE_LISTEN": "127.0.0.1:21377"}
    jobs = [start([small / "small.py", r, "waits"], small, 1, env, fresh=False) for r in runs]
    try:
        assert until(lambda: all(map(said, runs)))
        listen = [said(run)["listen"] for run in runs]
        assert until(lambda: all("ddpprobe_steps_total" in scrape(x) for x in listen))
        shown = [scrape(address) for address in listen]
        daemons = [psutil.Process(said(run)["pid"]) for run in runs]
        for run in runs:
            run.with_suffix(".go").touch()
        assert [job.wait(60) for job in jobs] == [0, 0]
        assert until(lambda: all(map(is_gone, daemons)))
    finally:
        for job in jobs:
            conftest.end_tree(job)
    ports = [int(address.rpartition(":")[2]) for address in listen]
    assert len(set(ports)) == 2
    assert all(21377 <= port < 21400 for port in ports)
    for run, text in zip(runs, shown, strict=True):
        assert ddpprobe.open(run).info()["run_id"] in text
        assert real_job.ddpprobe_says("anomalies", run) == (0, "no anomalies in 20 sampled steps\n")
