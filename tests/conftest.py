"""What every test stands on: strict containment, one thread a process, and real ranks."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

import ddpprobe
from ddpprobe.records.step import StepRecord
from ddpprobe.rundir import framing
from ddpprobe.rundir.journal import JournalTail
from ddpprobe.rundir.paths import RunDir

from . import slowest
from .launcher import Launcher
from .waiting import daemons_below, deadline

# Before anything imports torch. Four ranks on two cores must not start eight threads each.
os.environ["DDPPROBE_STRICT"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["DDPPROBE_LINGER"] = "20"  # a crash is nobody's alert here
# No test tells a Prometheus of this machine what to scrape; one of its own says where it looks.
os.environ["DDPPROBE_SD_DIR"] = ""
os.environ["DDPPROBE_SERVICE"] = ""  # nor is one asked that runs on this machine
# How long an example takes, or its making, says nothing on a busy machine.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
# A job that a shell starts in the background ignores Ctrl-C, and so would every command tested.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent
Torchrun = Callable[..., "subprocess.CompletedProcess[str]"]
# What a daemon that serves inside a test takes for itself.
TAKEN = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
MANY_MODULES = 200  # a collection takes as long as the import of twenty
_hidden = {"modules": 0}  # how many were imported when `_freeze` was last called


def pytest_configure(config: pytest.Config) -> None:
    """Add the table of the slowest files to the end of the output."""
    slowest.listen(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest."""
    slowest.longest_first(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the test files without the garbage collector: what they import stays.

    A wrapper, as under xdist the controller does not get to `pytest_collection_finish`.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Keep what all test files have imported, half a million objects, out of every collection.

    Full collections become rare: what they found was a tenth of what compiled models take, and a
    test that needs one asks for it.
    """
    _freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 100)
    _remember_chunks()


def pytest_runtest_setup() -> None:
    """Do the same for what a test before has imported: the first optimizer imports Dynamo."""
    if len(sys.modules) > _hidden["modules"] + MANY_MODULES:
        _freeze()


def _freeze() -> None:
    """Hide what is alive from the collector.

    `install` looks through the collector's objects for a `GradScaler` or a wrapper of FSDP1: with
    those of Dynamo among them that was a sixth of what a short training takes.
    """
    gc.collect()
    gc.freeze()
    _hidden["modules"] = len(sys.modules)


def _remember_chunks() -> None:
    """Let the store remember more chunks: hundreds of tests write the same made records.

    To have Zarr encode them is a quarter of what such tests take. What is asked is a function of
    its arguments alone, and a process that is not a test's remembers as many as ever.
    """
    encoding = sys.modules.get("ddpprobe.store.encoding")
    if encoding is not None:
        encoding._remembered = functools.lru_cache(8192)(encoding._remembered.__wrapped__)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    with handlers_kept():
        yield


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Put back how signals are handled: what is ignored, also everything started later ignores."""
    before = {number: signal.getsignal(number) for number in TAKEN}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that is not Python's
                signal.signal(number, handler)


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Torchrun]:
    """Run a script on real ranks: `torchrun(args, nproc=2, env=None, timeout=120, fresh=False)`.

    `args` is the source of a script (a string with a newline), or a path, or a path and arguments.
    The ranks are forked from a process that has imported torch, unless they are to be `fresh`:
    `launcher` says what is different. Without ranks (`nproc=0`) it is `python SCRIPT ...`, forked
    as well. Returns the completed process with its output as text;
    the exit code is torchrun's. When the time is up (`waiting`), every rank prints its Python
    stacks, all of them are killed, and the test fails with that output. Daemons that any run
    directory below `tmp_path` names are ended afterwards.
    """
    with torchrun_in(tmp_path) as run:
        yield run


