"""The compiled statistics equal those without them, bit for bit, and are optional."""

from __future__ import annotations

import logging
import os
import platform
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpprobe.rank.stats import histogram, native, rows
from ddpprobe.rank.stats.histogram import ABOVE, BELOW, EXPONENT, HEAD, NEAR_ZERO

BITS = {torch.float32: np.uint32, torch.bfloat16: np.uint16, torch.float16: np.uint16}
RANGES = [(0, None), (4, None), (64, None), (10, (-1.0, 2.0)), (7, (0.0, 0.3))]
ENOUGH = 1 << 18  # 16-bit elements from which on their patterns are counted, on both ways


def reference(x: np.ndarray, bins: int, limits: tuple[float, float] | None) -> np.ndarray:
    """The columns of a wide row that must be equal bit for bit (sums are left at 0), in float64."""
    want = np.zeros(HEAD + bins)
    finite = x[np.isfinite(x)]
    low, high = finite.min(initial=np.inf), finite.max(initial=-np.inf)
    want[:7] = (
        x.size, np.isnan(x).sum(), (x == np.inf).sum(), (x == -np.inf).sum(), (x == 0).sum(),
        low, high,
    )  # fmt: skip
    peak = np.abs(finite).max(initial=0)
    exponent = float(np.frexp(peak)[1]) if peak > 0 else histogram.LOWEST
    want[[NEAR_ZERO, EXPONENT]] = (np.abs(x) <= 0.05).sum(), exponent
    if not bins:
        return want
    if limits is None:
        index = np.floor(np.ldexp(finite, -int(exponent)) * (bins // 2)) + bins // 2
    else:
        want[[BELOW, ABOVE]] = (finite < limits[0]).sum(), (finite > limits[1]).sum()
        finite = finite[(finite >= limits[0]) & (finite <= limits[1])]
        index = np.floor((finite - limits[0]) * (bins / (limits[1] - limits[0])))
    np.add.at(want[HEAD:], np.clip(index, 0, bins - 1).astype(np.int64), 1)
    return want


def check(tensor: torch.Tensor) -> None:
    x = tensor.double().numpy().reshape(-1)
    finite = x[np.isfinite(x)]
    for bins, limits in RANGES:
        got = histogram.measure(tensor, bins, limits, 0.05).numpy()
        assert abs(got[7] - finite.sum()) <= 2e-6 * np.abs(finite).sum()
        assert got[8] == pytest.approx(np.square(finite).sum(), rel=2e-6)
        got[7:9] = 0
        np.testing.assert_array_equal(got, reference(x, bins, limits))


def of_bits(bits: list[int], dtype: torch.dtype) -> torch.Tensor:
    signed = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    return torch.from_numpy(np.array(bits, BITS[dtype])).view(signed).view(dtype)


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_every_pattern_of_bits_is_counted_where_it_belongs(engine, dtype) -> None:
    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.integers(0, np.iinfo(BITS[dtype]).max), min_size=1, max_size=150))
    def holds(bits):
        check(of_bits(bits, dtype))

    holds()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_patterns_of_a_16_bit_dtype_in_a_large_tensor(engine, dtype) -> None:
    every = of_bits(list(range(1 << 16)), dtype).repeat(4)
    check(every)
    check(torch.cat((every[:5], torch.zeros(ENOUGH, dtype=dtype), every[40_000:])))


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_a_tensor_gives_the_same_bits_wherever_it_lies(engine, dtype) -> None:
    values = torch.randn(5000).to(dtype)
    found = set()
    for offset in range(18):
        room = torch.empty(5000 + offset, dtype=dtype)
        here = room[offset:]
        here.copy_(values)
        found.add(histogram.measure(here, 8, None, 0.05).numpy().tobytes())
    assert len(found) == 1


def test_threads_do_not_disturb_each_other(engine) -> None:
    tensors = [torch.randn(ENOUGH + i).to(d) for i in range(4) for d in BITS]

    def measure(tensor: torch.Tensor) -> bytes:
        return histogram.measure(tensor, 64, None, 0.05).numpy().tobytes()

    alone = [measure(t) for t in tensors]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(measure, tensors)) == alone


def test_a_row_lands_at_its_index_and_nowhere_else(engine) -> None:
    block = torch.full((3, rows.WIDTH), 7.0, dtype=torch.float64)
    rows.reduce_into(torch.tensor([1.0, -2.0]), block, 1)
    assert block.tolist() == [[7.0] * 9, [2, 0, 0, 0, 0, -2, 1, -1, 5], [7.0] * 9]


