"""Healthy runs of architectures that people train: small, from random weights, by usual recipes.

The models come from transformers and timm, which are not in the environment of development: `make
bench-detection` has one with them. A recipe: AdamW with weight decay (none for biases and gains),
linear warm-up and cosine, gradients clipped at 1, dropout as the configuration has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.detection import nets
from benchmarks.detection.healthy import Healthy
from benchmarks.detection.libraries import load
from benchmarks.detection.nets import Batch

PIXELS, CHANNELS, IMAGES = 32, 3, 10
_WARM_UP = 30
_COMMON: Mapping[str, object] = {
    "vocab_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LLAMA: Mapping[str, object] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_BERT: Mapping[str, object] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip


class Recipe(Healthy):
    """How all of them are trained.

    Attributes:
        rate: the highest learning rate.
    """

    rate: ClassVar[float] = 1e-3

    def make_optimizer(self) -> torch.optim.Optimizer:
        parts = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parts if p.ndim > 1], "weight_decay": 0.05},
            {"params": [p for p in parts if p.ndim <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=self.rate)

    def before_step(self) -> None:
        done = (self.step - _WARM_UP) / (self.steps - _WARM_UP)
        share = min((self.step + 1) / _WARM_UP, 0.5 * (1 + math.cos(math.pi * max(done, 0))))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * max(share, 0.01)

    def before_update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


class Text(Recipe):
    """A model of transformers that reads tokens: the next one, or in place of a masked one.

    Attributes:
        name: its class.
        options: of its configuration.
        masked: whether it is an encoder, which gets a sixth of the tokens masked.
    """

    name: ClassVar[str]
    options: ClassVar[Mapping[str, object]]
    rate: ClassVar[float] = 5e-3  # by 1e-3 so narrow a Llama has not begun to copy in 300 steps
    masked: ClassVar[bool] = False

    def make_model(self) -> nn.Module:
        kind = getattr(load("transformers"), self.name)
        model: nn.Module = kind(kind.config_class(**_COMMON, **self.options))
        return model.train()

    def batch(self) -> Batch:
        x, y = self.data.text(size=8)
        if not self.masked:
            return x + 3, y + 3  # 0, 1 and 2 mean something else
        hidden = torch.rand(x.shape, generator=self.data.own) < 1 / 6
        hidden[:, 0] = True
        return torch.where(hidden, 31, x + 3), torch.where(hidden, x + 3, -100)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        keep: dict[str, bool] = {} if self.masked else {"use_cache": False}
        return nets.cross_entropy(self.wrapped(input_ids=x, **keep).logits, y)


class Seq2Seq(Text):
    """A model of transformers with an encoder and a decoder: it copies what it reads."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        before = torch.cat([torch.ones_like(x[:, :1]), x[:, :-1]], dim=1)
        out: Any = self.wrapped(input_ids=x, decoder_input_ids=before, use_cache=False)
        return nets.cross_entropy(out.logits, x)


class Image(Recipe):
    """A model of timm on images of 32 x 32: which of ten patterns it is.

    Attributes:
        name: as timm has it.
        options: of `timm.create_model`.
    """

    name: ClassVar[str]
    options: ClassVar[Mapping[str, object]] = {}

    def make_model(self) -> nn.Module:
        task = torch.Generator().manual_seed(self.seed)
        coarse = torch.randn(IMAGES, CHANNELS, 8, 8, generator=task)
        self.patterns = nn.functional.interpolate(coarse, size=PIXELS, mode="bilinear")
        options = {"pretrained": False, "num_classes": IMAGES, **self.options}
        model: nn.Module = load("timm").create_model(self.name, **options)
        return model.train()

    def batch(self) -> Batch:
        y = torch.randint(0, IMAGES, (8,), generator=self.data.own)
        noise = torch.randn(8, CHANNELS, PIXELS, PIXELS, generator=self.data.own)
        return self.patterns[y] + 0.5 * noise, y


def _text(
    name: str, options: Mapping[str, object], trap: str, kind: type[Text] = Text, world: int = 1,
    *, masked: bool = False,
) -> Callable[[str], type[Healthy]]:  # fmt: skip
    facts = {"name": name, "options": options, "trap": trap, "world": world, "masked": masked}
    return lambda job: type(job, (kind,), {**facts, "net": "gpt"})


def _image(
    name: str, trap: str, world: int = 1, **options: object
) -> Callable[[str], type[Healthy]]:
    return lambda job: type(
        job, (Image,), {"name": name, "options": options, "trap": trap, "world": world}
    )


_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_OPT = {**_BERT, "ffn_dim": 64, "word_embed_proj_dim": 32}
_MOE = {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
_VIT = {"img_size": PIXELS, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}
_MADE = (
    _text("GPT2LMHeadModel", _GPT2, "GPT-2, two ranks", world=2),
    _text("LlamaForCausalLM", _LLAMA, "Llama, two ranks", world=2),
    _text("Olmo2ForCausalLM", _LLAMA, "OLMo 2: norms after the layers, and of q and k"),
    _text("Qwen2ForCausalLM", _LLAMA, "Qwen 2"),
    _text("Gemma2ForCausalLM", {**_LLAMA, "head_dim": 8}, "Gemma 2: soft-capped logits"),
    _text("MixtralForCausalLM", _MOE, "Mixtral: two of four experts"),
    _text("GPTNeoXForCausalLM", _BERT, "GPT-NeoX: attention and MLP side by side"),
    _text("BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "BLOOM: ALiBi"),
    _text("OPTForCausalLM", _OPT, "OPT: ReLU, dropout"),
    _text("BertForMaskedLM", _BERT, "BERT, two ranks", world=2, masked=True),
    _text("ElectraForMaskedLM", {**_BERT, "embedding_size": 16}, "ELECTRA", masked=True),
    _text("T5ForConditionalGeneration",
          {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4,
           "decoder_start_token_id": 0}, "T5", Seq2Seq),
    _image("resnet10t", "ResNet 10-T"),
    _image("convnext_atto", "ConvNeXt atto", depths=(1, 1, 2, 1), dims=(16, 32, 48, 64)),
    _image("mobilenetv3_small_050", "MobileNetV3", world=2),
    _image("mobilenetv2_050", "MobileNetV2"),
    _image("vit_tiny_patch16_224", "ViT, stochastic depth, two ranks", world=2,
           drop_path_rate=0.1, **_VIT),
    _image("regnetx_002", "RegNet X"),
    _image("mixer_s16_224", "MLP-Mixer", img_size=PIXELS),
    _image("densenet121", "DenseNet", growth_rate=8, block_config=(2, 2, 2, 2)),
)  # fmt: skip
ZOO: dict[str, type[Healthy]] = {
    job: made(job) for job, made in ((f"Z{n:02}", m) for n, m in enumerate(_MADE, 1))
}
