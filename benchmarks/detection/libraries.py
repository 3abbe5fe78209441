"""Imports libraries of models, transformers, timm and others, beside a torch for the CPU."""

from __future__ import annotations

import importlib
from typing import Any

import torch


def load(name: str) -> Any:  # a module without types
    """Import a library of models; all of them import torchvision.

    The torchvision of a package index is built for a CUDA torch: beside one for the CPU its
    operators do not load, and its import fails unless those that it describes are declared. No
    model here calls them.
    """
    if not hasattr(torch.ops.torchvision, "nms"):
        for operator in ("nms", "qnms"):
            _OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float overlap) -> Tensor")
    return importlib.import_module(name)


_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")  # they last as long as it does
