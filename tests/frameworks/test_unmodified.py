"""`ddpprobe run` on scripts of trainers: the same bits and verdict as with `install()`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import ddpprobe

from ..integrations.three_ways import FAULT, PYTHON, TORCHRUN, Done, assert_same, start, the_run
from .trained import FULL, need

pytestmark = FULL
# Accelerate has no launcher for several processes on CPUs but the one that is meant for GPUs.
ACCELERATE = [
    str(Path(sys.executable).with_name("accelerate")), "launch", "--multi_gpu", "--num_machines=1",
    "--num_processes=2", "--mixed_precision=no", "--dynamo_backend=no",
]  # fmt: skip


@pytest.mark.parametrize(
    ("package", "name", "launcher"),
    [
        ("transformers", "huggingface", TORCHRUN),
        ("accelerate", "accelerate", ACCELERATE),
        ("lightning", "lightning", PYTHON),
    ],
)
def test_a_script_has_the_verdict_of_install_and_its_own_bits_on_two_ranks(
    tmp_path: Path, package: str, name: str, launcher: list[str]
) -> None:
    need(package)
    told = {"FAULT_RANK": "1", "DEVICES": "2"}

    def fresh(where: Path, path: str) -> Done:
        return start(where, [*launcher, path], None, **told)

    done = assert_same(tmp_path, fresh, launcher, name, **told)
    assert done["run"].returncode == 0
    info = the_run(tmp_path / "run").info()
    assert (info["wrapper"], info["world_size"]) == ("ddp", 2)
    if name == "huggingface":
        assert_losses_are_shares(the_run(tmp_path / "run"), done["run"].stdout)


def test_an_engine_of_deepspeed_is_observed_as_its_own_install_does(tmp_path: Path) -> None:
    need("deepspeed")

    def fresh(where: Path, path: str) -> Done:
        return start(where, [*TORCHRUN, path], None, FAULT_RANK="1")

    line = (
        "from ddpprobe.integrations.deepspeed import install\n"
        "install(engine, every=2, run_dir='ddpprobe-runs/own')\n"
    )
    done = assert_same(tmp_path, fresh, TORCHRUN, "deepspeed", line, FAULT_RANK="1")
    assert done["run"].returncode == 0
    info = the_run(tmp_path / "run").info()
    assert (info["wrapper"], info["world_size"]) == ("zero2", 2)


def assert_losses_are_shares(run: ddpprobe.Run, told: str) -> None:
    """Claim: what the model of each rank returns adds up to what the Trainer reports."""
    lines = [line.split() for line in told.splitlines()]
    reported = {int(step) - 1: float(loss) for step, loss, *_ in lines if loss != "None"}
    records = [r for r in run.records() if r.step < FAULT]
    assert [r.step for r in records] == list(range(0, FAULT, 2))
    for record in records:
        shares = [record.scalars[k]["loss"] * record.scalars[k]["micro_batches"] for k in (0, 1)]
        assert sum(shares) == pytest.approx(reported[record.step], rel=1e-5)
