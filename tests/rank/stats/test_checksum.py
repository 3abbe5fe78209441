"""A checksum tells any two tensors apart that differ in a bit, and never two that do not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddpprobe.rank.stats import checksum as module
from ddpprobe.rank.stats import native
from ddpprobe.rank.stats.checksum import checksum

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64)


def of(tensor: torch.Tensor) -> int:
    out = torch.zeros((), dtype=torch.int64, device=tensor.device)
    checksum(tensor, out)
    return int(out)


@given(numel=st.integers(1, 3000), bit=st.integers(0, 31), at=st.integers(0, 2999))
def test_one_flipped_bit_is_always_seen(numel: int, bit: int, at: int) -> None:
    a = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    b = a.clone()
    b.view(torch.int32)[at % numel] ^= torch.tensor(1 << bit).to(torch.int32)
    assert of(a) != of(b)


@pytest.mark.parametrize("numel", [2, 65536 * 2, 65536 * 5 + 3])
def test_two_elements_that_change_places_are_seen_in_and_across_rows(numel: int) -> None:
    a = torch.randn(numel)
    b = a.clone()
    b[[0, -1]] = b[[-1, 0]]
    assert of(a) != of(b)
    c = a.roll(1)
    assert of(a) != of(c)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 3, 8, 100])
def test_equal_bits_give_equal_checksums_wherever_they_lie_in_memory(
    dtype: torch.dtype, numel: int
) -> None:
    a = torch.randn(numel + 2).to(dtype)
    assert of(a[1:-1]) == of(a[1:-1].clone())
    square = torch.randn(7, 5).to(dtype)
    assert of(square.t()) == of(square.t().contiguous())


def test_length_counts_where_the_bits_are_all_zero() -> None:
    assert len({of(torch.zeros(n)) for n in range(50)}) == 50


def test_sparse_tensors_have_one_too() -> None:
    dense = torch.eye(4)
    assert of(dense.to_sparse()) == of(dense)


@pytest.mark.skipif(not native.prepare(), reason="needs a C++ compiler")
@pytest.mark.parametrize("numel", [0, 1, 65536 * 2, 65536 * 10 + 7])
def test_ranks_with_and_without_the_compiled_kernel_agree(
    monkeypatch: pytest.MonkeyPatch, numel: int
) -> None:
    a = torch.randn(numel)
    compiled = of(a)
    monkeypatch.setattr("ddpprobe.rank.stats.checksum.word_kernels", {})
    assert of(a) == compiled


def test_the_factors_reach_a_gpu_from_pinned_memory_and_once(monkeypatch) -> None:
    notes: list[object] = []

    def to(self: torch.Tensor, *where: object, **how: object) -> torch.Tensor:
        notes.append((*where, how))
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: notes.append("pinned") or self)
    monkeypatch.setattr(torch.Tensor, "to", to)
    device = torch.device("cuda", 7)
    for _ in range(2):
        module.prepare(device)
    module.factors.cache_clear()
    assert notes == ["pinned", (device, {"non_blocking": True})]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_agrees_with_the_cpu() -> None:
    a = torch.randn(65536 * 70 + 5)
    assert of(a) == of(a.cuda())
