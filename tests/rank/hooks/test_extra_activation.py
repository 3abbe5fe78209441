"""The gradient of outputs tells of an activation before a loss that has its own, and of no other.

Each case is torch's own loss; where nothing may be told the losses are those that come nearest.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ddpprobe
from ddpprobe.rank.hooks.class_facts import ClassHook
from ddpprobe.rank.hooks.extra_activation import CLASSES, LOOKS, add_extra_activation
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.records.step import EXTRA_ACTIVATION, EXTRA_ACTIVATIONS

from ... import far

Loss = Callable[[Tensor, Tensor], Tensor]  # of outputs [rows, classes] and labels 0 and 1 of these
BINARY = functional.binary_cross_entropy_with_logits


@pytest.fixture(params=["near", "far"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "far":
        far.pretend(monkeypatch)


def number(outputs: Tensor, loss: Loss, labels: Tensor) -> float | None:
    """What is told of one backward; None: nothing."""
    rows = StepRows(torch.device("cpu"), 0)
    grown = outputs.clone().requires_grad_() * 1.0

    def tell(kept: Tensor, gradient: Tensor, _: int) -> None:
        with contextlib.nullcontext() if rows.is_near else far.no_waiting():
            add_extra_activation(kept, gradient, rows)

    grown.register_hook(ClassHook(tell, grown))
    loss(grown, labels.to(outputs.dtype)).backward()
    pending = rows.fetch()
    pending.wait()
    return pending.result(0, partial=False).scalars.get(EXTRA_ACTIVATION)


def drawn(
    scale: float, *shape: int, dtype: torch.dtype = torch.float32, hot: bool = True, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Outputs, and labels of them: one of each row, or any."""
    draw = torch.Generator().manual_seed(seed)
    outputs = (scale * torch.randn(*shape, generator=draw)).to(dtype)
    if hot:
        label = torch.randint(0, shape[-1], shape[:-1], generator=draw)
        return outputs, functional.one_hot(label, shape[-1])
    return outputs, torch.rand(shape, generator=draw) < 0.3


def of_classes(activation: Callable[[Tensor], Tensor]) -> Loss:
    return lambda y, one_hot: functional.cross_entropy(activation(y), one_hot.argmax(-1))


def softmax(y: Tensor) -> Tensor:
    return y.softmax(-1)


