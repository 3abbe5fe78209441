"""What a CUDA graph is made of is the user's alone: the probe stays out of it, and says so."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ddpprobe
from ddpprobe.rank.hooks import stream_capture
from ddpprobe.records.step import StepRecord
from ddpprobe.testing import state_hash

from .test_compiled import read


class Cuda:
    """CUDA, whose stream is captured while `capturing`; and what ran on the device meanwhile."""

    def __init__(self) -> None:
        self.capturing = False
        self.asked = 0

    def is_capturing(self) -> bool:
        self.asked += 1
        return self.capturing

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", made.is_capturing)
    stream_capture.warn.cache_clear()
    return made


class Launched(TorchDispatchMode):
    """Counts what runs on the device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


class Half(nn.Module):
    """Captures one of its layers, and its backward, once: as a user does by hand."""

    def __init__(self, cuda: Cuda) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)
        self.cuda, self.capture_at = cuda, -1
        self.calls = self.launched = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls == self.capture_at:
            still = torch.ones(2, 3, requires_grad=True)
            with self.cuda.capture(), Launched() as seen:
                loss = self.first(still).sum()
                torch.autograd.grad(loss, [still, self.first.weight, self.first.bias])
            self.launched = seen.count
        self.calls += 1
        return self.second(self.first(x)).square().mean()


OF_A_WEIGHT = {"grad_local": 1, "grad": 1, "param": 1, "update": 1}


def train(model: nn.Module, steps: int, probe: ddpprobe.Probe | None = None) -> str:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        loss = model(torch.full((4, 3), 1.0 + step))
        if probe is not None:
            probe.log(mine=loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_hash(model, optimizer)


def half(cuda: Cuda, capture_at: int) -> Half:
    torch.manual_seed(0)
    model = Half(cuda)
    model.capture_at = capture_at
    return model


def calls_of(record: StepRecord, fqn: str) -> dict[str, int]:
    return {s.kind: int(record.counts[i, 5]) for i, s in enumerate(record.sites) if s.fqn == fqn}


@pytest.mark.parametrize("capture_at", [0, 2, 3])
def test_a_layer_captured_amid_a_step_holds_nothing_of_ours_and_the_step_says_so(
    tmp_path: Path, cuda: Cuda, caplog, capture_at: int
) -> None:
    plain = half(cuda, capture_at)
    want = train(plain, 5)
    seen = half(cuda, capture_at)
    with ddpprobe.install(seen, run_dir=tmp_path / "run", every=2, daemon="none") as probe:
        assert train(seen, 5, probe) == want
    assert seen.launched == plain.launched  # forward and backward of the layer, and no more
    records, life = read(tmp_path / "run")
    sampled = [record for record in records if record.sampled]
    assert [record.step for record in sampled] == [0, 2, 4]
    for record in sampled:  # what was not captured is all there
        assert calls_of(record, "first") == {"output": 1, "grad_output": 1}
        assert calls_of(record, "first.weight") == OF_A_WEIGHT | {"optim_state": 1}
    unsampled = [event for event in life if event["event"] == "unsampled"]
    assert [event["step"] for event in unsampled] == ([capture_at] if capture_at != 3 else [])
    assert all("CUDA graph" in str(event["reason"]) for event in unsampled)
    assert sum("captured in a CUDA graph" in message for message in caplog.messages) == len(
        unsampled
    )


def test_an_optimizer_captured_alone_ends_no_step_and_reads_nothing(
    tmp_path: Path, cuda: Cuda
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    for run_dir in (None, tmp_path / "run"):
        probe = (
            ddpprobe.install(model, run_dir=run_dir, every=1, daemon="none") if run_dir else None
        )
        model(torch.ones(2, 3)).sum().backward()
        with cuda.capture(), Launched() as seen:
            optimizer.step()
            if probe is not None:
                probe.log(mine=torch.ones(()), indices=torch.tensor([1]))
        counts.append(seen.count - 2 * (probe is not None))  # the two tensors that are logged
        optimizer.step()
        if probe is not None:
            probe.close()
    assert counts[0] == counts[1]
    records, _ = read(tmp_path / "run")
    assert [record.step for record in records] == [0]


def test_without_cuda_nobody_asks_whether_a_stream_is_captured(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("asked the CUDA runtime")
    )
    model = half(Cuda(), -1)
    with ddpprobe.install(model, run_dir=tmp_path / "run", every=1, daemon="none"):
        train(model, 2)


def test_a_capture_of_tensors_is_out_of_a_cuda_graph_as_well(cuda: Cuda) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with ddpprobe.capture(model, "*", keep="all") as seen:
        model(torch.ones(2, 3))
        with cuda.capture(), Launched() as launched:
            model(torch.ones(2, 3))
        count = launched.count
    with Launched() as alone:
        model(torch.ones(2, 3))
    assert count == alone.count
    assert len(seen["0"].calls) == 1


# ---- torch.cuda.make_graphed_callables


def hook_tables() -> list[str]:
    """Names of the tables that torch wants to be empty."""
    names = re.findall(
        r"len\(c\.(\w+)\) == 0", inspect.getsource(torch.cuda.make_graphed_callables)
    )
    assert len(names) >= 3
    return names


class NoGraphs(Exception):
    """torch got as far as making a graph."""


def test_in_a_pause_torch_makes_graphed_callables_of_the_model(tmp_path: Path, monkeypatch) -> None:
    def reached(*_: object, **__: object) -> None:
        raise NoGraphs

    monkeypatch.setattr(torch.cuda, "CUDAGraph", reached)  # after all that torch checks
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2), nn.Flatten(0))
    sample = (torch.ones(4, 3),)
    with ddpprobe.install(model, run_dir=tmp_path / "run", every=2, daemon="none") as probe:
        for steps in (0, 3):  # before the first step, and between two
            for _ in range(steps):
                train_once(model)
            with pytest.raises(AssertionError, match="must not have hooks"):
                torch.cuda.make_graphed_callables(model, sample)
            with probe.pause("make_graphed_callables"):
                for module in model.modules():
                    assert [len(getattr(module, name)) for name in hook_tables()] == [0, 0, 0]
                with pytest.raises(NoGraphs):
                    torch.cuda.make_graphed_callables((model, model[0]), (sample, sample))
                for _ in range(3):  # its warm-up
                    outputs = model(*sample)
                    torch.autograd.grad(outputs.sum(), [*model.parameters()])
        graphed(model)
        for _ in range(3):
            train_once(model)
    records, _ = read(tmp_path / "run")
    steps = {record.step: record for record in records if record.sampled}
    assert [*steps] == [0, 2, 4]
    assert calls_of(steps[2], "0")["output"] == 1
    after = steps[4]
    assert calls_of(after, "") == {"output": 1, "grad_output": 1}
    assert calls_of(after, "0").get("output", 0) == 0  # its hooks are called no more
    assert calls_of(after, "0.weight") == OF_A_WEIGHT


def train_once(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()


def graphed(model: nn.Sequential) -> None:
    """Do to a model what torch does: its forward runs none of its modules any more."""
    first, second = model[0], model[1]

    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(x, first.weight, first.bias)
        return nn.functional.linear(hidden, second.weight, second.bias).flatten()

    model.forward = forward  # type: ignore[method-assign]


# ---- mode="reduce-overhead"


def test_the_operator_is_tagged_where_torch_has_the_tag() -> None:
    tag = getattr(torch.Tag, "cudagraph_unsafe", None)
    assert tag is None or tag in torch.ops.ddpprobe.record.default.tags
