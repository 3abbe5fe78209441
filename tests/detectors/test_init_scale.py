"""A layer that begins many times too large is named; what is usual, or cannot be told, is not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from ddpprobe.detectors.init_scale import InitScale
from ddpprobe.records.step import COUNTS, LEARNING_RATE, NOTED, VALUES, Site, StepRecord
from tests.detectors.made_records import levels, record, run


def looked_at(step: int, tensors: Mapping[str, torch.Tensor], **changes: object) -> StepRecord:
    """A sampled step in which these parameters had their turn."""
    rows = {
        Site(fqn, "param", placement="replicated", dtype="float32"):
            {"numel": w.numel(), "rms": float(w.detach().double().square().mean().sqrt()),
             "min": float(w.detach().min()), "max": float(w.detach().max())}
        for fqn, w in tensors.items()
    }  # fmt: skip
    return record(step, rows=rows, **changes)


def mlp(*sizes: int) -> dict[str, torch.Tensor]:
    """Linear layers `l0`, `l1`, ..., as torch begins them."""
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    return dict(nn.ModuleDict({f"l{i}": x for i, x in enumerate(layers)}).named_parameters())


@pytest.mark.parametrize("layer", ["l0", "l1", "l3"])
def test_a_layer_that_begins_fifteen_times_too_large_is_named_at_the_first_look(layer: str) -> None:
    made = mlp(64, 256, 32, 512, 10)
    made[f"{layer}.weight"].data.mul_(15)
    (warn,) = run(InitScale(), [looked_at(s, made) for s in range(20)])
    assert (warn.level, warn.step, warn.module) == ("warn", 0, f"{layer}.weight")
    assert warn.values["gain"] == pytest.approx(15 / math.sqrt(3), rel=0.1)
    assert warn.values["others"] == pytest.approx(1 / math.sqrt(3), rel=0.1)


def test_an_embedding_of_rms_one_and_a_norm_beside_narrow_layers_are_no_fault() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({
        "embed": nn.Embedding(50, 1024), "up": nn.Linear(1024, 4096), "norm": nn.LayerNorm(4096),
        "conv": nn.Conv2d(64, 64, 3), "one": nn.Linear(1, 8), "head": nn.Linear(4096, 2),
    })  # fmt: skip
    made = dict(model.named_parameters())
    assert run(InitScale(), [looked_at(0, made)]) == []
    made["conv.weight"].data.mul_(15)
    (warn,) = run(InitScale(), [looked_at(0, made)])
    assert warn.module == "conv.weight"


@pytest.mark.parametrize("init", [nn.init.xavier_uniform_, nn.init.kaiming_normal_,
                                  nn.init.orthogonal_])  # fmt: skip
def test_layers_that_begin_in_different_usual_ways_are_no_fault(init) -> None:
    made = mlp(64, 256, 32, 512, 10)
    init(made["l1.weight"].data)
    assert run(InitScale(), [looked_at(0, made)]) == []


def test_a_model_all_of_whose_layers_are_large_is_meant_to_be() -> None:
    made = {name: 15 * w for name, w in mlp(64, 256, 32, 512, 10).items()}
    assert run(InitScale(), [looked_at(0, made)]) == []


def test_two_layers_tell_nothing_of_each_other() -> None:
    made = mlp(64, 256, 32)
    made["l1.weight"].data.mul_(15)
    assert run(InitScale(), [looked_at(0, made)]) == []


def test_the_parameters_may_take_turns_and_what_begins_at_zero_is_judged_when_it_is_not() -> None:
    made = mlp(64, 64, 64, 64, 64)
    zero = torch.zeros(64, 64)
    large = {"l3.weight": 15 * made["l3.weight"], "l3.bias": made["l3.bias"]}
    turns = [{k: w for k, w in made.items() if k.startswith(f"l{i}.")} for i in range(3)]
    steps = [looked_at(i, turn) for i, turn in enumerate(turns)]
    steps += [looked_at(3, {**large, "l3.weight": zero}), looked_at(4, large)]
    (warn,) = run(InitScale(), steps)
    assert (warn.step, warn.module) == (4, "l3.weight")


def test_a_note_does_not_make_a_later_look_the_first() -> None:
    made = mlp(64, 256, 32, 512, 10)
    made["l1.weight"].data.mul_(15)
    noted = looked_at(20, made, scalars={0: {NOTED: 1.0}})
    stream = [*(looked_at(s, made) for s in range(20)), noted, looked_at(21, made)]
    assert levels(run(InitScale(), stream)) == [("warn", 0)]


def test_what_grows_later_is_not_judged_here() -> None:
    made = mlp(64, 256, 32, 512, 10)
    grown = {k: w * (15 if k == "l1.weight" else 1) for k, w in made.items()}
    assert run(InitScale(), [looked_at(0, made), looked_at(1, grown)]) == []


def test_a_step_of_which_a_shard_is_missing_is_not_looked_at() -> None:
    made = mlp(64, 256, 32, 512, 10)
    made["l1.weight"].data.mul_(15)
    assert run(InitScale(), [looked_at(0, made, missing=(1,))]) == []


def test_a_layer_all_of_whose_weights_are_one_number_is_told_once_and_zeros_are_not() -> None:
    made = mlp(64, 256, 32, 10)
    for name in ("l1", "l2"):
        nn.init.constant_(made[f"{name}.weight"], 0.1)
    (warn,) = run(InitScale(), [looked_at(s, made) for s in range(20)])
    assert (warn.level, warn.step, warn.module) == ("warn", 0, "l1.weight")
    assert warn.values == {"layers": 2}
    assert "also l2.weight" in warn.message
    for name in ("l1", "l2"):
        nn.init.zeros_(made[f"{name}.weight"])
    assert run(InitScale(), [looked_at(0, made)]) == []
    norms = {f"norm.{name}": torch.ones(64) for name in ("weight", "bias")}
    assert run(InitScale(), [looked_at(0, {**mlp(64, 256, 32, 10), **norms})]) == []


@pytest.mark.parametrize(("inputs", "spread", "told"), [(64, 1e-3, True), (64, 0.03, False),
                                                       (8, 1e-3, False)])  # fmt: skip
def test_a_step_behind_its_start_the_weights_of_such_a_layer_lie_close_together(
    inputs: int, spread: float, told: bool
) -> None:
    made = mlp(inputs, 1)
    made["l0.weight"].data = 0.05 * (1 + spread * torch.linspace(-1, 1, inputs)[None])
    assert bool(run(InitScale(), [looked_at(0, made)])) is told


def test_adam_makes_one_number_of_a_layer_that_begins_at_zero() -> None:
    head = nn.Linear(64, 1)
    nn.init.zeros_(head.weight)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    records = []
    for step in range(3):
        optimizer.zero_grad()
        head(torch.rand(16, 64) + 1).mean().backward()
        optimizer.step()
        made = looked_at(step, {f"head.{k}": w for k, w in head.named_parameters()})
        records.append(replace(made, scalars={0: {LEARNING_RATE: 0.01}}))
    assert run(InitScale(), records) == []
    assert levels(run(InitScale(), [replace(r, scalars={}) for r in records])) == [("warn", 0)]


@pytest.mark.parametrize("begun", [0.0, 0.02])
def test_what_the_first_step_changed_tells_where_a_weight_began(begun: float) -> None:
    lr = 0.01  # Adam's first step is one learning rate: both may be one number after it
    made = {"l0.weight": torch.full((1, 64), begun - lr), "l0.bias": torch.zeros(1)}
    first = looked_at(0, made)
    numel = made["l0.weight"].numel()
    kept = [i for i, site in enumerate(first.sites) if site.fqn == "l0.weight"]
    values = first.values.copy()
    values[kept, VALUES.index("sum")] = numel * (begun - lr)
    update = record(0, rows={Site("l0.weight", "update"): {"numel": numel, "sum": -lr * numel}})
    joined = replace(
        first,
        sites=(*first.sites, *update.sites),
        counts=np.concatenate((first.counts, update.counts)),
        values=np.concatenate((values, update.values)),
        scalars={0: {LEARNING_RATE: lr}},
    )
    assert bool(run(InitScale(), [joined])) is (begun > 0)


def training(
    model: nn.Module, classes: int, steps: int = 60, every: int = 1, reduction: str = "mean",
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> list[StepRecord]:  # fmt: skip
    """A model that learns classes of random points, and what its head and itself return."""
    torch.manual_seed(seed)
    x, y = torch.randn(256, 64), torch.randint(classes, (256,))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    out = []
    for step in range(steps):
        logits = model(x).to(dtype)
        logits.retain_grad()
        loss = nn.functional.cross_entropy(logits.float(), y, reduction=reduction)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % every == 0:
            name = str(dtype).removeprefix("torch.")
            rows = {Site(fqn, kind, dtype=name): row(tensor) for fqn in ("head", "")
                    for kind, tensor in (("output", logits), ("grad_output", logits.grad))
                    if (fqn, kind) != ("", "grad_output")}  # fmt: skip
            out.append(record(step, {0: {"loss": float(loss.detach())}}, rows))
    return out


def row(tensor: torch.Tensor | None) -> dict[str, float]:
    assert tensor is not None
    x = tensor.detach().double()
    return {"numel": x.numel(), "min": float(x.min()), "max": float(x.max()),
            "sum": float(x.sum()), "sum_sq": float(x.square().sum())}  # fmt: skip


def net(width: int, classes: int, scale: float) -> nn.Module:
    """A net whose last layer begins with weights of this rms."""
    torch.manual_seed(1)
    head = nn.Linear(width, classes, bias=False)
    head.weight.data.normal_(std=scale)
    return nn.Sequential(nn.Linear(64, width), nn.LayerNorm(width), head)


@pytest.mark.parametrize(("classes", "every"), [(10, 1), (28, 10), (5000, 10)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_begins_sure_of_wrong_answers_is_told_once_its_loss_has_halved(
    classes: int, every: int, dtype: torch.dtype
) -> None:
    made = training(net(64, classes, 1.0), classes, every=every, dtype=dtype)
    (warn,) = run(InitScale(), made)
    assert (warn.level, warn.module, warn.kind) == ("warn", "head", "output")
    assert warn.values["deviation"] == pytest.approx(8, rel=0.3)
    assert warn.values["loss"] <= warn.values["loss_first"] / 2
    assert warn.step <= 50


def test_what_begins_as_usual_or_was_trained_before_or_stays_as_bad_is_none() -> None:
    assert run(InitScale(), training(net(64, 28, 1 / 8), 28)) == []
    assert run(InitScale(), training(net(64, 10, 5 / 8), 10)) == []  # as timm's MobileNetV2
    pretrained = net(64, 28, 1.0)
    training(pretrained, 28, steps=200)
    later = training(pretrained, 28)
    assert later[0].scalars[0]["loss"] < 1
    assert run(InitScale(), later) == []
    assert run(InitScale(), training(net(64, 28, 1.0), 28)[:1] * 60) == []


def test_a_loss_that_is_a_sum_or_is_no_cross_entropy_is_not_judged() -> None:
    assert run(InitScale(), training(net(64, 28, 1.0), 28, reduction="sum")) == []
    made = training(net(64, 28, 1.0), 28)
    place = COUNTS.index("numel"), VALUES.index("sum")
    for one in made:
        one.values[1, place[1]] = 1e-3 * one.counts[1, place[0]]
    assert run(InitScale(), made) == []


def test_a_first_step_without_a_loss_or_without_what_the_model_returns_says_nothing() -> None:
    made = training(net(64, 28, 1.0), 28)
    unlogged = [replace(made[0], scalars={0: {}}), *made[1:]]
    assert run(InitScale(), unlogged) == []
    bare = [record(one.step, one.scalars) for one in made]
    assert run(InitScale(), bare) == []
    assert run(InitScale(within=1), made) == []


def test_a_loss_that_halved_is_one_of_all_ranks_and_of_a_step_that_tells_it() -> None:
    made = training(net(64, 28, 1.0), 28)
    untold = [made[0], *(replace(one, scalars={0: {}}) for one in made[1:])]
    assert run(InitScale(), untold) == []
    bad = [replace(one, scalars={0: {"loss": math.nan}, 1: one.scalars[0]}) for one in made[1:]]
    assert run(InitScale(), [made[0], *bad]) == []


def test_fifty_steps_are_the_longest_it_waits() -> None:
    first, *_, last = training(net(64, 28, 1.0), 28)
    assert len(run(InitScale(), [first, replace(last, step=50)])) == 1
    assert run(InitScale(), [first, replace(last, step=51)]) == []
