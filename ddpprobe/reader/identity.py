"""What a run's run.json says, or, where that is lost, what else says it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpprobe.errors import RunError, RunNotFound
from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.run_directories import holds_records
from ddpprobe.rundir import paths, safe_read
from ddpprobe.rundir.not_a_run import what_is_there
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store.group_names import attempts_of
from ddpprobe.store.repeated_identity import repeated_identity

# What a rank writes down of its run as well; the rest of it is its own.
_OF_A_RANK = ("run_id", "name", "world_size", "every", "wrapper", "torch", "backend")
_WORDS = {
    "name": "name",
    "run_id": "id",
    "created_ns": "start",
    "nodes": "number of nodes",
    "torch": "version of torch",
    "hostname": "host of rank 0",
    "every": "sampling interval",
}  # fmt: skip  (the number of ranks and the wrapper are told by events and every journal, too)


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What a run says of itself.

    Attributes:
        told: as run.json says it.
        lost: "" if there is a run.json; else that it is missing, where `told` is from, and what is
            not known.
    """

    told: dict[str, Any] = field(default_factory=dict)
    lost: str = ""


def identity_of(directory: Path) -> RunIdentity:
    """Return what the run.json in a run's directory says; if it is lost, what records say.

    Raises:
        RunNotFound: it is no run directory.
        RunError: the file is damaged, or of a version that is not read.
    """
    run = RunDir(directory)
    try:
        data = safe_read.read_regular(directory, paths.RUN_JSON)
    except FileNotFoundError:
        if not holds_records(directory):
            raise RunNotFound(what_is_there(directory)) from None
        return _recovered(run)
    except OSError as error:
        raise RunError(f"{run.run_json}: cannot be read ({error.strerror})") from error
    try:
        identity = safe_read.parse(data)
    except ValueError:
        identity = None
    version = identity.get("format_version") if isinstance(identity, dict) else None
    if not isinstance(identity, dict) or type(version) is not int:
        raise RunError(
            f"{run.run_json}: half written or damaged ({len(data)} bytes, format_version "
            f"{version!r:.40}); move it away to open what the journals and the store still hold",
            exit_code=3,
        )
    if why := paths.unreadable(version):
        raise RunError(f"{directory}: {why}")
    return RunIdentity(identity)


def _recovered(run: RunDir) -> RunIdentity:
    """Return the same from the store's root, which repeats it, or from what the ranks wrote."""
    told, where = repeated_identity(run), "the store"
    if not isinstance(told.get("run_id"), str):
        told, where = _of_the_ranks(run), "what the ranks wrote down"
    unknown = [word for key, word in _WORDS.items() if told.get(key) is None]
    said = f"; name, id and what else it said are taken from {where}" if told else ""
    gap = f"; not known: {', '.join(unknown)}" if unknown else ""
    return RunIdentity(told, f"{paths.RUN_JSON} is missing{said}{gap}")


def _of_the_ranks(run: RunDir) -> dict[str, Any]:
    """Return what a rank of the first attempt says that has left a word of it."""
    reader = MergedReader(run)
    for attempt in sorted({*run.attempts(), *attempts_of(run)}):
        with contextlib.suppress(OSError):
            meta = reader.rank_meta(attempt)
            if isinstance(meta.get("run_id"), str):  # strangers' files hold anything
                of_rank_0 = ["hostname"] if meta.get("rank") == 0 else []
                return {key: meta[key] for key in (*_OF_A_RANK, *of_rank_0) if key in meta}
    return {}