@contextlib.contextmanager
def torchrun_in(directory: Path) -> Iterator[Torchrun]:
    """Do the same in another directory than a test's own, for what several tests look at."""

    def run(
        args: str | Path | Sequence[str | Path],
        nproc: int = 2,
        env: Mapping[str, str] | None = None,
        timeout: float = 120.0,
        *,
        fresh: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        if isinstance(args, str) and "\n" in args:
            script = directory / "script.py"
            script.write_text(args)
            args = script
        script = [args] if isinstance(args, str | Path) else list(args)
        environ = {**os.environ, "PYTHONFAULTHANDLER": "1", **(env or {})}
        # Not pipes: a daemon that inherited one would keep it open after its ranks.
        out, err = directory / "torchrun.out", directory / "torchrun.err"
        options = ["--nproc-per-node", nproc] if nproc else None
        where = {"cwd": directory, "env": environ, "out": out, "err": err}
        return _finished(Launcher(options, script, **where, fresh=fresh), timeout, out, err)

    try:
        yield run
    finally:
        end_daemons(directory)


def _finished(
    launcher: Launcher, timeout: float, out: Path, err: Path
) -> subprocess.CompletedProcess[str]:
    try:
        launcher.wait(timeout)
        late = False
    except subprocess.TimeoutExpired:
        late = True
    finally:
        end_tree(launcher)
    texts = [file.read_text() for file in (out, err)]
    if late:
        pytest.fail(f"ranks still ran after {timeout:.0f} s; their stacks:\n" + "\n".join(texts))
    return subprocess.CompletedProcess([], launcher.wait(), *texts)


def end_tree(process: Launcher | subprocess.Popen[bytes]) -> None:
    """End a launcher that still runs and its ranks; each of them prints its stacks first."""
    if process.poll() is not None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        ranks = psutil.Process(process.pid).children(recursive=True)
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGABRT)  # faulthandler prints, the process ends
        psutil.wait_procs(ranks, timeout=5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_daemons(directory: Path, timeout: float = 10.0) -> None:
    """End the daemons that run directories below `directory` name, by their process ids."""
    gone = FileNotFoundError, psutil.NoSuchProcess
    for path in daemons_below(directory):
        with contextlib.suppress(*gone, json.JSONDecodeError, KeyError):
            daemon = psutil.Process(json.loads(path.read_text())["pid"])
            if str(directory) not in " ".join(daemon.cmdline()):
                continue  # it ended, and its number belongs to somebody else
            daemon.terminate()
            _, alive = psutil.wait_procs([daemon], timeout)
            for left in alive:
                left.kill()


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`call(*words)`: (exit code, stdout, stderr) of one command line."""
    from ddpprobe.cli.main import main

    def run(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def poll() -> Callable[..., object]:
    """Wait until `poll(condition, timeout=10)` holds: returns its value, or fails the test."""

    def wait(condition: Callable[[], object], timeout: float = 10.0) -> object:
        late = deadline(timeout)
        while not (value := condition()):
            if time.monotonic() > late:
                pytest.fail(f"not within {timeout:.0f} s: {condition}")
            time.sleep(0.02)
        return value

    return wait


@pytest.fixture
def records_of() -> Callable[..., list[StepRecord]]:
    """Read what a rank has journaled: `records_of(run_dir, rank=0, attempt=0)`.

    A daemon that has stored all of it may have taken the journal away by then.
    """

    def read(run_dir: Path, rank: int = 0, attempt: int = 0) -> list[StepRecord]:
        run = RunDir(Path(run_dir))
        tail = JournalTail(run.rank_journal(attempt, "node_0000", rank))
        frames = [f for f in tail.poll() if f.type == framing.RECORD]
        records = [framing.decode_record(f.payload, tail.tables) for f in frames]
        tail.close()
        assert tail.damage == {}
        if not records and run.store.exists():
            stored = ddpprobe.open(run.path).records(rank)
            records = [record for record in stored if record.attempt == attempt]
        return records

    return read


@pytest.fixture(params=["compiled", "numpy"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the compiled statistics and without them."""
    from ddpprobe.rank.stats import native

    if not native.prepare():
        if request.param == "compiled":
            pytest.skip("no C++ compiler")
    elif request.param == "numpy":
        for kernels in (native.row_kernels, native.wide_kernels):
            for dtype in tuple(kernels):
                monkeypatch.delitem(kernels, dtype)
    return str(request.param)
