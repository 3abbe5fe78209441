"""The tables in which torch keeps the hooks of a leaf of the autograd graph.

The same rules hold as in `torch_private`: a stated degradation, and nothing private anywhere else.
"""

from __future__ import annotations

from torch import Tensor

_TABLES = ("_post_accumulate_grad_hooks", "_backward_hooks")


def forget_empty(leaf: Tensor) -> None:
    """Take the tables off `leaf` that removed hooks have left empty.

    An empty one costs 0.3 us in every backward (measured): torch asks it, in Python.

    Degradation: they stay.
    """
    for name in _TABLES:
        table = getattr(leaf, name, None)
        if table is not None and not table:
            setattr(leaf, name, None)
