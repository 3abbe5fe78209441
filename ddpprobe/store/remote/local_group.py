"""A directory on this machine as a place that groups of the store are carried to."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ddpprobe.rundir import paths, safe_read
from ddpprobe.store.group_names import log_of
from ddpprobe.store.manifest import MAX_LOG_BYTES, Manifest, State, Version, version_of_file

LONGEST_PART, LONGEST_KEY = 200, 1000
_PART = re.compile(rf"[A-Za-z0-9_](?:[A-Za-z0-9_.]{{0,{LONGEST_PART}}})")


class LocalGroup:
    """The half of `carry.Target` that is the same wherever the files come from.

    Args:
        run: where the groups are carried to.
    """

    def __init__(self, run: paths.RunDir) -> None:
        self.run = run

    def here(self, name: str, group: str) -> State:
        """Return what is here of a group: files that are what its manifest here says."""
        known = Manifest(self.run.path / log_of(name))
        if known.damage:
            return State()
        state = known.state
        files = {k: v for k, v in state.files.items() if self.version(group, k) == v}
        return State(state.sizes, state.consumed, files)

    def read_manifest(self, name: str) -> bytes | None:
        """Return the manifest that is here."""
        try:
            return safe_read.read_regular(self.run.path, log_of(name), MAX_LOG_BYTES)
        except OSError:
            return None

    def write_manifest(self, name: str, data: bytes) -> None:
        """Replace the manifest."""
        self.put(self.run.path / log_of(name), data)

    def version(self, group: str, key: str) -> Version | None:
        """Return what a file here is; None if there is none."""
        return version_at(self.run, group, key)

    def delete(self, group: str, keys: Sequence[str]) -> None:
        """Take files away."""
        for key in keys:
            if is_usual(key, set()):
                (self.run.store / group / key).unlink(missing_ok=True)

    def put(self, path: Path, data: bytes) -> None:
        """Replace a file, all at once."""
        paths.replace_file(path, [data])


def version_at(run: paths.RunDir, group: str, key: str) -> Version | None:
    """Return what a file of a group is; None if it cannot be read."""
    try:
        fd = safe_read.open_regular(run.store / group if group else run.store, key)
    except (OSError, ValueError):
        return None
    try:
        with os.fdopen(fd, "rb") as file:
            return version_of_file(file)
    except OSError:
        return None


def is_usual(key: str, others: set[str]) -> bool:
    """Whether this format makes such a name: no way out of the run, no file where others lie."""
    parts = key.split("/")
    above = {"/".join(parts[:n]) for n in range(1, len(parts))}
    return len(key) <= LONGEST_KEY and all(map(_PART.fullmatch, parts)) and not above & others
