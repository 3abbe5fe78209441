"""A loop over Accelerate, started by `accelerate launch`."""

import torch
from accelerate import Accelerator
from net import STEPS, Net, batch

accelerator = Accelerator(cpu=True)
model = Net()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
# The model is made.
for step in range(STEPS):
    loss = model(batch(step, accelerator.process_index))
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if accelerator.is_main_process:
        print(loss.item())
accelerator.end_training()
