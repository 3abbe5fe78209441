"""Models of torchvision: they classify pictures, and pixels."""

from __future__ import annotations

from functools import partial

import torch
from torch import Generator, Tensor, nn

from benchmarks.detection.libraries import load
from tests.models.families.timm import LABELS, PIXELS, of_pictures
from tests.models.training import Architecture


def _make(name: str, options: dict[str, object]) -> nn.Module:
    maker = getattr(load("torchvision").models, name)
    return maker(num_classes=LABELS, **options)


def _of_pixels(model: nn.Module, draw: Generator) -> Tensor:
    x = torch.randn(2, 3, PIXELS, PIXELS, generator=draw)
    y = torch.randint(0, LABELS, (2, PIXELS, PIXELS), generator=draw)
    return nn.functional.cross_entropy(model(x)["out"], y)


def _of_films(model: nn.Module, draw: Generator) -> Tensor:
    x = torch.randn(2, 3, 4, 16, 16, generator=draw)
    y = torch.randint(0, LABELS, (2,), generator=draw)
    return nn.functional.cross_entropy(model(x), y)


def _model(name: str, world: int = 1, **options: object) -> Architecture:
    return Architecture("torchvision", name, partial(_make, name, options), of_pictures, world)


def _lraspp() -> nn.Module:
    options = {"weights": None, "weights_backbone": None, "num_classes": LABELS}
    return load("torchvision").models.segmentation.lraspp_mobilenet_v3_large(**options)


def _film() -> nn.Module:
    video = load("torchvision").models.video
    return video.MViT(
        spatial_size=(16, 16), temporal_size=4, num_classes=LABELS,
        block_setting=[
            video.mvit.MSBlockConfig(
                num_heads=heads, input_channels=8 * heads, output_channels=8 * heads,
                kernel_q=[3, 3, 3], kernel_kv=[3, 3, 3], stride_q=[1, 1, 1], stride_kv=[1, 2, 2],
            )
            for heads in (2, 2)
        ],
        residual_pool=True, residual_with_cls_embed=False, rel_pos_embed=True, proj_after_attn=True,
    )  # fmt: skip


MODELS = (
    _model("resnet18"),
    _model("squeezenet1_1"),
    _model("mobilenet_v3_small"),
    _model("shufflenet_v2_x0_5", world=2),
    _model("mnasnet0_5"),
    _model("efficientnet_b0"),
    _model("VisionTransformer", image_size=PIXELS, patch_size=8, num_layers=2, num_heads=3,
           hidden_dim=48, mlp_dim=96),
    _model("SwinTransformer", patch_size=[2, 2], embed_dim=24, depths=[2, 2], num_heads=[3, 6],
           window_size=[4, 4], stochastic_depth_prob=0.1),
    Architecture("torchvision", "lraspp_mobilenet_v3_large", _lraspp, _of_pixels),
    Architecture("torchvision", "MViT", _film, _of_films),
)  # fmt: skip
