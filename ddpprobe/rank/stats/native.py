"""The kernels in C++, built once by the machine's own compiler and loaded by ctypes.

Optional: without a compiler, or when anything goes wrong, the statistics run in NumPy and torch
(`stats.cpu`), and crc32 in zlib, which takes several times as long. `prepare` is the only way in
and belongs where waiting is allowed (`install`): a reduction never builds anything.

Why not numba: it computes as fast, but the training process then holds LLVM, 100 MB a rank; the
library here has 50 KB and is there in 2 ms from the cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import math
import os
import platform
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from ddpprobe.rundir.fuse import Fuse

SOURCES = tuple(Path(__file__).with_name(name) for name in ("native.cpp", "crc32.cpp"))
TABLES = 4  # tables of counts a wide kernel needs, see native.cpp
FOLDED = 256  # bytes that a byte kernel leaves, see crc32.cpp
EMPTY = 0xFFFF_FFFF  # what zlib's crc32 goes on from where theirs is to be taken
_COMPILERS = ("c++", "g++", "clang++")
# No flag that lets the compiler reorder additions or assume that there is no NaN (and GCC's
# -ffast-math would switch subnormal numbers off in the whole process): `contract` off as well, so
# that machines with and without fused multiply-add agree. The last two change no value.
_FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-shared", "-fPIC",
    "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno",
)  # fmt: skip
_BYTES = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
_WORDS = (ctypes.c_void_p, ctypes.c_int64, *(ctypes.c_void_p,) * 3)
_BUILD_SECONDS = 60.0
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_ROW = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
_WIDE = (
    ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_bool,
    ctypes.c_double, ctypes.c_double, ctypes.c_double, ctypes.c_void_p, ctypes.c_void_p,
)  # fmt: skip

logger = logging.getLogger("ddpprobe")

# Empty until `prepare` has run. They take addresses; the caller vouches for what lies there.
# (elements, numel, repeats, row): float64 [9] out, as in `stats.rows`; says if one is not finite
row_kernels: dict[torch.dtype, Callable[..., bool]] = {}
# (elements, numel, repeats, bins, fixed, low, high, eps, counts, wide row): `counts` are int64
# zeros [TABLES * (bins + 3)]; float64 [HEAD + bins] out, as in `stats.histogram`
wide_kernels: dict[torch.dtype, Callable[..., None]] = {}
# (elements, numel, repeats, counts): float64 [PATTERNS] out, as in `stats.patterns`
pattern_kernels: dict[torch.dtype, Callable[..., None]] = {}
# (words, how many, within, between, out): as in `stats.checksum`; adds to int64 [] out
word_kernels: dict[torch.dtype, Callable[..., None]] = {}
# (bytes, how many, out): as in `stats.crc32`; a positive multiple of FOLDED, uint8 [FOLDED] out.
# None where the processor has no instruction for it.
byte_kernels: dict[torch.dtype, Callable[..., None]] = {}


@functools.cache
def prepare() -> bool:
    """Load the kernels, built before if they never were; return whether they are in use.

    Takes 2 ms from the cache and a second of the compiler's time otherwise. Never raises, unless
    under `DDPPROBE_STRICT=1`.
    """
    return bool(Fuse("the compiled statistics").guard(_load)())


def _load() -> bool:
    library = _library()
    if library is None:
        logger.info(
            "ddpprobe: no C++ compiler (%s) on PATH: statistics on the CPU take several times as "
            "long without the compiled kernels.",
            ", ".join(_COMPILERS),
        )
        return False
    rows = {dtype: _function(library, f"row_{name}", _ROW) for dtype, name in _NAMES.items()}
    for function in rows.values():
        cast("Any", function).restype = ctypes.c_bool
    _check(rows[torch.float32])
    if hasattr(library, "fold_crc32"):
        fold = _function(library, "fold_crc32", _BYTES)
        _check_fold(fold)
        byte_kernels[torch.uint8] = fold
    row_kernels.update(rows)
    for dtype, name in _NAMES.items():
        wide_kernels[dtype] = _function(library, f"wide_{name}", _WIDE)
    for dtype, name in {**_NAMES, torch.float64: "float64"}.items():
        pattern_kernels[dtype] = _function(library, f"patterns_{name}", _ROW)
    word_kernels[torch.int64] = _function(library, "add_checksum", _WORDS)
    return True


def _library() -> ctypes.CDLL | None:
    """Load the library from the cache or after building it; None: there is no compiler."""
    directory = _cache_directory()
    path = directory / f"native-{_identity()}.so" if directory is not None else None
    if path is not None:
        with contextlib.suppress(OSError):  # it is not there, or not whole
            return ctypes.CDLL(str(path))
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        return None
    # Several ranks may do this at once: each builds its own, and the last one stays.
    with tempfile.TemporaryDirectory(prefix="ddpprobe-", dir=directory) as temporary:
        built = _build(compiler, Path(temporary) / "native.so")
        return ctypes.CDLL(str(built if path is None else built.replace(path)))


def _function(library: ctypes.CDLL, name: str, signature: tuple[Any, ...]) -> Callable[..., Any]:
    function = library[name]
    function.argtypes, function.restype = signature, None
    return cast("Callable[..., Any]", function)


def _build(compiler: str, path: Path) -> Path:
    done = subprocess.run(  # noqa: S603  (a compiler, and our own source)
        [compiler, *_FLAGS, *map(str, SOURCES), "-o", str(path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_BUILD_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"{compiler} could not build the kernels (exit code {done.returncode}): "
            f"{done.stderr.strip()[-500:]}"
        )
    return path


def _identity() -> str:
    """Name what a build depends on: the sources, the flags, and what this processor can do.

    A home directory may be shared by machines whose processors are not the same.
    """
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES))
    digest.update(" ".join((*_FLAGS, platform.machine(), platform.libc_ver()[0])).encode())
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open("rb") as lines:
        kinds = (b"model name", b"flags", b"Features", b"CPU part")
        digest.update(b"".join(sorted({line for line in lines if line.startswith(kinds)})))
    return digest.hexdigest()[:20]


def _cache_directory() -> Path | None:
    """Return a directory that only this user can write to; None: there is none."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        path = base / "ddpprobe"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        return None
    private = status.st_uid == os.geteuid() and not status.st_mode & 0o022
    return path if private and os.access(path, os.W_OK) else None


def _check(row: Callable[..., bool]) -> None:
    """Refuse a library that cannot count: a compiler or a processor that is not what it says."""
    numbers = [1.0, -2.0, 0.0, 3.0] * 300  # a whole block and a rest
    for last, want in (
        (float("nan"), (1201, 1, 0, 0, 300, -2, 3, 600, 4200)),
        (0.5, (1201, 0, 0, 0, 300, -2, 3, 600.5, 4200.25)),
    ):
        given = (ctypes.c_float * 1201)(*numbers, last)
        got = (ctypes.c_double * 9)()
        bad = row(ctypes.addressof(given), len(given), 1, ctypes.addressof(got))
        if tuple(got) != want or bad is not math.isnan(last):
            raise RuntimeError(f"the compiled statistics give {tuple(got)}, expected {want}")


def _check_fold(fold: Callable[..., None]) -> None:
    """Refuse a checksum that is not zlib's: who reads a pack would call every tensor damaged."""
    given = bytes(range(256)) * 3
    left = (ctypes.c_char * FOLDED)()
    fold(given, len(given), ctypes.addressof(left))
    got, want = zlib.crc32(left, EMPTY), zlib.crc32(given)
    if got != want:
        raise RuntimeError(f"the compiled crc32 gives {got:#x}, expected {want:#x}")
