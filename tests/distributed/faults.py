"""Many short runs in one job, each on data of its own and with one NaN planted by plain hooks.

torchrun ... faults.py WRAP EVERY OUT DRAWS.json     (draws: [step, micro, rank, module, phase])

A draw of `null` is a clean run, of as many steps as it takes until a spike could be judged, twice.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ddpprobe

spec = importlib.util.spec_from_file_location("job", Path(__file__).with_name("job.py"))
job = importlib.util.module_from_spec(spec)
spec.loader.exec_module(job)

BLOCKS = 2  # one within an FSDP2 unit of its own, one not
AFTER = 4  # steps from the faulty one to the end
CLEAN_STEPS = 64


def poison(tensor: Tensor) -> Tensor:
    bad = tensor.clone()
    bad.view(-1)[::3] = torch.nan  # several: ReLU and dropout stop the gradient of single elements
    return bad


def plant(module: nn.Module, phase: str) -> torch.utils.hooks.RemovableHandle:
    def hook(_module: nn.Module, _args: object, output: Tensor) -> Tensor | None:
        if phase == "forward":
            return poison(output)
        output.register_hook(poison)
        return None

    return module.register_forward_hook(hook)


def run(wrap: str, every: int, out: Path, number: int, draw: list | None) -> None:
    rank, steps = dist.get_rank(), draw[0] + AFTER if draw else CLEAN_STEPS
    model = job.build()
    model.blocks = model.blocks[:BLOCKS]
    torch.manual_seed(100 * number + rank)  # of dropout
    for block in model.blocks:
        block.act.inplace = False  # a tensor hook of the fault's own would be lost on the view
    wrapped: nn.Module = model
    if wrap == "fsdp2":
        for part in (model.blocks[1], model):  # a unit, and what lies around it
            fully_shard(part)
    elif wrap == "ddp":
        wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01, foreach=True)
    with ddpprobe.install(wrapped, run_dir=out / str(number), every=every, daemon="none"):
        for step in range(steps):
            for micro in range(2):
                handle = None
                if draw and draw[:3] == [step, micro, rank]:
                    handle = plant(model.get_submodule(draw[3]), draw[4])
                wrapped(job.batch(100 * number + step, micro, rank))[1].backward()
                if handle is not None:
                    handle.remove()
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    wrap, every, out, draws = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    dist.init_process_group("gloo")
    for i, draw in enumerate(json.loads(Path(draws).read_text())):
        run(wrap, every, out, i, draw)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
