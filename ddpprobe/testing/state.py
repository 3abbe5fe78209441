"""One number for everything a training depends on: are two runs bit-identical?"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ddpprobe.rank.topology.naming import clean, inner


def state_hash(model: nn.Module, optimizer: Optimizer) -> str:
    """Return the sha256 of everything the rest of the training depends on, on this rank.

    That is: parameters (of sharded ones this rank's part), buffers, the optimizer's state and
    hyperparameters, and the random states of Python, NumPy, torch and the CUDA devices. Wrapper
    prefixes do not enter, so a plain run and a DDP run of one rank compare.
    """
    digest = hashlib.sha256()
    root = model
    while (wrapped := inner(root)) is not None:
        root = wrapped
    _feed(digest, [(clean(n), p) for n, p in root.named_parameters()])
    _feed(digest, [(clean(n), b) for n, b in root.named_buffers()])
    for group in optimizer.param_groups:
        _feed(digest, {k: v for k, v in group.items() if k != "params"})
        _feed(digest, [optimizer.state.get(p, {}) for p in group["params"]])
    _feed(digest, random.getstate())
    _feed(digest, np.random.get_state())  # noqa: NPY002  (the state that legacy code draws from)
    _feed(digest, torch.get_rng_state())
    if torch.cuda.is_available():
        _feed(digest, torch.cuda.get_rng_state_all())
    return digest.hexdigest()


def _feed(digest: Any, value: object) -> None:  # noqa: ANN401  (hashlib's type has no public name)
    """Add a nested value to a hash; every leaf with its type and shape."""
    if isinstance(value, Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        # A copy: numpy() on the memory of a gathered parameter would keep FSDP2 from freeing it.
        local = local.detach().cpu().clone(memory_format=torch.contiguous_format)
        digest.update(f"{local.dtype}{tuple(local.shape)}".encode())
        digest.update(local.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        _feed(digest, sorted(value.items(), key=lambda item: str(item[0])))
    elif isinstance(value, tuple | list):
        digest.update(f"[{len(value)}".encode())
        for item in value:
            _feed(digest, item)
    else:
        digest.update(f"{type(value).__name__}={value!r};".encode())
