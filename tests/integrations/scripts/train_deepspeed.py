"""A loop over DeepSpeed's engine with ZeRO-2, started by torchrun."""

import logging
import os

os.environ["DS_ACCELERATOR"] = "cpu"
logging.disable(logging.WARNING)  # of DeepSpeed, with the time, on stdout

import deepspeed  # noqa: E402
import torch  # noqa: E402
from net import STEPS, Net, batch  # noqa: E402

# Else it compiles a reduction over shared memory, for which gloo has no use: a minute or two.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
torch.use_deterministic_algorithms(True)
net = Net()
config = {
    "train_micro_batch_size_per_gpu": 16,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
    "zero_allow_untested_optimizer": True,
}  # fmt: skip
optimizer = torch.optim.AdamW(net.parameters())
engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
rank = torch.distributed.get_rank()
# The model is made.
for step in range(STEPS):
    loss = engine(batch(step, rank))
    engine.backward(loss)
    engine.step()
    if rank == 0:
        print(loss.item())
torch.distributed.destroy_process_group()
