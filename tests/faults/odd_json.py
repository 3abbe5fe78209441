"""JSON documents of a run, one of each sort, and what a stranger may put into their places."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddpprobe.rundir import framing, tensor_pack
from ddpprobe.rundir.paths import RunDir, write_json
from tests.faults.hostile_captures import EVENT, PACK, make, order
from tests.made_runs import NODE, Made

GONE = "left out"
DEEP = "@deep@"
ODD = (
    float("inf"), float("-inf"), float("nan"), 10**400, -(10**400), 2**63, -1, 1e308, True, None,
    "", "x", "\ud800", "\x1b[2J", [], {}, [[]], [1, 2], {"a": None}, DEEP, GONE,
)  # fmt: skip
Path_ = tuple[str | int, ...]
# What ranks and daemons say, of each sort once; `make` has some of them.
OF_RANK: tuple[dict[str, Any], ...] = (
    {"event": "sites", "expected": 3, "observed": 2, "step": 4, "unsupported": {"a": 2},
     "silent": ["b"]},
    {"event": "dropped", "reason": "ENOSPC", "count": 3},
    {"event": "fuse", "component": "hooks", "error": "ValueError"},
    {"event": "trigger", "number": 1, "step": 4, "reason": "asked for"},
    {"event": "topology", "wrapper": "ddp", "device": "cpu"},
    {"event": "unsampled", "step": 3, "reason": "too early"},
    {"event": "blind", "step": 4, "modules": ["a"], "count": 1},
    {"event": "interval", "step": 5, "every": 20, "ratio": 0.1},
    {"event": "order", "number": 0, "action": "capture", "start": 7, "stop": 8},
    {"event": "captured", "step": 5, "bytes": 9, "reason": "trigger: asked"},
    {"event": "paused", "reason": "checkpoint", "time_ns": 5},
    {"event": "resumed", "time_ns": 6},
    {"event": "closed", "status": "ok"},
)  # fmt: skip
OF_DAEMON: tuple[dict[str, Any], ...] = (
    {"event": "death", "rank": 1, "signal": "SIGKILL", "time_ns": 5, "step": 3, "first": True},
    order("trigger: asked"),
    {"event": "pushed", "step": 4},
    {"event": "finished"},
    {"event": "sealed"},
)
SAMPLE = {"time_ns": 5, "host": {"cpu_ratio": 0.5, "load1": 1.0},
          "ranks": {"0": {"resident_bytes": 4.0, "cpu_seconds": 1.0}}}  # fmt: skip
SERVES = {"pid": 1 << 22, "listen": "127.0.0.1:1", "gather": None, "started_ns": 5, "run_id": "id"}


def make_all(path: Path) -> RunDir:
    """Write the run of the hostile cases, and in it what else there can be."""
    make(path)
    run, second = RunDir(path), Made(path, attempt=1)
    for directory, said in (
        (run.rank_journal(1, NODE, 0), OF_RANK), (run.daemon_journal(1, NODE), OF_DAEMON)
    ):  # fmt: skip
        frames = [(framing.LIFE, event) for event in said]
        frames += [(framing.SAMPLE, SAMPLE)] if said is OF_DAEMON else []
        before = [path.read_bytes() for path in sorted(directory.glob("*.wal"))]
        due = 1 + max(frame.seq for data in before for frame in framing.iter_frames(data))
        # The last segment: nothing that was written before is read in another way.
        block = b"".join(
            framing.encode_frame(type_, seq, framing.encode_json(value))
            for seq, (type_, value) in enumerate([(framing.META, second._meta(0)), *frames], due)
        )
        (directory / "00000090.wal").write_bytes(block)
    run.daemon_file(NODE, "json").parent.mkdir(exist_ok=True)
    write_json(run.daemon_file(NODE, "json"), SERVES)
    return run


def places(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Yield the place of each value in a document, of the first two in a list."""
    yield at
    inner = value.items() if isinstance(value, dict) else ()
    inner = list(enumerate(value))[:2] if isinstance(value, list) else inner
    for key, one in inner:
        yield from places(one, (*at, key))


def changed(value: Any, at: Path_, odd: Any) -> bytes:
    """Return a document in which one value is another one, or is left out."""
    root = [json.loads(json.dumps(value))]
    holder: Any = root
    key: Any = 0
    for part in at:
        holder, key = holder[key], part
    if odd == GONE and at:
        del holder[key]
    else:
        holder[key] = odd
    return json.dumps(root[0]).replace(f'"{DEEP}"', "[" * 9000 + "]" * 9000).encode()


def journals(run: RunDir) -> list[Path]:
    """Return the journal segments that are not in the store, one after the other."""
    return sorted((run.path / "journal/001").rglob("*.wal"))


def with_frame(data: bytes, number: int, payload: bytes) -> bytes:
    """Return a journal in which one frame has another payload, and a checksum that holds."""
    out = b""
    for i, frame in enumerate(framing.iter_frames(data)):
        out += framing.encode_frame(
            frame.type, frame.seq, payload if i == number else frame.payload
        )
    return out


def head_of(frame: framing.Frame) -> tuple[Any, bytes]:
    """Return the JSON of a frame, and the bytes after it."""
    if frame.type != framing.RECORD:
        return json.loads(frame.payload), b""
    size = int.from_bytes(frame.payload[:4], "little")
    return json.loads(frame.payload[4 : 4 + size]), frame.payload[4 + size :]


def payload_of(frame: framing.Frame, head: bytes) -> bytes:
    """Return the payload of a frame whose JSON is another one."""
    if frame.type != framing.RECORD:
        return head
    return len(head).to_bytes(4, "little") + head + head_of(frame)[1]


def event_document(run: RunDir) -> dict[str, Any]:
    """Return the metadata of the captured step that is in the store."""
    return dict(json.loads((run.store / EVENT / "zarr.json").read_bytes()))


def pack_index(run: RunDir) -> dict[str, Any]:
    """Return the index of the pack that is not in the store."""
    data = (run.path / PACK).read_bytes()
    _, offset, length, *_ = tensor_pack._FOOTER.unpack(data[-tensor_pack._FOOTER.size :])
    return dict(json.loads(data[offset : offset + length]))
