"""What the server of processes imports: torch, and the libraries that are installed."""

from importlib.util import find_spec

import torch
import torch.distributed
import torch.nn.parallel  # noqa: F401

from benchmarks.detection.libraries import load

for name in ("transformers", "timm", "torchvision", "diffusers", "peft"):
    if find_spec(name):
        load(name)
