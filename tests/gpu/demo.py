"""Part `demo`: launch/demo.py from end to end: torchrun, NCCL, the daemon, the command line."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

from tests.gpu.parts import Case, Context

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "demo.py"


def cases() -> dict[str, Case]:
    return {wrap: partial(demo, wrap) for wrap in ("ddp", "fsdp2")}


def demo(wrap: str, context: Context) -> None:
    """Run it on all GPUs there are, four at most; in a dry run on one CPU."""
    ranks = context.size(min(4, torch.cuda.device_count()), 1)
    # A step takes a few ms: the daemon must be up before the training is over.
    words = ["--wrap", wrap, "--nproc", ranks, "--steps", context.size(600, 60)]
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, words)],
        cwd=context.scratch, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    print(done.stdout, flush=True)
    said = re.search(r"^planted: .*, found: (.*)$", done.stdout, re.MULTILINE)
    text = said[1] if said else f"ended with {done.returncode}: see the log"
    context.findings.check(f"{ranks} ranks", holds=done.returncode == 0, text=text)
    backend = "nccl" if context.cuda else "gloo"
    topology = re.search(r"^topology .*$", done.stdout, re.MULTILINE)
    text = topology[0].split(maxsplit=1)[1] if topology else "not told"
    context.findings.check(f"over {backend}", holds=f" {backend}," in text, text=text)
