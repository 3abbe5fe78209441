"""Scripts that say nothing of ddpprobe; trainers on several ranks are in `frameworks/`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..conftest import torchrun_in
from .three_ways import LINE, PYTHON, QUIET, Done, assert_same, start, the_run, written


@pytest.mark.parametrize(
    ("name", "world_size", "wrapper", "code"),
    [
        ("plain", 1, "none", 5),
        ("ddp", 2, "ddp", 0),
        ("fsdp2", 2, "fsdp2", 0),
        ("lightning", 1, "none", 0),
    ],
)
def test_a_script_has_the_verdict_of_install_and_its_own_bits_and_exit_code(
    tmp_path: Path, name: str, world_size: int, wrapper: str, code: int
) -> None:
    if name == "lightning":
        pytest.importorskip("lightning")
    told = {"FAULT_RANK": str(world_size - 1), "DEVICES": "1"}
    nproc = world_size if world_size > 1 else 0

    def forked(where: Path, path: str) -> Done:
        with torchrun_in(where) as run:
            return run(path, nproc, QUIET | told)

    done = assert_same(tmp_path, forked, nproc or PYTHON, name, **told)
    assert done["run"].returncode == code
    assert the_run(tmp_path / "run").info()["wrapper"] == wrapper


def test_a_script_that_calls_install_itself_keeps_its_own_options(tmp_path: Path) -> None:
    path = written(tmp_path / "run", "plain", LINE)
    done = start(tmp_path / "run", [*PYTHON, path], ["--every", "1"], FAULT_RANK="0")
    assert done.returncode == 5, done
    assert "observed" not in done.stderr
    steps = [r.step for r in the_run(tmp_path / "run").records(0) if r.sampled]
    assert steps[:3] == [0, 2, 4]
