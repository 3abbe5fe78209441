"""Part `faults`: a NaN planted in the forward, the backward or the optimizer is named."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

import ddpprobe
from ddpprobe.rank.torch_private import dynamo
from tests.gpu.findings import SKIPPED
from tests.gpu.parts import Case, Context
from tests.gpu.training import SETTINGS, Setting, Training, group_for, start_anew

STEP, AFTER = 5, 4
MODULE = "blocks.1.up"
USED = ("plain", "plain fp64", "autocast bf16", "GradScaler fp16", "ddp", "fsdp2", "compile")
PLACES = {  # what is planted: the phase and the place that are to be named
    "forward": ("forward", MODULE),
    "backward": ("backward", MODULE),
    "optimizer": ("step", f"{MODULE}.weight"),
}


def cases() -> dict[str, Case]:
    return {name: partial(plant_all, SETTINGS[name]) for name in USED}


def plant_all(setting: Setting, context: Context) -> None:
    """Plant each fault on a sampled and on an unsampled step; nothing is said of a clean run."""
    if setting.mode and not dynamo.SPEAKING:
        context.findings.add("all", SKIPPED, f"torch {torch.__version__} has graphs without hooks")
        return
    with group_for(setting, context.device):
        for every, kind in ((1, "sampled"), (1000, "unsampled")):
            for phase in PLACES:
                run = context.scratch / f"{phase}-{kind}"
                train(setting, context.device, run, every, phase)
                judge(context, setting, run, phase, kind)
        run = context.scratch / "clean"
        train(setting, context.device, run, 2, "")
    found = found_in(run)
    text = found[0].message if found else "nothing was said"
    context.findings.check("no fault", holds=not found, text=text)


def train(setting: Setting, device: str, run: Path, every: int, phase: str) -> None:
    start_anew(setting)
    planted = phase in ("forward", "backward")
    fault = f"nan:step={STEP},module={MODULE},phase={phase}" if planted else ""
    training = Training(setting, device, run, every, fault)
    training.steps(STEP)
    spoiling = training.optimizer.register_step_post_hook if phase == "optimizer" else nullcontext
    with spoiling(lambda *_: spoil(training)):
        training.steps(1)
    training.steps(AFTER)
    training.close()


@torch.no_grad()
def spoil(training: Training) -> None:
    """Do as an optimizer does that divides by zero."""
    weight = training.model.get_submodule(MODULE).weight
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    local.view(-1)[3] = torch.nan


def found_in(run: Path) -> list[ddpprobe.Anomaly]:
    """Return what was said of non-finite tensors, by step."""
    told = [a for a in ddpprobe.open(run).anomalies() if a.detector == "nonfinite"]
    return sorted(told, key=lambda a: a.step)


def judge(context: Context, setting: Setting, run: Path, phase: str, kind: str) -> None:
    what, found = f"{phase}, {kind} step", found_in(run)
    if not found:
        context.findings.check(what, holds=False, text="nothing was said")
        return
    in_phase, place = PLACES[phase]
    wanted = {"step": STEP, "rank": 0, "phase": in_phase}
    if phase == "optimizer" and kind == "unsampled" and context.cuda:
        # The host does not look at weights on a device then: the next forward is the first sign.
        wanted |= {"step": STEP + 1, "phase": "forward"}
    # Gradients of a step that a GradScaler skips are the scaler at work, and no page.
    wanted["level"] = "info" if setting.precision == "fp16" and phase == "backward" else "page"
    if kind == "sampled":
        wanted["module"] = place
    wrong = [
        f"{key} is {getattr(found[0], key)!r}, not {value!r}"
        for key, value in wanted.items()
        if getattr(found[0], key) != value
    ]
    text = "; ".join(wrong) or ", ".join(f"{key} {value}" for key, value in wanted.items())
    context.findings.check(what, holds=not wrong, text=text)
