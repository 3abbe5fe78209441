"""TRL's trainers train with the callback and without it: trl_job.py OUT sft|dpo [stop].

It trains without the probe, with it, on from a checkpoint, and with a fault on the last rank; or
until it is stopped. What it saw is in OUT/NAME.RANK.json.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

OUT, NAME = Path(sys.argv[1]), sys.argv[2]
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(OUT / "datasets")}

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer  # noqa: E402

from ddpprobe.integrations.huggingface import DdpprobeCallback  # noqa: E402
from tests.frameworks.job_parts import MICROS, digest, leave, tell  # noqa: E402
from tests.frameworks.trainer_parts import Patient, Seen, plant, stopped  # noqa: E402

STEPS, SAVED = 4, 2
WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))]


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=64, eos_token_id=1,
        bos_token_id=1,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def rows() -> Dataset:
    def words(i: int, n: int) -> str:
        return " ".join(f"w{(i * 7 + j) % 61}" for j in range(n))

    if NAME == "sft":
        return Dataset.from_list([{"text": words(i, 4 + i % 5)} for i in range(32)])
    return Dataset.from_list(
        [
            {"prompt": words(i, 2), "chosen": " " + words(i, 3), "rejected": " " + words(i + 9, 4)}
            for i in range(32)
        ]
    )


def train(
    out: Path, *callbacks: TrainerCallback, fault_at: int = -1, resume: str | None = None,
    steps: int = STEPS,
) -> str:  # fmt: skip
    """Train; return a digest of the parameters."""
    options: dict[str, Any] = {
        "output_dir": str(out), "max_steps": steps, "per_device_train_batch_size": 2,
        "use_cpu": True, "gradient_accumulation_steps": MICROS, "report_to": [], "seed": 3,
        "disable_tqdm": True, "save_strategy": "steps", "save_steps": SAVED, "max_length": 32,
        "learning_rate": 0.01, "bf16": False, "gradient_checkpointing": False,
        "logging_nan_inf_filter": False, "logging_steps": 1,
    }  # fmt: skip
    given: dict[str, Any] = {
        "train_dataset": rows(), "processing_class": tokenizer(), "callbacks": list(callbacks)
    }  # fmt: skip
    net = model()
    if fault_at >= 0:
        plant(net, fault_at)
    if NAME == "sft":
        trainer = SFTTrainer(net, args=SFTConfig(**options), **given)
    else:
        trainer = DPOTrainer(net, ref_model=model(), args=DPOConfig(**options), **given)
    trainer.train(resume_from_checkpoint=resume)
    return digest(net)


def stop() -> dict[str, Any]:
    callback = DdpprobeCallback(every=1, on_anomaly="stop", run_dir=OUT / "stopped")
    seen = Seen(callback)
    # Until it is stopped, or the test's own time is up.
    train(OUT / "stop", callback, seen, Patient(), fault_at=2, steps=10**6)
    return stopped(callback, seen.steps[-1])


if __name__ == "__main__" and sys.argv[3:] == ["stop"]:
    tell(OUT, NAME, stop())
elif __name__ == "__main__":
    alone = train(OUT / "alone")
    callback = DdpprobeCallback(every=1, daemon="none")
    seen = Seen(callback)
    bits = train(OUT / "fit", callback, seen)
    told: dict[str, Any] = {"same": bits == alone, "run": seen.run, "steps": seen.steps}
    told["losses"] = seen.losses
    told["closed"] = callback.probe is None
    seen = Seen(callback)
    train(OUT / "fit", callback, seen, resume=str(OUT / "fit" / f"checkpoint-{SAVED}"))
    told["resumed_run"] = seen.run
    faulty = DdpprobeCallback(every=1, daemon="none", run_dir=OUT / "faulty")
    train(OUT / "bad", faulty, fault_at=2)
    tell(OUT, NAME, told)
    leave()
