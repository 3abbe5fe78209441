"""Packs as the store sees them: which there are, and which of them can be used."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ddpprobe import inside, layout
from ddpprobe.packs import Pack, PackError
from ddpprobe.store.manifest import Lost

_TOP = "captures"
_PACK = re.compile(r"step_(\d{10,})\.pack")
_NODE, _RANK = re.compile(r"node_\d{4,}"), re.compile(r"rank_(\d{5,})")


def packs_of(
    run: layout.RunDir, attempt: int, node: str | None = None
) -> dict[int, dict[int, Path]]:
    """Return the packs of an attempt (of one node) as step -> rank -> file, ascending."""
    found: dict[int, dict[int, Path]] = {}
    top = f"{_TOP}/{run.captures(attempt, 'node', 0).parent.parent.name}"
    for name in inside.directories(run.path, top):
        if _NODE.fullmatch(name) and node in {None, name}:
            for inner in inside.directories(run.path, f"{top}/{name}"):
                rank = _RANK.fullmatch(inner)
                for file in inside.names(run.path, f"{top}/{name}/{inner}") if rank else ():
                    step = _PACK.fullmatch(file)
                    if rank and step:
                        path = run.path / top / name / inner / file
                        found.setdefault(int(step[1]), {})[int(rank[1])] = path
    return {step: dict(sorted(ranks.items())) for step, ranks in sorted(found.items())}


def attempts_with_packs(run: layout.RunDir) -> list[int]:
    """Return the attempts that left packs, ascending."""
    return sorted(int(n) for n in inside.directories(run.path, _TOP) if n.isdecimal())


def open_packs(
    run: layout.RunDir, attempt: int, step: int, paths: Iterable[tuple[int, Path]]
) -> tuple[dict[int, Pack], list[Lost]]:
    """Open packs by rank; those that are damaged, or another's, are listed as lost.

    One that is gone was folded meanwhile.
    """
    packs, lost = {}, []
    for rank, path in paths:
        try:
            pack = Pack.open(path)
            h = pack.header
            told = (h["attempt"], h["step"], h["rank"])
            if told != (attempt, step, rank):
                raise PackError(f"it says that it is attempt, step, rank {told}")  # noqa: TRY301
            packs[rank] = pack
        except FileNotFoundError:
            continue
        except (PackError, OSError) as error:
            lost.append(Lost(str(path.relative_to(run.path)), (step, step), str(error)))
    return packs, lost
