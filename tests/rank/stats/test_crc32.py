"""The compiled crc32 is zlib's, on every processor and wherever the bytes lie; packs carry it."""

from __future__ import annotations

import ctypes
import platform
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ddpprobe
from ddpprobe.rank.stats import native
from ddpprobe.rank.stats.crc32 import crc32
from ddpprobe.rundir import tensor_pack
from ddpprobe.rundir.tensor_pack import Pack, PackedTensor

BYTES = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
# What a processor can do, as /proc/cpuinfo says it, and the flags that make use of it.
OLDER, WIDER = "-march=x86-64-v3 -mpclmul", "-march=x86-64-v3 -mpclmul -mvpclmulqdq"
PROCESSORS = [({"avx2", "pclmulqdq"}, OLDER), ({"avx2", "vpclmulqdq"}, WIDER)]


@pytest.fixture(params=["compiled", "zlib"])
def engine(request, monkeypatch) -> None:
    native.prepare()
    if request.param == "zlib":
        monkeypatch.setattr("ddpprobe.rank.stats.crc32.byte_kernels", {})
    elif not native.byte_kernels:
        pytest.skip("needs a C++ compiler, and a processor that multiplies without carries")


def test_it_is_zlibs_whatever_the_length_and_wherever_it_lies(engine) -> None:
    @given(length=st.integers(0, 4 * native.FOLDED + 1), start=st.integers(0, 1 << 16))
    def holds(length, start):
        data = BYTES[start : start + length].data
        assert crc32(data) == zlib.crc32(data)

    holds()
    for data in (BYTES, BYTES[3:-5], np.zeros(100_000, np.uint8), BYTES.reshape(32, -1)):
        assert crc32(data.data) == zlib.crc32(data.data)


def test_what_is_not_contiguous_is_refused_not_read_beside(engine) -> None:
    with pytest.raises((ValueError, BufferError), match="contiguous"):
        crc32(BYTES[::-2].data)


def test_a_pack_is_the_same_bytes_with_it_as_with_zlib(engine, tmp_path: Path) -> None:
    header = {"attempt": 0, "step": 4, "rank": 0, "world_size": 1, "modules": {}}
    raws = [BYTES[:size] for size in (0, 5, 70_001, 1 << 20)]
    told = [
        (PackedTensor("m", str(i), "param", "", 0, 0, "uint8", raw.shape, {"kind": "local"}), raw)
        for i, raw in enumerate(raws)
    ]
    tensor_pack.write(tmp_path / "ours", header, told, crc32)
    tensor_pack.write(tmp_path / "zlib", header, told)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "zlib").read_bytes()
    pack = Pack.open(tmp_path / "ours")
    for i, raw in enumerate(raws):
        np.testing.assert_array_equal(pack.raw(i), raw)


def test_what_a_rank_keeps_goes_through_the_kernel(monkeypatch, tmp_path) -> None:
    native.prepare()
    fold = native.byte_kernels.get(torch.uint8)
    if fold is None:
        pytest.skip("needs a C++ compiler, and a processor that multiplies without carries")
    folded = []
    monkeypatch.setitem(
        native.byte_kernels, torch.uint8, lambda *how: folded.append(how[1]) or fold(*how)
    )
    model = torch.nn.Linear(64, 64)
    with ddpprobe.install(model, run_dir=tmp_path, daemon="none", every=1, capture=[""]):
        model(torch.ones(1, 64)).sum().backward()
        torch.optim.SGD(model.parameters()).step()
    (path,) = tmp_path.glob("captures/**/*.pack")
    pack = Pack.open(path)
    sizes = [t.bytes // native.FOLDED * native.FOLDED for t in pack.tensors]
    assert [size for size in sizes if size] == folded
    assert 64 * 64 * 4 in folded
    for i in range(len(sizes)):
        pack.check(i)


# ---- the kernel


def build(flags: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ctypes.CDLL:
    """Compile the kernel alone, for another processor than this one."""
    compiler = next(filter(None, map(native.shutil.which, native._COMPILERS)), None)
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("needs a C++ compiler, and names an x86")
    monkeypatch.setattr(native, "_FLAGS", ("-std=c++17", "-O1", "-shared", "-fPIC", *flags.split()))
    monkeypatch.setattr(native, "SOURCES", [s for s in native.SOURCES if s.stem == "crc32"])
    return ctypes.CDLL(str(native._build(compiler, tmp_path / "crc32.so")))


@pytest.mark.parametrize(("needs", "flags"), PROCESSORS, ids=["pclmul", "vpclmul"])
def test_a_processor_with_shorter_vectors_folds_to_the_same_crc(
    needs, flags, monkeypatch, tmp_path
) -> None:
    library = build(flags, monkeypatch, tmp_path)
    if not needs <= set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip(f"this processor lacks {needs}")
    fold = native._function(library, "fold_crc32", native._BYTES)
    native._check_fold(fold)
    monkeypatch.setitem(native.byte_kernels, torch.uint8, fold)
    for length in (256, 511, 512, 70_001):
        assert crc32(BYTES[1:][:length].data) == zlib.crc32(BYTES[1:][:length].data)


def test_a_processor_without_the_instruction_has_no_kernel(monkeypatch, tmp_path) -> None:
    assert not hasattr(build("-march=x86-64", monkeypatch, tmp_path), "fold_crc32")


def test_a_kernel_that_folds_wrong_is_refused() -> None:
    with pytest.raises(RuntimeError, match="crc32 gives 0x.*expected"):
        native._check_fold(lambda *_: None)
