"""After an exception of the main thread the last word does not wait for threads that go on."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

import ddpprobe
from ddpprobe.ends.words import describe
from ddpprobe.records.fate import Fate, Progress, RaisedError
from tests import forked_script
from tests.distributed.daemon_harness import wait
from tests.forked_script import Script
from tests.rank.capture.test_capturing import life_of

HEAD = """
    import sys, threading
    import torch
    from torch import nn
    import ddpprobe

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(steps):
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def install():
        ddpprobe.install(model, run_dir=sys.argv[1], every=1, daemon="none")
"""


def start(run: Path, script: str) -> Script:
    """Start a script whose threads may wait for the end of its stdin."""
    text = textwrap.dedent(HEAD) + textwrap.dedent(script)
    return Script(run.parent, text, run)


def goodbyes(run: Path) -> list[dict]:
    return [event for event in life_of(run) if event["event"] == "closed"] if run.exists() else []


def test_a_script_that_raises_and_lingers_says_so_while_it_lives(tmp_path) -> None:
    process = start(
        tmp_path / "r",
        """
        install()
        threading.Thread(target=sys.stdin.read, name="prefetch").start()
        train(3)
        raise ValueError("a bad batch")
        """,
    )
    try:
        (said,) = wait(lambda: goodbyes(tmp_path / "r"))
        assert process.poll() is None
    finally:
        process.end()
    assert said["error"]["type"] == "ValueError"
    assert (said["status"], said["threads"]) == ("exception", ["prefetch"])
    assert "ValueError: a bad batch" in process.stderr
    assert goodbyes(tmp_path / "r") == [said]
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (
            """
            install()
            def go_on():
                sys.stdin.read()
                train(5)
            threading.Thread(target=go_on).start()
            """,
            "ok",
        ),
        (
            """
            def go_on():
                install()
                ready.set()
                sys.stdin.read()
                train(5)
            ready = threading.Event()
            threading.Thread(target=go_on).start()
            ready.wait()
            raise ValueError("of the main thread, which does not train")
            """,
            "exception",
        ),
    ],
    ids=["an orderly end", "another thread trains"],
)
def test_training_of_a_thread_that_goes_on_is_recorded_to_its_end(
    script: str, status: str, tmp_path
) -> None:
    start(tmp_path / "r", script).end()
    assert [one.step for one in ddpprobe.open(tmp_path / "r").records()] == [0, 1, 2, 3, 4]
    (said,) = goodbyes(tmp_path / "r")
    assert (said["status"], said["steps"]) == (status, 5)


@pytest.mark.parametrize(
    ("how", "threads", "lingers"),
    [
        ("", ("a",), ", after which it waited for thread a"),
        ("unknown", ("a",), ", after which it waited for thread a"),
        ("SIGTERM", ("a", "b"), ", and its process did not end: it waited for threads a, b"),
        ("exit:1", ("a",), ""),
        ("", (), ""),
    ],
)
def test_a_page_names_the_threads_unless_the_process_has_ended_by_itself(
    how: str, threads: tuple[str, ...], lingers: str
) -> None:
    fate = Fate(
        1, how=how, closed=True, raised=True, error=RaisedError("ValueError", "bad", "x.py:3"),
        threads=threads, clock=Progress(7, 0, "forward", 7),
    )  # fmt: skip
    assert describe(fate) == f"rank 1 died (ValueError: bad at x.py:3{lingers}) in step 7"


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_of_multiprocessing_has_a_last_word(fails: bool, tmp_path) -> None:
    end = 'raise ValueError("a bad batch")' if fails else "pass"
    process = start(
        tmp_path / "r",
        f"""
        import multiprocessing

        def work():
            install()
            train(3)
            {end}

        worker = multiprocessing.get_context("fork").Process(target=work)
        worker.start()
        worker.join()
        sys.exit(worker.exitcode)
        """,
    )
    process.end()
    assert process.returncode == int(fails), process.stderr
    (goodbye,) = goodbyes(tmp_path / "r")
    assert goodbye["at_exit"]
    assert (goodbye.get("error") or {}).get("message") == ("a bad batch" if fails else None)


PROCESSES = """
import sys
import torch
import torch.multiprocessing
from torch import nn
import ddpprobe
assert ddpprobe.install  # all of it is imported before a process is started, or its work begins

def work(_, path, bad):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddpprobe.install(model, run_dir=path, every=1, daemon="none")
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if bad:
        raise ValueError("a bad batch")

if __name__ == "__main__":
    method, path, bad = sys.argv[1:]
    if method == "fork alone":
        start = torch.multiprocessing.get_context("fork").Process
        process = start(target=work, args=(0, path, bad))
        process.start()
        process.join()
        sys.exit(process.exitcode)
    torch.multiprocessing.start_processes(work, (path, bad), start_method=method)
"""


@pytest.mark.parametrize("bad", ["", "bad"])
@pytest.mark.parametrize("method", ["fork alone", "fork", "spawn"])
def test_a_process_started_behind_the_import_leaves_its_last_word(tmp_path, method, bad) -> None:
    """`multiprocessing` calls neither what `atexit` has nor what finalizers there were before."""
    done = forked_script.run(tmp_path, PROCESSES, method, tmp_path / "r", bad)
    assert (done.returncode, "ValueError: a bad batch" in done.stderr) == (
        int(bool(bad)),
        bool(bad),
    )
    (last,) = goodbyes(tmp_path / "r")
    assert (last["status"], last["steps"]) == ("exception" if bad else "ok", 3)
    if bad:
        assert (last["error"]["type"], last["error"]["message"]) == ("ValueError", "a bad batch")
