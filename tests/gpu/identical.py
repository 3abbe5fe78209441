"""Part `identical`: every bit of a training is the same with the probe and without."""

from __future__ import annotations

from functools import partial

import ddpprobe
from ddpprobe.records.step import IN_TURN, NUMEL, StepRecord
from tests.gpu.findings import SKIPPED, VOID
from tests.gpu.parts import Case, Context
from tests.gpu.training import EVERY, SETTINGS, STEPS, Setting, group_for, trained

SAMPLED = list(range(0, STEPS, EVERY))
WHAT = "parameters, optimizer, random states and losses"


def cases() -> dict[str, Case]:
    return {name: partial(compare, setting) for name, setting in SETTINGS.items()}


def compare(setting: Setting, context: Context) -> None:
    """Train twice without the probe, then with it."""
    say = context.findings
    if setting.only_cuda and not context.cuda:
        say.add(WHAT, SKIPPED, f"needs CUDA: {setting.only_cuda}")
        return
    run = context.scratch / "run"
    with group_for(setting, context.device):
        alone, again = (trained(setting, context.device) for _ in range(2))
        watched = trained(setting, context.device, run)
    if alone != again:
        say.add(WHAT, VOID, "two trainings without the probe differ")
    else:
        apart = [i for i, x in enumerate(watched.losses) if x != alone.losses[i]]
        text = "the same bits" if watched == alone else "other parameters or states"
        text = f"losses part at step {apart[0]}" if apart else text
        say.check(WHAT, holds=watched == alone, text=text)
    records = [r for r in ddpprobe.open(run).records() if r.sampled]
    steps = [r.step for r in records]
    text = f"steps {steps}" + (f", {len(records[0].sites)} sites" if records else "")
    if setting.graphed == "whole":
        records = records[1:]  # what makes the graph calls the model, too, before the first step
    counted = len({elements(r) for r in records}) == 1
    say.check("sampled steps are recorded whole", holds=steps == SAMPLED and counted, text=text)


def elements(record: StepRecord) -> int:
    """Return how many elements were read, but for what takes turns over sampled steps."""
    always = [place for place, site in enumerate(record.sites) if site.kind not in IN_TURN]
    return int(record.counts[always, NUMEL].sum())
