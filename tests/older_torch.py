"""What an older torch than today's cannot do itself, with or without the probe."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor.placement_types import _StridedShard

needs_fsdp2_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="torch 2.6 trains FSDP2 on a GPU only"
)


def cuts_uneven_strides() -> bool:
    """Whether `_StridedShard` cuts three rows in two: torch 2.6 refuses."""
    try:
        _StridedShard(0, split_factor=2)._split_tensor(torch.ones(3), 2, with_padding=False)
    except AssertionError:
        return False
    return True
