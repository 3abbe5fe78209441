"""What a module was called with, as JSON: enough to call it again, and nothing that could run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ddpprobe.rank.hooks.outputs import MAX_DEPTH

_MAX_NODES = 2000  # of one call: a list of a million numbers is data, not structure
_MAX_TEXT = 1000
_MAX_BITS = 64


def arguments(args: tuple[object, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return `{"args": tree, "kwargs": tree}` of a call, whose leaves have the paths of `leaves`.

    See `tensor_pack` for the trees. What cannot be built again from JSON is
    `{"opaque": its class}`.
    """
    left = [_MAX_NODES]
    return {"args": _tree(args, "", 0, left), "kwargs": _tree(dict(kwargs), "", 0, left)}


def _tree(value: object, path: str, depth: int, left: list[int]) -> dict[str, Any]:
    left[0] -= 1
    if isinstance(value, Tensor):
        return {"tensor": path}
    scalar = _scalar(value)
    if scalar is not None:
        return scalar
    kind: type = type(value)
    if left[0] > 0 and depth < MAX_DEPTH:
        prefix = f"{path}." if path else ""
        if type(value) in (list, tuple) and isinstance(value, list | tuple):
            parts = enumerate(value)
            return {kind.__name__: [_tree(v, f"{prefix}{i}", depth + 1, left) for i, v in parts]}
        if type(value) is dict and all(type(key) is str for key in value):
            items = value.items()
            return {"dict": {key: _tree(v, f"{prefix}{key}", depth + 1, left) for key, v in items}}
    return {"opaque": f"{kind.__module__}.{kind.__qualname__}"[:_MAX_TEXT]}


def _scalar(value: object) -> dict[str, Any] | None:
    if type(value) is float:
        return {"value": value} if math.isfinite(value) else {"float": str(value)}
    small = (
        value is None
        or type(value) is bool
        or (type(value) is int and value.bit_length() < _MAX_BITS)
        or (type(value) is str and len(value) <= _MAX_TEXT)
    )
    return {"value": value} if small else None
