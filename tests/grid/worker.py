"""Under torchrun: runs cells one after another in the same processes, one JSON line for each.

worker.py RESULTS NAME...      (cells by name; GRID_SCRATCH says where the runs go)
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).absolute().parents[2]
sys.path.insert(0, str(ROOT))

from tests import far  # noqa: E402
from tests.grid.axes import Cell  # noqa: E402
from tests.grid.cell import Outcome, is_far, run_cell, scratch  # noqa: E402


def main() -> None:
    """Run the named cells."""
    results, names = Path(sys.argv[1]), Path(sys.argv[2]).read_text().splitlines()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if is_far():
        far.pretend_for_good()
    rank = dist.get_rank()
    for index, name in enumerate(names):
        try:
            outcome = run_cell(Cell.named(name), scratch() / f"{os.getppid()}-{index}")
        except BaseException:  # noqa: BLE001  (whatever it was, it is this cell's result)
            text = "".join(traceback.format_exc().splitlines(keepends=True)[-40:])
            _append(results, Outcome(name, "failed", problems=[f"on rank {rank}: {text}"]))
            os._exit(17)  # the other ranks may be waiting in a collective: end them all
        if outcome is not None:
            _append(results, outcome)
    dist.destroy_process_group()
    time.sleep(0.5)  # torch with gloo aborts now and then when it exits right after a DDP run


def _append(results: Path, outcome: Outcome) -> None:
    line = json.dumps(dataclasses.asdict(outcome)) + "\n"
    with results.open("a") as file:
        file.write(line)


if __name__ == "__main__":
    main()
