"""Data types of captured tensors: torch's names, how Zarr stores them, what NumPy reads.

NumPy's own types stand in the store as themselves. bfloat16 and the float8s are stored as unsigned
integers of their size, with the real name in the attributes: an array of a data type that stock
Zarr does not know would keep it from opening the whole group around it. The bits are exact, and
reading goes through ml_dtypes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_NAN = "NaN"
# name -> (Zarr data type, fill value: NaN wherever there is one, so that a region which nobody
# delivered does not look like zeros to a stock reader)
_STORED: dict[str, tuple[str, Any]] = {
    "float64": ("float64", _NAN), "float32": ("float32", _NAN), "float16": ("float16", _NAN),
    "complex64": ("complex64", [_NAN, _NAN]), "complex128": ("complex128", [_NAN, _NAN]),
    **{f"{u}int{bits}": (f"{u}int{bits}", 0) for u in ("", "u") for bits in (8, 16, 32, 64)},
    "bool": ("bool", False),
    "bfloat16": ("uint16", 0x7FC0),
    "complex32": ("uint32", 0x7E007E00),
    "float8_e4m3fn": ("uint8", 0x7F), "float8_e5m2": ("uint8", 0x7F),
    "float8_e4m3fnuz": ("uint8", 0x80), "float8_e5m2fnuz": ("uint8", 0x80),
    "float8_e8m0fnu": ("uint8", 0xFF),
}  # fmt: skip


def stored_as(name: str) -> tuple[str, Any]:
    """Return Zarr's data type and the JSON fill value of a torch dtype (without `torch.`)."""
    return _STORED[name]


def item_bytes(name: str) -> int:
    """Return the bytes of one element."""
    return np.dtype(_STORED[name][0]).itemsize


def bits_of(name: str) -> str:
    """Return a type that NumPy and torch share, with elements of the same size."""
    size = item_bytes(name)
    return "complex128" if size == 16 else f"uint{8 * size}"


def dtype_of(name: str) -> np.dtype[Any]:
    """Return what the elements are to a reader; complex32, which NumPy lacks, is complex64."""
    if name == "complex32":
        return np.dtype(np.complex64)
    if name in _STORED and _STORED[name][0] == name:
        return np.dtype(name)
    import ml_dtypes  # noqa: PLC0415  (only for those who read such a tensor)

    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return found


def view(raw: NDArray[np.uint8], name: str) -> NDArray[Any]:
    """Return bytes [n * item_bytes] as elements [n] of `dtype_of(name)`, bit for bit."""
    if name == "complex32":
        halves = raw.view(np.float16).astype(np.float32)
        return halves.view(np.complex64)
    return raw.view(dtype_of(name))
