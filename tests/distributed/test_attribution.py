"""A NaN planted at random is named exactly: step, rank, phase, and on sampled steps the module."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

import ddpprobe

FAULTS = Path(__file__).with_name("faults.py")
LEAVES = ("norm", "up", "act", "down", "drop")
MODULES = ["embed", "head"] + [
    f"blocks.{i}{leaf}" for i in range(2) for leaf in ("", *(f".{name}" for name in LEAVES))
]
RANKS, CLEAN, CLEAN_STEPS = 2, 1, 64
# Of each test. `python -m tests.faults origins` is the campaign of many.
DRAWS = int(os.environ.get("DDPPROBE_TEST_DRAWS", "8"))


def draws(seed: int, *, sampled: bool) -> list[list[object]]:
    choose = random.Random(seed)
    found: list[list[object]] = []
    while len(found) < DRAWS:
        step = choose.randrange(1, 6 if sampled else 14)  # or on either side of a sampled one
        if sampled or step % 10:
            phase = choose.choice(["forward", "backward"])
            where = choose.choice(MODULES)
            found.append([step, choose.randrange(2), choose.randrange(RANKS), where, phase])
    return found


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
@pytest.mark.parametrize("every", [1, 10], ids=["sampled", "unsampled"])
def test_random_faults_are_named_exactly_and_a_clean_run_raises_no_page(
    wrap: str, every: int, torchrun, tmp_path: Path
) -> None:
    plan = draws(seed=every, sampled=every == 1)
    clean = CLEAN if every == 1 else 0
    (tmp_path / "draws.json").write_text(json.dumps(plan + [None] * clean))
    done = torchrun([FAULTS, wrap, str(every), tmp_path / "o", tmp_path / "draws.json"],
                    nproc=RANKS, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    wrong = []
    for i, (step, micro, rank, module, phase) in enumerate(plan):
        pages = [a for a in ddpprobe.open(tmp_path / "o" / str(i)).anomalies() if a.level == "page"]
        got = [(a.step, a.micro, a.rank, a.phase) for a in pages[:1]]
        named = not pages or pages[0].module == module or every != 1
        if got != [(step, micro, rank, phase)] or not named or not pages[0].first_cause:
            wrong.append(((step, micro, rank, module, phase), pages[:2]))
        assert all(a.step >= step for a in pages)
    assert not wrong, f"{len(wrong)} of {len(plan)}: {wrong}"
    for i in range(len(plan), len(plan) + clean):
        run = ddpprobe.open(tmp_path / "o" / str(i))
        assert [a for a in run.anomalies() if a.level == "page"] == []
        assert len(list(run.records())) == CLEAN_STEPS
