"""A loop in one process."""

import torch
from net import STEPS, Net, batch

model = Net()
optimizer = torch.optim.AdamW(model.parameters())
# The model is made.
for step in range(STEPS):
    optimizer.zero_grad()
    loss = model(batch(step))
    loss.backward()
    optimizer.step()
    print(loss.item())
raise SystemExit(5)
