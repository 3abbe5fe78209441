"""Packs: what is written is read, and what is damaged is refused."""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddpprobe.errors import PackDamaged
from ddpprobe.rundir import tensor_pack
from ddpprobe.rundir.paths import RunDir, make_dir
from ddpprobe.rundir.tensor_pack import ITEM_SIZES, Pack, PackedTensor

HEADER = {"attempt": 0, "step": 412, "rank": 3, "world_size": 4, "modules": {}}
BATCH = {"kind": "batch", "dim": 0, "ranks": [0, 1]}


def tensor(fqn: str, raw: np.ndarray, **facts: object) -> tuple[PackedTensor, np.ndarray]:
    given = {"dtype": "uint8", "shape": (raw.size,), "layout": BATCH, **facts}
    return PackedTensor("m", fqn, "input", "0", 0, 0, **given), raw


def write_one(path: Path) -> bytes:
    raws = [np.arange(n, dtype=np.uint8) for n in (100, 0, 64)]
    tensor_pack.write(path, HEADER, [tensor(f"t{i}", raw) for i, raw in enumerate(raws)])
    return path.read_bytes()


def read_all(path: Path) -> list[tuple[PackedTensor, bytes]]:
    pack = Pack.open(path)
    return [(t, pack.raw(i).tobytes()) for i, t in enumerate(pack.tensors)]


def rewrite_index(path: Path, change) -> None:
    """Forge an index, with the right checksum."""
    data = path.read_bytes()
    magic, offset, length, _, zero = struct.unpack("<8sQQII", data[-32:])
    told = json.loads(data[offset : offset + length])
    index = change(told) or json.dumps(told)
    index = index if isinstance(index, bytes) else index.encode()
    footer = struct.pack("<8sQQII", magic, offset, len(index), zlib.crc32(index), zero)
    path.write_bytes(data[:offset] + index + footer)


names = st.text(max_size=20).filter(lambda s: not any("\ud800" <= c <= "\udfff" for c in s))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(
            names, st.sampled_from(sorted(ITEM_SIZES)), st.lists(st.integers(0, 5), max_size=4)
        ),
        max_size=6,
    ),
    st.integers(0, 2**31),
)
def test_what_is_written_is_read_in_every_dtype_and_shape(tmp_path, told, seed) -> None:
    path, made = tmp_path / "one.pack", []
    for i, (name, dtype, shape) in enumerate(told):
        count = int(np.prod(shape, dtype=int)) * ITEM_SIZES[dtype]
        raw = np.random.default_rng(seed + i).integers(0, 256, count, dtype=np.uint8)
        made.append(tensor(name, raw, dtype=dtype, shape=tuple(shape), layout={**BATCH, "dim": i}))
    size = tensor_pack.write(path, {**HEADER, "reason": "x"}, made)
    pack = Pack.open(path)
    assert (pack.bytes, path.stat().st_size) == (size, size)
    assert pack.header == {**HEADER, "reason": "x"}
    for i, (mine, raw) in enumerate(made):
        found = pack.tensors[i]
        assert (found.fqn, found.dtype, found.shape) == (mine.fqn, mine.dtype, mine.shape)
        assert (found.layout, found.offset % 64) == (mine.layout, 0)
        assert pack.raw(i).tobytes() == raw.tobytes()


