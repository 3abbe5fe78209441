"""On real ranks a capture's whole tensors and statistics equal those of the unsharded model."""

from __future__ import annotations

from pathlib import Path

import pytest

JOB = Path(__file__).with_name("capture_job.py")


@pytest.mark.parametrize(
    ("nproc", "claims"),
    [
        (
            3,
            [
                "ddp", "fsdp2", "fsdp1", "checkpointing", "conditional", "stages", "dtypes",
                "shapes_that_do_not_fit", "mistakes_are_told_to_every_rank",
                "a_rank_that_does_not_ask_is_named", "statistics_only",
                "training_is_bit_identical", "tensor_parallel",
                "a_gradient_that_is_each_rank_s_own_is_no_replica",
            ],
        ),
        (4, ["hsdp", "fsdp2_over_tensor_parallel", "dtensors_of_any_layout"]),
    ],
)  # fmt: skip
def test_each_claim_holds_on_every_rank(nproc: int, claims: list[str], torchrun) -> None:
    done = torchrun([JOB, *claims], nproc=nproc)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split("\n")[:-1] == [f"ok {claim}" for claim in claims]
