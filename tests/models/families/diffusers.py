"""Models of diffusers: they predict noise, and autoencoders rebuild pictures."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.detection.libraries import load
from tests.models.training import Architecture

_BLOCKS = {
    "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8,
}  # fmt: skip


def _make(name: str, options: dict[str, object]) -> nn.Module:
    return getattr(load("diffusers"), name)(**options)


def _error(got: Tensor, draw: Generator) -> Tensor:
    return (got - torch.randn(got.shape, generator=draw)).square().mean()


def _times(draw: Generator) -> Tensor:
    return torch.randint(0, 100, (2,), generator=draw)


def _of_pictures(model: nn.Module, draw: Generator) -> Tensor:
    return _error(model(torch.randn(2, 3, 16, 16, generator=draw), _times(draw)).sample, draw)


def _of_words(model: nn.Module, draw: Generator) -> Tensor:
    x, words = torch.randn(2, 4, 8, 8, generator=draw), torch.randn(2, 5, 16, generator=draw)
    return _error(model(x, _times(draw), words).sample, draw)


def _of_hints(model: nn.Module, draw: Generator) -> Tensor:
    x, words = torch.randn(2, 4, 8, 8, generator=draw), torch.randn(2, 5, 16, generator=draw)
    hint = torch.randn(2, 3, 64, 64, generator=draw)
    down, middle = model(x, _times(draw), words, controlnet_cond=hint, return_dict=False)
    return sum((_error(part, draw) for part in down), _error(middle, draw))


def _of_itself(model: nn.Module, draw: Generator) -> Tensor:
    x = torch.randn(2, 3, 16, 16, generator=draw)
    return (model(x).sample - x).square().mean()


def _of_itself_drawn(model: nn.Module, draw: Generator) -> Tensor:
    x = torch.randn(2, 3, 16, 16, generator=draw)
    return (model(x, sample_posterior=True, generator=draw).sample - x).square().mean()


def _of_labels(model: nn.Module, draw: Generator) -> Tensor:
    x, labels = torch.randn(2, 4, 8, 8, generator=draw), _times(draw) % 5
    return _error(model(x, timestep=_times(draw), class_labels=labels).sample, draw)


def _of_two_texts(model: nn.Module, draw: Generator) -> Tensor:
    x, words = torch.randn(2, 4, 8, 8, generator=draw), torch.randn(2, 5, 16, generator=draw)
    pooled = torch.randn(2, 16, generator=draw)
    return _error(model(x, words, pooled, _times(draw)).sample, draw)


def _of_flow(model: nn.Module, draw: Generator) -> Tensor:
    options = {
        "hidden_states": torch.randn(2, 16, 4, generator=draw),
        "encoder_hidden_states": torch.randn(2, 5, 16, generator=draw),
        "pooled_projections": torch.randn(2, 16, generator=draw),
        "timestep": torch.rand(2, generator=draw), "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3),
    }  # fmt: skip
    return _error(model(**options).sample, draw)


def _of_films(model: nn.Module, draw: Generator) -> Tensor:
    x, words = torch.randn(2, 2, 4, 8, 8, generator=draw), torch.randn(2, 5, 16, generator=draw)
    return _error(model(x, words, _times(draw)).sample, draw)


def _model(name: str, loss: Any, world: int = 1, **options: object) -> Architecture:
    return Architecture("diffusers", name, partial(_make, name, options), loss, world)


MODELS = (
    _model("UNet2DModel", _of_pictures, world=2, sample_size=16, attention_head_dim=8,
           down_block_types=("DownBlock2D", "AttnDownBlock2D"),
           up_block_types=("AttnUpBlock2D", "UpBlock2D"), **_BLOCKS),
    _model("UNet2DConditionModel", _of_words, sample_size=8, cross_attention_dim=16,
           attention_head_dim=8, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
           up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **_BLOCKS),
    _model("ControlNetModel", _of_hints, cross_attention_dim=16, attention_head_dim=8,
           down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
           conditioning_embedding_out_channels=(8, 8, 16, 16), **_BLOCKS),
    _model("AutoencoderKL", _of_itself_drawn,
           down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
           **_BLOCKS),
    _model("VQModel", _of_itself, num_vq_embeddings=16,
           down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
           **_BLOCKS),
    _model("DiTTransformer2DModel", _of_labels, num_attention_heads=2, attention_head_dim=8,
           in_channels=4, num_layers=2, sample_size=8, num_embeds_ada_norm=100, norm_num_groups=8),
    _model("SD3Transformer2DModel", _of_two_texts, sample_size=8, in_channels=4, num_layers=2,
           attention_head_dim=8, num_attention_heads=2, joint_attention_dim=16,
           caption_projection_dim=16, pooled_projection_dim=16, out_channels=4),
    _model("FluxTransformer2DModel", _of_flow, in_channels=4, num_layers=1, num_single_layers=1,
           attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16,
           pooled_projection_dim=16, axes_dims_rope=(4, 4, 8)),
    _model("CogVideoXTransformer3DModel", _of_films, num_attention_heads=2, attention_head_dim=16,
           in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=16, num_layers=2,
           sample_width=8, sample_height=8, sample_frames=5, max_text_seq_length=5),
)  # fmt: skip
