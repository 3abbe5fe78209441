"""What an older torch than today's cannot do itself, with or without the probe.

The FSDP2 of torch 2.6 trains on a GPU only. Streams of a CPU lack two methods, which do nothing
there; gathering anew changes what autograd has saved, by its count; and gloo answers with the sum
where the mean is asked for. Importing this lets it train.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor.placement_types import _StridedShard


def cuts_uneven_strides() -> bool:
    """Whether `_StridedShard` cuts three rows in two: torch 2.6 refuses."""
    try:
        _StridedShard(0, split_factor=2)._split_tensor(torch.ones(3), 2, with_padding=False)
    except AssertionError:
        return False
    return True


class _Plain(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def exports_hooked_strictly() -> bool:
    """Whether `torch.export` traces a module that has a hook, whosever: that of torch 2.6 fails."""
    module = _Plain()
    module.register_forward_pre_hook(lambda *_: None)
    try:
        torch.export.export(module, (torch.ones(1),), strict=True)
    except AssertionError:
        return False
    return True


def _record_event(_: torch.cpu.Stream) -> object:
    return torch.cpu.Event()


def _wait_event(_: torch.cpu.Stream, event: object) -> None:
    pass


def _let_fsdp2_train_on_cpu() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

    copy_out = _fsdp_param_group.foreach_all_gather_copy_out
    factors = _fsdp_collectives._get_gradient_divide_factors

    def uncounted(result: object, parameters: Sequence[Any], group: object) -> None:
        with contextlib.ExitStack() as stack:
            for gathered in (t for p in parameters for t in getattr(p, "all_gather_outputs", ())):
                stack.enter_context(torch.autograd._unsafe_preserve_version_counter(gathered))
            copy_out(result, parameters, group)

    def divided_here(group: object, replicas: object, _: torch.dtype) -> tuple[float, float]:
        return factors(group, replicas, torch.float16)

    _fsdp_param_group.foreach_all_gather_copy_out = uncounted
    _fsdp_collectives._get_gradient_divide_factors = divided_here
    torch.cpu.Stream.record_event, torch.cpu.Stream.wait_event = _record_event, _wait_event


if not hasattr(torch.cpu.Stream, "record_event"):
    _let_fsdp2_train_on_cpu()
