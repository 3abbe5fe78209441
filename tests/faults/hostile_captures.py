"""The run that hostile runs are made of, with its captures, and what is done to these."""

from __future__ import annotations

import json
import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ddpprobe.rundir import framing, tensor_pack
from ddpprobe.rundir.paths import RunDir
from ddpprobe.rundir.tensor_pack import PackedTensor
from ddpprobe.store.manifest import Manifest, version_of
from ddpprobe.store.writer import StoreWriter
from tests import made_packs
from tests.faults.hostile_cases import DEEP, Case, instead, link, odd
from tests.made_runs import ANOMALY, NODE, Made, bad, record, sites

STORED, KEPT = (0, 7), (1, 5)  # attempt and step: in the store; in packs that are not folded
MODULE = "layers.0.mlp"
EVENT = "attempt_000/captures/step_0000000007"
PACK = f"captures/001/{NODE}/rank_00001/step_0000000005.pack"
EVIL = (
    "<script>x()</script>", "<img src=x onerror=x()>", "\x1b[31m\x1b]0;x\x07", "\u202e\u2028\x9b3",
    "'\"><svg/onload=x()>", "=cmd|' /C calc'!A0", "a\nb\r\tc", "{{7*7}}${7*7}%{x}", "../../etc",
)  # fmt: skip
CALL = {
    "micro": 0, "call": 0, "args": {"list": [{"tensor": ""}]}, "kwargs": {"dict": {}},
    "autocast": {}, "rng": "after", "inputs_changed": False,
}  # fmt: skip


def make(path: Path) -> None:
    """Write the run that all cases begin with: one attempt in the store, one in its journals."""
    first = Made(path).whole(20, grow_at=12)
    first.tell(framing.LIFE, {"event": "death", "rank": 1, "signal": "SIGKILL", "time_ns": 1})
    capture(first.run, *STORED)
    first.tell(framing.LIFE, order("trigger: asked"))
    for rank in (0, 1):
        said = {"number": 0, "action": "capture", "start": 7, "stop": 8}
        first.writer(rank).append_json(framing.LIFE, {"event": "order", **said})
        kept = {"event": "captured", "step": 7, "bytes": 9, "reason": "trigger: asked"}
        first.writer(rank).append_json(framing.LIFE, kept)
    first.close()
    folder = StoreWriter(first.run, NODE, block=8, durable=False)
    folder.seal()
    folder.close()
    second = Made(path, attempt=1).whole(12, told=False)
    second.tell(framing.ANOMALY, ANOMALY)
    second.write([record(0, 12, attempt=1, first_bad=bad(0, 12))])
    capture(second.run, *KEPT)
    second.close(cleanly=False)


def order(reason: str) -> dict[str, Any]:
    """Return what the head's daemon says of an order."""
    return {"event": "order", "number": 0, "action": "capture", "start": 7, "stop": 8,
            "modules": [MODULE], "reason": reason, "cause": "request/1"}  # fmt: skip


