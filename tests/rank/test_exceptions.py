"""What is said of the exceptions behind the one that ends a rank, and of where each was raised."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ddpprobe.rank.last_words import describe
from ddpprobe.records.events import ClosedEvent, to_json
from ddpprobe.records.fate import RaisedError, Reason, cut
from ddpprobe.rundir import validate

HERE = "test_exceptions.py:"


class TrainingFailed(Exception):
    """A script's own."""


def said(raise_it: Callable[[], object]) -> RaisedError:
    try:
        raise_it()
    except Exception as error:  # noqa: BLE001  (the subject)
        return describe(error)
    raise AssertionError("nothing was raised")


def of_a_library(body: str, file: str = os.__file__, name: str = "library") -> Callable[..., Any]:
    """Return a function `call` of a file, by default of Python's own library."""
    names: dict[str, Any] = {"__name__": name}
    lines = "\n".join(f"    {line}" for line in body.split("\n"))
    exec(compile(f"def call(*args):\n{lines}", file, "exec"), names)
    return names["call"]


def look_up() -> None:
    {"a": 1}["tokens"]


def chained(handle: Callable[[Exception], object]) -> Callable[[], None]:
    def call() -> None:
        try:
            look_up()
        except KeyError as error:
            handle(error)

    return call


# ---- which of a chain are told


def from_it() -> None:
    try:
        look_up()
    except KeyError as error:
        raise TrainingFailed("epoch 3 failed") from error


def in_its_place() -> None:
    try:
        look_up()
    except KeyError:
        raise TrainingFailed("epoch 3 failed")  # noqa: B904  (the subject)


def twice() -> None:
    try:
        from_it()
    except TrainingFailed as error:
        raise SystemError("gave up") from error


@contextlib.contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except KeyError:
        raise TrainingFailed("epoch 3 failed")  # noqa: B904  (the subject)


def within_a_manager() -> None:
    with translated():
        look_up()


