"""A device that fails, or never ends its work: the rank says how it ended, and ends (see `far`)."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

import ddpprobe
from ddpprobe.rank.hooks import lanes, stream_capture
from ddpprobe.rundir.fuse import Fuse

from .. import far
from .capture.test_capturing import hooks_on, life_of
from .hooks.test_watch import net

ASSERT = "CUDA error: device-side assert triggered\nFor debugging consider CUDA_LAUNCH_BLOCKING=1"


class Device:
    """What all lanes come from: it may fail, or stand still."""

    def __init__(self) -> None:
        self.failed = self.stuck = False

    def ask(self) -> None:
        if self.failed:
            raise RuntimeError(ASSERT)
        assert not self.stuck, "asked to wait for a device that stands still"


class Arrival(far.Arrival):
    device: Device

    def query(self) -> bool:
        if self.device.stuck:
            return False
        self.device.ask()
        return super().query()

    def synchronize(self) -> None:
        self.device.ask()
        super().synchronize()


class Lane(far.SlowLane):
    """A lane from a device that may fail."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def _arrival(self, source: Tensor, host: Tensor, polls: int) -> Arrival:
        if not self.device.stuck:
            self.device.ask()
        arrival = Arrival(source, host, polls)
        arrival.device = self.device
        return arrival

    def post(self, source: Tensor, host: Tensor) -> Arrival:
        return self._arrival(source, host, self.polls)

    def send(self, source: Tensor, host: Tensor) -> Arrival:
        return self._arrival(source, host, self.polls)

    def mark(self) -> Arrival:
        return self._arrival(torch.zeros(1), torch.zeros(1), 2)


@pytest.fixture
def device(monkeypatch) -> Device:
    far.pretend(monkeypatch)
    found = Device()
    monkeypatch.setattr(lanes, "lane_of", lambda _: Lane(found))
    monkeypatch.delenv("DDPPROBE_STRICT")
    return found


def train(model: nn.Module, run, *, every: int, end, **options) -> None:
    """Train for three steps; in the fourth forward `end` is called, and raises."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ddpprobe.install(model, run_dir=run, every=every, daemon="none", **options):
        for step in range(4):
            loss = model(torch.ones(2, 4)).sum()
            if step == 3:
                end()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def goodbye_of(run) -> dict:
    (found,) = (event for event in life_of(run) if event["event"] == "closed")
    return found


@pytest.mark.parametrize("every", [1, 100], ids=["sampled", "unsampled"])
def test_a_rank_whose_device_fails_says_what_it_ended_with(every: int, device, tmp_path) -> None:
    def end() -> None:
        device.failed = True
        raise RuntimeError(ASSERT)

    model, run = net(), tmp_path / "r"
    with pytest.raises(RuntimeError, match="device-side assert"):
        train(model, run, every=every, end=end, capture=["0"])
    said = goodbye_of(run)["error"]
    assert said["message"] == ASSERT.splitlines()[0]
    assert not said["collective"]
    assert not hooks_on(model)
    lost = [event for event in life_of(run) if event["event"] == "fuse"]
    assert [event["error"] for event in lost] == [f"RuntimeError: {ASSERT.splitlines()[0]}"]


@pytest.mark.parametrize("every", [1, 100], ids=["sampled", "unsampled"])
def test_a_rank_whose_device_stands_still_ends_and_says_what_it_has_not_got(
    every: int, device, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(lanes, "BROKEN_SECONDS", 0.05)

    def end() -> None:
        device.stuck = True
        raise ValueError("a bad batch")

    model, run = net(), tmp_path / "r"
    with pytest.raises(ValueError, match="a bad batch"):
        train(model, run, every=every, end=end, capture=["0"])
    assert goodbye_of(run)["error"]["type"] == "ValueError"
    assert not hooks_on(model)
    lost = {e["reason"] for e in life_of(run) if e["event"] == "dropped"}
    assert lost == {"end: no word from the device", "capture: no word from the device"}


def test_at_the_end_of_a_training_a_device_is_waited_for_longer(device, monkeypatch) -> None:
    monkeypatch.setattr(lanes, "END_SECONDS", 3600.0)
    arrival = Lane(device).mark()
    arrival.polls = 50
    assert lanes.arrives(arrival, time.monotonic() + lanes.END_SECONDS)
    device.stuck = True
    assert not lanes.arrives(Lane(device).mark(), time.monotonic())


def test_a_failed_device_is_not_asked_outside_of_a_fuse(monkeypatch) -> None:
    def failed() -> bool:
        raise RuntimeError(ASSERT)

    called: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    fuse = stream_capture.outside_capture(Fuse("hooks"), lambda: called.append("captured"))
    hook = fuse.guard(lambda: called.append("hook"))
    hook()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", failed)
    hook()
    assert called == ["hook"]
