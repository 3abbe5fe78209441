"""Who waits for the others in front of a forward is in the forward; who is late is at its data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpprobe.records.step import REDUCE_SECONDS
from tests.conftest import torchrun_in
from tests.distributed import waits_job as job

# In the last two the wrapper is put around the model, or the model sharded, after `install()`.
CASES = ("ddp", "fsdp1", "fsdp2", "ddp-behind", "fsdp2-behind")
RANKS = 3


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("waits")
    with torchrun_in(directory) as torchrun:
        done = torchrun([Path(job.__file__), directory, *CASES], nproc=RANKS)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.mark.parametrize("case", CASES)
def test_the_rank_that_all_wait_for_is_behind_the_others_by_its_place(case: str, out: Path) -> None:
    seen = json.loads((out / f"{case}.json").read_text())
    others = [rank for rank in range(RANKS) if rank != job.LATE]
    last = job.MICROS - 1
    for micro, places in seen.items():
        waiting = [job.STEP, int(micro), "forward"]
        assert {rank: places[str(rank)] for rank in others} == dict.fromkeys(others, waiting)
    assert seen["0"][str(job.LATE)] == [job.STEP - 1, last, "data"]
    assert seen["1"][str(job.LATE)] == [job.STEP, 0, "backward"]


@pytest.mark.parametrize("case", CASES)
def test_what_ranks_wait_for_is_time_of_the_forward(case: str, out: Path, records_of) -> None:
    for rank in range(RANKS):
        (record,) = [r for r in records_of(out / case, rank) if r.step == job.STEP]
        data, forward = (record.scalars[rank][f"{name}_seconds"] for name in ("data", "forward"))
        assert (data if rank == job.LATE else forward) >= job.LONG
        scalars = record.scalars[rank]
        assert 0 < scalars[REDUCE_SECONDS] <= scalars["backward_seconds"]


def test_each_rank_says_where_it_stands_and_whether_it_waits_for_others(out: Path) -> None:
    said = json.loads((out / "barrier.json").read_text())
    script = Path(job.__file__).name
    assert set(said) == {str(rank) for rank in range(RANKS)}
    for rank, (where, waits) in said.items():
        late = int(rank) == job.LATE
        assert where.startswith(f"{script}:")
        assert where.endswith(" in barrier)") != late
        assert waits != late
