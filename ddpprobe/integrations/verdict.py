"""What `ddpprobe anomalies` says of a run that has just ended, asked by one of its ranks.

A process of its own reads the run, so that the training process imports nothing for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

UNDECIDED = "undecided"
SECONDS = 15.0  # for the other ranks to close, and the daemon to write what is left
READ_SECONDS = 60.0  # for one look, which has Python to start: also where a machine is busy
_PAUSE = 0.25  # between looks


def verdict(run_dir: str, seconds: float = SECONDS) -> str:
    """Return one line: the first cause, that nothing was found, or "undecided" and why.

    Args:
        run_dir: the run's directory; this rank has closed its files.
        seconds: for how long it is looked at while other ranks are under way.

    Raises:
        OSError: no process can be started.
    """
    end = time.monotonic() + seconds
    while True:
        said = _ask(run_dir)
        if said is not None and (said["end"] or {}).get("state") != "running":
            return _one_line(said, run_dir)
        if time.monotonic() >= end:
            break
        time.sleep(_PAUSE)
    why = "the run could not be read" if said is None else "other ranks were under way"
    return f"{UNDECIDED}: {why}; see ddpprobe anomalies {run_dir}"


def _ask(run_dir: str) -> dict[str, Any] | None:
    words = [sys.executable, "-m", "ddpprobe", "anomalies", run_dir, "--json"]
    try:
        done = subprocess.run(  # noqa: S603  (our own program)
            words, capture_output=True, check=False, timeout=READ_SECONDS, stdin=subprocess.DEVNULL
        )
        said = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return None
    return said if isinstance(said, dict) and "judged" in said else None


def _one_line(said: dict[str, Any], run_dir: str) -> str:
    found, judged = said["anomalies"], said["judged"]
    if found:
        first = found[0]
        rank = "" if first["rank"] is None else f", rank {first['rank']}"
        module = f", {first['module']}" if first["module"] else ""
        more = f" (and {len(found) - 1} more)" if found[1:] else ""
        what = f"{first['detector']}: {first['message']}{more}"
        return f"{first['level']}: step {first['step']}{rank}{module}: {what}"
    if not judged["complete"]:
        return f"{UNDECIDED}: only a part of the run is held; see ddpprobe anomalies {run_dir}"
    return f"no anomalies in {judged['sampled']} sampled steps"
