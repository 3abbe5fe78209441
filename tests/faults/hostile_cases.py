"""Runs as a stranger may send them: what is done to a run that was fine."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs
import numpy as np

from ddpprobe.rundir import framing
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store.commit import GroupWriter
from ddpprobe.store.manifest import Manifest, version_of
from tests.made_runs import NODE

GROUP, LOG = "attempt_000/rank_00001", "manifest/attempt_000.rank_00001.log"
DEEP = b"[" * 100_000 + b"]" * 100_000
ODD = (
    None, -1, 1 << 40, 1 << 200, float("inf"), float("nan"), True, "", "x\x1b[2J<script>", "\ud800",
    [], {}, [[]], [1, 2], {"a": None}, [None], [[0, "zz"]],
)  # fmt: skip
Case = Callable[[Path, Path, random.Random], None]


# ---- things that lead out of the run


def links() -> Iterator[tuple[str, Case]]:
    wal = f"journal/001/{NODE}/rank_00001/00000000.wal"
    places = ("run.json", "run.zarr", "manifest", "journal", "run.zarr/attempt_000", LOG, wal,
              f"run.zarr/{GROUP}", f"run.zarr/{GROUP}/counts", f"run.zarr/{GROUP}/zarr.json",
              f"run.zarr/{GROUP}/counts/c/0/0/0", f"run.zarr/{GROUP}/step/c/0", "journal/001",
              f"journal/001/{NODE}", f"journal/001/{NODE}/rank_00001")  # fmt: skip
    for place in places:
        yield f"link {place}", lambda run, outside, _, p=place: link(run / p, outside / "stolen")
        if (place.count("/"), place[-4:]) != (0, "") and "." in place.rpartition("/")[2]:
            for kind in (os.mkfifo, _socket, _device):
                name = kind.__name__.strip("_")
                yield f"{name} {place}", lambda run, _o, _r, p=place, k=kind: instead(run / p, k)
    for kind in (os.mkfifo, _socket, _device):
        for place in ("run.lock", "daemon/node_0000.lock", f"heartbeat/000/{NODE}/rank_00001"):
            name = kind.__name__.strip("_")
            yield f"{name} {place}", lambda run, _o, _r, p=place, k=kind: instead(run / p, k)


def link(path: Path, target: Path) -> None:
    path.rename(target)
    path.symlink_to(target)


def instead(path: Path, make_it: Callable[[Path], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    make_it(path)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # its name may be no longer than 107 bytes
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def _device(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero, without an end


def _traversal(run: Path, outside: Path, rng: random.Random) -> None:
    (outside / "stolen").write_bytes(b"x")
    log = Manifest(run / LOG)
    way = os.path.relpath(outside / "stolen", run / "run.zarr" / GROUP)
    log.append(log.state, {way: (1, 2), "/etc/passwd": (3, 4), "a\0b": (1, 1)}, durable=False)


# ---- files that agree with their manifest, as only malice makes them


def forge(run: Path, key: str, data: bytes, **sizes: int) -> None:
    """Replace a file of the group, and say in the manifest that it is what was committed."""
    path = run / "run.zarr" / GROUP / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    log = Manifest(run / LOG)
    log.state.sizes.update(sizes)
    log.append(log.state, {key: version_of(data)}, durable=False)


def with_crc(data: bytes) -> bytes:
    return data + struct.pack("<I", google_crc32c.value(data))


def _zeros_in_zstd(size: int) -> bytes:
    return bytes(numcodecs.Zstd(1).encode(bytes(size)))


def _zeros_in_blosc(codec_name: str) -> bytes:
    return bytes(numcodecs.Blosc(codec_name, 5, 2).encode(np.zeros(16384, "<i8")))


BLOSC_BOMB = struct.pack("<BBBBIII", 2, 1, 0x24, 8, 1 << 31, 1 << 20, 64) + bytes(48)


def _change(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = run / "run.zarr" / GROUP / "zarr.json"
    document = json.loads(path.read_text())
    change(document)
    forge(run, "zarr.json", json.dumps(document).encode())


def _arrays(document: dict[str, Any]) -> dict[str, Any]:
    return document["consolidated_metadata"]["metadata"]


def _of_absurd_size(run: Path, _: Path, rng: random.Random) -> None:
    _change(run, lambda d: _arrays(d)["counts"].update(shape=[1 << 40, 1 << 20, 7]))
    log = Manifest(run / LOG)
    log.state.sizes.update(step=1 << 40, site=1 << 20)
    log.append(log.state, {}, durable=False)


def _many_rows(run: Path, _: Path, rng: random.Random) -> None:
    """Rows for which there are files, all of them the same few bytes."""
    numbers = with_crc(_zeros_in_blosc("lz4"))
    for number in range(200):
        forge(run, f"step/c/{number}", numbers, step=16384 * (number + 1))


def _many_sites(run: Path, _: Path, rng: random.Random) -> None:
    text = with_crc(_zeros_in_zstd(4 + 4 * 16384))
    for name in ("site", "fqn", "kind", "leaf", "placement", "dtype"):
        for number in range(7):
            forge(run, f"{name}/c/{number}", text, site=16384 * 7)


FORGED: dict[str, Case] = {
    "absurd size": _of_absurd_size,
    "negative size": lambda run, _o, _r: forge(run, "x", b"", step=-5, site=-1),
    "many rows": _many_rows,
    "many sites": _many_sites,
    "zstd bomb": lambda run, _o, _r: forge(run, "fqn/c/0", with_crc(_zeros_in_zstd(1 << 30))),
    "zstd bomb in bounds": lambda run, _o, _r: forge(
        run, "fqn/c/0", with_crc(_zeros_in_zstd(60 << 20))
    ),
    "zstd of unknown size": lambda run, _o, _r: forge(
        run, "fqn/c/0", with_crc(struct.pack("<IBB", 0xFD2FB528, 0, 88) + bytes(40))
    ),
    "blosc bomb": lambda run, _o, _r: forge(run, "step/c/0", with_crc(BLOSC_BOMB)),
    "blosc of another codec": lambda run, _o, _r: forge(
        run, "step/c/0", with_crc(_zeros_in_blosc("zstd"))
    ),
    "strings too many": lambda run, _o, _r: forge(
        run, "fqn/c/0", with_crc(bytes(numcodecs.Zstd(1).encode(b"\xff" * (4 + 4 * 16384))))
    ),
    "shard index out of bounds": lambda run, _o, _r: forge(
        run, "counts/c/0/0/0", with_crc(struct.pack("<14Q", *[1 << 62] * 14))
    ),
    "a pickle for a chunk": lambda run, _o, _r: forge(
        run, "step/c/0", b"cos\nsystem\n(S'touch /tmp/ddpprobe-pwned'\ntR."
    ),
    "a pickle codec": lambda run, _o, _r: _change(
        run, lambda d: _arrays(d)["step"].update(codecs=[{"name": "numcodecs.pickle"}])
    ),
    "an object dtype": lambda run, _o, _r: _change(
        run, lambda d: _arrays(d)["counts"].update(data_type="object")
    ),
    "arrays that are a number": lambda run, _o, _r: _change(
        run, lambda d: d["consolidated_metadata"].update(metadata=17)
    ),
    "a version that is a word": lambda run, _o, _r: _change(
        run, lambda d: d["attributes"]["ddpprobe"].update(format_version="new")
    ),
    "deep metadata": lambda run, _o, _r: forge(run, "zarr.json", DEEP),
    "huge metadata": lambda run, _o, _r: forge(run, "zarr.json", b"[" + b"[]," * (9 << 20) + b"1]"),
    "path traversal": _traversal,
    "deep manifest": lambda run, _o, _r: _log(run, DEEP),
    "huge manifest line": lambda run, _o, _r: _log(run, b'{"files":{' + b'"a":[1,2],' * (3 << 20)),
    "a manifest of magics": lambda run, _o, _r: (run / LOG).write_bytes(b"dpp1" * (6 << 20)),
    "a sparse manifest": lambda run, _o, _r: os.truncate(run / LOG, 1 << 40),
    "a sparse chunk": lambda run, _o, _r: os.truncate(
        run / "run.zarr" / GROUP / "step/c/0", 1 << 40
    ),
    "a sparse segment": lambda run, _o, _r: os.truncate(
        run / f"journal/001/{NODE}/rank_00000/00000000.wal", 1 << 40
    ),
    "deep run.json": lambda run, _o, _r: (run / "run.json").write_bytes(DEEP),
    "run.json is a list": lambda run, _o, _r: (run / "run.json").write_bytes(b"[1]"),
    "run.json is binary": lambda run, _o, _r: (run / "run.json").write_bytes(bytes(range(256))),
    "a sparse run.json": lambda run, _o, _r: os.truncate(run / "run.json", 1 << 40),
}  # fmt: skip


def _log(run: Path, payload: bytes) -> None:
    log = run / LOG
    frame = framing.encode_frame(framing.META, Manifest(log).lines, payload)
    log.write_bytes(log.read_bytes() + frame)


# ---- JSON whose checksum holds and whose values make no sense


def _odd_run_json(run: Path, _: Path, rng: random.Random) -> None:
    path = run / "run.json"
    path.write_text(json.dumps(odd(json.loads(path.read_text()), rng, keep="format_version")))


def _odd_frames(run: Path, _: Path, rng: random.Random) -> None:
    """Change a JSON frame, or the JSON in front of a record, in some journal."""
    path = rng.choice(sorted((run / "journal/001").rglob("*.wal")))
    out = b""
    frames = list(framing.iter_frames(path.read_bytes()))
    chosen = rng.randrange(len(frames))
    for number, frame in enumerate(frames):
        payload = frame.payload
        if number == chosen:
            payload = _odd_payload(frame, rng)
        out += framing.encode_frame(frame.type, frame.seq, payload)
    path.write_bytes(out)


def _odd_payload(frame: framing.Frame, rng: random.Random) -> bytes:
    if frame.type != framing.RECORD:
        return json.dumps(odd(json.loads(frame.payload), rng)).encode()
    size = int.from_bytes(frame.payload[:4], "little")
    head = json.dumps(odd(json.loads(frame.payload[4 : 4 + size]), rng)).encode()
    return len(head).to_bytes(4, "little") + head + frame.payload[4 + size :]


def _odd_rows(run: Path, _: Path, rng: random.Random) -> None:
    """Change values in a one-dimensional array of some group, through the store's own writer."""
    key = rng.choice(["merged", "rank_00001", "anomalies", NODE])
    group = GroupWriter(RunDir(run), f"attempt_000/{key}", durable=False)
    columns = [c for c in group.columns.values() if len(c.dims) == 1 and group.sizes[c.dims[0]]]
    column = rng.choice(columns)
    at = rng.randrange(group.sizes[column.dims[0]])
    if column.dtype == "string":
        value = rng.choice(
            ["", "{}", "[]", "\x1b]0;x\x07", "[" * 5000, '{"event":"death","rank":[]}']
        )
        group.put(column.name, (at,), np.array([value], object))
    else:
        low, high = (0, 255) if column.dtype == "uint8" else (-128, 127)
        wide = column.dtype == "int64"
        value = rng.choice([low, high, 0, 99, *((-(2**63), 2**63 - 1) if wide else ())])
        group.put(column.name, (at,), np.array([value], column.dtype))
    group.commit()


def odd(value: Any, rng: random.Random, keep: str = "") -> Any:
    """Replace one value somewhere in a JSON tree, or leave out a key."""
    where = value
    for _ in range(4):
        keys = [k for k in where if k != keep] if isinstance(where, dict) else range(len(where))
        if not keys:
            return rng.choice(ODD)
        key = rng.choice(list(keys))
        inner = where[key]
        if isinstance(inner, (dict, list)) and inner and rng.random() < 0.7:
            where = inner
            continue
        if isinstance(where, dict) and rng.random() < 0.2:
            del where[key]
        else:
            where[key] = rng.choice(ODD)
        break
    return value


ODDITIES: dict[str, Case] = {
    "odd run.json": _odd_run_json, "odd frame": _odd_frames, "odd rows": _odd_rows,
}  # fmt: skip
