"""Which run a job is, and which attempt of it: by its directory, and by the URL that it goes to.

A job that starts on an empty disk is a further attempt of the run that lies at its URL, as one in
the same directory is. Whether one lies there is asked once, in a process of its own, for ten
seconds at most. If nobody answers, the job begins all the same: its daemon settles it later.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ddpprobe.daemon import launch
from ddpprobe.rundir import paths, safe_read, store_url
from ddpprobe.rundir.paths import RUN_JSON, DirectoryLock, RunDir
from ddpprobe.rundir.processes import SAME_START_SECONDS
from ddpprobe.rundir.validate import MALFORMED

DISK = "daemon/disk"  # in the head's directory, new at each start: see `is_shared`
LAUNCH = "launch"  # in run.json: the torchrun that may start the ranks again
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
STAMP = "%Y%m%dT%H%M%SZ"  # with which a run begins that nobody gave a name
MOST_NODES = 8  # named in a line

logger = logging.getLogger("ddpprobe")


@dataclass(frozen=True, slots=True)
class Claimed:
    """An attempt that is this job's.

    Attributes:
        run: its directory.
        identity: what run.json says.
        attempt: its number.
        token: what says so in the object store; "" if the run goes to none.
        lock: held for as long as the attempt lives.
    """

    run: RunDir
    identity: dict[str, Any]
    attempt: int
    token: str
    lock: DirectoryLock


def claim(
    run_dir: str | os.PathLike[str] | None, name: str | None, facts: Mapping[str, Any],
    model: str = "",
) -> Claimed:  # fmt: skip
    """Find out which attempt of which run this job is, and take its directory.

    Args:
        run_dir: as `install()` was given it.
        name: as `install()` was given it.
        facts: what run.json will say of a new run, besides its names.
        model: of several that are installed together: its run lies below what `run_dir` and `name`
            say, in a directory of this name.

    Raises:
        ValueError: the directory cannot be used, is held by a live run, or is none; or what is
            there cannot be continued. The text says what to do.
    """
    stamp = datetime.datetime.now(tz=datetime.UTC).strftime(STAMP)
    run_id = f"{stamp}-{os.urandom(3).hex()}"
    url = store_url.wanted(run_dir)
    here = run_dir if url is None else None
    if not name and model and here:
        name = Path(here).name
    again = _restarted(facts, model) if run_dir is None else None
    name = name or (store_url.name_of(url) if url else again or run_id)
    run = RunDir(Path(here or paths.RUNS / name, model).absolute())
    if model:
        name, url = f"{name}/{model}", url and f"{url}/{model}"
    if _holds_something_else(run):
        raise ValueError(
            f"{run.path} is not empty and not a ddpprobe run. Give run_dir= a new directory."
        )
    lock = _take(run)
    try:
        new = not run.run_json.exists()
        if new:
            where = {"destination": url} if url else {}
            identity = {**facts, "run_id": run_id, "name": name, **where}
        else:
            identity = paths.continued(run.run_json.read_bytes(), run.path)
            store_url.must_be(url, identity, run.path)
        identity, attempt, token = _ask(run, identity, new=new)
        if new:
            paths.write_json(run.run_json, identity)
        _keep(run, attempt, token)
    except BaseException:
        lock.release()
        raise
    return Claimed(run, identity, attempt, token, lock)


def launch_of(call: str) -> dict[str, Any]:
    """Return what run.json says of who started this rank, if that may start it again: torchrun.

    Args:
        call: name of this call of `install()`, of which a script may have several.
    """
    if RESTARTS not in os.environ:
        return {}
    try:
        agent = psutil.Process().parent()
        if agent is None:
            return {}
        began = agent.create_time()
    except (psutil.Error, OSError):
        return {}
    number = call.rpartition("/")[2]
    return {LAUNCH: {"pid": agent.pid, "pid_start": began, "call": number}}


def arrive(run: RunDir, node: str, identity: Mapping[str, Any], attempt: int, token: str) -> None:
    """Make the directory of a run be there on a node: the head's own, or one on another disk.

    Args:
        run: its directory.
        node: this node's name.
        identity: what run.json says on the head.
        attempt: that the head claimed.
        token: that it claimed the attempt with; "" if the run goes to no object store.
    """
    known = run.run_json.exists()
    if known and (not token or run.claim(attempt).exists()):
        return
    _keep(run, attempt, token)
    told = paths.continued(run.run_json.read_bytes(), run.path) if known else identity
    if told["run_id"] == identity["run_id"]:
        # What was the head's disk may be another node's now.
        own = {paths.OWN_DISK: node} if token else {}
        paths.write_json(run.run_json, {**told, **own})


def mark_disk(run: RunDir) -> str:
    """Leave a new mark in the head's directory, by which other nodes know it; return the mark."""
    mark = os.urandom(8).hex()
    path = run.path / DISK
    paths.make_dir(path.parent)
    paths.write_json(path, {"mark": mark})
    return mark


