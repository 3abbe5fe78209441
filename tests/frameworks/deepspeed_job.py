"""A loop over DeepSpeed's engine: deepspeed_job.py OUT zero1|zero2|zero2-bf16|refused [stop].

It trains without the probe, with it, on from a checkpoint, and with a fault on the last rank; or
until the probe stops it; or not at all. What it saw, and what hooks of its own and DeepSpeed's
functions say of the gradients, is in OUT/NAME.RANK.json, or OUT/stop.RANK.json.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", str(free_port()))

import deepspeed  # noqa: E402
import torch  # noqa: E402
from deepspeed.utils import safe_get_full_grad  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from tests.frameworks.job_parts import (  # noqa: E402
    MICROS,
    RANK,
    WORLD,
    Net,
    batch,
    digest,
    leave,
    tell,
)

STEPS, SAVED, FAULT = 4, 2, 2


def engine_of(net: Net, name: str) -> Any:
    stage, _, word = name.removeprefix("zero").partition("-")
    offload = {"offload_optimizer": {"device": "cpu"}} if word == "offload" else {}
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": MICROS,
        # By default a bucket takes 2 GB. Here one gradient is larger than a bucket, two fill one.
        "zero_optimization": {"stage": int(stage), "reduce_bucket_size": 16, **offload},
        "gradient_clipping": 0.5, "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True, "bf16": {"enabled": word == "bf16"},
    }  # fmt: skip
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]


def train(
    out: Path, name: str, options: dict[str, Any] | None, *, resume: Path | None = None,
    save: Path | None = None, fault: int = -1, told: dict[str, Any] | None = None,
) -> tuple[str, list[float], str]:  # fmt: skip
    """Train; return a digest of the parameters, the losses, and the run's directory."""
    from ddpprobe.integrations.deepspeed import install

    net = Net()
    engine = engine_of(net, name)
    if resume is not None:
        engine.load_checkpoint(str(resume))
    probe, losses, run = None, [], ""
    if options is not None:
        probe = install(engine, root_dir=out, **options)
        run = str(probe.run_dir)
    if told is not None:
        listen(net, told)
    for step in range(engine.global_steps, STEPS):
        for micro in range(MICROS):
            net.fault = step == fault and RANK == WORLD - 1
            loss = engine(batch(step, micro).to(next(net.parameters()).dtype))
            losses.append(loss.item())
            engine.backward(loss)
            if told is not None and micro == MICROS - 1:
                told.setdefault("grad", []).append(
                    {n: norm(safe_get_full_grad(p)) for n, p in net.named_parameters()}
                )
            engine.step()
        if save is not None and step + 1 == SAVED:
            with probe.pause("checkpoint"):
                engine.save_checkpoint(str(save))
    if probe is not None:
        probe.close()
    bits = digest(net)
    engine.destroy()
    return bits, losses, run


def listen(net: Net, told: dict[str, Any]) -> None:
    """Note the norms of outputs, of the gradients to them, and of local gradients, in order."""

    def note(kind: str, name: str, tensor: Tensor) -> None:
        told.setdefault(kind, {}).setdefault(name, []).append(norm(tensor))

    for name, module in net.named_children():

        def forward(_: nn.Module, __: object, output: Tensor, name: str = name) -> None:
            note("output", name, output)
            output.register_hook(lambda grad: note("grad_output", name, grad))

        module.register_forward_hook(forward)
    for name, parameter in net.named_parameters():
        parameter.register_hook(lambda grad, name=name: note("grad_local", name, grad))


def norm(tensor: Tensor) -> float:
    return tensor.detach().double().norm().item()


def all_of_it(out: Path, name: str) -> dict[str, Any]:
    options: dict[str, Any] = {"every": 1, "daemon": "none"}
    found: dict[str, Any] = {}
    alone, _, _ = train(out, name, None, told=found)
    bits, found["losses"], found["run"] = train(out / "fit", name, options, save=out / "saved")
    found["same"] = bits == alone
    _, _, found["resumed_run"] = train(out / "fit", name, options, resume=out / "saved")
    train(out, name, {**options, "run_dir": out / "faulty"}, fault=FAULT)
    return found


def stop(out: Path, name: str) -> dict[str, Any]:
    import ddpprobe
    from ddpprobe.integrations.deepspeed import install

    net = Net()
    engine = engine_of(net, name)
    with install(engine, every=1, run_dir=out / "stopped", on_anomaly="stop"):
        try:
            for turn in range(10**6):  # until it is stopped, or the test's own time is up
                net.fault = turn == FAULT * MICROS
                engine.backward(engine(batch(turn, 0).to(next(net.parameters()).dtype)))
                engine.step()
                time.sleep(0.02)  # for the daemon
        except ddpprobe.AnomalyStop as stopped:
            anomaly = stopped.anomaly
    return {"for": [anomaly.step, anomaly.rank], "step": engine.global_steps}


def refused(out: Path) -> dict[str, str]:
    import ddpprobe
    from ddpprobe.integrations.deepspeed import install

    found = {}

    def say(name: str, install: Callable[[Any], object], model: Any) -> None:
        try:
            install(model)
        except ddpprobe.Error as error:
            found[name] = str(error)

    for name in ("zero0", "zero3", "zero2-offload"):
        say(name, install, engine_of(Net(), name))
    engine = engine_of(Net(), "zero1")
    say("the engine", ddpprobe.install, engine)
    say("the model", ddpprobe.install, engine.module)
    return found


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    # Else it compiles a reduction over shared memory, for which gloo has no use: a minute or two.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    where, chosen, part = Path(sys.argv[1]), sys.argv[2], sys.argv[-1]
    if part == "stop":
        tell(where, part, stop(where, chosen))
    else:
        tell(where, chosen, refused(where) if part == "refused" else all_of_it(where, chosen))
    leave()
