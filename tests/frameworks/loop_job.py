"""A loop of one's own over Accelerate or Fabric: loop_job.py OUT accelerate|fabric [stop].

It trains without the probe, with it, on from the middle, and with a fault on the last rank; or
until the probe stops it. What it saw is in OUT/NAME.RANK.json, or OUT/stop.RANK.json.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.frameworks.job_parts import MICROS, RANK, WORLD, Net, batch, digest, leave, tell

STEPS, SAVED, FAULT = 4, 2, 2
ENDLESS = range(10**6)  # until it is stopped, or the test's own time is up
PAUSE = 0.02  # seconds a step for the daemon, without which nothing stops


def over_accelerate(out: Path, options: dict[str, Any] | None, steps: range, fault: int) -> Any:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker, on_main_process

    from ddpprobe.integrations.accelerate import install

    class Notes(GeneralTracker):
        name, requires_logging_directory, tracker = "notes", False, None

        def __init__(self) -> None:
            super().__init__()
            self.told: dict[str, Any] = {}

        @on_main_process
        def store_init_configuration(self, values: dict[str, Any]) -> None:
            self.told |= values

        @on_main_process
        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            self.told |= values

    notes = Notes()
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=MICROS, project_dir=str(out), log_with=notes
    )
    accelerator.init_trackers("test")
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.05))
    probe, losses = None, []
    if options is not None:
        probe = install(accelerator, model, first_step=steps[0], **options)
    for step in steps:
        time.sleep(PAUSE if steps == ENDLESS else 0)
        for micro in range(MICROS):
            net.fault = step == fault and RANK == WORLD - 1
            with accelerator.accumulate(model):
                loss = model(batch(step, micro))
                losses.append(loss.item())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    return net, losses, probe, notes.told.get("ddpprobe/run_dir")


def over_fabric(out: Path, options: dict[str, Any] | None, steps: range, fault: int) -> Any:
    from lightning.fabric import Fabric

    from ddpprobe.integrations.fabric import install

    fabric = Fabric(accelerator="cpu", devices=WORLD, strategy="ddp" if WORLD > 1 else "auto")
    fabric.launch()
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.05))
    probe, losses = None, []
    if options is not None:
        probe = install(fabric, model, root_dir=out, first_step=steps[0], **options)
    for step in steps:
        time.sleep(PAUSE if steps == ENDLESS else 0)
        for micro in range(MICROS):
            net.fault = step == fault and RANK == WORLD - 1
            with fabric.no_backward_sync(model, enabled=WORLD > 1 and micro < MICROS - 1):
                loss = model(batch(step, micro))
                losses.append(loss.item())
                fabric.backward(loss / MICROS)
        optimizer.step()
        optimizer.zero_grad()
    return net, losses, probe, None


def all_of_it(out: Path, over: Callable[..., Any]) -> dict[str, Any]:
    options, steps = {"every": 1, "daemon": "none"}, range(STEPS)
    alone = digest(over(out, None, steps, -1)[0])
    net, losses, probe, told = over(out / "fit", options, steps, -1)
    found: dict[str, Any] = {"same": digest(net) == alone, "losses": losses, "told": told}
    found["run"] = probe.run_dir
    probe.close()
    resumed = over(out / "fit", options, range(SAVED, STEPS), -1)[2]
    found["resumed_run"] = resumed.run_dir
    resumed.close()
    over(out, {**options, "run_dir": out / "faulty"}, steps, FAULT)[2].close()
    return found


def stop(out: Path, over: Callable[..., Any]) -> dict[str, Any]:
    import ddpprobe

    options = {"every": 1, "run_dir": out / "stopped", "on_anomaly": "stop"}
    try:
        over(out, options, ENDLESS, FAULT)
    except ddpprobe.AnomalyStop as stopped:
        return {"for": [stopped.anomaly.step, stopped.anomaly.rank], "step": stopped.step}
    raise AssertionError("nothing has stopped the loop")


if __name__ == "__main__":
    where, name, part = Path(sys.argv[1]), sys.argv[2], sys.argv[-1]
    over = {"accelerate": over_accelerate, "fabric": over_fabric}[name]
    if part == "stop":
        tell(where, part, stop(where, over))
    else:
        tell(where, name, all_of_it(where, over))
    leave()
