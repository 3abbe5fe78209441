"""Runs as a stranger may send them, and what every reading verb must make of them.

As a script, `hostile.py SCRATCH ODDITIES SEED [MOST]`, it makes all (or so many) of them one after
the other and prints a line of JSON for each that fails, and one at the end: it is a process of its
own, so that its memory can be measured.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs
import numpy as np

from ddpprobe import cli, codec
from ddpprobe.layout import RunDir
from ddpprobe.store.commit import GroupWriter
from ddpprobe.store.manifest import Manifest, version_of
from ddpprobe.store.writer import StoreWriter
from tests.made_runs import ANOMALY, NODE, Made, bad, record

VERBS = (
    ("info",), ("anomalies",), ("anomalies", "--json"), ("trace", "--site", "*"),
    ("trace", "--site", "*", "--rank", "1", "--stat", "nan", "--json"), ("verify",),
    ("info", "--json"),
)  # fmt: skip
GROUP, LOG = "attempt_000/rank_00001", "manifest/attempt_000.rank_00001.log"
MEMORY_BYTES = 512 << 20
SECONDS = 30.0
DEEP = b"[" * 100_000 + b"]" * 100_000
ODD = (
    None, -1, 1 << 40, 1 << 200, float("inf"), float("nan"), True, "", "x\x1b[2J<script>", "\ud800",
    [], {}, [[]], [1, 2], {"a": None}, [None], [[0, "zz"]],
)  # fmt: skip
HARMFUL = ("exec", "compile", "pickle.find_class", "socket.connect", "socket.bind", "os.system",
           "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "ctypes.dlopen",
           "marshal.loads", "os.remove", "os.rename", "os.truncate", "os.mkdir")  # fmt: skip

Case = Callable[[Path, Path, random.Random], None]


def make(path: Path) -> None:
    """Write the run that all cases begin with: one attempt in the store, one in its journals."""
    first = Made(path).whole(20, grow_at=12)
    first.tell(codec.LIFE, {"event": "death", "rank": 1, "signal": "SIGKILL", "time_ns": 1})
    first.close()
    folder = StoreWriter(first.run, NODE, block=8, durable=False)
    folder.seal()
    folder.close()
    second = Made(path, attempt=1).whole(12, told=False)
    second.tell(codec.ANOMALY, ANOMALY)
    second.write([record(0, 12, attempt=1, first_bad=bad(0, 12))])
    second.close(cleanly=False)


# ---- things that lead out of the run


def _links() -> Iterator[tuple[str, Case]]:
    wal = f"journal/001/{NODE}/rank_00001/00000000.wal"
    places = ("run.json", "run.zarr", "manifest", "journal", "run.zarr/attempt_000", LOG, wal,
              f"run.zarr/{GROUP}", f"run.zarr/{GROUP}/counts", f"run.zarr/{GROUP}/zarr.json",
              f"run.zarr/{GROUP}/counts/c/0/0/0", f"run.zarr/{GROUP}/step/c/0", "journal/001",
              f"journal/001/{NODE}", f"journal/001/{NODE}/rank_00001")  # fmt: skip
    for place in places:
        yield f"link {place}", lambda run, outside, _, p=place: _link(run / p, outside / "stolen")
        if (place.count("/"), place[-4:]) != (0, "") and "." in place.rpartition("/")[2]:
            for kind in (os.mkfifo, _socket, _device):
                name = kind.__name__.strip("_")
                yield f"{name} {place}", lambda run, _o, _r, p=place, k=kind: _instead(run / p, k)
    for kind in (os.mkfifo, _socket, _device):
        for place in ("run.lock", "daemon/node_0000.lock", f"heartbeat/000/{NODE}/rank_00001"):
            name = kind.__name__.strip("_")
            yield f"{name} {place}", lambda run, _o, _r, p=place, k=kind: _instead(run / p, k)


def _link(path: Path, target: Path) -> None:
    path.rename(target)
    path.symlink_to(target)


def _instead(path: Path, make_it: Callable[[Path], object]) -> None:
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


def _with_crc(data: bytes) -> bytes:
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
    numbers = _with_crc(_zeros_in_blosc("lz4"))
    for number in range(200):
        forge(run, f"step/c/{number}", numbers, step=16384 * (number + 1))


def _many_sites(run: Path, _: Path, rng: random.Random) -> None:
    text = _with_crc(_zeros_in_zstd(4 + 4 * 16384))
    for name in ("site", "fqn", "kind", "leaf", "placement", "dtype"):
        for number in range(7):
            forge(run, f"{name}/c/{number}", text, site=16384 * 7)


FORGED: dict[str, Case] = {
    "absurd size": _of_absurd_size,
    "negative size": lambda run, _o, _r: forge(run, "x", b"", step=-5, site=-1),
    "many rows": _many_rows,
    "many sites": _many_sites,
    "zstd bomb": lambda run, _o, _r: forge(run, "fqn/c/0", _with_crc(_zeros_in_zstd(1 << 30))),
    "zstd bomb in bounds": lambda run, _o, _r: forge(
        run, "fqn/c/0", _with_crc(_zeros_in_zstd(60 << 20))
    ),
    "zstd of unknown size": lambda run, _o, _r: forge(
        run, "fqn/c/0", _with_crc(struct.pack("<IBB", 0xFD2FB528, 0, 88) + bytes(40))
    ),
    "blosc bomb": lambda run, _o, _r: forge(run, "step/c/0", _with_crc(BLOSC_BOMB)),
    "blosc of another codec": lambda run, _o, _r: forge(
        run, "step/c/0", _with_crc(_zeros_in_blosc("zstd"))
    ),
    "strings too many": lambda run, _o, _r: forge(
        run, "fqn/c/0", _with_crc(bytes(numcodecs.Zstd(1).encode(b"\xff" * (4 + 4 * 16384))))
    ),
    "shard index out of bounds": lambda run, _o, _r: forge(
        run, "counts/c/0/0/0", _with_crc(struct.pack("<14Q", *[1 << 62] * 14))
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
    frame = codec.encode_frame(codec.META, Manifest(log).lines, payload)
    log.write_bytes(log.read_bytes() + frame)


# ---- JSON whose checksum holds and whose values make no sense


def _odd_run_json(run: Path, _: Path, rng: random.Random) -> None:
    path = run / "run.json"
    path.write_text(json.dumps(_odd(json.loads(path.read_text()), rng, keep="format_version")))


def _odd_frames(run: Path, _: Path, rng: random.Random) -> None:
    """Change a JSON frame, or the JSON in front of a record, in some journal."""
    path = rng.choice(sorted((run / "journal/001").rglob("*.wal")))
    out = b""
    frames = list(codec.iter_frames(path.read_bytes()))
    chosen = rng.randrange(len(frames))
    for number, frame in enumerate(frames):
        payload = frame.payload
        if number == chosen:
            payload = _odd_payload(frame, rng)
        out += codec.encode_frame(frame.type, frame.seq, payload)
    path.write_bytes(out)


def _odd_payload(frame: codec.Frame, rng: random.Random) -> bytes:
    if frame.type != codec.RECORD:
        return json.dumps(_odd(json.loads(frame.payload), rng)).encode()
    size = int.from_bytes(frame.payload[:4], "little")
    head = json.dumps(_odd(json.loads(frame.payload[4 : 4 + size]), rng)).encode()
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


def _odd(value: Any, rng: random.Random, keep: str = "") -> Any:
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
# What is not damage, or of which nobody is told: a link in the place of what is optional.
UNSEEN = ("run.lock", "daemon/", "heartbeat/", "odd ", "link journal", "many rows", "many sites")


def cases(oddities: int) -> Iterator[tuple[str, Case]]:
    """Yield all cases by name, the oddities `oddities` times each."""
    yield from _links()
    yield from FORGED.items()
    for name, case in ODDITIES.items():
        yield from ((f"{name} {i}", case) for i in range(oddities))


def problems_of(run: Path, outside: Path, name: str, heard: list[str]) -> Iterator[str]:
    """Run every verb; yield what is not as it must be."""
    codes = {}
    canaries = [p for p in (outside, *outside.rglob("*")) if not p.is_symlink()]
    for path in canaries:
        os.utime(path, (0, path.stat().st_mtime))
    for verb, *options in VERBS:
        out, err = io.StringIO(), io.StringIO()
        heard.clear()
        started = time.monotonic()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                codes[verb] = cli.main([verb, str(run), *options])
            except Exception as error:  # noqa: BLE001  (the finding)
                yield f"{verb} raised {type(error).__name__}: {error}"
                continue
        if time.monotonic() - started > SECONDS:
            yield f"{verb} took {time.monotonic() - started:.0f} s"
        if codes[verb] not in (0, 1, 2, 3):
            yield f"{verb} exits with {codes[verb]}"
        said = out.getvalue() + err.getvalue()
        if any(ord(c) < 32 and c != "\n" for c in said):
            yield f"{verb} lets control characters through"
        yield from (f"{verb} does {event}" for event in sorted(set(heard)))
    followed = [str(p) for p in canaries if p.stat().st_atime > 1]
    if followed:
        yield f"read outside of the run: {followed[:3]}"
    if codes.get("verify") not in (2, 3) and not any(word in name for word in UNSEEN):
        yield f"verify finds nothing: {codes}"


def main(scratch: Path, oddities: int, seed: int, most: int = 0) -> int:
    """Go through the cases; a line for each that failed, and one at the end with the memory."""
    model, heard, failed, done = scratch / "model", list[str](), 0, 0
    make(model)
    list(problems_of(model, scratch, "odd ", heard))  # imports what there is to import
    sys.addaudithook(lambda event, _: heard.append(event) if event in HARMFUL else None)
    chosen = list(cases(oddities))
    for name, case in random.Random(seed).sample(chosen, most) if most else chosen:
        run, outside = scratch / "run", scratch / "outside"
        shutil.copytree(model, run)
        outside.mkdir()
        case(run, outside, random.Random(f"{seed} {name}"))
        found = list(problems_of(run, outside, name, heard))
        if found:
            print(json.dumps({"case": name, "problems": found}), flush=True)
        failed, done = failed + bool(found), done + 1
        shutil.rmtree(run)
        shutil.rmtree(outside)
    # Not getrusage, whose peak is that of whoever forked this process, if that was larger.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) * 1024
    print(json.dumps({"cases": done, "failed": failed, "peak_bytes": peak}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
