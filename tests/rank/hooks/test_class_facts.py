"""The gradient of logits tells the labels of a cross-entropy, and what a row weighs in it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ddpprobe
from ddpprobe.rank.hooks import class_facts
from ddpprobe.rank.hooks.class_facts import (
    ELEMENTS,
    ENOUGH_ROWS,
    FEWEST_ROWS,
    ROWS,
    ClassHook,
    add_classes,
    classes_of,
    looked_at,
)
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.records.step import (
    CLASS_LABELLED,
    CLASS_LOOKED,
    CLASS_OF_ALL,
    CLASS_POWER,
    CLASS_RIGHT,
    CLASS_ROWS,
    CLASS_SEEN,
    CLASS_SURE,
    CLASS_WEIGHT,
)

from ... import far

Loss = Callable[[Tensor], Tensor]


@pytest.fixture(params=["near", "far"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "far":
        far.pretend(monkeypatch)


def facts(logits: Tensor, loss: Loss) -> dict[str, float]:
    """What is told of one backward."""
    rows = StepRows(torch.device("cpu"), 0)
    output = logits.clone().requires_grad_() * 1.0
    assert classes_of(output)

    def tell(kept: Tensor, gradient: Tensor, count: int) -> None:
        with contextlib.nullcontext() if rows.is_near else far.no_waiting():
            add_classes(kept, gradient, count, rows)

    output.register_hook(ClassHook(tell, output))
    loss(output).backward()
    pending = rows.fetch()
    pending.wait()
    return dict(pending.result(0, partial=False).scalars)


def drawn(classes: int, scale: float, *shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits [*shape, classes] and labels [*shape]."""
    draw = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(*shape, classes, generator=draw)
    return logits, torch.randint(0, classes, shape, generator=draw)


@pytest.mark.parametrize("classes", [3, 10, 40])
@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("power", [1.0, 0.5, -1.0])
def test_weights_of_classes_are_seen_as_a_power_of_their_shares(
    classes: int, scale: float, power: float
) -> None:
    shares = torch.linspace(0, -3, classes).softmax(0)
    counts = (600 * shares).round().long().clamp(min=2)
    labels = torch.arange(classes).repeat_interleave(counts)
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))][:ROWS]
    logits, _ = drawn(classes, scale, len(labels))
    weights = labels.bincount(minlength=classes).float() ** power
    told = facts(logits, lambda y: functional.cross_entropy(y, labels, weight=weights))
    assert told[CLASS_POWER] == pytest.approx(power, abs=0.15)
    assert told[CLASS_WEIGHT] == pytest.approx(1 / len(labels), rel=0.3)
    assert told[CLASS_RIGHT] == pytest.approx(float((logits.argmax(-1) == labels).float().mean()))
    assert told[CLASS_SEEN] == sum(2.0**label for label in set(labels.tolist()))


def focal(labels: Tensor) -> Loss:
    def loss(y: Tensor) -> Tensor:
        each = functional.cross_entropy(y, labels, reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).mean()

    return loss


def weighted(labels: Tensor, rows: Tensor, y: Tensor) -> Tensor:
    return (functional.cross_entropy(y, labels, reduction="none") * rows).sum()


def test_of_losses_that_weigh_rows_of_one_label_unlike_nothing_is_told() -> None:
    for classes, count in ((2, 128), (3, 128), (10, 128), (10, 12)):
        logits, labels = drawn(classes, 1.0, count)
        draw = torch.Generator().manual_seed(1)
        rows = torch.rand(count, generator=draw) + 0.2
        weights = torch.rand(classes, generator=draw) + 0.2
        losses: list[Loss] = [
            focal(labels),
            partial(weighted, labels, rows),
            partial(functional.cross_entropy, target=labels, weight=weights, label_smoothing=0.1),
            partial(squared, labels=labels),
        ]
        for loss in losses:
            told = facts(logits, loss)
            assert math.isnan(told[CLASS_POWER])
            assert math.isnan(told[CLASS_WEIGHT])
    # Of two classes one is no proof, and where each row has its own label none is.
    for classes, labels in ((2, torch.arange(64) % 2), (40, torch.arange(40))):
        logits, _ = drawn(classes, 1.0, len(labels))
        weights = torch.arange(1.0, classes + 1)
        told = facts(logits, partial(functional.cross_entropy, target=labels, weight=weights))
        assert math.isnan(told[CLASS_POWER])


SHAPES = [(32,), (8,), (300,), (4, 9), (2, 600)]


