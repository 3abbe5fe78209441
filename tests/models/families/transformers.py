"""Models of Hugging Face's transformers: they read tokens, pictures or sound."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.detection.libraries import load
from tests.models.training import Architecture

WORDS, LENGTH, LABELS = 32, 12, 5
_TOKENS = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BERT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
_LLAMA = {**_BERT, "num_key_value_heads": 2}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_EXPERTS = {**_LLAMA, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_T5 = {
    "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
_BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "max_position_embeddings": 64, "decoder_start_token_id": 2,
}  # fmt: skip
_WHISPER = {
    **_BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32,
    "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
_PIXELS = {**_BERT, "image_size": 32, "patch_size": 8, "num_labels": LABELS}


def make(name: str, options: Mapping[str, object]) -> nn.Module:
    """Build a model from its configuration."""
    kind = getattr(load("transformers"), name)
    config = kind.config_class(**options)
    return kind(config)


def tokens(draw: Generator) -> Tensor:
    """Return a batch of words, int64 [4, LENGTH]; the first three mean something else."""
    return torch.randint(3, WORDS, (4, LENGTH), generator=draw)


def of_tokens(model: nn.Module, draw: Generator) -> Tensor:
    """Return the loss that a model computes of its own words."""
    x = tokens(draw)
    return model(input_ids=x, labels=x).loss


def _of_classes(model: nn.Module, draw: Generator) -> Tensor:
    y = torch.randint(0, LABELS, (4,), generator=draw)
    return model(input_ids=tokens(draw), labels=y).loss


def _of_answers(model: nn.Module, draw: Generator) -> Tensor:
    ends = torch.randint(0, LENGTH, (2, 4), generator=draw)
    return model(input_ids=tokens(draw), start_positions=ends[0], end_positions=ends[1]).loss


def _of_pictures(model: nn.Module, draw: Generator) -> Tensor:
    x = torch.randn(4, 3, 32, 32, generator=draw)
    y = torch.randint(0, LABELS, (4,), generator=draw)
    return model(pixel_values=x, labels=y).loss


def _of_hidden_patches(model: nn.Module, draw: Generator) -> Tensor:
    x = torch.randn(4, 3, 32, 32, generator=draw)
    return model(pixel_values=x, noise=torch.rand(4, 16, generator=draw)).loss


def _of_mels(model: nn.Module, draw: Generator) -> Tensor:
    return model(input_features=torch.randn(4, 8, 32, generator=draw), labels=tokens(draw)).loss


def _of_waves(model: nn.Module, draw: Generator) -> Tensor:
    y = torch.randint(0, LABELS, (4,), generator=draw)
    return model(input_values=torch.randn(4, 400, generator=draw), labels=y).loss


def _of_pairs(model: nn.Module, draw: Generator) -> Tensor:
    x = torch.randn(4, 3, 32, 32, generator=draw)
    return model(input_ids=tokens(draw), pixel_values=x, return_loss=True).loss


def _of_series(model: nn.Module, draw: Generator) -> Tensor:
    x = torch.randn(4, 16, 2, generator=draw)
    return model(past_values=x, future_values=torch.randn(4, 4, 2, generator=draw)).loss


def _clip() -> nn.Module:
    text = {**_TOKENS, **_BERT, "projection_dim": 16}
    return make("CLIPModel", {"text_config": text, "vision_config": _PIXELS, "projection_dim": 16})


def _model(name: str, loss: Any, options: Mapping[str, object], world: int = 1) -> Architecture:
    return Architecture("transformers", name, partial(make, name, options), loss, world)


def _text(name: str, options: Mapping[str, object], world: int = 1) -> Architecture:
    return _model(name, of_tokens, {**_TOKENS, **options}, world)


MODELS = (
    _text("GPT2LMHeadModel", _GPT, world=2),
    _text("LlamaForCausalLM", _LLAMA, world=2),
    _text("MistralForCausalLM", {**_LLAMA, "sliding_window": 4}),
    _text("Qwen2ForCausalLM", _LLAMA),
    _text("Qwen3ForCausalLM", {**_LLAMA, "head_dim": 8}),
    _text("Gemma2ForCausalLM", {**_LLAMA, "head_dim": 8}),
    _text("Olmo2ForCausalLM", _LLAMA),
    _text("Phi3ForCausalLM", _LLAMA),
    _text("MixtralForCausalLM", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    _text("Qwen3MoeForCausalLM", {**_EXPERTS, "num_experts": 4, "head_dim": 8}),
    _text("GPTNeoXForCausalLM", _BERT),
    _text("BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    _text("OPTForCausalLM", {**_BERT, "ffn_dim": 64, "word_embed_proj_dim": 16}),
    _text("FalconForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2,
                                "num_attention_heads": 4}),
    _text("MambaForCausalLM", {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}),
    _text("BertForMaskedLM", _BERT, world=2),
    _text("RobertaForMaskedLM", _BERT),
    _text("ElectraForMaskedLM", {**_BERT, "embedding_size": 16}),
    _text("AlbertForMaskedLM", {**_BERT, "embedding_size": 16}),
    _text("DebertaV2ForMaskedLM", {**_BERT, "relative_attention": True,
                                   "pos_att_type": ["p2c", "c2p"]}),
    _model("DistilBertForQuestionAnswering", _of_answers,
           {**_TOKENS, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}),
    _model("XLNetForSequenceClassification", _of_classes,
           {**_TOKENS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64,
            "num_labels": LABELS}),
    _text("T5ForConditionalGeneration", _T5, world=2),
    _text("BartForConditionalGeneration", _BART),
    _model("WhisperForConditionalGeneration", _of_mels, {**_TOKENS, **_WHISPER}),
    _model("Wav2Vec2ForSequenceClassification", _of_waves,
           {**_BERT, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4),
            "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2, "num_labels": LABELS, "classifier_proj_size": 16}),
    _model("ViTForImageClassification", _of_pictures, _PIXELS, world=2),
    _model("ViTMAEForPreTraining", _of_hidden_patches,
           {**_PIXELS, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2, "decoder_intermediate_size": 32}),
    _model("SwinForImageClassification", _of_pictures,
           {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2],
            "num_heads": [2, 4], "window_size": 4, "num_labels": LABELS}),
    _model("SegformerForImageClassification", _of_pictures,
           {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16,
            "num_attention_heads": [1, 2, 2, 4], "num_labels": LABELS}),
    _model("ConvNextV2ForImageClassification", _of_pictures,
           {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_labels": LABELS}),
    _model("PatchTSTForPrediction", _of_series,
           {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4,
            "prediction_length": 4, "d_model": 16, "num_attention_heads": 2, "ffn_dim": 32,
            "num_hidden_layers": 2}),
    Architecture("transformers", "CLIPModel", _clip, _of_pairs),
)  # fmt: skip
