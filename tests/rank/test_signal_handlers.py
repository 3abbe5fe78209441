"""A script's handler of a signal that never ran is told from one that may have."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ddpprobe.rank.last_words import goodbye
from ddpprobe.rank.signal_handlers import (
    Handlers,
    is_as_compiled,
    signal_of,
)

TRACED = sys.version_info[:2] != (3, 12)  # which leaves no trace in a function of a few kinds
MONITORED = hasattr(sys, "monitoring")

pytestmark = pytest.mark.usefixtures("python_s_own_handlers")


@pytest.fixture
def handlers() -> Iterator[Handlers]:
    handlers = Handlers()
    yield handlers
    handlers.release()


class Composed:
    """Several handlers in one, as frameworks make them."""

    def __call__(self, number: int, frame: object) -> None:
        """Note nothing."""

    def method(self, number: int, frame: object) -> None:
        """Note nothing."""


def plain() -> Callable[..., None]:
    def handler(*_: object) -> None:
        """Set a flag."""

    return handler


def replacing() -> Callable[..., None]:
    def handler(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one is not to interrupt it

    return handler


def composed() -> Callable[..., None]:
    class Fresh(Composed):
        def __call__(self, number: int, frame: object) -> None:
            """Note nothing."""

    # Each test needs a code that has not run: a class body's function shares its own.
    Fresh.__call__ = _copy(Fresh.__call__)  # type: ignore[method-assign]
    return Fresh()


def _copy(function: Any) -> Any:
    return type(function)(function.__code__.replace(), function.__globals__)


KINDS: dict[str, Callable[[], Callable[..., None]]] = {
    "a function": lambda: _copy(plain()),
    "one that puts another in its place": lambda: _copy(replacing()),
    "a partial": lambda: functools.partial(_copy(plain()), 1),
    "an object": composed,
    "a method": lambda: _copy(Composed.method).__get__(Composed()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_that_never_ran_is_known_and_one_that_did_is_no_more(handlers, kind) -> None:
    signal.signal(signal.SIGTERM, KINDS[kind]())
    handlers.look()
    assert handlers.may_have_run is not TRACED
    signal.raise_signal(signal.SIGTERM)
    assert handlers.may_have_run
    assert not handlers.left_by_an_exception


def test_one_that_ran_before_anybody_looked_may_have_ended_the_script(handlers) -> None:
    signal.signal(signal.SIGTERM, _copy(plain()))
    signal.raise_signal(signal.SIGTERM)
    assert handlers.may_have_run


def test_one_that_was_given_back_meanwhile_still_counts(handlers) -> None:
    signal.signal(signal.SIGTERM, _copy(plain()))
    handlers.look()
    signal.raise_signal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert handlers.may_have_run


def test_what_is_no_function_of_python_s_is_not_vouched_for(handlers) -> None:
    assert not handlers.may_have_run
    signal.signal(signal.SIGTERM, print)
    assert handlers.may_have_run


def test_whoever_traces_or_profiles_changes_nothing_about_it() -> None:
    for install in (sys.settrace, sys.setprofile):
        function = _copy(plain())
        before = sys.gettrace() if install is sys.settrace else sys.getprofile()
        assert is_as_compiled(function.__code__) is TRACED
        install(lambda *_: None)
        try:
            function()
        finally:
            install(before)
        assert not is_as_compiled(function.__code__)


def test_a_handler_stays_what_the_script_set_and_sees_what_it_saw(handlers) -> None:
    seen = []

    def handler(*given: object) -> None:
        seen.append((given, sys._getframe(1)))

    signal.signal(signal.SIGTERM, handler)
    handlers.look()
    assert signal.getsignal(signal.SIGTERM) is handler
    signal.raise_signal(signal.SIGTERM)
    (((number, frame), caller),) = seen
    assert (number, frame) == (signal.SIGTERM, caller)


def test_a_call_by_a_signal_is_told_from_one_of_the_script_s() -> None:
    seen = []

    def handler(_number: object, _frame: object = None) -> None:
        seen.append(signal_of(sys._getframe()))

    signal.signal(signal.SIGTERM, handler)
    signal.raise_signal(signal.SIGTERM)
    handler(None)
    handler(signal.SIGTERM, None)
    assert seen == [signal.SIGTERM, None, None]


def test_a_goodbye_in_a_handler_was_asked_for_and_one_in_the_same_function_was_not() -> None:
    told = []

    def handler(*_: object) -> None:
        told.append(goodbye())

    signal.signal(signal.SIGTERM, handler)
    signal.raise_signal(signal.SIGTERM)
    handler(None, None)
    assert [words.asked for words in told] == [True, False]


SCRIPT = """
import atexit, signal, sys
from ddpprobe.rank.signal_handlers import OF_THE_SCRIPT
from ddpprobe.rank.last_words import goodbye
def leave(*_): sys.exit(0)
def mark(*_): flag.append(1)
def fail(*_): raise TimeoutError
flag = []
def tell():
    told = goodbye(at_exit=True)
    print(told.handles, told.asked)
atexit.register(tell)
def handle(function):
    signal.signal(signal.SIGTERM, function)
    OF_THE_SCRIPT.look()
def survive():
    try: signal.raise_signal(signal.SIGTERM)
    except TimeoutError: OF_THE_SCRIPT.step_ended()
"""


@pytest.mark.skipif(not TRACED, reason="Python 3.12 leaves no trace")
@pytest.mark.parametrize(
    ("script", "handles", "asked"),
    [
        ("handle(leave)", False, False),
        ("handle(leave); sys.exit(0)", False, False),
        ("handle(leave); signal.raise_signal(signal.SIGTERM)", True, MONITORED),
        ("handle(leave); leave()", True, False),
        ("handle(mark); signal.raise_signal(signal.SIGTERM)", True, False),
        ("handle(mark); signal.raise_signal(signal.SIGTERM); handle(leave); leave()", True, False),
        ("handle(fail); survive()", True, False),
    ],
)
def test_at_the_end_of_the_interpreter_it_is_known_whether_a_handler_ran(
    script, handles, asked
) -> None:
    command = [sys.executable, "-c", SCRIPT + script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(handles), str(asked)]
