"""Runs each part in a process of its own, and goes on after whatever kills or hangs it."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.findings import FAILED, NO_PACKAGES, RUNNING, TABLE, Findings, path_of
from tests.gpu.parts import CASE_SECONDS, PART_SECONDS, PARTS, POISONED, WITHOUT

MAIN = Path(__file__).with_name("__main__.py")
_POLL_SECONDS = 0.1
GRACE_SECONDS = 20.0  # beyond a case's time, in which it may say itself that it is late
_MERCY_SECONDS = 5.0
_NO_CASE = "start"


def run_part(
    name: str, device: str, results: Path, path: list[str], cases: Sequence[str] = (),
    seconds: float = PART_SECONDS,
) -> dict[str, Any]:  # fmt: skip
    """Run all cases of one part; return what is in its file then.

    Args:
        name: of the part.
        device: "cuda" or "cpu".
        results: where its file goes, and its output as gpu-PART.log.
        path: directories for PYTHONPATH.
        cases: parts of names; only such cases are run, by default all.
        seconds: that it may take.
    """
    print(f"\n== {name}: {PARTS[name].title}", flush=True)
    findings = Findings(path_of(results, name), name, device, fresh=True)
    missing = [m for m in ("torch", *PARTS[name].imports) if importlib.util.find_spec(m) is None]
    if missing:
        hint = "choose a Python that has it" if "torch" in missing else "give --wheels DIR"
        findings.stop(NO_PACKAGES, f"{', '.join(missing)}: {hint}")
        return _told(findings)
    until = time.time() + seconds
    with (results / f"gpu-{name}.log").open("wb") as log:
        while True:
            code, late = _Child(name, device, results, path, cases, until, log).wait()
            findings = Findings(path_of(results, name), name, device)
            if code == WITHOUT:
                return _told(findings)
            if findings.running is None and code not in (0, POISONED):
                findings.begin(_NO_CASE)
            if findings.running is not None:
                why = late or _how_it_ended(code)
                findings.add("process", FAILED, why)
                findings.end()
            if not findings.left or _NO_CASE in findings.done or time.time() > until:
                break
    if findings.left and time.time() > until:
        text = f"not begun after {seconds:.0f} s: {', '.join(findings.left)}"
        findings.add("all", FAILED, text)
    findings.finish()
    return _told(findings)


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}: see the log"
    return f"its process ended with {code}: see the log"


def _told(findings: Findings) -> dict[str, Any]:
    told = findings.told
    print(f"-- {told['part']}: {told['status']} {told['note']}".rstrip(), flush=True)
    return told


class _Child:
    """One process that runs cases, and the end of it when it takes too long."""

    def __init__(
        self, part: str, device: str, results: Path, path: list[str], cases: Sequence[str],
        until: float, log: Any,
    ) -> None:  # fmt: skip
        self._file, self._part, self._until = path_of(results, part), part, until
        self._said = len(json.loads(self._file.read_text())["lines"])
        command = [sys.executable, str(MAIN), part, "--child", "--device", device]
        command += ["--results", str(results), "--until", str(until)]
        command += [word for case in cases for word in ("--case", case)]
        self._process = subprocess.Popen(
            command, cwd=path[0], env=_environment(path), stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, start_new_session=True,
        )  # fmt: skip

    def wait(self) -> tuple[int, str]:
        """Return the exit code, and why it was ended, "" if it ended by itself."""
        while self._process.poll() is None:
            time.sleep(_POLL_SECONDS)
            told = self._look()
            case_late = (
                told["running"] and time.time() - told["since"] > CASE_SECONDS + GRACE_SECONDS
            )
            if case_late or time.time() > self._until:
                self._end()
                self._look()
                limit = f"{CASE_SECONDS + GRACE_SECONDS:.0f} s" if case_late else "its part's time"
                return self._process.returncode, f"killed, {limit} was over"
        self._look()
        return self._process.returncode, ""

    def _look(self) -> dict[str, Any]:
        """Read the part's file; print what is new in it."""
        told: dict[str, Any] = json.loads(self._file.read_text())
        for line in told["lines"][self._said :]:
            text = line["text"].splitlines()[-1][:160] if line["text"] else ""
            goal = line.get("goal", "")
            print(f"{line['result']:8} {line['case']}: {line['what']}  {text}  {goal}".rstrip(),
                  flush=True)  # fmt: skip
        self._said = len(told["lines"])
        return told

    def _end(self) -> None:
        """End the process and those it has started: first kindly, so that it prints its stacks."""
        for kill in (signal.SIGABRT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, kill)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_MERCY_SECONDS)


def _environment(path: list[str]) -> dict[str, str]:
    """Return the environment of a part: strict, and in need of no network."""
    fixed = {
        "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONFAULTHANDLER": "1",
        "DDPPROBE_STRICT": "1",
        "DDPPROBE_LINGER": "0",
        "WANDB_SILENT": "true",
    }
    defaults = {
        # cuBLAS gives the same bits every time with a workspace of its own for each stream.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # A machine without a network may have no other interface.
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return {**defaults, **os.environ, **fixed}


def write_table(results: Path, told: list[dict[str, Any]], device: str) -> None:
    """Write the table of all parts that have ended in this directory, those run now among them."""
    parts = {name: _kept(path_of(results, name)) for name in PARTS}
    parts |= {one["part"]: one for one in told}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    kept = [one for one in parts.values() if one and one["device"] == device]
    text = json.dumps({"made": today, "device": device, "parts": kept}, indent=1)
    (results / TABLE).write_text(text + "\n")


def _kept(path: Path) -> dict[str, Any] | None:
    """Return what an earlier command has left of a part; None if it was killed or is not there."""
    if not path.exists():
        return None
    told: dict[str, Any] = json.loads(path.read_text())
    if told["status"] == RUNNING:
        told |= {"status": FAILED, "note": "killed with the command that ran it"}
    return told
