"""What an output tells of the targets: copies of the input, and one number for all samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.hooks.target_facts import (
    FEWEST_PLACES,
    NUMBERS,
    SAMPLES,
    add_copied,
    is_pulled,
    trained,
)
from ddpprobe.records.step import COPIED, NORM_MOMENTUM, NORM_VALUES, PULL, PULL_REST, TARGET

from ... import far

CLASSES = 11


@pytest.fixture(params=["near", "far"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "far":
        far.pretend(monkeypatch)


def copied(given: object, returned: object) -> float | None:
    rows = StepRows(torch.device("cpu"), 0)
    with far.no_waiting():
        add_copied((given,), returned, rows)
    pending = rows.fetch()
    pending.wait()
    return pending.result(0, partial=False).scalars.get(COPIED)


def logits_of(text: torch.Tensor) -> torch.Tensor:
    return nn.functional.one_hot(text, CLASSES).float()


def text_of(*shape: int) -> torch.Tensor:
    """Tokens of which no two neighbours are the same."""
    steps = torch.randint(1, CLASSES, shape, generator=torch.Generator().manual_seed(3))
    return steps.cumsum(-1) % CLASSES


@pytest.mark.parametrize("shape", [(1, 40), (5, 33), (300, 7), (3, 500)])
def test_the_share_of_a_text_that_is_answered_with_itself_is_told(shape: tuple[int, int]) -> None:
    text = text_of(*shape)
    behind = torch.cat((text[:, 1:], text[:, :1]), 1)
    assert copied(text, logits_of(text)) == 1
    assert copied(text, logits_of(behind)) == 0
    assert copied(text.int(), {"loss": torch.zeros(()), "logits": logits_of(text)}) == 1
    half = torch.where(torch.arange(shape[1]) < shape[1] // 2, text, behind)
    assert copied(text, logits_of(half)) == pytest.approx(0.5, abs=0.2)


def test_padding_and_what_else_stands_still_says_nothing() -> None:
    text = text_of(4, 64)
    text[:, 20:] = 0
    assert copied(text, logits_of(text)) == 1
    text[:, 3:] = 0
    assert copied(text, logits_of(text)) == -1, FEWEST_PLACES
    mask = torch.ones(4, 64, dtype=torch.int64)
    behind = text_of(4, 64)
    assert copied((mask, behind), logits_of(behind)) == 1


def test_targets_that_are_given_beside_what_is_to_be_read_are_not_taken_for_it() -> None:
    text, targets = text_of(4, 64), text_of(4, 64).flip(1)
    assert copied((text, targets), logits_of(targets)) < 0.3
    assert copied({"input_ids": text, "labels": targets}, logits_of(targets)) < 0.3
    assert copied((text, targets), logits_of(text)) == 1


@pytest.mark.parametrize(
    ("given", "returned"),
    [
        (torch.ones(2, 9), torch.ones(2, 9, CLASSES)),  # no tokens
        (text_of(2, 9), torch.ones(2, 8, CLASSES)),  # of another length
        (text_of(2, 9), torch.ones(2, CLASSES)),
        (text_of(2, 9), torch.ones(2, 9, CLASSES, dtype=torch.int64)),
        (text_of(2, 1), torch.ones(2, 1, CLASSES)),
        (text_of(2, 9), torch.ones(2, 9, 1)),
        (text_of(2, 9), ()),
        (text_of(2, 9), torch.ones(2, 9, CLASSES, device="meta")),
        (text_of(2, 9).to_sparse(), torch.ones(2, 9, CLASSES)),
        (text_of(2, 9), torch.ones(2, 9, CLASSES).to_sparse()),
    ],
)
def test_of_what_is_no_text_with_its_logits_nothing_is_told(given, returned) -> None:
    assert copied(given, returned) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_of_nested_tensors_nothing_is_told() -> None:
    text, logits = text_of(2, 9), torch.ones(2, 9, CLASSES)
    assert copied(torch.nested.nested_tensor(list(text)), logits) is None
    assert copied(text, torch.nested.nested_tensor(list(logits))) is None
    grown = torch.nested.nested_tensor([torch.ones(SAMPLES)] * SAMPLES, requires_grad=True) * 1.0
    assert trained(grown) is None


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def facts(run: Path, model: nn.Module, loss: Loss, steps: int = 3, **options) -> list[dict]:
    """The scalars of each step of a training on rows of four numbers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    drawn = torch.Generator().manual_seed(0)
    with ddpprobe.install(model, run_dir=run, every=1, daemon="none", **options):
        for _ in range(steps):
            x = torch.randn(32, 4, generator=drawn)
            loss(model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [dict(record.scalars[0]) for record in ddpprobe.open(run).records()]


def net(outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, outputs))


