"""`install(histograms=...)`: named sites have histograms, in the journal and in the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray
from torch import nn

import ddpprobe
from ddpprobe.errors import UnknownSeries
from ddpprobe.rank.hooks import bin_rows
from ddpprobe.reader.verify.verify import verify
from ddpprobe.records.histogram import EDGES, NEAR_ZERO
from ddpprobe.store.writer import StoreWriter
from ddpprobe.testing import state_hash


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2))


def train(net: nn.Module, steps: int = 4, scaler: Any = None) -> tuple[list[np.ndarray], str]:
    """Return what module 1 gave in each micro-batch, and the state that training ended in."""
    seen: list[np.ndarray] = []
    handle = net[1].register_forward_hook(lambda *a: seen.append(a[2].detach().clone().numpy()))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(3)
    for _ in range(steps):
        for _ in range(2):
            loss = net(torch.randn(5, 6, generator=data)).square().mean()
            (scaler.scale(loss) if scaler else loss).backward()
        (scaler.step(optimizer), scaler.update()) if scaler else optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    return seen, state_hash(net, optimizer)


def trained(path: Path, **options: Any) -> tuple[ddpprobe.Run, list[np.ndarray], str]:
    net, scaler = model(), options.pop("scaler", None)
    with ddpprobe.install(net, run_dir=path, every=1, daemon="none", **options):
        seen, state = train(net, scaler=scaler)
    return ddpprobe.open(path), seen, state


def bins_of(parts: list[np.ndarray]) -> list[int]:
    x = np.concatenate([part.ravel() for part in parts]).astype(np.float64)
    return np.histogram(x[x != 0], EDGES)[0].tolist()


def assert_is_what_was_seen(run: ddpprobe.Run, seen: list[np.ndarray]) -> None:
    found = run.histograms("1:output")
    assert [str(site) for site in found.sites] == ["1:output"]
    assert found.steps.tolist() == [0, 1, 2, 3]
    assert found.known.all()
    for step in range(4):
        here = seen[2 * step : 2 * step + 2]
        assert found.bins[step, 0].tolist() == bins_of(here)
        share = np.mean(np.abs(np.concatenate(here)) < NEAR_ZERO)
        assert run.series("1:output", "near_zero_ratio").values[step, 0] == share


def test_the_bins_are_those_of_what_the_module_gave_in_the_journal_and_in_the_store(
    tmp_path: Path,
) -> None:
    run, seen, _ = trained(tmp_path / "r", histograms=["1", "2.weight"])
    assert_is_what_was_seen(run, seen)
    assert {str(site) for site in run.histograms().sites} >= {
        "1:output", "1:grad_output", "2.weight:grad_local", "2.weight:grad",
    }  # fmt: skip
    before = run.histograms(rank=0)
    writer = StoreWriter(run._merged_reader.run, "node_0000", block=3, durable=False)
    writer.seal()
    writer.close()
    folded = ddpprobe.open(run.path)
    assert_is_what_was_seen(folded, seen)
    after = folded.histograms(rank=0)
    assert after.sites == before.sites
    assert after.bins.tolist() == before.bins.tolist()
    assert verify(folded).damage == []
    group = xarray.open_zarr(run.path / "run.zarr", group="attempt_000/rank_00000")
    assert all(text.startswith("[[") for text in group["histograms_json"].values.tolist())


def test_training_with_histograms_is_bit_identical_and_without_them_nothing_is_written(
    tmp_path: Path,
) -> None:
    _, plain = train(model())
    _, _, state = trained(tmp_path / "with", histograms="*")
    assert state == plain
    run, _, _ = trained(tmp_path / "without")
    assert run.histograms().sites == ()
    writer = StoreWriter(run._merged_reader.run, "node_0000", durable=False)
    writer.seal()
    writer.close()
    assert not list(run.path.rglob("*histograms*"))
    with pytest.raises(UnknownSeries, match=r"has a histogram in this run.*histograms=\["):
        run.series("1:output", "near_zero_ratio")


def test_gradients_of_a_scaled_loss_have_the_histogram_of_the_unscaled_one(tmp_path) -> None:
    plain, _, _ = trained(tmp_path / "plain", histograms="2*")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    run, _, _ = trained(tmp_path / "scaled", histograms="2*", scaler=scaler)
    for glob in ("2:grad_output", "2.*:grad_local", "2.*:grad"):
        mine, other = run.histograms(glob), plain.histograms(glob)
        assert mine.sites == other.sites
        assert mine.sites
        assert mine.bins[0].tolist() == other.bins[0].tolist(), glob


def test_a_site_that_has_more_calls_than_are_counted_has_no_histogram_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bin_rows, "MOST_CALLS", 1)
    run, _, _ = trained(tmp_path / "calls", histograms=["1"])
    assert "1:output" not in {str(site) for site in run.histograms().sites}
    [rank] = run.info()["attempts"][0]["ranks"]
    assert rank["unsupported"] == {bin_rows._TOO_MANY_CALLS: 3}
    monkeypatch.setattr(bin_rows, "MOST_SITES", 1)
    monkeypatch.setattr(bin_rows, "MOST_CALLS", 100)
    run, seen, _ = trained(tmp_path / "sites", histograms=["1"])
    assert_is_what_was_seen(run, seen)
    assert len(run.histograms().sites) == 1


def test_globs_that_name_nothing_or_too_much_are_refused(tmp_path: Path) -> None:
    net = nn.Sequential(*(nn.Linear(1, 1) for _ in range(60)))
    for globs, says in (
        ("blocks.*", r"histograms glob 'blocks\.\*' matches no module and no parameter. There are"),
        ("*", "histograms names 181 modules and parameters, at most 128 have one: name fewer"),
    ):
        with pytest.raises(ValueError, match=says):
            ddpprobe.install(net, run_dir=tmp_path / "r", histograms=globs, daemon="none")
    ddpprobe.install(net, run_dir=tmp_path / "r", histograms=["3", "*.bias"], daemon="none").close()


def test_a_picture_has_an_image_for_each_site_and_too_many_are_refused(tmp_path: Path) -> None:
    run, _, _ = trained(tmp_path / "r", histograms=["1"])
    figure = run.histograms().plot()
    assert [ax.get_title() for ax in figure.axes] == ["1:output", "1:grad_output"]
    with pytest.raises(UnknownSeries, match="0 sites with histograms: 1 to 24 can be drawn"):
        run.histograms("0:output").plot()
    with pytest.raises(UnknownSeries, match="no site matches 'nothing'"):
        run.histograms("nothing")