def test_no_flipped_bit_and_no_cut_gives_a_wrong_byte(tmp_path) -> None:
    path = tmp_path / "one.pack"
    whole = write_one(path)
    right = read_all(path)
    padding = {*range(100, 128)}  # between tensors: nobody's bytes
    assert len(right) == 3
    for at in range(len(whole)):
        bad = bytearray(whole)
        bad[at] ^= 1 << (at % 8)
        path.write_bytes(bad)
        if at in padding:
            assert read_all(path) == right
        else:
            with pytest.raises(PackDamaged):
                read_all(path)
    for length in [*range(0, len(whole), 7), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(PackDamaged):
            read_all(path)


FORGERIES = {
    "sizes beyond the file": lambda t: t["tensors"][2].update(bytes=1 << 50, shape=[1 << 50]),
    "an absurd shape": lambda t: t["tensors"][0].update(shape=[1 << 62, 1 << 62]),
    "a negative offset": lambda t: t["tensors"][0].update(offset=-64),
    "overlapping tensors": lambda t: t["tensors"][2].update(offset=64),
    "a foreign dtype": lambda t: t["tensors"][0].update(dtype="object"),
    "a foreign kind": lambda t: t["tensors"][0].update(kind="exec"),
    "a layout that is not there": lambda t: t["tensors"][0].update(layout=7),
    "an unknown layout": lambda t: t["layouts"].__setitem__(0, {"kind": "magic"}),
    "a field too many": lambda t: t["tensors"][0].update(more=1),
    "a number where a name is": lambda t: t["tensors"][0].update(fqn=1),
    "true for a number": lambda t: t["tensors"][0].update(micro=True),
    "a header without a step": lambda t: t["header"].pop("step"),
    "not a number": lambda t: json.dumps(t).replace('"micro": 0', '"micro": NaN', 1),
    "no text": lambda t: b"\xff\xfe",
    "deep nesting": lambda t: "[" * 100_000,
    "no mapping": lambda t: "[]",
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_an_index_that_lies_is_refused_and_nothing_is_allocated(forgery, tmp_path) -> None:
    path = tmp_path / "one.pack"
    write_one(path)

    def change(told):
        found = FORGERIES[forgery](told)
        return found if isinstance(found, str | bytes) else None

    rewrite_index(path, change)
    with pytest.raises(PackDamaged):
        Pack.open(path)


def test_an_index_larger_than_the_bound_is_neither_read_nor_written(tmp_path, monkeypatch) -> None:
    path = tmp_path / "one.pack"
    write_one(path)
    monkeypatch.setattr(tensor_pack, "MAX_INDEX", 100)
    with pytest.raises(PackDamaged, match="footer"):
        Pack.open(path)
    with pytest.raises(PackDamaged, match="bytes"):
        write_one(tmp_path / "two.pack")
    assert not (tmp_path / "two.pack").exists()


def test_a_tensor_is_read_and_checked_piece_by_piece(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tensor_pack, "_READ_BYTES", 48)
    path = tmp_path / "one.pack"
    whole = write_one(path)
    assert [raw for _, raw in read_all(path)] == [bytes(range(n)) for n in (100, 0, 64)]
    pack = Pack.open(path)
    for i in range(3):
        pack.check(i)
    path.write_bytes(whole[:99] + b"\xff" + whole[100:])  # in the last piece of the first
    for look in (pack.check, pack.raw):
        with pytest.raises(PackDamaged, match="checksum differs"):
            look(0)
    pack.check(2)


def test_a_tensor_that_no_memory_holds_is_refused(tmp_path) -> None:
    size = 1 << 60
    claim, _ = tensor("t", np.empty(0, np.uint8), shape=(size,), bytes=size)
    with pytest.raises(PackDamaged, match=f"{size} bytes do not fit"):
        Pack(tmp_path / "one.pack", HEADER, (claim,), size + 100).raw(0)


def test_what_is_no_file_is_refused(tmp_path) -> None:
    write_one(tmp_path / "one.pack")
    (tmp_path / "link").symlink_to(tmp_path / "one.pack")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(PackDamaged):
            Pack.open(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        Pack.open(tmp_path / "none")


def test_a_file_that_was_replaced_meanwhile_is_not_mixed_up(tmp_path) -> None:
    path = tmp_path / "one.pack"
    write_one(path)
    pack = Pack.open(path)
    tensor_pack.write(path, HEADER, [tensor("other", np.ones(500, np.uint8))])
    with pytest.raises(PackDamaged):
        pack.raw(0)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_refuses_leaves_nothing_behind(code, tmp_path, monkeypatch) -> None:
    path = RunDir(tmp_path).pack(0, "node_0000", 3, 412)
    before = write_one(path)
    real, calls = os.writev, []

    def refuse(fd, buffers):
        calls.append(fd)
        if len(calls) > 1:
            raise OSError(code, os.strerror(code))
        return real(fd, [buffers[0][:10]])  # a part is taken, then nothing more

    monkeypatch.setattr(os, "writev", refuse)
    with pytest.raises(OSError, match=os.strerror(code)):
        write_one(path)
    assert [p.name for p in path.parent.iterdir()] == ["step_0000000412.pack"]
    assert path.read_bytes() == before


def test_short_writes_and_many_tensors_are_all_written(tmp_path, monkeypatch) -> None:
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, buffers: real(fd, [buffers[0][:33]]))
    raws = [np.full(i % 50, i % 256, np.uint8) for i in range(1500)]
    tensor_pack.write(
        tmp_path / "one.pack", HEADER, [tensor(str(i), raw) for i, raw in enumerate(raws)]
    )
    assert [raw for _, raw in read_all(tmp_path / "one.pack")] == [raw.tobytes() for raw in raws]


def test_a_tensor_that_is_not_what_it_says_is_not_written(tmp_path) -> None:
    with pytest.raises(PackDamaged, match="10 bytes"):
        tensor_pack.write(
            tmp_path / "p", HEADER, [tensor("t", np.zeros(10, np.uint8), dtype="float32")]
        )


def test_packs_are_the_owners_business_only(tmp_path) -> None:
    path = RunDir(make_dir(tmp_path / "run")).pack(0, "node_0000", 3, 412)
    write_one(path)
    assert path == tmp_path / "run/captures/000/node_0000/rank_00003/step_0000000412.pack"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
