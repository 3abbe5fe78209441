"""A training function of Ray Train: ray_job.py OUT WORLD.

It trains without the probe, with it, on from the middle, until the last rank raises or is killed
and Ray starts all of them again, with a fault on the last rank, until its function raises, and
until the probe stops it for a fault. What each worker saw is in OUT/ray.RANK.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from tests.frameworks.job_parts import MICROS, Net, batch, digest, tell

STEPS, SAVED, FAULT = 4, 2, 2
ENDLESS = 10**6  # until it is stopped, or the test's own time is up
PAUSE = 0.02  # seconds a step for the daemon, without which nothing stops
# Where the last rank dies once, and whether the first one has saved a checkpoint by then.
DEATHS = {"raised_once": {"dies": 1}, "killed_once": {"dies": 3, "saves": True}}


def work(config: dict[str, Any]) -> None:
    """One worker; what it saw goes to `config["part"].RANK.json`."""
    from ddpprobe import AnomalyStop
    from ddpprobe.integrations.ray import install

    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    net = Net()
    model = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    told: dict[str, Any] = {"losses": [], "directory": os.getcwd()}
    out, part = Path(config["out"]), config["part"]
    died, saved = out / f"{part}.died", out / f"{part}.saved"
    first = SAVED if saved.exists() else config.get("first", 0)

    def loop() -> None:
        for step in range(first, config.get("steps", STEPS)):
            time.sleep(PAUSE if "steps" in config else 0)
            for micro in range(MICROS):
                net.fault = step == config.get("fault") and rank == world - 1
                loss = model(batch(step, micro, rank, world))
                if step == config.get("dies") and rank == world - 1 and not died.exists():
                    died.touch()
                    while not any(Path(told["run"], "daemon").glob("*.json")):
                        time.sleep(0.01)  # for the daemon, which is to see it
                    if part == "killed_once":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise OSError("the disk is gone")
                told["losses"].append(loss.item())
                (loss / MICROS).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == config.get("raises"):
                raise ValueError("the data are bad")
            if step == SAVED - 1 and rank == 0 and config.get("saves"):
                saved.touch()

    if part == "alone":
        loop()
    else:
        options = {"every": 1, **config.get("options", {})}
        with install(model, first_step=first, **options) as probe:
            told["run"] = probe.run_dir
            try:
                loop()
            except AnomalyStop as stop:
                told |= {"step": stop.step, "for": [stop.anomaly.step, stop.anomaly.rank]}
                tell(out, part, told, rank)
                raise
    told["digest"] = digest(net)
    tell(out, part, told, rank)


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
    for part, how in DEATHS.items():
        fit(part, failures=1, **how)
    fit("faulty", fault=FAULT, options={"run_dir": str(out / "faulty")})
    try:
        fit("raised", raises=1, options={"run_dir": str(out / "raised")})
    except ray.train.TrainingFailedError:
        print("the training function raised")
    options = {"run_dir": str(out / "stopped"), "on_anomaly": "stop"}
    try:
        fit("stopped", fault=FAULT, steps=ENDLESS, options=options)
    except ray.train.TrainingFailedError as error:
        print(f"fit() raised: {error}")
    for rank in range(world):
        alone, told, resumed, stopped, *started_again = (
            json.loads((out / f"{part}.{rank}.json").read_text())
            for part in ("alone", "fit", "resumed", "stopped", *DEATHS)
        )
        told |= {"same": told["digest"] == alone["digest"], "resumed_run": resumed["run"]}
        told["stopped"] = {"step": stopped["step"], "for": stopped["for"]}
        told |= {part: one["run"] for part, one in zip(DEATHS, started_again, strict=True)}
        tell(out, "ray", told, rank)


if __name__ == "__main__":
    ray.init(num_cpus=int(sys.argv[2]) + 1, include_dashboard=False)
    all_of_it(Path(sys.argv[1]), int(sys.argv[2]))
