"""How far the samples of a batch differ, in what the model is given and in what it returns."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.rank.hooks.step_facts import NUMBERS, SAMPLES, add_input, add_output
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.records.step import INPUT_SPREAD, OUTPUT_SPREAD

from ... import far


@pytest.fixture(params=["near", "far"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "far":
        far.pretend(monkeypatch)


def spread_of(*tensors: torch.Tensor, given: bool = True) -> float | None:
    """The spread of the first, None if there is none."""
    rows = StepRows(torch.device("cpu"), 0)
    if given:
        add_input((tensors,), rows)
    else:
        add_output(tensors, rows)
    found = rows.fetch().result(0, partial=False).scalars
    return found.get(INPUT_SPREAD if given else OUTPUT_SPREAD)


def reference(tensor: torch.Tensor) -> float:
    """The share of the mean square that is left behind the mean of all samples."""
    x = tensor.detach().double().flatten(1)
    return float((x.var(0, correction=0).sum()) / x.square().mean(0).sum())


def test_of_several_inputs_samples_are_alike_if_they_are_in_all_that_have_samples() -> None:
    torch.manual_seed(0)
    mask, places = torch.ones(8, 5), torch.arange(5.0)
    alike, data = torch.ones(8, 5), torch.randn(8, 5)
    assert spread_of(mask, data, places) == pytest.approx(reference(data), rel=1e-5)
    assert spread_of(data, mask) == spread_of(mask, data)
    assert spread_of(torch.tensor(0.5), mask, alike, places) == 0


@pytest.mark.parametrize("shape", [(16, 7), (2, 3, 5), (5, 4, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_the_spread_is_the_share_of_the_mean_square_that_varies_between_samples(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 8 + 3).to(dtype)
    assert spread_of(tensor) == pytest.approx(reference(tensor), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
def test_of_samples_that_are_alike_nothing_is_left_but_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    one = (torch.randn(1, 300) * 1e3).to(dtype)
    for batch in (2, 3, 11, 16, 700):
        found = spread_of(one.repeat(batch, 1))
        assert found is not None
        assert found < 1e-12
    assert spread_of(torch.zeros(4, 3)) == 0


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e30, 1e38])
def test_the_size_of_the_numbers_is_no_matter(size: float) -> None:
    """Their squares are no float32."""
    tensor = torch.tensor([[1.0, 3.0], [2.0, -1.0]])
    assert spread_of(tensor * size) == pytest.approx(reference(tensor), rel=1e-5)


def test_what_is_not_finite_has_a_spread_that_is_no_number() -> None:
    for bad in (torch.inf, torch.nan):
        assert math.isnan(spread_of(torch.tensor([[1.0, bad], [2.0, 1.0]])))


def test_one_sample_of_sixteen_that_is_another_is_seen() -> None:
    batch = torch.ones(16, 40)
    batch[11, 7] = 1.001
    found = spread_of(batch)
    assert found is not None
    assert found > 1e-10


def test_of_a_large_tensor_some_samples_are_read_and_some_numbers_all_over_each() -> None:
    """The first token is the same in all texts, and so are the logits after it."""
    logits = torch.randn(1, 64, 257).repeat(70, 1, 1)
    assert logits[0].numel() > NUMBERS
    assert len(logits) > SAMPLES
    alike = spread_of(logits)
    logits[:, 20:] = torch.randn(70, 44, 257)
    apart = spread_of(logits)
    assert alike is not None
    assert apart is not None
    assert alike < 1e-12
    assert apart == pytest.approx(44 / 64 * 15 / 16, rel=0.1)


def test_views_are_read_as_what_they_are() -> None:
    tensor = torch.randn(6, 9, 4)
    for view in (tensor[:, :-1], tensor.transpose(1, 2), tensor.permute(2, 0, 1)):
        assert spread_of(view) == pytest.approx(reference(view), rel=1e-5)


def test_packed_samples_lie_along_the_second_dimension() -> None:
    tensor = torch.randn(5, 7)
    assert spread_of(tensor[None, None]) == spread_of(tensor[None]) == spread_of(tensor)


def test_numbers_without_another_dimension_are_a_sample_each() -> None:
    numbers = torch.tensor([1.0, 3.0])
    assert spread_of(numbers) == pytest.approx(1 / 5)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_single_sample_and_what_is_no_dense_tensor_have_none() -> None:
    for tensor in (
        torch.ones(1, 4), torch.ones(1, 1, 4), torch.ones(()), torch.ones(0, 4), torch.ones(3, 0),
        torch.eye(3).to_sparse(), torch.ones(3, 3, device="meta"), torch.ones(3, 2).cfloat(),
        torch.ones(1, 4).expand(3, 4), torch.zeros(3, 8, dtype=torch.uint8).view(torch.bits8),
        torch.quantize_per_tensor(torch.ones(3, 4), 0.1, 0, torch.quint8),
    ):  # fmt: skip
        assert spread_of(tensor) is None
        if tensor.is_floating_point() and not tensor.is_sparse:
            assert spread_of(tensor.requires_grad_(), given=False) is None


def test_of_an_output_the_first_tensor_is_read_that_is_trained_by_and_no_loss() -> None:
    loss, logits = torch.ones((), requires_grad=True), torch.randn(4, 3, requires_grad=True)
    fixed, other = torch.ones(4, 3), torch.ones(4, 3, requires_grad=True)
    assert spread_of(loss, fixed, logits, other, given=False) == pytest.approx(reference(logits))
    assert spread_of(loss, fixed, given=False) is None


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(data).relu())


@pytest.mark.usefixtures("device")
def test_a_net_of_dead_units_is_recorded_and_told(tmp_path: Path, records_of) -> None:
    torch.manual_seed(0)
    model = _Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        for step in range(40):
            if step == 20:
                model.first.bias.data.fill_(-1e3)
            for _ in range(2):  # micro-batches
                model(torch.randn(6, 4)).square().mean().backward()
            model.eval()
            with torch.no_grad():
                model(torch.ones(6, 4))  # is no training
            model.train()
            optimizer.step()
            optimizer.zero_grad()
    records = records_of(tmp_path / "r")
    spreads = [record.scalars[0][OUTPUT_SPREAD] for record in records]
    assert min(spreads[:20]) > 1e-3
    assert max(spreads[20:]) < 1e-12
    assert all(0.1 < record.scalars[0][INPUT_SPREAD] <= 1 for record in records)
    found = [a for a in ddpprobe.open(tmp_path / "r").anomalies() if a.detector == "collapse"]
    assert [(a.level, a.step, a.kind) for a in found] == [("warn", 27, "output")]


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_model_over_nested_tensors_is_recorded(tmp_path: Path, records_of, layout) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path / "run", every=1, daemon="none"):
        for _ in range(2):
            samples = [torch.randn(length, 3) for length in (2, 5)]
            output = model(torch.nested.nested_tensor(samples, layout=layout))
            torch.nested.to_padded_tensor(output, 0.0).sum().backward()
            optimizer.step()
    records = records_of(tmp_path / "run")
    assert [record.step for record in records] == [0, 1]
    for record in records:
        of = {site.key: int(n) for site, n in zip(record.sites, record.counts[:, 0], strict=True)}
        assert of["", "output", ""] == of["", "grad_output", ""] == 14
