"""launch/train_gpt.py, whose ranks wait before chosen steps until a test lets them go on.

torchrun ... held_gpt.py DIRECTORY STEP,STEP... [arguments of train_gpt.py]

Before each of the steps a rank waits for the file DIRECTORY/go.STEP.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "launch/train_gpt.py"


def main() -> None:
    directory, steps = Path(sys.argv.pop(1)), [int(step) for step in sys.argv.pop(1).split(",")]
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    gpt = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpt)
    draw = gpt.draw

    def held(data, args, device, step, *where):
        trains = len(where) == 2  # a micro-batch and a rank: it evaluates on other batches
        while trains and step in steps and not (directory / f"go.{step}").exists():
            time.sleep(0.01)
        return draw(data, args, device, step, *where)

    gpt.draw = held
    gpt.main()


if __name__ == "__main__":
    main()
