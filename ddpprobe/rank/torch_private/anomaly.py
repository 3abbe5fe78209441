"""The forward's stack that torch's anomaly mode keeps with every node of the autograd graph.

The same rules hold as in `torch_private`: a stated degradation, and nothing private anywhere else.
"""

from __future__ import annotations

import torch
from torch.autograd.graph import Node

_KEY = "traceback_"


def recording() -> torch.autograd.set_detect_anomaly:
    """Context in which torch remembers where each node was made; it looks for no NaN itself."""
    return torch.autograd.set_detect_anomaly(True, check_nan=False)


def traceback_of(node: Node) -> list[str]:
    """Return where a node was made, as `traceback.format_stack` writes it, outermost frame first.

    Degradation: an empty list; an operation of the backward then has no source line.
    """
    kept: object = node.metadata  # a method to the type checker, a mapping at run time
    told = kept.get(_KEY) if isinstance(kept, dict) else None
    return [line for line in told if isinstance(line, str)] if isinstance(told, list) else []


def self_test() -> dict[str, bool]:
    """Whether a node made while recording knows the line that made it."""
    with recording():
        made = torch.ones(1, requires_grad=True).log()
    stack = traceback_of(made.grad_fn) if made.grad_fn is not None else []
    return {"traceback_of": bool(stack) and ".log()" in stack[-1]}
