"""What the campaigns have in common: many cheap runs, each kept as a line, so that one can go on.

A line of the file of results is `{"plan": {...}, "verdict": "right", "why": "...", ...}`. A plan
whose line is there is not run again.
"""

from __future__ import annotations

import contextlib
import io
import json
import queue
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ddpprobe.cli.main import main as ddpprobe
from tests.faults.zygote import Zygote

Line = dict[str, Any]
VOID = "void"  # the harness could not bring it about; done again by the next campaign
_writing = threading.Lock()  # the lines, and what is caught of stdout


def asked(*words: object) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the JSON object of a command line of ddpprobe, in this process."""
    out = io.StringIO()
    with _writing, contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = ddpprobe([*map(str, words), "--json"])
    return code, json.loads(out.getvalue() or "{}")


def carry_out(
    plans: Iterable[Mapping[str, Any]],
    carry: Callable[[Zygote, Mapping[str, Any], Path], Line],
    scratch: Path,
    results: Path,
    jobs: int,
) -> Iterator[Line]:
    """Carry out the plans that have no line in `results` yet; yield the lines of all.

    Args:
        plans: with a "number" each.
        carry: does one, in a directory of its own, and returns verdict, why and what else to keep.
        scratch: for these directories; that of a plan which came out right is deleted.
        results: the file of lines, which is added to.
        jobs: how many at a time.
    """
    plans = [dict(plan) for plan in plans]
    known = {json.dumps(line["plan"], sort_keys=True): line for line in _read(results)}
    left = [p for p in plans if json.dumps(p, sort_keys=True) not in known]
    yield from (known[k] for p in plans if (k := json.dumps(p, sort_keys=True)) in known)
    zygotes: queue.SimpleQueue[Zygote] = queue.SimpleQueue()

    def one(plan: Mapping[str, Any]) -> Line:
        directory = scratch / str(plan["number"])
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        zygote = zygotes.get()
        try:
            line = {"plan": plan, **carry(zygote, plan, directory)}
        except RuntimeError as error:  # it is gone
            zygote.close()
            zygote = held.enter_context(Zygote())
            line = {"plan": plan, "verdict": VOID, "why": str(error)}
        finally:
            zygotes.put(zygote)
        if line["verdict"] == "right":
            shutil.rmtree(directory, ignore_errors=True)
        with _writing, results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        _say(line)
        return line

    with contextlib.ExitStack() as held:
        for _ in range(min(jobs, len(left))):
            zygotes.put(held.enter_context(Zygote()))
        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(one, left)


def _say(line: Line) -> None:
    if line["verdict"] != "right":
        plan = line["plan"]
        print(f"{plan['number']}: {line['verdict']}: {line['why']}", file=sys.stderr, flush=True)


def _read(results: Path) -> Iterator[Line]:
    if not results.exists():
        return
    for text in results.read_text().splitlines():
        with contextlib.suppress(ValueError):  # torn, when it was interrupted
            line = json.loads(text)
            if line["verdict"] != VOID:
                yield line
