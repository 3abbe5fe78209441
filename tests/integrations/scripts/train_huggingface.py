"""Hugging Face's Trainer, started by torchrun; a model of transformers."""

import torch
from net import STEPS, Bad
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=16))
model.transformer.h[1].mlp.dropout = Bad()
# The model is made.


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Losses(TrainerCallback):
    def on_log(self, args, state, control, logs, **_):
        if state.is_world_process_zero:
            print(state.global_step, logs.get("loss"), logs.get("grad_norm"), logs.get("eval_loss"))


arguments = TrainingArguments(
    output_dir="trained", max_steps=STEPS, per_device_train_batch_size=2, use_cpu=True, seed=3,
    logging_steps=1, logging_nan_inf_filter=False, report_to=[], disable_tqdm=True,
    save_strategy="no", eval_strategy="steps", eval_steps=5, learning_rate=0.01,
)  # fmt: skip
held_out = torch.utils.data.Subset(Tokens(), range(990, 996))
trainer = Trainer(
    model, arguments, train_dataset=Tokens(), eval_dataset=held_out, callbacks=[Losses()]
)
trainer.remove_callback(PrinterCallback)  # prints how long it took
trainer.train()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
