"""Models of timm: they classify pictures of 32 x 32."""

from __future__ import annotations

from functools import partial

import torch
from torch import Generator, Tensor, nn

from benchmarks.detection.libraries import load
from tests.models.training import Architecture

PIXELS, LABELS = 32, 5
_VIT = {"img_size": PIXELS, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}


def of_pictures(model: nn.Module, draw: Generator) -> Tensor:
    """Return the loss of a batch of pictures, each of a class."""
    x = torch.randn(4, 3, PIXELS, PIXELS, generator=draw)
    y = torch.randint(0, LABELS, (4,), generator=draw)
    return nn.functional.cross_entropy(model(x), y)


def _make(name: str, options: dict[str, object]) -> nn.Module:
    return load("timm").create_model(name, pretrained=False, num_classes=LABELS, **options)


def _model(name: str, world: int = 1, **options: object) -> Architecture:
    return Architecture("timm", name, partial(_make, name, options), of_pictures, world)


MODELS = (
    _model("resnet10t"),
    _model("convnext_atto", depths=(1, 1, 2, 1), dims=(16, 32, 48, 64), drop_path_rate=0.1),
    _model("mobilenetv3_small_050", world=2),
    _model("mobilenetv2_050"),
    _model("tinynet_e", drop_rate=0.2),
    _model("lcnet_050"),
    _model("mobilevit_xxs"),
    _model("edgenext_xx_small", depths=(1, 1, 2, 1), dims=(16, 16, 32, 32)),
    _model("xcit_nano_12_p16_224", img_size=PIXELS, patch_size=8, embed_dim=48, depth=2,
           num_heads=4),
    _model("vit_tiny_patch16_224", drop_path_rate=0.1, **_VIT),
    _model("deit_tiny_distilled_patch16_224", **_VIT),
    _model("beit_base_patch16_224", init_values=0.1, **_VIT),
    _model("cait_xxs24_224", img_size=PIXELS, patch_size=8, embed_dim=48, depth=2, num_heads=3),
    _model("regnetx_002"),
    _model("densenet121", growth_rate=8, block_config=(2, 2, 2, 2)),
    _model("ghostnet_050"),
    _model("swin_tiny_patch4_window7_224", img_size=PIXELS, patch_size=2, window_size=4,
           embed_dim=24, depths=(2, 2), num_heads=(3, 6)),
)  # fmt: skip
