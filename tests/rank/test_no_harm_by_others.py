"""What a user's logging raises, and how deep a model is, never becomes an error of training."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.rundir.fuse import Fuse, harmless


class Broken(logging.Handler):
    """A handler whose `emit` raises, as one that sends to a service may."""

    def emit(self, record: logging.LogRecord) -> None:
        raise ConnectionError(record.getMessage())


class Refusing(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        raise ConnectionError(record.getMessage())


@pytest.fixture(autouse=True)
def contained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDPPROBE_STRICT", raising=False)


@pytest.fixture(params=["handler", "handler of the root", "filter"])
def broken(request: pytest.FixtureRequest) -> Iterator[logging.Logger]:
    log, root = logging.getLogger("ddpprobe"), logging.getLogger()
    handler, sieve = Broken(), Refusing()
    if request.param == "filter":
        log.addFilter(sieve)
    else:
        (root if "root" in request.param else log).addHandler(handler)
    yield log
    log.removeFilter(sieve)
    for each in (log, root):
        each.removeHandler(handler)


def fail() -> None:
    raise ZeroDivisionError("boom")


def test_a_log_handler_that_raises_does_not_let_a_contained_error_out(
    broken: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    blown = []
    fuse = Fuse("hooks", on_blow=lambda: blown.append(1))
    assert fuse.guard(fail)() is None
    assert fuse.blown
    assert blown == [1]
    broken.warning("ddpprobe: said to nobody")
    assert "said to nobody" in capsys.readouterr().err


def test_the_users_own_interrupts_pass_through_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("ddpprobe.another")

    def stop(_: logging.LogRecord) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(log, "handle", stop)
    with pytest.raises(KeyboardInterrupt):
        harmless(log).warning("x")


def test_a_line_of_the_log_names_the_place_that_said_it(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("ddpprobe").warning("here")
    assert caplog.records[-1].filename == Path(__file__).name


def test_training_goes_on_where_the_log_is_broken(
    broken: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    probe = ddpprobe.install(model, run_dir=tmp_path / "run", every=1, daemon="none")
    assert probe._recorder is not None
    monkeypatch.setattr(probe._recorder._pacer, "sampled", lambda _: 1 / 0)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert probe._recorder._clock_fuse.blown
    probe.close()


# ---- deep models


def nested(depth: int) -> nn.Module:
    model: nn.Module = nn.Linear(2, 2)
    for _ in range(depth):
        model = nn.Sequential(model)
    return model


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(4):
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


class CallsItself(nn.Module):
    """One layer, `depth` times: by calling itself, so hooks are on every call."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layer, self.left = nn.Linear(2, 2), depth
        self.depth = depth

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layer(x))
        self.left -= 1
        if not self.left:
            self.left = self.depth
            return x
        called: torch.Tensor = self(x)
        return called


def deepest(made: Callable[[int], nn.Module]) -> int:
    """Return how many modules may be called in one another here for a bare forward."""
    low, high = 8, 4000
    while low < high - 1:
        middle = (low + high) // 2
        try:
            made(middle)(torch.ones(2, 2))
            low = middle
        except RecursionError:
            high = middle
    return low


@pytest.mark.parametrize("made", [nested, CallsItself])
def test_a_model_that_is_as_deep_as_the_stack_allows_is_watched(
    made: Callable[[int], nn.Module], tmp_path: Path
) -> None:
    limit, depth = sys.getrecursionlimit(), deepest(made) - 2
    assert depth > 150
    model = made(depth)
    train(model)  # bare
    probe = ddpprobe.install(model, run_dir=tmp_path / "run", every=2, daemon="none")
    train(model)
    assert probe._recorder is not None
    assert (probe._recorder.fuse.errors, probe._recorder._clock_fuse.errors) == (0, 0)
    probe.close()
    assert sys.getrecursionlimit() == limit
    assert ddpprobe.open(tmp_path / "run").info()["sites"] > (depth if made is nested else 4)


def test_a_fuse_that_blows_where_no_frame_is_left_raises_nothing_and_stays_blown() -> None:
    blown = []
    fuse = Fuse("hooks", on_blow=lambda: blown.append(1))
    guarded = fuse.guard(fail)
    escaped = []

    def dig() -> None:
        with contextlib.suppress(RecursionError):
            dig()
        try:
            guarded()  # first where the stack is full, then ever higher
        except ZeroDivisionError as error:
            escaped.append(error)

    dig()
    guarded()
    assert escaped == []
    assert fuse.blown
    assert blown == [1]


# ---- hooks that are taken off while torch calls them


@pytest.mark.parametrize("way", ["forward", "pre"])
def test_a_probe_that_is_closed_inside_a_hook_of_a_captured_step_is_not_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """torch asks before each hook whether it takes kwargs: one that is gone is called without."""
    monkeypatch.setenv("DDPPROBE_STRICT", "1")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    probe = ddpprobe.install(model, run_dir=tmp_path / "run", every=1, daemon="none", capture="*")
    steps = iter(range(100))

    def close(*_: object) -> None:
        if next(steps) == 2:
            probe.close()

    if way == "forward":
        model[0].register_forward_hook(close, prepend=True)
    else:
        model[0].register_forward_pre_hook(close, prepend=True)
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert "contained" not in caplog.text


@pytest.mark.parametrize("where", ["within the forward", "within the backward"])
def test_inference_in_another_thread_in_the_middle_of_a_step_switches_nothing_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    monkeypatch.setenv("DDPPROBE_STRICT", "1")
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    raised: list[BaseException] = []

    def infer() -> None:
        try:
            with torch.no_grad():
                model(torch.ones(3, 2))
        except BaseException as error:  # noqa: BLE001  (a thread would only print it)
            raised.append(error)

    def beside(*_: object) -> None:
        if torch.is_grad_enabled() or where == "within the backward":
            thread = threading.Thread(target=infer)
            thread.start()
            thread.join()

    if where == "within the forward":
        model[1].register_forward_hook(beside)
    else:
        model[2].weight.register_hook(beside)
    with ddpprobe.install(model, run_dir=tmp_path / "run", every=1, daemon="none", capture="*"):
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert raised == []
    assert "contained" not in caplog.text
    run = ddpprobe.open(tmp_path / "run")
    assert [(r.step, r.scalars[0]["micro_batches"]) for r in run.records()] == [
        (step, 1.0) for step in range(4)
    ]
    assert [captured.step for captured in run.captures()] == [0, 1, 2, 3]
