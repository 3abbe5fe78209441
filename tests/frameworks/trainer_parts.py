"""What the jobs of Hugging Face's `Trainer` do alike, TRL's among them."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, TrainerCallback

from ddpprobe.integrations.huggingface import DdpprobeCallback
from tests.frameworks.job_parts import MICROS, RANK, WORLD


def plant(net: GPT2LMHeadModel, fault_at: int) -> None:
    """Make one output NaN, in the second micro-batch of a step of the last rank."""
    calls = 0

    def hook(module: nn.Module, args: object, output: Tensor) -> Tensor | None:
        nonlocal calls
        calls += torch.is_grad_enabled()
        bad = calls == fault_at * MICROS + 1 and RANK == WORLD - 1
        return output * float("nan") if bad else None

    net.transformer.h[1].mlp.c_proj.register_forward_hook(hook)


class Seen(TrainerCallback):
    """Notes where the run is, while it is one, which steps there were, and what the loss was."""

    def __init__(self, callback: DdpprobeCallback) -> None:
        self.callback, self.run, self.steps, self.losses = callback, "", [], []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.run = str(self.callback.probe.run_dir)
        self.steps.append(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))


class Patient(TrainerCallback):
    """Gives the daemon the time that it takes."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        time.sleep(0.02)


def stopped(callback: DdpprobeCallback, step: int) -> dict[str, Any]:
    """Return what a training tells that the probe has stopped: for what, and in which step."""
    reason = callback._fit.stopped_for
    return {"step": step, "for": reason and [reason.step, reason.rank]}
