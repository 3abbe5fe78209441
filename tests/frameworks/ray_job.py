"""A training function of Ray Train: ray_job.py OUT WORLD.

It trains without the probe, with it, on from the middle, with a fault on the last rank, and until
its function raises. What each worker saw is in OUT/ray.RANK.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import Tensor, nn

STEPS, MICROS, SAVED, FAULT = 4, 2, 2, 2


class Net(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 1)
        self.fault = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).tanh()
        if self.fault:
            hidden = hidden * float("nan")
        return (self.down(hidden) - x.sum(1, keepdim=True)).pow(2).mean()


def work(config: dict[str, Any]) -> None:
    """One worker; what it saw goes to `config["part"].RANK.json`."""
    from ddpprobe.integrations.ray import install

    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    net = Net()
    model = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    told: dict[str, Any] = {"losses": [], "directory": os.getcwd()}
    first, died = config.get("first", 0), Path(config["out"], "died")

    def loop() -> None:
        for step in range(first, STEPS):
            for micro in range(MICROS):
                net.fault = step == config.get("fault") and rank == world - 1
                seed = (step * MICROS + micro) * world + rank
                x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
                loss = model(x)
                told["losses"].append(loss.item())
                (loss / MICROS).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == config.get("raises"):
                raise ValueError("the data are bad")
            if step == config.get("dies_once") and not died.exists():
                if rank == 0:
                    died.touch()
                raise OSError("the disk is gone")

    if config["part"] == "alone":
        loop()
    else:
        options = {"every": 1, "daemon": "none", **config.get("options", {})}
        with install(model, first_step=first, **options) as probe:
            told["run"] = probe.run_dir
            loop()
    bits = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    told["digest"] = hashlib.sha256(bits).hexdigest()
    Path(config["out"], f"{config['part']}.{rank}.json").write_text(json.dumps(told))


def all_of_it(out: Path, world: int) -> None:
    def fit(part: str, failures: int = 0, **config: Any) -> None:
        config |= {"part": part, "out": str(out)}
        run_config = RunConfig(
            name="experiment", storage_path=str(out / "storage"),
            failure_config=FailureConfig(max_failures=failures),
        )  # fmt: skip
        scaling = ScalingConfig(num_workers=world, use_gpu=False)
        TorchTrainer(
            work, train_loop_config=config, scaling_config=scaling, run_config=run_config
        ).fit()

    fit("alone")
    fit("fit")
    fit("resumed", first=SAVED)
    fit("again", failures=1, dies_once=1)
    fit("faulty", fault=FAULT, options={"run_dir": str(out / "faulty")})
    try:
        fit("raised", raises=1, options={"run_dir": str(out / "raised")})
    except ray.train.TrainingFailedError:
        print("the training function raised")
    for rank in range(world):
        alone, told, resumed, again = (
            json.loads((out / f"{part}.{rank}.json").read_text())
            for part in ("alone", "fit", "resumed", "again")
        )
        told |= {"same": told["digest"] == alone["digest"], "resumed_run": resumed["run"]}
        told["started_again_run"] = again["run"]
        (out / f"ray.{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    ray.init(num_cpus=int(sys.argv[2]) + 1, include_dashboard=False)
    all_of_it(Path(sys.argv[1]), int(sys.argv[2]))
