"""What ran in the newest attempt of a run: run.json was written by the first one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_OF_THE_FIRST = ("world_size", "backend", "every", "torch")
ASKED = (*_OF_THE_FIRST, "node", "hostname", "rank")  # of what a rank wrote of itself


def newest_identity(
    identity: Mapping[str, Any], metas: Sequence[Mapping[str, Any]], wrappers: Iterable[str]
) -> dict[str, Any]:
    """Return what the newest attempt says of what run.json says, as far as it says anything.

    The model may have been wrapped since the first `install()`, and a later attempt may have other
    ranks, elsewhere, of another version, that sample other steps.

    Args:
        identity: content of run.json. Where it has no nodes and no host, it is lost: then these are
            not known, which is said elsewhere.
        metas: what each rank of the attempt that is here wrote of itself, ascending.
        wrappers: of the model, as its ranks told them.
    """
    told = {name for name in wrappers if name}
    meta = metas[0] if metas else {}
    nodes = {str(each["node"]) for each in metas if each.get("node") is not None}
    places = {
        "nodes": len(nodes) if len(metas) == meta.get("world_size") else None,  # else elsewhere
        "hostname": next((each.get("hostname") for each in metas if each.get("rank") == 0), None),
    }
    found = {
        "wrapper": next(iter(told)) if len(told) == 1 else "mixed" if told else "",
        **{key: meta.get(key) for key in _OF_THE_FIRST},
        **{key: value for key, value in places.items() if identity.get(key) is not None},
    }
    # An attempt without a process group says so: that of an earlier one is not its own.
    return {key: value for key, value in found.items() if value or (key, value) == ("backend", "")}
