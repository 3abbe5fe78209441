"""Modules that torch computes in another way once anybody's hook hangs on them.

`nn.TransformerEncoderLayer` has a fused forward for evaluation, which a frozen encoder takes in a
training step too. Torch takes the other forward if any module in the layer has a hook, and then the
last bits differ: of the features, so of all that is trained on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

REASON = "an nn.TransformerEncoderLayer in evaluation mode, of which hooks would change the bits"


def inside_layers(modules: Iterable[nn.Module]) -> dict[nn.Module, nn.TransformerEncoderLayer]:
    """Return the modules in layers that have a fused forward, the layers among them.

    Not those on which hooks hang already: somebody else's, or ours on the model as a whole.
    """
    found: dict[nn.Module, nn.TransformerEncoderLayer] = {}
    for layer in _layers(modules):
        found |= dict.fromkeys(layer.modules(), layer)
    return found


def fused(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Return those in layers that may take their fused forward now, so that no hook is to hang."""
    return {module for module, layer in inside_layers(modules).items() if not layer.training}


def _layers(modules: Iterable[nn.Module]) -> Iterator[nn.TransformerEncoderLayer]:
    for module in modules:
        if isinstance(module, nn.TransformerEncoderLayer) and _has_fused_forward(module):
            yield module


def _has_fused_forward(layer: nn.TransformerEncoderLayer) -> bool:
    return (
        type(layer).forward is nn.TransformerEncoderLayer.forward
        and torch.backends.mha.get_fastpath_enabled()
        and bool(getattr(layer.self_attn, "batch_first", False))
        and not any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules())  # noqa: SLF001  (as torch does)
    )