def is_shared(run: RunDir, mark: str) -> bool:
    """Return whether a node sees the directory that the head has just marked."""
    safe_read.names(run.path, "daemon")  # to open a directory makes NFS look at it anew
    try:
        return bool(json.loads((run.path / DISK).read_bytes())["mark"] == mark)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def say_where(claimed: Claimed, own: Sequence[int], *, moved: bool) -> None:
    """Say in one line where the nodes write, if that is not what each of them may take it for.

    Args:
        claimed: the attempt.
        own: indices of the nodes on whose own disk the directory is.
        moved: some rank was started in another working directory, and the path is relative.
    """
    path, url = claimed.run.path, claimed.identity.get("destination")
    taken = "; a relative run_dir is taken from rank 0's working directory" if moved else ""
    if not own:
        if moved:
            logger.warning("ddpprobe: all nodes write to %s%s", path, taken)
        return
    more = f", ... ({len(own)})" if own[MOST_NODES:] else ""
    named = ("node " if len(own) == 1 else "nodes ") + ", ".join(map(str, own[:MOST_NODES])) + more
    where = f"not on rank 0's disk: {named}. Every node writes its own ranks to {path}{taken}"
    if url:
        logger.info("ddpprobe: %s; all of it goes to %s", where, url)
    else:
        then = "when the job has ended, merge them: ddpprobe collect DEST DIR..."
        logger.warning("ddpprobe: %s; %s", where, then)


def _restarted(facts: Mapping[str, Any], model: str) -> str | None:
    """Return the name of the run in which the attempt before was, if torchrun started us again.

    Runs without a name of their own begin with the time, so those before torchrun are not read.
    """
    mine = facts.get(LAUNCH)
    if mine is None or os.environ.get(RESTARTS) == "0":
        return None
    began = datetime.datetime.fromtimestamp(
        mine["pid_start"] - 2 * SAME_START_SECONDS, datetime.UTC
    )
    for path in sorted(paths.RUNS.glob(str(Path("2*Z-*", model, RUN_JSON))), reverse=True):
        name = path.relative_to(paths.RUNS).parts[0]
        if name < began.strftime(STAMP):
            return None
        try:
            said = safe_read.parse(path.read_bytes())
            theirs = said[LAUNCH]
            apart = abs(float(theirs["pid_start"]) - mine["pid_start"])
        except (OSError, *MALFORMED):
            continue
        same = all(theirs.get(key) == mine[key] for key in ("pid", "call"))
        if same and apart <= SAME_START_SECONDS and said.get("hostname") == facts["hostname"]:
            return name
    return None


def _keep(run: RunDir, attempt: int, token: str) -> None:
    """Write down beside the journals whose an attempt is."""
    paths.make_dir(run.attempt_dir(attempt))
    if token:
        paths.write_json(run.claim(attempt), {"claim": token})


def _holds_something_else(run: RunDir) -> bool:
    if not run.path.is_dir() or run.run_json.exists():
        return False
    # A job that was killed while it asked, or was refused, leaves its lock file.
    return any(path != run.lock for path in run.path.iterdir())


def _take(run: RunDir) -> DirectoryLock:
    try:
        paths.make_dir(run.path)
        lock = DirectoryLock(run.lock)
        held = not lock.acquire()
    except OSError as error:
        raise ValueError(
            f"cannot write to the run directory {run.path}: {error.strerror}. "
            "Give run_dir= (or DDPPROBE_DIR) a directory this user can write to."
        ) from error
    if held:
        raise ValueError(
            f"{run.path} is held by a live run. If that is an earlier probe of this process, as of "
            "a cell that is run again, call its close() first. Else give run_dir= another "
            "directory, or leave it out to get a new one. (If that run is this job, started by "
            "mp.spawn or the like: call install() after init_process_group.)"
        )
    return lock


def _ask(run: RunDir, identity: dict[str, Any], *, new: bool) -> tuple[dict[str, Any], int, str]:
    """Return what run.json is to say, the attempt's number, and the token that claims it."""
    attempts = run.attempts()
    least = attempts[-1] + 1 if attempts else 0
    url = identity.get("destination")
    if not isinstance(url, str):
        return identity, least, ""
    token = os.urandom(8).hex()
    public = {k: v for k, v in identity.items() if k != paths.OWN_DISK}
    question = {"run_json": public, "new": new, "least": least, "token": token}
    answer = launch.ask_store(url, question)
    if "refused" in answer:
        raise ValueError(answer["refused"])
    if "attempt" in answer:
        settled, attempt = dict(answer["run_json"]), int(answer["attempt"])
        if settled["run_id"] != identity["run_id"]:
            logger.info("ddpprobe: %s holds a run: this is attempt %d of it", url, attempt)
        return settled, attempt, token
    if "another" in answer:
        why = f"another run lies there ({answer['another']!r:.60})"
    else:
        why = f"it cannot be asked which runs it holds ({answer['unknown']})"
    beside = store_url.beside(url, str(identity["run_id"]))
    logger.warning(
        "ddpprobe: %s: %s; the training goes on, and if this run cannot go there, it goes to %s",
        url, why, beside,
    )  # fmt: skip
    return identity, least, token
