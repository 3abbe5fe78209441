"""Hugging Face's Trainer trains with the callback and without it: huggingface_job.py OUT PART.

Parts leave what they saw in OUT/PART.RANK.json. `fit` is one training twice, a resumed one, and one
with a fault; `stop` ends for a fault.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from ddpprobe.integrations.huggingface import DdpprobeCallback
from tests.frameworks.job_parts import MICROS, WORLD, digest, leave, tell
from tests.frameworks.trainer_parts import Patient, Seen, plant, stopped

STEPS, SAVED = 5, 3


def model(fault_at: int = -1) -> GPT2LMHeadModel:
    torch.manual_seed(1)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=16)
    built = GPT2LMHeadModel(config)
    if fault_at >= 0:
        plant(built, fault_at)
    return built


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Of different lengths, so that the mean over tokens is none over micro-batches."""

    def __len__(self) -> int:
        return 2 * MICROS * WORLD * STEPS - 2 * WORLD  # the last step of an epoch has less

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: index % 9] = -100
        return {"input_ids": ids, "labels": labels}


def train(
    out: Path, *callbacks: TrainerCallback, fault_at: int = -1, resume: str | None = None,
    steps: int = STEPS,
) -> tuple[str, Trainer]:  # fmt: skip
    """Train; returns a digest of the parameters, and the trainer."""
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=2, use_cpu=True,
        gradient_accumulation_steps=MICROS, logging_steps=1, logging_nan_inf_filter=False,
        report_to=[], disable_tqdm=True, seed=3, save_strategy="steps", save_steps=SAVED,
        eval_strategy="steps", eval_steps=2, learning_rate=0.01,
        lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = Trainer(
        model(fault_at), arguments, train_dataset=Tokens(),
        eval_dataset=torch.utils.data.Subset(Tokens(), range(2)), callbacks=list(callbacks),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return digest(trainer.model), trainer


def all_of_it(out: Path) -> dict[str, Any]:
    alone, _ = train(out / "alone")
    callback = DdpprobeCallback(every=1, daemon="none")
    seen = Seen(callback)
    bits, _ = train(out / "fit", callback, seen)
    told: dict[str, Any] = {"same": bits == alone, "run": seen.run, "losses": seen.losses}
    told["closed"] = callback.probe is None
    again = DdpprobeCallback(every=1, daemon="none")
    seen = Seen(again)
    train(out / "fit", again, seen, resume=str(out / "fit" / f"checkpoint-{SAVED}"))
    told["resumed_run"] = seen.run
    faulty = DdpprobeCallback(every=1, daemon="none", run_dir=out / "faulty")
    train(out / "bad", faulty, fault_at=2)
    return told


def stop(out: Path) -> dict[str, Any]:
    callback = DdpprobeCallback(every=1, on_anomaly="stop", run_dir=out / "stopped")
    steps = 10**6  # until it is stopped, or the test's own time is up
    _, trainer = train(out / "stop", callback, Patient(), fault_at=2, steps=steps)
    return stopped(callback, trainer.state.global_step)


if __name__ == "__main__":
    where, part = Path(sys.argv[1]), sys.argv[2]
    found = {"fit": all_of_it, "stop": stop}[part](where)
    tell(where, part, found)
    leave()
