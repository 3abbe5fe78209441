"""`ddpprobe run` in front of what starts ranks without torchrun's variables, and of restarts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..conftest import torchrun_in
from .three_ways import (
    FAULT,
    PYTHON,
    QUIET,
    STEPS,
    TORCHRUN,
    place,
    script,
    start,
    the_run,
    written,
)

NAN = ("nonfinite", "page", FAULT, 1, "bad", "output", True)
EVERY = ["--every", "1"]


def test_processes_of_mp_spawn_are_one_run_with_their_own_bits(tmp_path: Path) -> None:
    """Bare, the same replicas are forked: three interpreters less have to import torch."""
    done = start(
        tmp_path / "run", [*PYTHON, script("spawn"), str(tmp_path / "store")], EVERY, FAULT_RANK="1"
    )
    with torchrun_in(tmp_path / "bare") as run:
        bare = run(written(tmp_path / "bare", "ddp", ""), 2, QUIET | {"FAULT_RANK": "1"})
    assert (done.returncode, bare.returncode) == (0, 0), (done, bare)
    assert done.stdout == bare.stdout != ""
    assert done.stderr.count("DistributedDataParallel is observed in ") == 1
    run = the_run(tmp_path / "run")
    assert (run.info()["wrapper"], run.info()["world_size"]) == ("ddp", 2)
    assert [r.step for r in run.records(1)] == list(range(STEPS))
    assert place(run.anomalies()[0]) == NAN


def test_tasks_of_srun_on_two_nodes_are_one_run_of_two_nodes(tmp_path: Path) -> None:
    """Simulated: the variables that srun gives to two tasks, on two nodes, of one machine."""

    def task(rank: int) -> None:
        told = {
            "SLURM_JOB_ID": "77", "SLURM_NTASKS": "2", "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank), "MASTER_ADDR": "127.0.0.1",
        }  # fmt: skip
        command = [*PYTHON, script("slurm"), str(tmp_path / "store")]
        done = start(tmp_path, command, EVERY, FAULT_RANK="1", **told)
        assert done.returncode == 0, done
        assert done.stderr.count("is observed in ") == (rank == 0)

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(task, range(2))) == [None, None]
    run = the_run(tmp_path)
    assert run.info()["nodes"] == 2
    assert {r.ranks for r in run.records()} == {(0, 1)}
    assert [r.step for r in run.records()] == list(range(STEPS))
    assert place(run.anomalies()[0]) == NAN


def test_ranks_that_torchrun_starts_again_go_on_in_the_same_run(tmp_path: Path) -> None:
    done = start(tmp_path, [*TORCHRUN, "--max-restarts=1", script("restarted")], EVERY)
    assert done.returncode == 0, done
    run = the_run(tmp_path)
    steps = {(r.attempt, r.step) for r in run.records(0)}
    assert {(1, step) for step in range(STEPS)} <= steps
    assert {(0, step) for step in range(4)} <= steps
    assert {attempt for attempt, _ in steps} == {0, 1}