def test_what_only_looks_like_memory_is_not_read(engine) -> None:
    row = torch.empty(rows.WIDTH, dtype=torch.float64)
    rows.reduce(torch.complex(torch.ones(1), torch.ones(1)).conj().imag, row)
    assert row[7] == -1  # the bit that negates it
    rows.reduce(torch._efficientzerotensor((3,)), row)
    assert row[4] == 3
    freed = torch.ones(8, 8)[3:]
    views = (freed, freed[:, ::3])
    freed.untyped_storage().resize_(0)
    for tensor in views:
        with pytest.raises(rows.Unsupported, match="freed"):
            rows.reduce(tensor, row)


def test_subnormal_numbers_stay_what_they_are_in_the_process() -> None:
    if not native.prepare():
        pytest.skip("no C++ compiler")
    assert (torch.tensor([1e-40]) * 0.5).item() > 0


# ---- building


@pytest.fixture
def cold(monkeypatch, tmp_path: Path) -> Path:
    """An empty cache, and kernels that were never loaded; returns where the library will lie."""
    if not native.prepare():
        pytest.skip("no C++ compiler")
    for kernels in (native.row_kernels, native.wide_kernels):
        for dtype in BITS:
            monkeypatch.delitem(kernels, dtype)
    quickly = tuple("-O0" if flag == "-O3" else flag for flag in native._FLAGS)
    monkeypatch.setattr(native, "_FLAGS", quickly)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ddpprobe"


def test_ranks_that_start_at_once_build_side_by_side_and_leave_one_library(cold) -> None:
    barrier = threading.Barrier(2)

    def start(_) -> bool:
        barrier.wait()
        return native._library() is not None

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(start, range(2))) == [True] * 2
    (library,) = os.listdir(cold)
    assert library.endswith(".so")


def test_a_build_is_kept_and_a_broken_one_replaced(cold, monkeypatch) -> None:
    cold.mkdir(mode=0o700)
    path = cold / f"native-{native._identity()}.so"
    path.write_bytes(b"half a library")
    assert native._library() is not None
    monkeypatch.setenv("PATH", "")  # no compiler any more, and none is needed
    assert native._library() is not None


def test_a_cache_that_others_can_write_to_is_not_used(cold) -> None:
    cold.mkdir()
    cold.chmod(0o777)
    assert native._library() is not None
    assert os.listdir(cold) == []


def test_without_a_compiler_numpy_does_it_and_says_so_once(cold, monkeypatch, caplog) -> None:
    monkeypatch.setenv("PATH", "")
    with caplog.at_level(logging.INFO, logger="ddpprobe"):
        assert native.prepare.__wrapped__() is False
    assert "no C++ compiler" in caplog.text
    assert native.row_kernels == {}
    check(torch.randn(3000))


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo out of luck >&2; exit 3", "exit code 3.*out of luck"),
        ("exit 0", "could not|No such file"),
    ],
)
def test_a_compiler_that_fails_is_contained(cold, monkeypatch, tmp_path, caplog, script, says):
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DDPPROBE_STRICT", "0")
    assert native.prepare.__wrapped__() is False
    assert native.row_kernels == {}
    assert "contained" in caplog.text
    monkeypatch.setenv("DDPPROBE_STRICT", "1")
    with pytest.raises((RuntimeError, OSError), match=says):
        native.prepare.__wrapped__()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an older x86")
def test_a_processor_with_shorter_vectors_gives_the_same_bits(cold, monkeypatch) -> None:
    tensors = [torch.randn(3000).to(dtype) for dtype in BITS]
    found = []
    for architecture in ("-march=native", "-march=x86-64"):
        flags = tuple(architecture if f == "-march=native" else f for f in native._FLAGS)
        monkeypatch.setattr(native, "_FLAGS", flags)
        assert native.prepare.__wrapped__()
        out = torch.zeros(len(tensors), rows.WIDTH, dtype=torch.float64)
        for index, tensor in enumerate(tensors):
            rows.reduce_into(tensor, out, index)
        found.append(out.numpy().tobytes())
    assert found[0] == found[1]
    assert len(os.listdir(cold)) == 2


def test_a_library_that_counts_wrong_is_refused() -> None:
    with pytest.raises(RuntimeError, match="expected"):
        native._check(lambda *_: None)
