"""Packs as the store sees them: which there are, and which of them can be used."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ddpprobe import layout
from ddpprobe.packs import Pack, PackError
from ddpprobe.store.manifest import Lost

_PACK = re.compile(r"step_(\d{10,})\.pack")
_NODE, _RANK = re.compile(r"node_\d{4,}"), re.compile(r"rank_(\d{5,})")


def packs_of(
    run: layout.RunDir, attempt: int, node: str | None = None
) -> dict[int, dict[int, Path]]:
    """Return the packs of an attempt (of one node) as step -> rank -> file, ascending."""
    found: dict[int, dict[int, Path]] = {}
    top = run.captures(attempt, "node", 0).parent.parent
    for directory in _inside(top):
        if _NODE.fullmatch(directory.name) and node in {None, directory.name}:
            for inner in _inside(directory):
                rank = _RANK.fullmatch(inner.name)
                for path in _inside(inner) if rank else ():
                    step = _PACK.fullmatch(path.name)
                    if rank and step:
                        found.setdefault(int(step[1]), {})[int(rank[1])] = path
    return {step: dict(sorted(ranks.items())) for step, ranks in sorted(found.items())}


def attempts_with_packs(run: layout.RunDir) -> list[int]:
    """Return the attempts that left packs, ascending."""
    names = [p.name for p in _inside(run.captures(0, "node", 0).parent.parent.parent)]
    return sorted(int(n) for n in names if n.isdecimal())


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


def _inside(path: Path) -> list[Path]:
    try:
        return sorted(p for p in path.iterdir() if not p.is_symlink())
    except (FileNotFoundError, NotADirectoryError):
        return []