MISTAKES: dict[tuple[str, str], Loss] = {
    ("sigmoid", "binary"): lambda y, wanted: BINARY(y.sigmoid(), wanted),
    ("ReLU", "binary"): lambda y, wanted: BINARY(y.relu(), wanted),
    ("softmax", "classes"): of_classes(softmax),
    ("sigmoid", "classes"): of_classes(torch.sigmoid),
    ("ReLU", "classes"): of_classes(torch.relu),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pair", MISTAKES)
def test_an_activation_before_a_loss_that_has_its_own_is_seen(
    pair: tuple[str, str], dtype: torch.dtype
) -> None:
    for classes in (2, 3, 10, 200):
        for scale in (1.0, 3.0) if dtype == torch.bfloat16 else (0.02, 1.0, 3.0):
            outputs, labels = drawn(scale, 64, classes, dtype=dtype, hot=pair[1] == "classes")
            told = number(outputs, MISTAKES[pair], labels)
            assert told == EXTRA_ACTIVATIONS.index(pair) + 1, (classes, scale)


@pytest.mark.parametrize("shape", [(64,), (64, 1), (8, 1, 6, 6), (4, 20)])
def test_one_logit_for_each_sample_or_pixel_is_enough(shape: tuple[int, ...]) -> None:
    for pair in (("sigmoid", "binary"), ("ReLU", "binary")):
        told = number(*_with_loss(drawn(2.0, *shape, hot=False), MISTAKES[pair]))
        assert told == EXTRA_ACTIVATIONS.index(pair) + 1
    outputs, labels = drawn(2.0, *shape, hot=False)
    place = EXTRA_ACTIVATIONS.index(("sigmoid inside", "binary")) + 1
    assert number(outputs.sigmoid(), BINARY, labels) == place
    assert number(outputs.sigmoid(), functional.binary_cross_entropy, labels) == 0


def _with_loss(drawn: tuple[Tensor, Tensor], loss: Loss) -> tuple[Tensor, Loss, Tensor]:
    return drawn[0], loss, drawn[1]


def brier(y: Tensor, wanted: Tensor) -> Tensor:
    return (y.softmax(-1) - wanted).square().mean()


def focal(y: Tensor, wanted: Tensor) -> Tensor:
    of_label = (y.log_softmax(-1) * wanted).sum(-1)
    return -((1 - of_label.exp()) ** 2 * of_label).mean()


def weighted(y: Tensor, wanted: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 2, y.shape[-1], dtype=y.dtype)
    return functional.cross_entropy(y, wanted.argmax(-1), weight=weights)


# The labels of a binary loss weigh as a sigmoid that is done twice makes them weigh at its start.
UNLUCKY = 0.378 / 0.622


RIGHT: dict[str, Loss] = {
    "classes": of_classes(lambda y: y),
    "classes, log-softmax": of_classes(lambda y: y.log_softmax(-1)),  # which changes nothing
    "classes, smoothed": lambda y, wanted: functional.cross_entropy(y, wanted, label_smoothing=0.1),
    "classes, weighted": weighted,
    "classes, in part": lambda y, wanted: functional.cross_entropy(y[:20], wanted[:20].argmax(-1)),
    "binary": BINARY,
    "binary, weighted": lambda y, wanted: BINARY(y, wanted, pos_weight=torch.tensor(UNLUCKY)),
    "binary of a sigmoid": lambda y, wanted: functional.binary_cross_entropy(y.sigmoid(), wanted),
    "squares of a sigmoid": lambda y, wanted: functional.mse_loss(y.sigmoid(), wanted),
    "squares": functional.mse_loss,
    "squares of a softmax": brier,
    "focal": focal,
    "sum": lambda y, _: y.sum(),
    "nothing": lambda y, _: y.sum() * 0,
    "not finite": lambda y, _: y.sum() * math.nan,
}


@pytest.mark.parametrize("name", RIGHT)
def test_of_other_losses_nothing_is_told(name: str) -> None:
    hot = not name.startswith("binary")
    for seed, classes in enumerate((2, 5, 30)):
        for scale in (1e-3, 0.03, 0.1, 0.3, 0.6, 1.0, 4.0, 30.0):
            outputs, labels = drawn(scale, 64, classes, hot=hot, seed=seed)
            told = number(outputs, RIGHT[name], labels)
            assert told is not None
            assert told == 0 or math.isnan(told)


# Of outputs that lie close together any of these has the slope of a form somewhere.
SMOOTH: dict[str, Loss] = {
    "squares": lambda y, wanted: (y - wanted).square().mean(),
    "Huber": lambda y, wanted: functional.huber_loss(y, wanted, delta=0.3),
    "softplus": lambda y, wanted: functional.softplus(y - wanted).mean(),
    "hinge": lambda y, wanted: (1 - y * (2 * wanted - 1)).relu().mean(),
}


@pytest.mark.parametrize("rows", [2, 64])
@pytest.mark.parametrize("name", SMOOTH)
def test_no_smooth_loss_of_outputs_that_lie_close_is_taken_for_one_behind_an_activation(
    name: str, rows: int
) -> None:
    draw = torch.Generator().manual_seed(0)
    sides = torch.arange(rows)[:, None] % 2
    for place in torch.arange(-1.0, 1.1, 0.25):
        for wanted in (torch.zeros(rows, 1), 2 * torch.ones(rows, 1), 2.0 * sides):
            outputs = place + 0.3 * torch.randn(rows, 1, generator=draw) / rows
            told = number(outputs, SMOOTH[name], wanted)
            assert told is not None
            assert told == 0 or math.isnan(told), (place, wanted)


def test_a_mistake_is_not_told_by_labels_of_one_side() -> None:
    outputs, labels = drawn(2.0, 64, 1, hot=False)
    for pair, loss in MISTAKES.items():
        if pair[1] == "binary":
            told = number(outputs, loss, labels | True)
            assert told is not None
            assert math.isnan(told)


def test_rows_that_have_no_label_are_passed_over() -> None:
    outputs, labels = drawn(2.0, 64, 5)
    for pair, loss in MISTAKES.items():
        told = number(outputs, lambda y, to, loss=loss: loss(y[::2], to[::2]), labels)
        assert told == EXTRA_ACTIVATIONS.index(pair) + 1


def test_at_the_start_it_is_not_known_whether_one_is_there() -> None:
    outputs, labels = drawn(1e-6, 64, 5)
    for activation in (softmax, torch.sigmoid, lambda y: y):
        told = number(outputs, of_classes(activation), labels)
        assert told is not None
        assert math.isnan(told)


def test_small_gradients_are_gradients() -> None:
    outputs, labels = drawn(2.0, 64, 5)
    told = number(outputs, lambda y, to: 1e-30 * MISTAKES["softmax", "classes"](y, to), labels)
    assert told == EXTRA_ACTIVATIONS.index(("softmax", "classes")) + 1


def test_of_a_large_vocabulary_nothing_is_computed() -> None:
    outputs, labels = drawn(1.0, 8, CLASSES + 1)
    assert number(outputs, MISTAKES["softmax", "classes"], labels) is None


def test_a_run_tells_it_at_its_first_looks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        for _ in range(LOOKS + 2):
            x = torch.randn(32, 4)
            BINARY(model(x).sigmoid(), (x[:, 0] > 0).float()).backward()
            optimizer.step()
            optimizer.zero_grad()
    records = list(ddpprobe.open(tmp_path / "r").records())
    told = [record.scalars[0].get(EXTRA_ACTIVATION) for record in records]
    assert told[LOOKS:] == [None, None]
    place = EXTRA_ACTIVATIONS.index(("sigmoid", "binary")) + 1
    known = [one for one in told[:LOOKS] if one is not None and not math.isnan(one)]
    assert set(known) == {place}  # of answers that are sure nobody knows, see the last ones
    assert len(known) > 30
