"""One fence: an error of ours is logged once, counted, switches the component off, stays inside."""

from __future__ import annotations

import functools
import logging
import signal

import pytest

from ddpprobe.rundir.fuse import Fuse


def fail() -> None:
    raise ZeroDivisionError("boom")


@pytest.fixture
def open_fuse(monkeypatch: pytest.MonkeyPatch) -> Fuse:
    monkeypatch.delenv("DDPPROBE_STRICT", raising=False)
    return Fuse("hooks", allowed=3)


def test_errors_are_contained_counted_and_logged_once(open_fuse, caplog) -> None:
    guarded = open_fuse.guard(fail)
    with caplog.at_level(logging.WARNING, "ddpprobe"):
        for _ in range(5):
            assert guarded() is None
    assert (open_fuse.errors, open_fuse.blown) == (3, True)
    assert open_fuse.last_error == "ZeroDivisionError: boom"
    assert len(caplog.records) == 1
    assert "hooks failed and is contained; training goes on" in caplog.text


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("of its text")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("\nCUDA error: an assert \nfor debugging ..."),
            "RuntimeError: CUDA error: an assert",
        ),
        (RuntimeError(), "RuntimeError: "),
        (Unspeakable(), "Unspeakable: "),
    ],
    ids=["several lines", "no text", "a text that raises"],
)
def test_an_error_is_kept_in_one_line_whatever_its_text(open_fuse, error, said) -> None:
    def raise_it() -> None:
        raise error

    assert open_fuse.guard(raise_it)() is None
    assert open_fuse.last_error.startswith(said)
    assert "\n" not in open_fuse.last_error


def test_a_blown_fuse_does_not_enter_the_component_again(open_fuse) -> None:
    calls = []
    open_fuse.blown = True
    assert open_fuse.guard(lambda: calls.append(1))() is None
    assert calls == []


def test_it_says_once_that_it_has_blown(monkeypatch) -> None:
    monkeypatch.delenv("DDPPROBE_STRICT", raising=False)
    said = []
    guarded = Fuse("x", on_blow=lambda: said.append(1)).guard(fail)
    guarded()
    guarded()
    assert said == [1]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_the_users_own_interrupts_pass(open_fuse, stop) -> None:
    def interrupted() -> None:
        raise stop

    with pytest.raises(stop):
        open_fuse.guard(interrupted)()


def test_strict_mode_raises(monkeypatch) -> None:
    monkeypatch.setenv("DDPPROBE_STRICT", "1")
    with pytest.raises(ZeroDivisionError):
        Fuse("x").guard(fail)()


def test_the_default_is_open(monkeypatch) -> None:
    monkeypatch.delenv("DDPPROBE_STRICT", raising=False)
    Fuse("x").guard(fail)()


class TimeIsUp(Exception):
    pass


def on_alarm(number: int, frame: object) -> None:
    raise TimeIsUp


class OnAlarm:
    def __call__(self, *given: object) -> None:
        raise TimeIsUp


@pytest.mark.parametrize(
    "handler", [on_alarm, OnAlarm(), functools.partial(on_alarm), OnAlarm().__call__]
)
def test_what_a_handler_of_a_signal_raises_is_the_users(monkeypatch, handler) -> None:
    monkeypatch.delenv("DDPPROBE_STRICT", raising=False)
    fuse = Fuse("hooks")

    def interrupted() -> None:
        signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(TimeIsUp):
            fuse.guard(fuse.guard(interrupted))()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (fuse.errors, fuse.blown) == (0, False)


def test_what_the_same_function_raises_when_it_is_called_is_contained(monkeypatch) -> None:
    monkeypatch.delenv("DDPPROBE_STRICT", raising=False)
    fuse = Fuse("hooks")
    assert fuse.guard(lambda: on_alarm(signal.SIGUSR1, None))() is None
    assert fuse.errors == 1
