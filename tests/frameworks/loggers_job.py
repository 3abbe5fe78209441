"""Frameworks train with their loggers, with the probe and without: loggers_job.py OUT NAME.

NAME is huggingface, lightning, fabric or accelerate. All loggers write to files below OUT. What was
seen is in OUT/NAME.RANK.json.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.frameworks.job_parts import RANK, WORLD, digest, leave, tell

OUT, NAME = Path(sys.argv[1]), sys.argv[2]
STEPS = 4
os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(OUT)}
os.environ |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_TRACKING_URI": f"file://{OUT}/mlflow"}
OPTIONS: dict[str, Any] = {"every": 1, "daemon": "none"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Depend on all generators of random numbers, so that nobody else may draw from them."""
        noise = random.random() + np.random.rand() + torch.rand(())
        return {"loss": (self.down(self.up(x).tanh()) * (1 + noise)).pow(2).mean()}


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def seeded() -> Net:
    seed()
    return Net()


def batch(step: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step * WORLD + RANK))


def huggingface(out: Path, *, probed: bool) -> tuple[nn.Module, str | None]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from ddpprobe.integrations.huggingface import DdpprobeCallback

    callback = DdpprobeCallback(**OPTIONS)
    where: list[str] = []

    class Seeded(TrainerCallback):
        """Seeds after the loggers: MLflow names a run by `random`, not always as often."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            seed()

    class Seen(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if callback.probe is not None:
                where.append(str(callback.probe.run_dir))

    class Data(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return 4 * STEPS * WORLD

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"x": batch(index)[0], "labels": torch.zeros(())}

    arguments = TrainingArguments(
        output_dir=str(out), max_steps=STEPS, per_device_train_batch_size=4, use_cpu=True,
        logging_steps=2, report_to=["wandb", "mlflow", "tensorboard"], disable_tqdm=True, seed=3,
        save_strategy="no", learning_rate=0.1,
    )  # fmt: skip
    net = seeded()
    Trainer(
        net, arguments, train_dataset=Data(),
        callbacks=[Seeded(), callback, Seen()] if probed else [Seeded()],
    ).train()  # fmt: skip
    return net, where[-1] if where else None


def loggers(out: Path) -> list[Any]:
    pl = importlib.import_module("lightning.pytorch.loggers")
    return [
        pl.TensorBoardLogger(out), pl.CSVLogger(out), pl.WandbLogger(save_dir=OUT, offline=True),
        pl.MLFlowLogger(tracking_uri=os.environ["MLFLOW_TRACKING_URI"]),
    ]  # fmt: skip


def lightning(out: Path, *, probed: bool) -> tuple[nn.Module, str | None]:
    import lightning.pytorch as pl

    from ddpprobe.integrations.lightning import LightningCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = seeded()

        def training_step(self, x: Tensor, index: int) -> Tensor:
            loss = self.net(x)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    callback, where, module = LightningCallback(**OPTIONS), [], Module()
    given = torch.stack([batch(step) for step in range(STEPS)])

    class Seeded(pl.Callback):
        """Seeds after the loggers, which are set up first."""

        def setup(self, *_: object, **__: object) -> None:
            seed()

    class Seen(pl.Callback):
        def on_train_batch_end(self, *_: object) -> None:
            if callback.probe is not None:
                where.append(str(callback.probe.run_dir))

    pl.Trainer(
        accelerator="cpu", devices=WORLD, strategy="ddp" if WORLD > 1 else "auto",
        default_root_dir=out, max_steps=STEPS, enable_progress_bar=False, logger=loggers(out),
        enable_model_summary=False, enable_checkpointing=False, log_every_n_steps=1,
        callbacks=[Seeded(), callback, Seen()] if probed else [Seeded()],
    ).fit(module, DataLoader(given, batch_size=None))  # fmt: skip
    return module, where[-1] if where else None


def fabric(out: Path, *, probed: bool) -> tuple[nn.Module, str | None]:
    from lightning.fabric import Fabric

    from ddpprobe.integrations.fabric import install

    fabric = Fabric(
        accelerator="cpu", devices=WORLD, strategy="ddp" if WORLD > 1 else "auto",
        loggers=loggers(out),
    )  # fmt: skip
    fabric.launch()
    for logger in fabric.loggers:
        assert logger.experiment is not None  # MLflow makes a name for a run with `random`
    net = seeded()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.05))
    probe = install(fabric, model, root_dir=out, **OPTIONS) if probed else None
    for step in range(STEPS):
        loss = model(batch(step))["loss"]
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        fabric.log("loss", loss.item(), step)
    where = probe.run_dir if probe is not None else None
    if probe is not None:
        probe.close()
    for logger in fabric.loggers:
        logger.finalize("success")
    return net, where


def accelerate(out: Path, *, probed: bool) -> tuple[nn.Module, str | None]:
    from accelerate import Accelerator

    from ddpprobe.integrations.accelerate import install

    accelerator = Accelerator(
        cpu=True, project_dir=str(out), log_with=["wandb", "mlflow", "tensorboard"]
    )
    accelerator.init_trackers(f"test-{out.name}")
    net = seeded()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.05))
    probe = install(accelerator, model, **OPTIONS) if probed else None
    for step in range(STEPS):
        loss = model(batch(step))["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item()}, step=step)
    where = probe.run_dir if probe is not None else None
    if probe is not None:
        probe.close()
    for tracker in accelerator.trackers:  # end_training() would end the process group as well
        tracker.finish()
    return net, where


if __name__ == "__main__":
    train = globals()[NAME]
    alone, _ = train(OUT / "alone", probed=False)
    if "wandb" in sys.modules and sys.modules["wandb"].run is not None:
        sys.modules["wandb"].finish()
    net, run = train(OUT / "probed", probed=True)
    if "wandb" in sys.modules and sys.modules["wandb"].run is not None:
        sys.modules["wandb"].finish()
    tell(OUT, NAME, {"same": digest(net) == digest(alone), "run": run})
    leave()
