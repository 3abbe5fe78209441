"""On a GPU the host never waits for the probe, and nothing grows; on the CPU the same run.

The CPU runs prove that the tests themselves can run: a machine without a GPU skips the others.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.records.step import VALUES
from ddpprobe.testing import state_hash

from .rank.stats.test_rows import reference

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


@contextlib.contextmanager
def no_waiting(device):
    """Let whatever makes the host wait for the GPU raise."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


class Training:
    """A model with small and large tensors, in two dtypes, and what its hooks of mine saw."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(nn.Linear(8, 600), nn.ReLU(inplace=True), nn.Linear(600, 8)).to(
            device
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.data = torch.randn(300, 8).to(device)
        self.seen: dict[tuple[str, str], list[torch.Tensor]] = defaultdict(list)

    def watch(self) -> None:
        """Keep what the last layer returns, and its weight's gradient."""
        self.model[2].register_forward_hook(
            lambda m, a, output: self.seen["2", "output"].append(output.detach().clone())
        )
        self.model[2].weight.register_hook(
            lambda gradient: self.seen["2.weight", "grad"].append(gradient.clone())
        )

    def steps(self, count: int) -> None:
        with no_waiting(self.device):
            for _ in range(count):
                with torch.autocast(self.device, dtype=torch.bfloat16):
                    loss = self.model(self.data).square().mean()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()


def observed(training: Training, run_dir, every: int) -> ddpprobe.Probe:
    return ddpprobe.install(training.model, run_dir=run_dir, every=every, daemon="none")


@pytest.mark.parametrize("device", DEVICES)
def test_a_training_is_seen_exactly_unchanged_and_never_waited_for(device, tmp_path, records_of):
    alone, seen = Training(device), Training(device)
    alone.steps(6)
    seen.watch()
    probe = observed(seen, tmp_path / "run", every=2)
    seen.steps(6)
    probe.close()
    assert state_hash(seen.model, seen.optimizer) == state_hash(alone.model, alone.optimizer)
    records = records_of(tmp_path / "run")
    assert [record.step for record in records if record.sampled] == [0, 2, 4]
    for record in records:
        sites = {(site.fqn, site.kind): i for i, site in enumerate(record.sites)}
        for key, tensors in seen.seen.items():
            tensor = tensors[record.step].double().cpu().numpy().reshape(-1)
            want = reference(tensor)
            assert record.counts[sites[key]][:5].tolist() == [tensor.size, 0, 0, 0, want["zeros"]]
            got = dict(zip(VALUES, record.values[sites[key]].tolist(), strict=True))
            assert (got["min"], got["max"]) == (want["min"], want["max"])
            assert got["sum"] == pytest.approx(want["sum"], abs=1e-6 * abs(tensor).sum())
            assert got["sum_sq"] == pytest.approx(want["sum_sq"], rel=1e-6)


def test_a_forward_that_a_cuda_graph_is_made_of_is_no_step(
    tmp_path, records_of, monkeypatch, caplog
):
    training = Training("cpu")
    probe = observed(training, tmp_path / "run", every=1)
    training.steps(2)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        training.steps(2)
    training.steps(2)
    probe.close()
    records = records_of(tmp_path / "run")
    assert [record.step for record in records] == [0, 1, 2, 3]
    assert {record.counts[:, 0].sum() for record in records} == {records[0].counts[:, 0].sum()}
    assert sum("CUDA graph" in message for message in caplog.messages) == 1


@pytest.mark.gpu
@gpu[1]
def test_a_training_can_be_captured_in_a_cuda_graph(tmp_path):
    training = Training("cuda")
    probe = observed(training, tmp_path / "run", every=2)
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.01)

    def step() -> None:
        training.model(training.data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    before = training.model[0].weight.clone()
    graph.replay()
    assert not torch.equal(before, training.model[0].weight)
    for _ in range(5):
        step()
    probe.close()


@pytest.mark.gpu
@gpu[1]
def test_memory_on_a_gpu_stays_as_it_is(tmp_path):
    training = Training("cuda")
    probe = observed(training, tmp_path / "run", every=2)
    training.steps(20)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, peak = torch.cuda.memory_allocated(), []
    for _ in range(2):
        training.steps(100)
        torch.cuda.synchronize()
        peak.append(torch.cuda.max_memory_allocated())
    assert torch.cuda.memory_allocated() <= before
    assert peak[0] == peak[1]
    probe.close()
