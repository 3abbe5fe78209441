"""The process that runs cases of one part; it may be killed at any time."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.gpu.findings import FAILED, NO_DEVICE, Findings, path_of
from tests.gpu.parts import CASE_SECONDS, POISONED, WITHOUT, Context, cases_of


def run(part: str, names: list[str], device: str, results: Path, until: float) -> int:
    """Run the cases of a part that are not done yet; return the exit code.

    Args:
        part: its name.
        names: parts of the names of cases; only these are run, if there are any.
        device: "cuda" or "cpu".
        results: where the part's file is.
        until: of `time.time`, when the part should be over.
    """
    findings = Findings(path_of(results, part), part, device)
    findings.told["machine"] = machine(device)
    if device == "cuda" and not torch.cuda.is_available():
        findings.stop(NO_DEVICE, why_not())
        return WITHOUT
    if device == "cpu":
        torch.set_num_threads(1)
    warnings.filterwarnings("default")
    cases = cases_of(part)
    chosen = [name for name in cases if not names or any(word in name for word in names)]
    findings.told["cases"] = chosen
    for name in findings.left:
        findings.begin(name)
        limit = time.monotonic() + min(CASE_SECONDS, until - time.time())
        scratch = Path(tempfile.mkdtemp(prefix="ddpprobe-gpu-"))
        context = Context(findings, device, scratch, limit)
        try:
            cases[name](context)
        except Exception as error:  # noqa: BLE001  (whatever it was, it is this case's result)
            traceback.print_exc()
            findings.add(type(error).__name__, FAILED, last_words(error), trace=trace_of(error))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        findings.end()
        if device == "cuda" and not usable():
            sys.stdout.flush()
            os._exit(POISONED)  # the interpreter's own end may hang on such a device
    return 0


def usable() -> bool:
    """Return whether the device still answers."""
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except RuntimeError:
        traceback.print_exc()
        return False
    gc.collect()  # models of the case that is over
    torch.cuda.empty_cache()
    return True


def last_words(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:400]


def trace_of(error: Exception) -> list[str]:
    """Return the last lines of a traceback."""
    return "".join(traceback.format_exception(error)).splitlines()[-30:]


def why_not() -> str:
    built = torch.version.cuda
    return f"torch {torch.__version__}" + (
        f", built for CUDA {built}" if built else ", a CPU build"
    )


def machine(device: str) -> dict[str, Any]:
    """Return what a part ran on."""
    from benchmarks.tables import machine as words

    told = {"words": words(), "torch": torch.__version__, "cuda": torch.version.cuda or ""}
    if device == "cuda" and torch.cuda.is_available():
        told["device"] = torch.cuda.get_device_name()
        told["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return told