@pytest.mark.parametrize("classes", [2, 3, 10, 200])
@pytest.mark.parametrize("scale", [1e-3, 0.3, 5.0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weight_and_answers_are_those_by_hand(classes: int, scale: float, reduction: str) -> None:
    logits, labels = drawn(classes, scale, 32)
    told = facts(logits, lambda y: functional.cross_entropy(y, labels, reduction=reduction))
    assert told[CLASS_WEIGHT] == pytest.approx(1 if reduction == "sum" else 1 / 32, rel=1e-3)
    assert told[CLASS_RIGHT] == pytest.approx(float((logits.argmax(-1) == labels).float().mean()))
    assert (told[CLASS_ROWS], told[CLASS_LOOKED]) == (32, 32)
    assert (told[CLASS_LABELLED], told[CLASS_OF_ALL]) == (1, -1)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_lie_in_equal_distances_and_are_not_too_many(shape: tuple[int, ...]) -> None:
    logits, labels = drawn(5, 1.0, *shape)
    told = facts(logits, lambda y: functional.cross_entropy(y.flatten(0, -2), labels.flatten()))
    assert told[CLASS_ROWS] == labels.numel()
    assert told[CLASS_WEIGHT] == pytest.approx(1 / labels.numel(), rel=1e-3)
    kept = []
    grown = logits.clone().requires_grad_() * 1.0
    ClassHook(lambda *told: kept.append(told), grown)(torch.ones_like(grown))
    ((rows, _, count),) = kept
    assert count == labels.numel()
    assert min(count, ROWS) / 2 <= len(rows) <= ROWS
    all_ = [tuple(row) for row in logits.flatten(0, -2).tolist()]
    places = [all_.index(tuple(row)) for row in rows.tolist()]
    assert len(set(places)) == len(rows)
    if len(shape) > 1:
        assert {place % shape[1] for place in places} == set(range(shape[1])) or count > ROWS
        assert len({place // shape[1] for place in places}) == shape[0]


def test_places_of_a_text_come_in_turn_whatever_its_length_is() -> None:
    for samples, length in ((256, 32), (8, 1024), (64, 64)):
        output = torch.arange(samples * length).view(samples, length, 1).expand(-1, -1, 3)
        places = looked_at(output)[:, 0]
        assert len(set((places % length).tolist())) >= min(length, ROWS) / 2
        assert len(set((places // length).tolist())) >= min(samples, ROWS) / 2


def test_of_a_large_vocabulary_few_rows_are_kept_and_the_label_is_any_of_it() -> None:
    labels = torch.full((2, 40), 40_001)
    logits, _ = drawn(50_000, 1.0, 2, 40)
    told = facts(logits, lambda y: functional.cross_entropy(y.flatten(0, 1), labels.flatten()))
    assert told[CLASS_WEIGHT] == pytest.approx(1 / 80, rel=1e-2)
    assert ENOUGH_ROWS / 2 <= told[CLASS_LOOKED] <= ENOUGH_ROWS
    kept = []
    grown = logits.requires_grad_() * 1.0
    ClassHook(lambda *told: kept.append(told), grown)(torch.ones_like(grown))
    assert ENOUGH_ROWS / 2 <= len(kept[0][0]) <= ENOUGH_ROWS
    few = torch.zeros(4096, 1000, requires_grad=True) * 1.0
    ClassHook(lambda *told: kept.append(told), few)(torch.ones_like(few))
    assert ELEMENTS / 2 <= kept[1][0].numel() <= ELEMENTS * 1.1


def test_classes_of_images_are_their_second_dimension() -> None:
    logits, labels = drawn(6, 1.0, 3, 7, 9)
    told = facts(logits.movedim(-1, 1), lambda y: functional.cross_entropy(y, labels))
    assert told[CLASS_ROWS] == 3 * 7 * 9
    assert told[CLASS_WEIGHT] == pytest.approx(1 / (3 * 7 * 9), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_that_the_loss_ignores_have_no_label(dtype: torch.dtype) -> None:
    logits, labels = drawn(7, 2.0, 64)
    labels[:16] = -100
    told = facts(logits.to(dtype), lambda y: functional.cross_entropy(y.float(), labels))
    assert told[CLASS_LABELLED] == 0.75
    assert told[CLASS_WEIGHT] == pytest.approx(1 / 48, rel=1e-2)
    right = (logits.to(dtype).argmax(-1) == labels)[16:]
    assert told[CLASS_RIGHT] == pytest.approx(float(right.float().mean()))


def test_a_row_whose_answer_is_sure_is_not_taken_for_an_ignored_one() -> None:
    logits, labels = drawn(4, 1.0, 32)
    logits[:8] = 1000.0 * functional.one_hot(labels[:8], 4)
    told = facts(logits, lambda y: functional.cross_entropy(y, labels))
    assert (told[CLASS_LABELLED], told[CLASS_SURE]) == (1, 0.25)
    labels[:2] = -100
    assert facts(logits, lambda y: functional.cross_entropy(y, labels))[CLASS_SURE] == 0.25
    labels[8:20] = -100
    told = facts(logits, lambda y: functional.cross_entropy(y, labels))
    assert (told[CLASS_LABELLED], told[CLASS_SURE]) == (0.5, 0.25)


@pytest.mark.parametrize("smoothing", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("classes", [3, 10, 1000])
def test_smoothed_labels_are_the_same_until_answers_are_surer(
    smoothing: float, classes: int
) -> None:
    logits, labels = drawn(classes, 0.3, 32)
    loss = nn.CrossEntropyLoss(label_smoothing=smoothing)
    told = facts(logits, lambda y: loss(y, labels))
    assert told[CLASS_WEIGHT] == pytest.approx(1 / 32, rel=1e-3)
    assert told[CLASS_RIGHT] == pytest.approx(float((logits.argmax(-1) == labels).float().mean()))
    logits += 20.0 * functional.one_hot(labels, classes)
    assert math.isnan(facts(logits, lambda y: loss(y, labels))[CLASS_WEIGHT])


@pytest.mark.parametrize("label", [0, 2])
def test_the_label_is_told_where_all_have_the_same(label: int) -> None:
    logits, labels = drawn(3, 1.0, 32)
    labels[:] = label
    assert facts(logits, lambda y: functional.cross_entropy(y, labels))[CLASS_OF_ALL] == label
    labels[20] = 1
    assert facts(logits, lambda y: functional.cross_entropy(y, labels))[CLASS_OF_ALL] == -1
    labels[:] = -100
    labels[3:10] = label  # fewer than say something
    assert facts(logits, lambda y: functional.cross_entropy(y, labels))[CLASS_OF_ALL] == -1


@pytest.mark.parametrize("samples", [4, 8])
def test_places_of_few_samples_may_have_one_label(samples: int) -> None:
    logits, labels = drawn(3, 1.0, samples, 20)
    labels[:] = 1
    told = facts(logits, lambda y: functional.cross_entropy(y.flatten(0, 1), labels.flatten()))
    assert told[CLASS_OF_ALL] == (1 if samples == 8 else -1)


def squared(y: Tensor, labels: Tensor) -> Tensor:
    return functional.mse_loss(y, functional.one_hot(labels, y.shape[-1]).float())


def of_each(y: Tensor, labels: Tensor) -> Tensor:
    wanted = functional.one_hot(labels, y.shape[-1]).float()
    return functional.binary_cross_entropy_with_logits(y, wanted)


def weighed(y: Tensor, labels: Tensor) -> Tensor:
    weights = torch.randn(len(y), generator=torch.Generator().manual_seed(1))
    return (weights * functional.cross_entropy(y, labels, reduction="none")).mean()


def mixed(y: Tensor, labels: Tensor) -> Tensor:
    one, other = (functional.cross_entropy(y, part) for part in (labels, labels.flip(0)))
    return 0.7 * one + 0.3 * other


def maximized(y: Tensor, labels: Tensor) -> Tensor:
    return -functional.cross_entropy(y, labels)


@pytest.mark.parametrize("loss", [squared, of_each, weighed, mixed, maximized])
@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("scale", [1e-3, 0.3, 3.0])
def test_of_another_loss_nothing_is_told(loss, classes: int, scale: float) -> None:
    logits, labels = drawn(classes, scale, 48)
    told = facts(logits, lambda y: loss(y, labels))
    names = CLASS_WEIGHT, CLASS_LABELLED, CLASS_RIGHT, CLASS_OF_ALL
    assert [math.isnan(told[name]) for name in names] == [True] * 4


def test_no_gradient_and_one_that_is_not_finite_tell_nothing() -> None:
    logits, _ = drawn(3, 1.0, 16)
    assert math.isnan(facts(logits, lambda y: y.sum() * 0)[CLASS_WEIGHT])
    assert math.isnan(facts(logits, lambda y: y.sum() * math.nan)[CLASS_WEIGHT])


def test_what_may_be_logits_has_classes_and_enough_rows() -> None:
    assert classes_of(torch.ones(FEWEST_ROWS, 2)) == 2
    assert classes_of(torch.ones(2, FEWEST_ROWS // 2, 5)) == 5
    assert classes_of(torch.ones(2, 3, 4, 4)) == 3
    assert classes_of(torch.ones(FEWEST_ROWS, 1)) == 1
    assert classes_of(torch.ones(FEWEST_ROWS)) == 1
    for few in (torch.ones(FEWEST_ROWS - 1, 2), torch.ones(7), torch.ones(()), torch.ones(8, 0)):
        assert classes_of(few) == 0


def test_what_is_kept_is_a_copy_and_is_given_up_behind_the_first_backward() -> None:
    output = torch.randn(16, 3, requires_grad=True) * 1.0
    heard = []
    hook = ClassHook(lambda *told: heard.append(told), output)
    before = output.detach().clone()
    with torch.no_grad():
        output.zero_()
    hook(torch.ones(16, 3))
    hook(torch.ones(16, 3))
    ((kept, _, rows),) = heard
    assert torch.equal(kept, before)
    assert rows == 16
    assert hook._kept is None


def test_a_training_tells_it_of_its_first_micro_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    right = []
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        for _ in range(3):
            for part in range(2):
                x = torch.randn(32, 4)
                y, label = model(x), (x[:, 0] > 0).long()
                if not part:
                    right.append(float((y.argmax(1) == label).float().mean()))
                (functional.cross_entropy(y, label) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    told = [record.scalars[0] for record in ddpprobe.open(tmp_path / "r").records()]
    assert [one[CLASS_RIGHT] for one in told] == pytest.approx(right)
    assert [one[CLASS_WEIGHT] for one in told] == pytest.approx([1 / 64] * 3, rel=1e-3)
    assert {one[CLASS_ROWS] for one in told} == {32}
    assert class_facts.ROWS >= 32
