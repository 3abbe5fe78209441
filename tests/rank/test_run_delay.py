"""What a thread could have run and had no core for is read from the kernel, for one thread."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpprobe.rank import run_delay
from ddpprobe.rank.run_delay import RunDelay

from ..waiting import deadline

SPIN = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


@pytest.fixture
def delay() -> Iterator[RunDelay]:
    delay = RunDelay()
    delay.begin()
    if delay.seconds() is None:
        pytest.skip("this kernel does not tell")
    yield delay
    delay.close()


@pytest.fixture
def crowded() -> Iterator[None]:
    """One core for this thread, and another process that wants it, too."""
    allowed = os.sched_getaffinity(0)
    core = min(allowed)
    with subprocess.Popen([sys.executable, "-S", "-c", SPIN, str(core)]) as other:
        os.sched_setaffinity(0, {core})
        yield
        os.sched_setaffinity(0, allowed)
        other.kill()


@pytest.mark.usefixtures("crowded")
def test_it_grows_while_another_process_has_the_core(delay: RunDelay) -> None:
    start, late = delay.seconds(), deadline(30)
    while delay.seconds() < start + 0.05:
        assert time.monotonic() < late


def test_it_does_not_grow_while_the_thread_itself_waits(delay: RunDelay) -> None:
    before, began = delay.seconds(), time.monotonic()
    time.sleep(0.2)
    # After its sleep it may have to wait for a core, on a busy machine for longer than it slept.
    assert 0 <= delay.seconds() - before <= time.monotonic() - began - 0.2


def test_it_is_about_the_thread_that_began_whoever_asks(delay: RunDelay) -> None:
    mine = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    found: list[tuple[float | None, str]] = []
    asks = threading.Thread(target=lambda: found.append((delay.seconds(), mine.read_text())))
    before = delay.seconds()
    asks.start()
    asks.join()
    ((told, text),) = found
    assert before <= told <= int(text.split()[1]) / 1e9


def test_a_thread_that_has_ended_tells_nothing_any_more() -> None:
    delay = RunDelay()
    began = threading.Thread(target=delay.begin)
    began.start()
    began.join()
    late = deadline(10)
    while delay.seconds() is not None:  # the kernel may take its time to let go of it
        assert time.monotonic() < late
    delay.begin()
    assert delay.seconds() is not None
    delay.close()


def test_a_forked_child_begins_with_its_own_thread(delay: RunDelay) -> None:
    held = delay._file
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            delay.begin()
            here = os.readlink(f"/proc/self/fd/{delay._file.number}")
            os.write(writer, f"{os.getpid()} {here}".encode())
        finally:
            os._exit(0)  # or pytest would go on twice
    os.close(writer)
    os.waitpid(child, 0)
    pid, path = os.read(reader, 200).decode().split()
    os.close(reader)
    assert path == f"/proc/{pid}/task/{pid}/schedstat"
    assert (int(pid), delay._file) == (child, held)


def test_where_the_kernel_has_no_such_file_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for text in (None, "", "1", "a b c"):
        path = tmp_path / "schedstat"
        if text is not None:
            path.write_text(text)
        monkeypatch.setattr(run_delay, "_PATH", str(path))
        delay = RunDelay()
        delay.begin()
        assert delay.seconds() is None
        delay.close()
