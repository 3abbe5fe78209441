"""Adapters of peft, around models of transformers whose own weights are frozen."""

from __future__ import annotations

from functools import partial

from torch import nn

from benchmarks.detection.libraries import load
from tests.models.families import transformers
from tests.models.training import Architecture

_LLAMA = {
    "vocab_size": transformers.WORDS, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_PROJECTIONS = ["q_proj", "v_proj"]


def _make(name: str, options: dict[str, object]) -> nn.Module:
    peft = load("peft")
    base = transformers.make("LlamaForCausalLM", _LLAMA)
    config = getattr(peft, name)(task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(base, config)


def _model(label: str, name: str, world: int = 1, **options: object) -> Architecture:
    make = partial(_make, name, options)
    return Architecture("peft", label, make, transformers.of_tokens, world)


MODELS = (
    _model("LoRA", "LoraConfig", world=2, r=4, lora_dropout=0.1, target_modules=_PROJECTIONS),
    _model("DoRA", "LoraConfig", r=4, use_dora=True, target_modules=_PROJECTIONS),
    _model("LoRA, embeddings trained", "LoraConfig", r=4, target_modules=_PROJECTIONS,
           modules_to_save=["embed_tokens", "lm_head"]),
    _model("AdaLoRA", "AdaLoraConfig", total_step=100, target_modules=_PROJECTIONS),
    _model("LoHa", "LoHaConfig", r=4, target_modules=_PROJECTIONS),
    _model("VeRA", "VeraConfig", r=4, target_modules=_PROJECTIONS),
    _model("BOFT", "BOFTConfig", boft_block_size=4, target_modules=_PROJECTIONS),
    _model("OFT", "OFTConfig", oft_block_size=8, target_modules=_PROJECTIONS),
    _model("IA3", "IA3Config", world=2, target_modules=["k_proj", "v_proj", "down_proj"],
           feedforward_modules=["down_proj"]),
    _model("prefix tuning", "PrefixTuningConfig", num_virtual_tokens=4),
    _model("prompt tuning", "PromptTuningConfig", num_virtual_tokens=4),
)  # fmt: skip