def wanted(x: torch.Tensor) -> torch.Tensor:
    return x[:, 0] * x[:, 1] + x.sum(1)


@pytest.mark.parametrize("outputs", [1, 3])
def test_pairs_of_all_outputs_with_all_targets_pull_along_a_line_to_their_mean(
    outputs: int, tmp_path
) -> None:
    means = []

    def broadcast(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        means.append(float(wanted(x).mean()))
        return (y[:, :1] - wanted(x)).square().mean()

    told = facts(tmp_path / "r", net(outputs), broadcast)
    assert [one[PULL] for one in told] == pytest.approx([2 / 32] * 3, rel=1e-4)
    assert [one[TARGET] for one in told] == pytest.approx(means, rel=1e-4)
    assert all(abs(one[PULL_REST]) < 1e-6 for one in told)


def test_what_a_line_does_not_explain_is_that_of_a_regression_by_hand(tmp_path) -> None:
    seen = []

    def right(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        seen.append((y.detach()[:, 0].double(), wanted(x).double()))
        return (y[:, 0] - wanted(x)).square().mean()

    told = facts(tmp_path / "r", net(), right)
    for one, (y, t) in zip(told, seen, strict=True):
        r = torch.corrcoef(torch.stack((y, y - t)))[0, 1]
        assert one[PULL_REST] == pytest.approx(float(1 - r**2), abs=1e-4)
        assert one[PULL_REST] > 0.1


def test_no_gradient_that_differs_is_no_line(tmp_path) -> None:
    (one,) = facts(tmp_path / "r", net(), lambda y, _: y.mean(), steps=1)
    assert math.isnan(one[PULL_REST])


def test_an_output_that_is_changed_in_place_or_is_too_large_or_too_few_is_left_out(
    tmp_path,
) -> None:
    def in_place(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return y.mul_(2.0).square().mean()

    (one,) = facts(tmp_path / "r", net(), in_place, steps=1)
    assert PULL not in one
    grown = torch.ones(SAMPLES, 2, requires_grad=True) * 1.0
    assert is_pulled(grown)
    assert not is_pulled(grown[1:])
    assert not is_pulled(grown.expand(NUMBERS, SAMPLES, 2))
    assert trained(grown.detach()) is None
    assert trained(torch.ones(SAMPLES, 2, requires_grad=True)) is None
    assert trained((grown.sum(), grown)) is grown


class Normed(nn.Module):
    def __init__(self, per_sample: int) -> None:
        super().__init__()
        self.up, self.wide = nn.Linear(4, 3 * per_sample), nn.BatchNorm1d(4)
        self.norm, self.per_sample = nn.BatchNorm1d(3), per_sample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.wide(x)).unflatten(1, (3, self.per_sample))
        return self.norm(y if self.per_sample > 1 else y[..., 0])


@pytest.mark.parametrize("per_sample", [1, 5])
def test_the_fewest_values_by_which_a_batch_norm_normalizes_are_told(
    per_sample: int, tmp_path
) -> None:
    told = facts(tmp_path / "r", Normed(per_sample), lambda y, _: y.square().sum())
    assert {one[NORM_VALUES] for one in told} == {32.0}
    assert {one[NORM_MOMENTUM] for one in told} == {0.1}


def test_a_batch_norm_in_evaluation_mode_has_no_values(tmp_path) -> None:
    model = Normed(1)
    for norm in (model.norm, model.wide):
        norm.eval()
    told = facts(tmp_path / "r", model, lambda y, _: y.square().sum())
    assert all(NORM_VALUES not in one and NORM_MOMENTUM not in one for one in told)


def test_the_largest_momentum_of_running_statistics_is_told(tmp_path) -> None:
    model = Normed(1)
    model.norm.momentum, model.wide.momentum = 0.99, 0.3
    told = facts(tmp_path / "r", model, lambda y, _: y.square().sum())
    assert {one[NORM_MOMENTUM] for one in told} == {0.99}


def test_statistics_that_are_not_there_or_are_means_have_no_momentum(tmp_path) -> None:
    model = Normed(1)
    model.norm.momentum = None  # type: ignore[assignment]  # torch's own word for a mean of all
    model.wide = nn.BatchNorm1d(4, momentum=0.99, track_running_stats=False)
    told = facts(tmp_path / "r", model, lambda y, _: y.square().sum())
    assert all(NORM_VALUES in one and NORM_MOMENTUM not in one for one in told)
