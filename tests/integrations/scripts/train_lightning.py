"""Lightning's Trainer, which starts its second process by itself."""

import logging
import os
import warnings

import torch
from net import STEPS, Net, batch
from torch import Tensor

logging.getLogger("lightning.pytorch").setLevel("ERROR")
warnings.simplefilter("ignore")
import lightning  # noqa: E402


class Task(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, steps: Tensor) -> Tensor:
        loss = self.net(batch(int(steps), self.global_rank))
        if self.global_rank == 0:
            print(loss.item())
        return loss

    def validation_step(self, steps: Tensor) -> None:
        self.net(batch(int(steps)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


model, devices = Task(), int(os.environ["DEVICES"])
# The model is made.
steps = torch.utils.data.DataLoader(torch.arange(STEPS * devices), batch_size=1)
lightning.Trainer(
    max_epochs=1, accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto",
    logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, limit_val_batches=2, val_check_interval=5,
).fit(model, steps, steps)  # fmt: skip
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