def capture(run: RunDir, attempt: int, step: int, change: Mapping[str, Any] | None = None) -> None:
    """Write the packs of two ranks: what executes a linear module again."""
    weight, batch = made_packs.whole([5, 7], "float32"), np.ones((4, 7), np.float32)
    shards, rows = made_packs.sharded(weight, [2], [0]), made_packs.batch(batch, [2, 2])
    for rank in (0, 1):
        told = []
        for kind, fqn, dtype, (local, lay) in (
            ("param", f"{MODULE}.weight", "float32", shards[rank]),
            ("input", MODULE, "float32", rows[rank]),
            ("output", MODULE, "bfloat16", rows[rank]),
        ):
            raw = np.frombuffer(np.ascontiguousarray(local).tobytes(), np.uint8)
            shape = tuple(local.shape)
            raw = raw[: raw.nbytes // (1 + (dtype == "bfloat16"))]
            told.append((PackedTensor(MODULE, fqn, kind, "", 0, 0, dtype, shape, lay), raw))
        about = {
            "class": "torch.nn.Linear", "training": True, "calls": [CALL],
            "state": {"weight": f"{MODULE}.weight"},
        }  # fmt: skip
        header = {
            "attempt": attempt, "step": step, "rank": rank, "world_size": 2,
            "wall_time_ns": 10**18 + step, "reason": "trigger: asked", "dropped": 0,
            "modules": {MODULE: about}, **(change or {}),
        }  # fmt: skip
        tensor_pack.write(run.pack(attempt, NODE, rank, step), header, told)


def rewrite(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the index of a pack, so that its checksum holds."""
    path = run / PACK
    data = path.read_bytes()
    _, offset, length, *_ = tensor_pack._FOOTER.unpack(data[-tensor_pack._FOOTER.size :])
    told = json.loads(data[offset : offset + length])
    change(told)
    path.write_bytes(data[:offset] + _ended(offset, json.dumps(told).encode()))


def _ended(offset: int, index: bytes) -> bytes:
    footer = tensor_pack._FOOTER.pack(tensor_pack._MAGIC, offset, len(index), zlib.crc32(index), 0)
    return index + footer


def forge(run: Path, change: Callable[[dict[str, Any]], object], key: str = EVENT) -> None:
    """Change the metadata of an event, and say in the manifest that it is what was committed."""
    path = run / "run.zarr" / key / "zarr.json"
    document = json.loads(path.read_text())
    change(document)
    _forge(run, key, json.dumps(document).encode())


def _forge(run: Path, key: str, data: bytes, name: str = "zarr.json") -> None:
    path = run / "run.zarr" / key / name
    path.write_bytes(data)
    log = Manifest(run / "manifest" / f"{key.replace('/', '.')}.log")
    log.append(log.state, {name: version_of(data)}, durable=False)


def _headers(document: dict[str, Any]) -> dict[str, Any]:
    return document["attributes"]["ddpprobe"]["headers"]


def _odd_pack(run: Path, _: Path, rng: random.Random) -> None:
    rewrite(run, lambda told: odd(told, rng))


def _odd_about(run: Path, _: Path, rng: random.Random) -> None:
    """Change what a pack, or the store, says of a module's call: any JSON is allowed there."""
    if rng.random() < 0.5:
        forge(run, lambda document: odd(_headers(document)[rng.choice("01")], rng))
    else:
        rewrite(run, lambda told: odd(told["header"], rng))


def _odd_event(run: Path, _: Path, rng: random.Random) -> None:
    forge(run, lambda document: odd(document, rng))


def _many(run: Path, _: Path, rng: random.Random) -> None:
    """Tensors without a byte, each of which lies on a mesh of very many ranks."""
    ranks = list(range(200_000))
    layout = {"kind": "dtensor", "ranks": ranks, "mesh": [len(ranks)], "shape": [0],
              "axes": [["shard", 0, 1, ""]]}  # fmt: skip

    def change(told: dict[str, Any]) -> None:
        one = {**told["tensors"][0], "shape": [0], "bytes": 0, "crc": 0, "layout": 0}
        told["layouts"] = [layout]
        told["tensors"] = [{**one, "fqn": f"w{i}"} for i in range(2000)]

    rewrite(run, change)


def sparse(run: Path, _: Path, rng: random.Random) -> None:
    """A pack that holds next to nothing, and says that it is a tensor of 2 GiB."""
    size = 2 << 30
    path = run / PACK
    data = path.read_bytes()
    _, offset, length, *_ = tensor_pack._FOOTER.unpack(data[-tensor_pack._FOOTER.size :])
    told = json.loads(data[offset : offset + length])
    told["tensors"] = [{**told["tensors"][1], "shape": [size // 4], "bytes": size, "offset": 0}]
    path.write_bytes(b"")
    os.truncate(path, size)
    with path.open("ab") as file:
        file.write(_ended(size, json.dumps(told).encode()))


def _names(run: Path, _: Path, rng: random.Random) -> None:
    """Another run, in which everything that has a name has a bad one."""
    shutil.rmtree(run)
    made = Made(run)
    odd_sites = tuple(replace(s, fqn=EVIL[i], leaf=EVIL[-i]) for i, s in enumerate(sites(9)))
    for step in range(8):
        for rank in (0, 1):
            numbers = {"loss": 1.0, **dict.fromkeys(EVIL, 2.0)}
            one = record(rank, step, 9, sites=odd_sites, scalars={rank: numbers})
            made.write([one])
    said = replace(ANOMALY, detector=EVIL[0], module=EVIL[1], message="".join(EVIL), phase=EVIL[2])
    made.tell(framing.ANOMALY, said)
    made.tell(framing.ANOMALY, replace(said, detector="nonfinite", module=odd_sites[1].fqn))
    made.tell(
        framing.LIFE, {"event": "death", "rank": 1, "signal": EVIL[1], "time_ns": 5, "step": 3}
    )
    made.tell(framing.LIFE, order("".join(EVIL)))
    hosts = dict.fromkeys(EVIL, 0.5)
    made.tell(framing.SAMPLE, {"time_ns": 10**18, "host": hosts, "ranks": {"0": hosts}})
    modules = {name: {"class": name, "calls": [CALL], "state": {name: name}} for name in EVIL}
    capture(made.run, 0, 7, {"reason": EVIL[0] + EVIL[2], "modules": modules})
    made.close()
    told = json.loads((run / "run.json").read_text())
    about = {n: EVIL[i % 4] + n for i, n in enumerate(("name", "run_id", "hostname", "backend"))}
    (run / "run.json").write_text(json.dumps({**told, **about, "wrapper": "".join(EVIL)}))


def links() -> Iterator[tuple[str, Case]]:
    """Yield links, pipes, ... in the place of what is captured."""
    places = ("captures", "captures/001", f"captures/001/{NODE}", str(Path(PACK).parent), PACK,
              "run.zarr/attempt_000/captures", f"run.zarr/{EVENT}", f"run.zarr/{EVENT}/zarr.json",
              f"run.zarr/{EVENT}/t00000/value/c/0/0")  # fmt: skip
    for place in places:
        yield f"link {place}", lambda run, outside, _, p=place: link(run / p, outside / "stolen")
    for place in (PACK, f"run.zarr/{EVENT}/t00000/value/c/0/0"):
        yield f"mkfifo {place}", lambda run, _o, _r, p=place: instead(run / p, os.mkfifo)


FORGED: dict[str, Case] = {
    "names": _names,
    "captured: a pickle for a pack": lambda run, _o, _r: (run / PACK).write_bytes(
        b"cos\nsystem\n(S'touch /tmp/ddpprobe-pwned'\ntR."
    ),
    "captured: deep pack": lambda run, _o, _r: (run / PACK).write_bytes(_ended(0, DEEP)),
    "captured: a pack of a million ranks": lambda run, _o, _r: rewrite(
        run, lambda told: told["header"].update(world_size=1 << 40)
    ),
    "captured: many tensors on a large mesh": _many,
    "captured: deep event": lambda run, _o, _r: _forge(run, EVENT, DEEP),
    "captured: an absurd world": lambda run, _o, _r: forge(
        run, lambda d: d["attributes"]["ddpprobe"].update(world_size=1 << 40)
    ),
    "captured: an absurd shape": lambda run, _o, _r: forge(
        run, lambda d: d["consolidated_metadata"]["metadata"]["t00000/value"].update(
            shape=[1 << 60, 1 << 60]
        ),
    ),
    "captured: expired is deep": lambda run, _o, _r: _forge(run, "attempt_000/captures", DEEP),
    "captured: expired is a list": lambda run, _o, _r: _forge(run, "attempt_000/captures", b"[1]"),
    "captured: expired is a word": lambda run, _o, _r: forge(
        run, lambda d: d["attributes"]["ddpprobe"].update(expired=["x", {}]), "attempt_000/captures"
    ),
    "captured: a sparse chunk": lambda run, _o, _r: os.truncate(
        run / "run.zarr" / EVENT / "t00000/value/c/0/0", 1 << 40
    ),
}  # fmt: skip
ODDITIES: dict[str, Case] = {
    "odd pack": _odd_pack, "odd event": _odd_event, "odd call": _odd_about,
}  # fmt: skip
