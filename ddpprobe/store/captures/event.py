"""What was captured at one step: the packs of all ranks as tensors, and as Zarr metadata.

One group per step, one group per tensor in it (dimension names hold within a group), one array
`value`. Its attributes repeat what the ranks said; everything else follows from that, so a reader
makes the metadata again and compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from ddpprobe.rundir import paths
from ddpprobe.rundir.tensor_pack import FIRST_BAD, ITEM_SIZES, KINDS, Pack, TensorKey, header_of
from ddpprobe.rundir.validate import WRONG, int64
from ddpprobe.store import format as fmt
from ddpprobe.store.captures import dtypes
from ddpprobe.store.captures.places import HeldPart
from ddpprobe.store.captures.plan import Plan, make_plan, no_whole

MAX_RANKS = 1 << 20
# Of an event's metadata: some 600 kB for 40 tensors of 256 ranks. Python makes up to 20 times as
# much of it. An event that needs more stays packs, which can be read as well.
MAX_EVENT_BYTES = 24 << 20
# Looks at a rank of a mesh (10 ns) that the plans of an event may take; to place one takes 1000
# times as long. It is enough for 40 tensors of 2048 ranks, and what a few bytes say of very many
# ranks does not keep a reader for hours.
MAX_LOOKS, LOOKS_OF_A_PLACE = 1 << 28, 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of an event: its name in the store, which one it is, its parts and its plan."""

    name: str
    key: TensorKey
    held: tuple[HeldPart, ...]
    plan: Plan


@dataclass(frozen=True, slots=True)
class CaptureEvent:
    """The captured tensors of one step.

    Attributes:
        attempt, step, world: of the job.
        headers: by rank, of the packs that were there.
        entries: the tensors.
    """

    attempt: int
    step: int
    world: int
    headers: Mapping[int, Mapping[str, Any]]
    entries: tuple[Entry, ...]

    @property
    def silent(self) -> list[int]:
        """Ranks that delivered nothing."""
        return [r for r in range(self.world) if r not in self.headers]

    @property
    def missed(self) -> list[int]:
        """Those of them that were to deliver: the first bad module is kept where it is, only."""
        own = all(header.get("reason") == FIRST_BAD for header in self.headers.values())
        return [] if own else self.silent


def event_of(attempt: int, step: int, packs: Mapping[int, Pack]) -> CaptureEvent:
    """Put the packs of one step together, by rank."""
    held: dict[TensorKey, dict[int, HeldPart]] = {}
    for rank, pack in sorted(packs.items()):
        for t in pack.tensors:
            held.setdefault(t.key, {})[rank] = HeldPart(rank, t.shape, t.layout, t.crc)
    world = max([min(int(p.header["world_size"]), MAX_RANKS) for p in packs.values()])
    headers = {rank: pack.header for rank, pack in sorted(packs.items())}
    return planned(attempt, step, world, headers, {k: [*h.values()] for k, h in held.items()})


def planned(
    attempt: int,
    step: int,
    world: int,
    headers: Mapping[int, Mapping[str, Any]],
    held: Mapping[TensorKey, Sequence[HeldPart]],
) -> CaptureEvent:
    """Return the event of parts by tensor."""
    silent = [r for r in range(world) if r not in headers]
    entries, left = [], MAX_LOOKS
    for i, (key, parts) in enumerate(sorted(held.items())):
        left -= _looks(parts)
        if left >= 0:
            plan = make_plan(key.kind, parts, silent, world)
        else:
            plan = no_whole(parts, "the event has too many parts on too many ranks")
        entries.append(Entry(f"t{i:05d}", key, tuple(parts), plan))
    return CaptureEvent(attempt, step, world, headers, tuple(entries))


def _looks(parts: Sequence[HeldPart]) -> int:
    """Return how many looks at ranks the plan of a tensor takes."""
    told = [h.layout.get("ranks") for h in parts]
    sizes = [len(ranks) for ranks in told if isinstance(ranks, list | tuple)]
    return sum(sizes) + LOOKS_OF_A_PLACE * max(sizes, default=0)


def group_key(attempt: int, step: int) -> str:
    """Return the path of an event's group."""
    return f"{captures_key(attempt)}/step_{step:010d}"


def captures_key(attempt: int) -> str:
    """Return the path of the group of all events of an attempt."""
    return f"{fmt.attempt_key(attempt)}/captures"


