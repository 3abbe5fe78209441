"""The tensors inside whatever a module returns, each with the path that leads to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from torch import Tensor

MAX_DEPTH = 6  # deeper nesting than any model seen; bounds a self-referring structure


def leaves(output: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) of an output: "" for a bare tensor, "0", "logits", "past.0.key", ...

    Looks into tuples (named, subclassed, torch.return_types), lists, mappings and dataclasses;
    None, numbers and strings hold no tensor.
    """
    if isinstance(output, Tensor):
        yield path, output
        return
    if depth >= MAX_DEPTH:
        return
    prefix = f"{path}." if path else ""
    if isinstance(output, Mapping):
        for key, value in output.items():
            yield from leaves(value, f"{prefix}{key}", depth + 1)
    elif isinstance(output, (tuple, list)):
        for index, value in enumerate(output):
            yield from leaves(value, f"{prefix}{index}", depth + 1)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from leaves(getattr(output, field.name, None), f"{prefix}{field.name}", depth + 1)
