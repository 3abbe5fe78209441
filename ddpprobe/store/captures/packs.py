"""Packs as the store sees them: which there are, and which of them can be used."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ddpprobe.errors import PackDamaged
from ddpprobe.rundir import paths, safe_read
from ddpprobe.rundir.tensor_pack import Pack
from ddpprobe.store.manifest import Lost

_TOP = "captures"
_PACK = re.compile(r"step_(\d{10,})\.pack")
_NODE, _RANK = re.compile(r"node_\d{4,}"), re.compile(r"rank_(\d{5,})")


def packs_of(
    run: paths.RunDir, attempt: int, node: str | None = None
) -> dict[int, dict[int, Path]]:
    """Return the packs of an attempt (of one node) as step -> rank -> file, ascending."""
    found: dict[int, dict[int, Path]] = {}
    top = f"{_TOP}/{run.captures(attempt, 'node', 0).parent.parent.name}"
    for name in safe_read.directories(run.path, top):
        if _NODE.fullmatch(name) and node in {None, name}:
            for inner in safe_read.directories(run.path, f"{top}/{name}"):
                rank = _RANK.fullmatch(inner)
                for file in safe_read.names(run.path, f"{top}/{name}/{inner}") if rank else ():
                    step = _PACK.fullmatch(file)
                    if rank and step:
                        path = run.path / top / name / inner / file
                        found.setdefault(int(step[1]), {})[int(rank[1])] = path
    return {step: dict(sorted(ranks.items())) for step, ranks in sorted(found.items())}


def attempts_with_packs(run: paths.RunDir) -> list[int]:
    """Return the attempts that left packs, ascending."""
    return sorted(int(n) for n in safe_read.directories(run.path, _TOP) if n.isdecimal())


def open_packs(
    run: paths.RunDir, attempt: int, step: int, pack_paths: Iterable[tuple[int, Path]]
) -> tuple[dict[int, Pack], list[Lost]]:
    """Open packs by rank; those that are damaged, or another's, are listed as lost.

    One that is gone was folded meanwhile.
    """
    packs, lost = {}, []
    for rank, path in pack_paths:
        try:
            pack = Pack.open(path)
            h = pack.header
            told = (h["attempt"], h["step"], h["rank"])
            if told != (attempt, step, rank):
                raise PackDamaged(f"it says that it is attempt, step, rank {told}")  # noqa: TRY301
            packs[rank] = pack
        except FileNotFoundError:
            continue
        except (PackDamaged, OSError) as error:
            lost.append(Lost(str(path.relative_to(run.path)), (step, step), str(error)))
    return packs, lost
