"""Away from the CPU a row is the same: by torch's operators, and by the Triton kernel.

Without a GPU the kernel runs in Triton's interpreter, where Triton is installed.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata

import numpy as np
import pytest
import torch
from packaging.version import Version
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ddpprobe.rank.stats import device, histogram, rows
from ddpprobe.rank.stats.rows import ROW
from ddpprobe.rundir.fuse import Fuse

from .test_rows import CLASSES, FLOATS, reference

TILE = 1 << 14  # bytes
PROGRAMS = 3  # in the interpreter: few, so that each has several chunks


def has_interpreter() -> bool:
    """Whether Triton can interpret a kernel: before 3.7 it takes int() of arrays of one element."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return False
    return Version(triton) >= Version("3.7") or Version(np.__version__) < Version("2.4")


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton"
)
needs_interpreter = pytest.mark.skipif(
    not has_interpreter(), reason="needs Triton, and before 3.7 a NumPy before 2.4"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def check(got: list[float], tensor: torch.Tensor, times: int = 1) -> None:
    """Counts, minimum and maximum are exact, sums within 1e-6."""
    x = tensor.double().cpu().numpy().reshape(-1)
    got, want = dict(zip(ROW, got, strict=True)), reference(x)
    for name in ROW[:5]:
        assert got[name] == want[name] * times, name
    assert (got["min"], got["max"]) == (want["min"], want["max"])
    magnitude = np.abs(x[np.isfinite(x)]).sum()
    assert abs(got["sum"] / times - want["sum"]) <= 1e-6 * magnitude + 1e-300
    assert got["sum_sq"] / times == pytest.approx(want["sum_sq"], rel=1e-6, abs=0.0)


def patchwork(dtype: torch.dtype) -> torch.Tensor:
    """30 tiles and some elements; each of the three programs meets several kinds of chunk."""
    torch.manual_seed(0)
    tile = TILE // dtype.itemsize
    x = torch.randn(30 * tile + 77, dtype=torch.float64)
    x[: tile // 2] = 0.0
    x[7 * tile + 5] = torch.nan
    x[24 * tile : 27 * tile] *= 1e30
    x[27 * tile :] *= 1e-25
    x[-1], x[-2] = torch.inf, -torch.inf
    return x.to(dtype)


# ---- torch's operators, the reference on every other device


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_operators_give_the_row_of_numpy(kind, dtype, monkeypatch):
    monkeypatch.setattr(device, "GPU_BLOCK", 1000)  # several blocks
    torch.manual_seed(1)
    for numel in (1, 4097):
        tensor, out = CLASSES[kind](numel).to(dtype), torch.full((9,), torch.nan).double()
        device.reduce_device(tensor, 3, out)
        check(out.tolist(), tensor, times=3)


def test_the_row_of_an_empty_tensor_is_the_identity_of_the_merge():
    out = torch.full((rows.WIDTH,), torch.nan, dtype=torch.float64)
    device.reduce_device(torch.empty(0), 1, out)
    assert tuple(out.tolist()) == rows.EMPTY


class Dispatches(TorchDispatchMode):
    """Counts the operators that are called."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def peak_of(work: Callable[[], object]) -> int:
    """Bytes that were allocated at a time at most, inside of operators too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        work()
    live = peak = 0
    events = run.profiler.kineto_results.events()
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_operators_are_few_and_their_scratch_stays_below_128_mib(dtype, monkeypatch):
    part = 16  # the bound is tested on a part of it
    monkeypatch.setattr(device, "GPU_BLOCK", device.GPU_BLOCK // part)
    tensor, out = torch.randn(1 << 20).to(dtype), torch.empty(9, dtype=torch.float64)
    for blocks, most in ((1, 24), (2, 60)):
        flat = tensor[: blocks * device.GPU_BLOCK]
        with torch.no_grad(), Dispatches() as mode:
            device.reduce_by_operators(flat, 1, out)
        assert mode.count <= most
    peak = peak_of(lambda: device.reduce_by_operators(tensor, 1, out))
    assert device.GPU_BLOCK * 8 <= peak <= (128 << 20) // part


@pytest.mark.parametrize("limits", [None, (-1.0, 1.0)])
def test_the_scratch_of_a_histogram_away_from_the_cpu_stays_below_128_mib(limits):
    block = torch.randn(histogram.GPU_BLOCK // 16)
    wide, times = torch.zeros(histogram.HEAD + 64).double(), torch.full((), 3)
    peak = peak_of(lambda: histogram._count(block.double(), times, wide, limits, 0.1))
    assert peak <= (128 << 20) // 16


# ---- which of the two does the work


def test_on_the_cpu_triton_is_not_even_looked_for(monkeypatch):
    monkeypatch.setattr(device, "_kernels", lambda _: pytest.fail("looked for Triton"))
    rows.reduce(torch.randn(5), torch.empty(rows.WIDTH, dtype=torch.float64))
    device.reduce_device(torch.randn(5), 1, torch.empty(rows.WIDTH, dtype=torch.float64))


class OnGpu(torch.Tensor):
    """Stands in for a tensor on a GPU; `device` takes only plain ones to the kernel."""

    is_cuda = True


def test_a_subclass_of_a_tensor_goes_to_the_operators(monkeypatch):
    monkeypatch.setattr(device, "_in_one_pass", lambda *_: pytest.fail("would read its memory"))
    out = torch.empty(rows.WIDTH, dtype=torch.float64)
    device.reduce_device(torch.ones(5).as_subclass(OnGpu), 1, out)
    assert out[7] == 5


def test_a_kernel_that_fails_is_told_once_and_the_operators_take_over(monkeypatch, caplog):
    monkeypatch.setenv("DDPPROBE_STRICT", "0")
    asked = []

    def broken(flat, repeats, out):
        asked.append(flat)
        raise OSError("no compiler")

    monkeypatch.setattr(device, "Tensor", OnGpu)
    monkeypatch.setattr(device, "_in_one_pass", Fuse("the Triton kernel").guard(broken))
    tensor, out = torch.ones(5).as_subclass(OnGpu), torch.empty(rows.WIDTH, dtype=torch.float64)
    with caplog.at_level(logging.WARNING, "ddpprobe"):
        for _ in range(3):
            device.reduce_device(tensor, 1, out)
            assert out[8] == 5
    assert len(asked) == len(caplog.records) == 1
    assert "no compiler" in caplog.text


class AtAnAddress:
    """Stands in for the module of the kernels: keeps what it is told, and has compiled float32."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int, int]] = []

    def reduce_at(self, address, numel, dtype, out, scratch, stream, index) -> bool:
        if dtype is not torch.float32:
            return False
        assert (scratch, stream, index) == ("scratch", 7, None)
        self.told.append((address, numel, out))
        return True


def test_a_kernel_is_told_the_address_of_what_lies_in_one_piece_and_of_nothing_else(monkeypatch):
    kernels, out = AtAnAddress(), torch.zeros((3, rows.WIDTH), dtype=torch.float64)
    monkeypatch.setattr(device, "_kernels", lambda _: kernels)
    monkeypatch.setattr(device, "_scratch", lambda *_: "scratch")
    monkeypatch.setattr(device.torch_private, "raw_stream", lambda _: 7)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    tensor = torch.randn(4, 6)
    for lies in (tensor, tensor[1:], torch.nn.Parameter(tensor), torch.empty(0)):
        assert device._at_address(lies, out, 2)
        address = out.data_ptr() + 2 * rows.WIDTH * 8
        assert kernels.told.pop() == (lies.data_ptr(), lies.numel(), address)
    others = (
        tensor.t(), tensor[:, 1:], tensor[:1].expand(4, 6), tensor.to_sparse(), tensor.int(),
        tensor.half(), torch.empty(2, device="meta"), torch._neg_view(tensor),
        tensor.as_subclass(OnGpu),
    )  # fmt: skip
    assert not [other for other in others if device._at_address(other, out, 2)]
    seen = []
    torch.vmap(lambda x: seen.append(device._at_address(x, out, 2)) or x)(tensor)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert not device._at_address(tensor, out, 2)
    assert (seen, kernels.told) == ([False], [])


# ---- the kernel

INTERPRET = """
import sys
import torch
from ddpprobe.rank.stats.triton_rows import Scratch, reduce_rows

rows = []
for tensor, times, programs in torch.load(sys.argv[1]):
    scratch = Scratch(torch.device("cpu"), programs)
    scratch.rows.fill_(torch.nan)
    out = torch.full((9,), torch.nan, dtype=torch.float64)
    reduce_rows(tensor, times, out, scratch)
    assert scratch.ticket.item() == 0
    rows.append(out)
torch.save(torch.stack(rows), sys.argv[2])
"""

COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ddpprobe.rank.stats.triton_rows import _DTYPES, _REGISTERS, _WARPS
from ddpprobe.rank.stats.triton_rows import _merge_many, _reduce, _reduce_many
from ddpprobe.rank.stats.triton_words import _add, _total

for dtype in ("bf16", "fp16", "fp32", "fp64"):
    numbers = {"n": "i64", "repeats": "i64", "programs": "i32"}
    places = {"out": "*fp64", "rows": "*fp64", "ticket": "*i32"}
    source = ASTSource(_reduce, {"x": "*" + dtype, **places, **numbers}, {})
    options = {"num_warps": _WARPS, "maxnreg": _REGISTERS, "enable_fp_fusion": True}
    assert compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]

# Of many tensors: 16 bytes are read at once where all addresses allow it, as with one tensor.
table = {"table": "*i64", "owners": "*i32"}
options = {"num_warps": _WARPS, "maxnreg": _REGISTERS, "enable_fp_fusion": True}
for dtype, kind in [*_DTYPES.items()][::3]:
    for aligned in (True, False):
        signature = {**table, "rows": "*fp64", "scratch": "*fp64"}
        signature |= dict.fromkeys(("kind", "aligned"), "constexpr")
        constants = {(4,): kind, (5,): aligned}
        source = ASTSource(_reduce_many, signature, constants)
        made = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
        wide = "v2.b64" if dtype.itemsize == 8 else "v4.b32"
        assert made["cubin"] and (f"ld.global.{wide}" in made["ptx"]) is aligned, (dtype, aligned)
block, factors = "constexpr", {"within": "*i64", "between": "*i64"}
for kernel, signature, constants in (
    (_add, {**table, **factors, "scratch": "*i64", "aligned": block}, True),
    (_add, {**table, **factors, "scratch": "*i64", "aligned": block}, False),
    (_total, {"table": "*i64", "scratch": "*i64", "out": "*i64", "block": block}, 1024),
):
    source = ASTSource(kernel, signature, {(len(signature) - 1,): constants})
    assert compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
source = ASTSource(_merge_many, {"table": "*i64", "scratch": "*fp64", "rows": "*fp64"}, {})
assert compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
"""


def python(code: str, *args: object, **env: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, args)]
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@needs_interpreter
def test_in_the_interpreter_the_kernel_gives_the_row_of_numpy(tmp_path):
    torch.manual_seed(2)
    small = [
        (CLASSES["dirty"](numel).to(dtype), 10**12, PROGRAMS)
        for numel in (1, 4097)
        for dtype in FLOATS
    ]
    patches = [(patchwork(dtype), 1, PROGRAMS) for dtype in FLOATS]
    alike = [
        (tensor, 1, PROGRAMS)
        for tensor in (
            torch.empty(0),
            torch.full((6 * TILE // 4,), 0.1),
            torch.randn(6 * TILE // 4) * 1e-25,
            torch.randn(6 * TILE // 4) * 1e18,
        )
    ]
    cases = [*small, *patches, *alike, patches[1]]
    torch.save(cases, tmp_path / "cases")
    python(INTERPRET, tmp_path / "cases", tmp_path / "rows", TRITON_INTERPRET="1")
    got = torch.load(tmp_path / "rows").tolist()
    for row, (tensor, times, _) in zip(got, cases, strict=True):
        check(row, tensor, times)
    assert got[-1] == got[len(small) + 1]  # the same bits again


@needs_triton
def test_the_kernel_compiles_for_a_gpu_that_is_not_there(tmp_path):
    python(COMPILE, TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.gpu
@needs_gpu
@needs_triton
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_on_a_gpu_the_kernel_gives_the_row_of_numpy_on_two_streams_at_once(dtype):
    assert device._kernels(torch.device("cuda", 0)) is not None
    cases = [patchwork(dtype)] + [CLASSES[k](5001).to(dtype) for k in CLASSES]
    side, out = torch.cuda.Stream(), torch.empty((4, len(cases), 9), dtype=torch.float64).cuda()
    on_gpu = [case.cuda() for case in cases]
    torch.cuda.synchronize()
    for index, tensor in enumerate(on_gpu):
        device.reduce_device(tensor, 2, out[0, index])
        with torch.cuda.stream(side):
            device.reduce_device(tensor[1:], 1, out[1, index])
        # Compiled by now: the same again by what lies at an address.
        assert device.reduce_as_it_lies(tensor, out[2], index)
        with torch.cuda.stream(side):
            assert device.reduce_as_it_lies(tensor[1:], out[3], index)
        assert not device.reduce_as_it_lies(tensor[::2], out[3], index)
    torch.cuda.synchronize()
    for index, case in enumerate(cases):
        check(out[0, index].tolist(), case, times=2)
        check(out[1, index].tolist(), case[1:])  # not aligned to 16 bytes
        check(out[2, index].tolist(), case)
    assert torch.equal(out[3], out[1])


@pytest.mark.gpu
@needs_gpu
@needs_triton
def test_on_a_gpu_the_kernel_can_be_captured_and_counts_beyond_32_bits():
    x = torch.ones(1 << 16, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows.WIDTH, dtype=torch.float64, device="cuda")
    device.reduce_device(x, 1, out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        device.reduce_device(x, 1, out)
    x.fill_(2.0)
    graph.replay()
    assert (out[7].item(), out[8].item()) == (1 << 17, 1 << 18)
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GiB of the GPU's memory")
    large = torch.zeros((1 << 31) + 9, device="cuda", dtype=torch.bfloat16)
    large[-1] = torch.nan
    device.reduce_device(large, 1, out)
    assert out[:5].tolist() == [(1 << 31) + 9, 1, 0, 0, (1 << 31) + 8]
