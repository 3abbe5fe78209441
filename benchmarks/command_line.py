"""The command line that all benchmarks have in common."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any


def parser(module: str, about: str | None) -> argparse.ArgumentParser:
    """Return what reads the arguments of `python -m benchmarks.<module>`: `--quick`, so far."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=about)
    made.add_argument("--quick", action="store_true", help="a smoke run of a few seconds")
    return made


def parent(module: str, about: str | None) -> argparse.ArgumentParser:
    """Return the same for one that measures itself in a process of its own, told what by JSON."""
    made = parser(module, about)
    made.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    return made


def ask_child(module: str, *task: object, **environment: str) -> Any:
    """Run such a module in a fresh process on `task`; return the JSON in its last line."""
    command = [sys.executable, "-m", f"benchmarks.{module}", "--child", json.dumps(task)]
    said = subprocess.check_output(command, text=True, env={**os.environ, **environment})
    return json.loads(said.splitlines()[-1])
