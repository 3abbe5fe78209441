"""Every statistic of a row equals the float64 reference; no tensor makes it raise unexplained."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpprobe.rank.stats import cpu, rows
from ddpprobe.rank.stats.rows import ROW, Unsupported


def dirty(n: int) -> torch.Tensor:
    x = torch.randn(n)
    x[::7], x[1::11], x[2::13] = torch.nan, torch.inf, -torch.inf
    return x


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CLASSES = {
    "clean": torch.randn,
    "dirty": dirty,
    "tiny": lambda n: torch.randn(n) * 1e-25,
    "huge": lambda n: torch.randn(n) * 1e30,
    "all nan": lambda n: torch.full((n,), torch.nan),
    "all negative": lambda n: -torch.rand(n) - 1,
    "one -inf": lambda n: torch.randn(n).index_fill_(0, torch.tensor([n // 2]), -torch.inf),
    "zeros": lambda n: torch.zeros(n).index_fill_(0, torch.tensor([0]), -0.0),
}
CPU_CLASSES = {
    **CLASSES,
    "subnormal": lambda n: torch.randn(n) * 1e-42,
    "constant": lambda n: torch.full((n,), 0.1),
}


def row(tensor: torch.Tensor) -> dict[str, float]:
    out = torch.empty(rows.WIDTH, dtype=torch.float64)
    rows.reduce(tensor, out)
    return dict(zip(ROW, out.tolist(), strict=True))


def reference(x: np.ndarray) -> dict[str, float]:
    finite = x[np.isfinite(x)]
    return {
        "numel": x.size, "nan": np.isnan(x).sum(), "pos_inf": (x == np.inf).sum(),
        "neg_inf": (x == -np.inf).sum(), "zeros": (x == 0).sum(),
        "min": finite.min(initial=np.inf), "max": finite.max(initial=-np.inf),
        "sum": math.fsum(finite), "sum_sq": math.fsum(finite * finite),
    }  # fmt: skip


def check(tensor: torch.Tensor, relative: float) -> None:
    x = tensor.double().numpy().reshape(-1)
    got, want = row(tensor), reference(x)
    for name in ("numel", "nan", "pos_inf", "neg_inf", "zeros", "min", "max"):
        assert got[name] == want[name], name
    finite = x[np.isfinite(x)]
    assert abs(got["sum"] - want["sum"]) <= relative * np.abs(finite).sum() + 1e-300
    assert got["sum_sq"] == pytest.approx(want["sum_sq"], rel=relative, abs=0.0)


@pytest.mark.parametrize("kind", CPU_CLASSES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_equal_the_float64_reference(engine: str, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # Around 64 lanes, a block of 1024 and one of 2**17, and what NumPy takes for small.
    for numel in (1, 5, 63, 64, 65, 1023, 1024, 1025, 1088, 4096, 4097, (1 << 17) + 1030):
        check(CPU_CLASSES[kind](numel).to(dtype), relative=2e-6)


def test_any_small_float32_tensor_is_exact(engine: str) -> None:
    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.floats(width=32), min_size=1, max_size=50))
    def holds(values: list[float]) -> None:
        check(torch.tensor(values, dtype=torch.float32), relative=1e-13)

    holds()


def test_an_empty_tensor_is_the_identity_of_the_merge(engine: str) -> None:
    assert tuple(row(torch.empty(0, 3)).values()) == rows.EMPTY
    assert tuple(row(torch.ones(4)[2:2]).values()) == rows.EMPTY


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_layouts_do_not_change_the_numbers(engine: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 5, 6).to(dtype)
    want = row(x)
    for same in (x.to(memory_format=torch.channels_last), x.transpose(0, 3), x[:, :, :, :]):
        got = row(same)
        assert got == pytest.approx(want, rel=1e-5, abs=1e-4)  # lanes in another order
    check(x[:, ::2, 1:, ::3], relative=2e-6)
    check(x.view(-1)[7:], relative=2e-6)


def test_an_expanded_gradient_is_counted_without_being_allocated(engine: str) -> None:
    expanded = torch.tensor([[2.0], [3.0]]).expand(2, 10**12)
    got = row(expanded)
    assert (got["numel"], got["sum"], got["sum_sq"]) == (2e12, 5e12, 13e12)


def test_other_dtypes_give_numbers() -> None:
    assert row(torch.tensor([True, False, True]))["sum"] == 2
    assert row(torch.tensor([3, -4], dtype=torch.int64))["sum_sq"] == 25
    got = row(torch.tensor([3 + 4j, complex(math.nan, 0)]))
    assert (got["numel"], got["nan"], got["sum_sq"]) == (4, 1, 25)
    eight = torch.tensor([1.5, -2.0, 0.0]).to(torch.float8_e4m3fn)
    assert (row(eight)["sum"], row(eight)["zeros"]) == (-0.5, 1)


def test_sparse_and_jagged_tensors_give_their_stored_values() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls some of these layouts beta
        sparse = torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 2.0, math.nan], (5,))
        assert (row(sparse)["numel"], row(sparse)["sum"], row(sparse)["nan"]) == (2, 3, 1)
        csr = torch.eye(3).to_sparse_csr()
        assert (row(csr)["numel"], row(csr)["sum"]) == (3, 3)
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        strided = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        assert row(jagged)["sum"] == row(strided)["sum"] == 5


def test_what_has_no_values_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="meta tensor"):
        row(torch.empty(3, device="meta"))
    with pytest.raises(Unsupported, match="vmap"):
        torch.func.vmap(lambda x: (row(x), x)[1])(torch.randn(2, 3))


def test_autocast_and_grad_mode_around_it_change_nothing(engine: str) -> None:
    x = torch.randn(100, requires_grad=True)
    want = row(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert row(x) == want
    assert x.grad is None


def test_calls_of_one_site_merge_into_one_row() -> None:
    x = torch.randn(7, 5)
    call = torch.empty(7, rows.WIDTH, dtype=torch.float64)
    for i in range(7):
        rows.reduce(x[i], call[i])
    counts, values = rows.split_rows(call.numpy(), np.array([0, 1, 0, 1, 0, 1, 0]), 3)
    want = row(x[::2])
    assert counts[0, 0] == 20
    assert values[0].tolist() == pytest.approx([want[k] for k in ("min", "max", "sum", "sum_sq")])
    assert counts[2].tolist() == [0] * 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_on_a_gpu_rows_are_the_same_and_nothing_synchronises(kind, dtype) -> None:
    x = CLASSES[kind](4097).to(dtype)
    on_gpu, out = x.cuda(), torch.empty(rows.WIDTH, dtype=torch.float64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows.reduce(on_gpu, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    got, want = dict(zip(ROW, out.tolist(), strict=True)), row(x)
    for name in ROW[:7]:
        assert got[name] == want[name], name
    assert got["sum"] == pytest.approx(want["sum"], rel=1e-6, abs=1e-6 * max(1, want["sum_sq"]))
    assert got["sum_sq"] == pytest.approx(want["sum_sq"], rel=1e-6, abs=0.0)


@pytest.mark.parametrize("shape", [(4, 3, 5), (1, 3, 5), (4, 3, 1), (4, 1, 5), (4, 3, 0)], ids=str)
def test_a_tensor_expanded_in_two_dimensions_counts_each_element_as_often_as_it_stands(
    engine: str, shape: tuple[int, ...]
) -> None:
    base = torch.tensor([[[2.0], [0.0], [torch.nan]]])[:, : shape[1]]
    expanded = base.expand(shape)
    assert row(expanded) == pytest.approx(row(expanded.contiguous()), nan_ok=True)
    moved = expanded.transpose(0, 1).unsqueeze(1).expand(-1, 7, -1, -1)
    assert row(moved) == pytest.approx(row(moved.contiguous()), nan_ok=True)


@pytest.mark.parametrize("n", [5, 1 << 13])
def test_squares_beyond_float64_are_infinite_and_no_warning(n: int) -> None:
    """Without the compiled kernels; a script may have made warnings errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        row = cpu.reduce_cpu(torch.full((n,), 1e200, dtype=torch.float64))
    got = dict(zip(ROW, row, strict=True))
    assert (got["sum_sq"], got["max"], got["pos_inf"]) == (math.inf, 1e200, 0)