class File:
    """As the writer of `torch.save`: on a full disk it cannot be ended, either."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        raise OSError("unexpected pos 1984 vs 1936")


def within_a_with() -> None:
    with File():
        look_up()


@pytest.mark.parametrize(
    ("raise_it", "type_"),
    [
        (from_it, "TrainingFailed"), (in_its_place, "TrainingFailed"),
        (within_a_manager, "TrainingFailed"), (twice, "SystemError"), (within_a_with, "OSError"),
    ],
)  # fmt: skip
def test_the_root_of_what_an_exception_was_raised_because_of_is_told(raise_it, type_) -> None:
    told = said(raise_it)
    assert (told.type, told.handled, told.behind) == (type_, None, "")
    assert told.cause is not None
    assert (told.cause.type, told.cause.message) == ("KeyError", "'tokens'")
    assert told.cause.where.startswith(HERE)
    assert told.cause.where.endswith(" in look_up")
    assert validate.event(json.loads(json.dumps(to_json(ClosedEvent(error=told))))).error == told


def test_what_was_merely_being_handled_is_told_as_that() -> None:
    def read(_: Exception) -> None:
        raise ValueError("torn")

    told = said(chained(read))
    assert (told.type, told.cause) == ("ValueError", None)
    assert told.handled is not None
    assert (told.handled.type, told.handled.message) == ("KeyError", "'tokens'")

    def in_c(_: Exception) -> None:
        int("torn")

    assert said(chained(in_c)).cause is None

    def both(error: Exception) -> None:
        try:
            read(error)
        except ValueError as torn:
            raise TrainingFailed("epoch 3 failed") from torn

    told = said(chained(both))
    assert [each and each.type for each in (told.cause, told.handled)] == ["ValueError", "KeyError"]


def test_what_was_hidden_or_is_none_is_not_told() -> None:
    def hide(_: Exception) -> None:
        raise TrainingFailed("epoch 3 failed") from None

    def at_the_end_of_a_loop() -> None:
        try:
            next(iter(()))
        except StopIteration:
            look_up()

    for raise_it in (chained(hide), look_up, at_the_end_of_a_loop):
        told = said(raise_it)
        assert (told.cause, told.handled) == (None, None)


def test_of_a_library_s_end_of_a_wait_nothing_is_told_and_of_a_want_of_memory_it_is() -> None:
    def wait(error: type[Exception]) -> Callable[[], None]:
        def call() -> None:
            try:
                of_a_library("raise args[0]")(error)
            except error as ended:
                raise RuntimeError("DataLoader worker exited unexpectedly") from ended

        return call

    assert said(wait(queue.Empty)).cause is None
    cause = said(wait(MemoryError)).cause
    assert cause is not None
    assert (cause.type, cause.message) == ("MemoryError", "")

    def check() -> None:
        raise AssertionError

    def a_check_of_the_script_s() -> None:
        try:
            check()
        except AssertionError as error:
            raise TrainingFailed("epoch 3 failed") from error

    cause = said(a_check_of_the_script_s).cause
    assert cause is not None
    assert cause.type == "AssertionError"


def test_an_exception_that_was_raised_anew_in_the_same_words_is_told_once() -> None:
    def again(error: Exception) -> None:
        raise KeyError(*error.args) from error

    assert said(chained(again)).cause is None


def test_a_generator_s_stop_that_became_an_error_is_told_with_its_place() -> None:
    def batches() -> Iterator[object]:
        yield next(iter(()))

    told = said(lambda: list(batches()))
    assert told.message == "generator raised StopIteration"
    assert told.cause is not None
    assert told.cause.where.endswith(" in batches")


def test_a_checkpoint_on_a_full_disk_is_told_with_what_the_disk_said() -> None:
    told = said(lambda: torch.save({"weights": torch.zeros(400)}, "/dev/full"))
    assert "unexpected pos" in told.message
    assert told.cause == Reason("RuntimeError", "basic_ios::clear: iostream error")


# ---- groups


def grouped() -> None:
    raise ExceptionGroup("shards failed", [OSError(5, "Input/output error"), ValueError("bad")])


def test_of_a_group_its_own_words_and_its_place_are_told() -> None:
    told = said(grouped)
    assert (told.type, told.message, told.where) == (
        "OSError", "[Errno 5] Input/output error", "",
    )  # fmt: skip
    group, _, line = told.group.partition(" at ")
    assert group == "ExceptionGroup: shards failed (2 sub-exceptions)"
    assert line.startswith(HERE)
    assert line.endswith(" in grouped")

    def from_a_group() -> None:
        try:
            grouped()
        except ExceptionGroup as error:
            raise TrainingFailed("epoch 3 failed") from error

    cause = said(from_a_group).cause
    assert cause is not None
    assert (cause.type, cause.group) == ("OSError", told.group)
    assert said(look_up).group == ""


# ---- where it was raised


def copy() -> None:
    subprocess.run(["false"], check=True)


def test_what_python_s_library_raised_is_told_with_the_line_of_the_script() -> None:
    told = said(copy)
    line = copy.__code__.co_firstlineno + 1
    assert told.script == f"{HERE}{line} in copy"
    assert told.where.startswith("subprocess.py:")
    assert said(look_up).script == ""


def test_an_installed_package_is_the_script_only_where_nothing_else_is() -> None:
    package = "/venv/lib/python3.12/site-packages/trainer/loop.py"
    fit = of_a_library("args[0]()", package, "trainer.loop")
    told = said(lambda: fit(of_a_library("raise OSError('no')")))
    assert told.where == "os.py:2 in call"
    assert told.script.startswith(HERE)
    # Without a line of the test's own in the traceback:
    fit = of_a_library(
        "try:\n    args[0]()\nexcept OSError as error:\n    return error", package, "trainer.loop"
    )
    told = describe(fit(of_a_library("raise OSError('no')")))
    assert (told.where, told.script) == ("os.py:2 in call", "loop.py:3 in call")
    told = describe(fit(of_a_library("raise OSError('no')", package, "trainer.loop")))
    assert (told.where, told.script) == ("loop.py:2 in call", "")


def test_of_an_exception_behind_another_no_place_is_told_that_is_a_library_s_alone() -> None:
    def resolve() -> None:
        asks = of_a_library(
            "try:\n    args[0]()\nexcept OSError as error:\n    raise ValueError('x') from error"
        )
        asks(of_a_library("raise OSError('Name or service not known')"))

    told = said(resolve)
    assert told.cause == Reason("OSError", "Name or service not known")
    assert told.script.endswith(" in resolve")


# ---- how much of a text


@pytest.mark.parametrize(
    ("text", "most", "told"),
    [
        ("as long as it may be", 20, "as long as it may be"),
        ("was transferred incorrectly, or", 28, "was transferred..."),
        ("was transferred incorrectly now", 30, "was transferred incorrectly..."),
        ("is corrupted. This", 17, "is corrupted..."),
        ("x" * 400, 300, "x" * 297 + "..."),
        ("a " + "x" * 400, 300, "a " + "x" * 295 + "..."),
    ],
)
def test_a_text_that_is_cut_says_so_and_ends_with_a_word(text, most, told) -> None:
    assert cut(text, most) == told
    assert len(cut(text, most)) <= most
