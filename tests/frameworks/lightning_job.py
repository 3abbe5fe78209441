"""Lightning trains with the callback and without it: lightning_job.py OUT PART [DEVICES].

Parts leave what they saw in OUT/PART.RANK.json. `fit` is one training twice, a resumed one, and one
with a fault; `stop` ends for a fault, `interrupted` by Ctrl-C; `before` calls `ddpprobe.install` in
front of `fit()`. $LIGHTNING is the package that has the Trainer.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ddpprobe
from tests.frameworks.job_parts import MICROS, digest, leave, tell

pl: Any = importlib.import_module(os.environ.get("LIGHTNING", "lightning.pytorch"))
from ddpprobe.integrations.lightning import LightningCallback  # noqa: E402  (looks at the above)

STEPS, SAVED = 6, 4


class Module(pl.LightningModule):
    """Its `training_step` calls `net`; itself is only called if something wraps it."""

    def __init__(self, fault_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
        self.fault_at = fault_at
        self.losses: list[float] = []
        self.norms: list[float] = []  # of the gradients as the optimizer gets them

    def training_step(self, batch: list[Tensor], index: int) -> dict[str, Tensor]:
        x, y = batch
        hidden = self.net[1](self.net[0](x))
        if self.global_step == self.fault_at and self.global_rank == self.trainer.world_size - 1:
            hidden = self.net[1](hidden * float("nan"))
        loss = (self.net[3](self.net[2](hidden)) - y).pow(2).mean()
        self.losses.append(loss.item())
        return {"loss": loss, "spread": hidden.std()}

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.net(batch[0])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms.append(float(nn.utils.get_total_norm([p.grad for p in self.parameters()])))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def data() -> DataLoader[Any]:
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2)


def fit(
    out: Path, devices: int, *callbacks: Any, fault_at: int = -1, checkpoint: Any = None,
    steps: int = STEPS, **options: Any,
) -> tuple[str, Module, Any]:  # fmt: skip
    """Train; returns a digest of the parameters, the module and the trainer."""
    pl.seed_everything(3)
    module = Module(fault_at)
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto",
        default_root_dir=out, max_steps=steps, accumulate_grad_batches=MICROS, logger=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=1,
        val_check_interval=4, callbacks=list(callbacks),
        **{"enable_checkpointing": False, **options},
    )  # fmt: skip
    trainer.fit(module, data(), data(), ckpt_path=checkpoint)
    return digest(module), module, trainer


class Seen(pl.Callback):
    """Notes where the run is, while it is one."""

    def __init__(self, callback: LightningCallback) -> None:
        self.callback, self.run = callback, ""

    def on_train_batch_end(self, *_: object) -> None:
        if self.callback.probe is not None:
            self.run = str(self.callback.probe.run_dir)


def all_of_it(out: Path, devices: int) -> dict[str, Any]:
    alone, *_ = fit(out / "alone", devices)
    callback = LightningCallback(every=1, daemon="none")
    seen = Seen(callback)
    saving = pl.callbacks.ModelCheckpoint(out / "saved", every_n_train_steps=SAVED, save_top_k=-1)
    bits, module, _ = fit(out / "fit", devices, callback, seen, saving, enable_checkpointing=True)
    told: dict[str, Any] = {"same": bits == alone, "run": seen.run, "losses": module.losses}
    told["norms"] = module.norms
    told["closed"] = callback.probe is None
    again, kept = LightningCallback(every=1, daemon="none"), next((out / "saved").glob("*.ckpt"))
    seen = Seen(again)
    fit(out / "fit", devices, again, seen, checkpoint=kept)
    told["resumed_run"] = seen.run
    faulty = LightningCallback(every=1, daemon="none", run_dir=out / "faulty")
    fit(out / "bad", devices, faulty, fault_at=2)
    return told


class Patient(pl.Callback):
    """Gives the daemon the time that it takes."""

    def on_train_batch_start(self, *_: object) -> None:
        time.sleep(0.02)


def stop(out: Path, devices: int) -> dict[str, Any]:
    callback = LightningCallback(every=1, on_anomaly="stop", run_dir=out / "stopped")
    steps = 10**6  # until it is stopped, or the test's own time is up
    _, _, trainer = fit(out / "stop", devices, callback, Patient(), fault_at=2, steps=steps)
    stopped = callback._fit.stopped_for
    return {"step": trainer.global_step, "for": stopped and [stopped.step, stopped.rank]}


class Interrupted(pl.Callback):
    """Presses Ctrl-C in the third step, once the daemon is there to see how it ends."""

    def on_train_batch_start(self, trainer: Any, *_: object) -> None:
        if trainer.global_step == 2:
            while not any(Path(trainer.default_root_dir, "daemon").glob("*.json")):
                time.sleep(0.01)
            signal.raise_signal(signal.SIGINT)


def interrupted(out: Path, devices: int) -> dict[str, Any]:
    callback = LightningCallback(every=1, run_dir=out / "interrupted")
    fit(out / "interrupted", devices, callback, Interrupted())
    return {}  # it does not come here: Lightning ends the process


def before(out: Path, devices: int) -> dict[str, Any]:
    pl.seed_everything(3)
    module = Module()
    probe = ddpprobe.install(module, every=1, run_dir=out / "before-run")
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto",
        default_root_dir=out, max_steps=STEPS, logger=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, data())
    probe.close()
    return {"step": trainer.global_step, "run": probe.run_dir}


if __name__ == "__main__":
    where, part = Path(sys.argv[1]), sys.argv[2]
    count = int(sys.argv[3] if len(sys.argv) > 3 else os.environ.get("WORLD_SIZE", "1"))
    parts = {"fit": all_of_it, "stop": stop, "interrupted": interrupted, "before": before}
    found = parts[part](where, count)
    tell(where, part, found)
    leave()