def documents_of(event: CaptureEvent) -> dict[str, fmt.Document]:
    """Return the metadata of an event's group and of everything in it, by path below it."""
    inner: dict[str, fmt.Document] = {}
    for entry in event.entries:
        array = _array_document(entry)
        inner[entry.name] = fmt.group_document({}, {"value": array})
        inner[f"{entry.name}/value"] = array
    headers = {str(rank): dict(header) for rank, header in event.headers.items()}
    attrs = {
        "ddpprobe": {
            "format_version": fmt.FORMAT_VERSION, "kind": "capture", "attempt": event.attempt,
            "step": event.step, "world_size": event.world, "headers": headers,
        },
    }  # fmt: skip
    plain = {k: v if "shape" in v else fmt.group_document({}, {}) for k, v in inner.items()}
    return {"": fmt.group_document(attrs, plain), **inner}


def event_from(document: Mapping[str, Any]) -> CaptureEvent:
    """Read an event back from the metadata of its group.

    Raises:
        ValueError: this format writes no such group.
    """
    try:
        attrs = document["attributes"]["ddpprobe"]
        if why := paths.unreadable(attrs["format_version"]):
            raise ValueError(why)
        arrays = document["consolidated_metadata"]["metadata"]
        told = [v["attributes"]["ddpprobe"] for k, v in arrays.items() if k.endswith("/value")]
        held = {_key_from(t): [*map(_held_from, _parts_of(t))] for t in told}
        headers = {int(rank): header_of(header) for rank, header in attrs["headers"].items()}
        world = int64(attrs["world_size"])
        if not 0 <= world <= MAX_RANKS:
            raise ValueError(f"a world of {world} ranks")
        event = planned(int64(attrs["attempt"]), int64(attrs["step"]), world, headers, held)
    except WRONG as error:
        raise ValueError(f"no capture of this format: {error!r}") from error
    # Through JSON, which knows no tuples.
    if json.loads(json.dumps(documents_of(event)[""])) != document:
        raise ValueError("no capture of this format: its metadata is not what its parts make")
    return event


def _array_document(entry: Entry) -> fmt.Document:
    plan, data_type = entry.plan, dtypes.stored_as(entry.key.dtype)
    layouts: dict[str, int] = {}
    parts = []
    for h in entry.held:
        text = json.dumps(h.layout, sort_keys=True)
        parts.append([h.rank, list(h.shape), layouts.setdefault(text, len(layouts)), h.crc])
    key = entry.key
    said = {
        **{name: getattr(key, name) for name in key.__slots__},
        "shape": None if plan.shape is None else list(plan.shape),
        "why": plan.why,
        "origin": plan.origin,
        "missing": [[list(p.ranks), [[list(r) for r in runs] for runs in p.runs or ()]]
                    for p in plan.missing],
        "layouts": [json.loads(text) for text in layouts],
        "parts": parts,
    }  # fmt: skip
    size = dtypes.item_bytes(key.dtype)
    return {
        "shape": list(plan.array),
        "data_type": data_type[0],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(plan.chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": data_type[1],
        "codecs": [fmt.bytes_codec(size), {"name": "crc32c"}],
        "attributes": {"ddpprobe": said},
        "dimension_names": list(plan.dims),
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


def _key_from(told: Mapping[str, Any]) -> TensorKey:
    key = TensorKey(*(told[name] for name in TensorKey.__slots__))
    texts, numbers = (key.module, key.fqn, key.kind, key.leaf, key.dtype), (key.micro, key.call)
    if not all(type(t) is str for t in texts) or not all(type(n) is int for n in numbers):
        raise ValueError(f"no tensor: {astuple(key)}")
    if key.kind not in KINDS or key.dtype not in ITEM_SIZES:
        raise ValueError(f"a tensor of kind {key.kind!r} and dtype {key.dtype!r}")
    return key


def _parts_of(told: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (rank, shape, told["layouts"][layout], crc) for rank, shape, layout, crc in told["parts"]
    ]


def _held_from(told: tuple[Any, ...]) -> HeldPart:
    rank, shape, layout, crc = told
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in (rank, crc, *shape)):
        raise ValueError(f"no part: {told}")
    return HeldPart(rank, tuple(shape), dict(layout), crc)
