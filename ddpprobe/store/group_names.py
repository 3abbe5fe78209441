"""How the groups of a run are named: their manifests, and their files, in a run or in a bucket."""

from __future__ import annotations

import re

from ddpprobe.rundir import paths, safe_read
from ddpprobe.store import format as fmt

MANIFEST = re.compile(
    r"(attempt_(?:\d{3,}))\.(?:(rank_\d{5,})|(node_\d{4,})|merged|anomalies|captures"
    r"|captures\.step_(\d{10,})(?:\.(node_\d{4,}))?)"
)
ROOT = "root"


def log_of(name: str) -> str:
    """Return the name of a manifest's object, which is its path in a run, too."""
    return f"manifest/{name}.log"


def key_of(group: str, key: str) -> str:
    """Return the name of the object that holds a file of a group."""
    return "/".join(part for part in (safe_read.STORE, group, key) if part)


def group_of(name: str) -> tuple[str, bool]:
    """Return the group of a manifest, and whether it lists one node's chunks alone."""
    if name == ROOT:
        return "", False
    match = MANIFEST.fullmatch(name)
    alone = bool(match and match[5])
    return (name.rpartition(".")[0] if alone else name).replace(".", "/"), alone


def groups_of(run: paths.RunDir, attempt: int) -> list[str]:
    """Paths of the groups of an attempt, committed or only listed in a manifest, ascending."""
    top = fmt.attempt_key(attempt)
    names = set(safe_read.names(run.path, f"{safe_read.STORE}/{top}"))
    names |= {
        n.removeprefix(f"{top}.").removesuffix(".log")
        for n in run.manifest_names()
        if n.startswith(f"{top}.") and n.endswith(".log")
    }
    return sorted(key for name in names if fmt.kind_of_group(key := f"{top}/{name}"))


def attempts_of(run: paths.RunDir) -> list[int]:
    """Attempts that have a group in the store, ascending."""
    listed = safe_read.names(run.path, safe_read.STORE) + run.manifest_names()
    names = {n.partition(".")[0] for n in listed}
    digits = [n.removeprefix("attempt_") for n in names if n.startswith("attempt_")]
    return sorted(int(d) for d in digits if d.isdecimal())
