"""A progress bar is seen by a person who waits, and by nobody else."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddpprobe.cli import progress as module
from ddpprobe.cli.progress import progress
from ddpprobe.reader.run import open_run
from ddpprobe.reader.verify.verify import verify, work
from ddpprobe.store.writer import StoreWriter

from ..made_runs import NODE, Made

WIPED = "\x1b[1A\x1b[2K"  # one line up, erase it


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


class Terminal:
    """Stands in for stderr: `with terminal(): ...`, then `read()` is what came out on it."""

    def __init__(self) -> None:
        self._ours, theirs = pty.openpty()
        self._stream = os.fdopen(theirs, "w")

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with contextlib.redirect_stderr(self._stream):
            yield

    def read(self) -> str:
        text = b""
        while select.select([self._ours], [], [], 0.05)[0]:
            text += os.read(self._ours, 4096)
        return text.decode()

    def close(self) -> None:
        self._stream.close()
        os.close(self._ours)


def count(title: str = "checking", total: int | None = 4, *, silent: bool = False) -> None:
    with progress(title, total, silent=silent) as bar:
        for _ in range(4):
            bar.advance()


def test_short_work_draws_nothing_and_loads_no_library(terminal, monkeypatch):
    monkeypatch.delitem(sys.modules, "rich.progress", raising=False)
    with terminal():
        count()
    assert terminal.read() == ""
    assert "rich.progress" not in sys.modules


def test_work_that_lasts_is_drawn_and_wiped_when_it_ends(terminal, monkeypatch):
    monkeypatch.setattr(module, "APPEARS_SECONDS", 0.0)
    with terminal():
        count("reading \x1b]0;owned\x07[red]x[/red]")
    shown = terminal.read()
    assert "reading ?]0;owned?[red]x[/red]" in shown  # neither the terminal's orders nor rich's
    assert "100%" in shown
    assert shown.rindex(WIPED) > shown.rindex("100%")
    with terminal():
        count(total=None)
    assert "checking" in terminal.read()


def test_it_is_wiped_when_the_work_breaks_off(terminal, monkeypatch):
    monkeypatch.setattr(module, "APPEARS_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt), terminal(), progress("checking", 2) as bar:
        bar.advance()
        raise KeyboardInterrupt
    assert terminal.read().endswith(WIPED)


def test_nobody_but_a_person_at_a_terminal_sees_it(terminal, monkeypatch, capfd):
    monkeypatch.setattr(module, "APPEARS_SECONDS", 0.0)
    with terminal():
        count(silent=True)
    assert terminal.read() == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes rich believe in a terminal
    count()
    assert "".join(capfd.readouterr()) == ""


def test_verify_does_as_many_units_as_it_announced(tmp_path: Path):
    made = Made(tmp_path / "run", ranks=2).whole(20)
    run = made.close()
    folder = StoreWriter(run, NODE, block=8, durable=False)
    folder.fold()
    folder.close()
    done: list[int] = []
    opened = open_run(tmp_path / "run")
    assert verify(opened, done.append).ok
    assert sum(done) == work(opened) > 20
    for damaged in sorted((tmp_path / "run" / "run.zarr").rglob("zarr.json"))[::7]:
        damaged.write_bytes(b"{")
    assert work(opened) >= 0  # what is wrong is for `verify` to say
    assert not verify(opened, done.append).ok
