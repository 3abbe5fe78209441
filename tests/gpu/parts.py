"""The parts of `make test-gpu`, what each needs, and what a case of one is given."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.findings import SKIPPED, Findings

PART_SECONDS = 465.0  # of a part, so that with its start it stays under eight minutes
CASE_SECONDS = 200.0  # of one case: what hangs must leave time for the others
# Exit codes of a process that runs cases.
WITHOUT = 3  # there is no CUDA device
POISONED = 75  # after an error the device refuses everything, in this process


@dataclass(frozen=True)
class Part:
    """One part: what it is, and which modules it imports beside torch and NumPy."""

    title: str
    imports: tuple[str, ...]


_TRAINING = ("psutil",)
_READING = (*_TRAINING, "zarr", "numcodecs", "google_crc32c", "ml_dtypes")
_DAEMON = (*_READING, "prometheus_client", "hypercorn")
PARTS: Mapping[str, Part] = {
    "marked": Part("the tests that need a GPU", (*_READING, "pytest", "hypothesis")),
    "identical": Part("training is bit-identical with and without", _READING),
    "faults": Part("a planted NaN is named", _READING),
    "records": Part("the records of a training are those of the CPU", _READING),
    "deaths": Part("a rank that its device ends is named", _DAEMON),
    "waits": Part("the host never waits, and no memory grows", _TRAINING),
    "bandwidth": Part("the statistics kernel beside a copy", _TRAINING),
    "overhead": Part("what a step costs", _READING),
    "breakdown": Part("where a step spends its time", _TRAINING),
    "capture": Part("what keeping full tensors costs", _TRAINING),
    "demo": Part("the demo from end to end", (*_DAEMON, "plotext", "rich", "jinja2", "plotly")),
}


@dataclass
class Context:
    """What a case is given.

    Attributes:
        findings: where it says what it found.
        device: "cuda", or "cpu" for a dry run at small sizes.
        scratch: an empty directory of its own.
        until: of `time.monotonic`, when it should be over.
    """

    findings: Findings
    device: str
    scratch: Path
    until: float

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def size(self, on_gpu: Any, dry: Any) -> Any:
        """Return the size for a measurement, or the one for a dry run."""
        return on_gpu if self.cuda else dry

    def seconds_left(self) -> float:
        return self.until - time.monotonic()

    def needs_cuda(self, why: str) -> bool:
        """Say that the case is skipped in a dry run; return whether it is."""
        if not self.cuda:
            self.findings.add("dry run", SKIPPED, f"needs CUDA: {why}")
        return not self.cuda

    def sync(self) -> None:
        """Wait for the device."""
        if self.cuda:
            import torch  # the process that only starts the others does without

            torch.cuda.synchronize()


Case = Callable[[Context], None]


def cases_of(part: str) -> dict[str, Case]:
    """Return the cases of a part, in order; imports what it needs."""
    module = importlib.import_module(f"tests.gpu.{part}")
    cases: dict[str, Case] = module.cases()
    return cases
