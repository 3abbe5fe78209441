"""What a rank says of the exception that ends it: whose doing it was, and where."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from traceback import StackSummary
from typing import Any

import pytest
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

from ddpprobe.rank.last_words import describe, goodbye
from ddpprobe.rank.scheduler import pool, restarts_left, scheduler
from ddpprobe.records.events import ClosedEvent
from ddpprobe.records.fate import RaisedError

pytestmark = pytest.mark.usefixtures("python_s_own_handlers")


def caught(raise_it: Callable[[], object]) -> BaseException:
    try:
        raise_it()
    except BaseException as error:  # noqa: BLE001  (the subject)
        return error
    raise AssertionError("nothing was raised")


def inside(module: str, body: str) -> Callable[[], Any]:
    """Return a function of a module of this name."""
    names: dict[str, Any] = {"__name__": module}
    exec(f"def call(*args):\n    {body}", names)
    return names["call"]


def own() -> None:
    raise ValueError("bad batch\nand more")


ASSERT = "raise RuntimeError('CUDA error: device-side assert triggered\\nCUDA kernel errors ...')"
OUT_OF_MEMORY = "import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried to')"
GONE = "raise RuntimeError('[gloo/transport/tcp/pair.cc] Connection closed by peer')"
ENGINE = "torch.autograd.graph"
C10D = "torch.distributed.distributed_c10d"


def of_cpp(text: str) -> str:
    """Return a body out of which an error comes as out of C++: no `raise` is in its frame."""
    return f"(_ for _ in ()).throw(RuntimeError({text!r}))"


def from_it(broken: Callable[[], Any]) -> None:
    try:
        broken()
    except RuntimeError as error:
        raise OSError("training failed") from error


def while_handling(broken: Callable[[], Any]) -> None:
    try:
        broken()
    finally:
        own()


def from_nothing(broken: Callable[[], Any]) -> None:
    try:
        broken()
    except RuntimeError:
        raise OSError("training failed") from None


def handled_again(times: int, broken: Callable[[], Any]) -> None:
    """Raise so many errors, one over the other, above that of `broken`."""
    try:
        if times > 1:
            handled_again(times - 1, broken)
        else:
            broken()
    finally:
        own()


class DistBackendError(RuntimeError):
    """Named as torch's."""


def dist_error(text: str = "NCCL error") -> None:
    """Raise it as C++ does: with no `raise` in a frame."""
    (_ for _ in ()).throw(DistBackendError(text))


def own_dist_error() -> None:
    raise DistBackendError("the configuration of the mesh is wrong")


@pytest.mark.parametrize(
    ("raise_it", "collective"),
    [
        (own, False),
        (inside(ENGINE, GONE), True),
        (inside(C10D, of_cpp("no words")), True),
        (inside(C10D, "raise RuntimeError('Optimizer state has not been consolidated')"), False),
        (inside(C10D, "raise RuntimeError('Rank 1 failed to pass monitoredBarrier')"), True),
        (inside(C10D, of_cpp("ProcessGroupGloo::allgather: invalid output tensor list")), False),
        (inside(C10D, of_cpp("Incorrect output list size 1, same as the process group")), False),
        (inside(C10D, of_cpp("op.preamble.length <= op.nbytes. 8 vs 4")), True),
        (inside("torch.serialization", of_cpp("Parent directory /a/nccl does not exist.")), False),
        (inside("train", of_cpp("[a/gloo/pair.cc:534] Connection closed by peer [::1]:1")), True),
        (inside("train", of_cpp("[a/gloo/x.cc:3] Timed out waiting 9ms for recv")), True),
        (inside("train", of_cpp("Connection closed by peer")), False),
        (inside("train", of_cpp("gloo is not built")), False),
        (inside("train", GONE), False),
        (inside("torch.distributed.distributed_c10d", "raise ValueError('wrong group')"), False),
        (inside(ENGINE, "raise RuntimeError('backward through the graph a second time')"), False),
        (inside("botocore.client", "raise OSError('Connection reset by peer')"), False),
        (dist_error, True),
        (own_dist_error, False),
        (lambda: dist_error("code: -98, name: EADDRINUSE, address already in use"), False),
        # Files and pipes of any name, and modules that are named like torch.
        (inside("torch.serialization", "open('nccl_model.pt')"), False),
        (inside("torch.serialization", "raise BrokenPipeError(32, 'Broken pipe')"), False),
        (inside("torch.serialization", of_cpp("my gloo run is no folder")), False),
        (inside("torch.utils.data.dataloader", of_cpp("Connection reset by peer")), False),
        (inside("torch_utils.data", of_cpp("connection refused by the tokenizer")), False),
        (inside("torchdata.nodes", of_cpp("timed out waiting for a worker")), False),
        # What a device has failed with is heard by whoever asks it next.
        (inside("torch.distributed.distributed_c10d", ASSERT), False),
        (inside("torch.distributed.fsdp._fully_shard._fsdp_collectives", OUT_OF_MEMORY), False),
        (lambda: dist_error("NCCL error in: x.cpp:36, unhandled cuda error (run with ...)"), False),
        (lambda: dist_error("remote process exited or there was a network error"), True),
        (lambda: from_it(inside(ENGINE, GONE)), True),
        (lambda: while_handling(inside(ENGINE, GONE)), True),
        (lambda: inside(ENGINE, GONE)(), True),  # noqa: PLW0108  (a frame of ours around it)
        (lambda: from_nothing(inside(ENGINE, GONE)), False),
        (lambda: handled_again(15, inside(ENGINE, GONE)), True),
        (lambda: handled_again(16, inside(ENGINE, GONE)), False),
    ],
)
def test_an_error_out_of_communication_is_told_from_one_of_its_own(raise_it, collective) -> None:
    assert describe(caught(raise_it)).collective is collective


def test_of_a_group_the_exception_is_told_that_no_peer_is_behind() -> None:
    gone, bad = caught(inside(ENGINE, GONE)), caught(own)
    for group in (
        BaseExceptionGroup("tasks", [gone, bad]),
        ExceptionGroup("tasks", [ExceptionGroup("inner", [bad, gone]), gone]),
    ):
        told = describe(group)
        assert (told.type, told.message, told.collective) == ("ValueError", "bad batch", False)
    told = describe(ExceptionGroup("tasks", [gone, gone]))
    assert (told.type, told.collective) == ("RuntimeError", True)


def test_of_what_a_worker_raised_the_reason_is_told() -> None:
    text = (
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
        'last):\n  File "data.py", line 7, in __getitem__\nValueError: corrupt sample 17\nof 20\n'
    )
    told = describe(caught(inside("torch._utils", f"raise ValueError({text!r})")))
    said = "Caught ValueError in DataLoader worker process 0: corrupt sample 17"
    assert told.message == said


def test_of_what_a_spawned_process_raised_the_reason_is_told() -> None:
    frames = (
        'Traceback (most recent call last):\n  File "t.py", line 7, in f\n    raise E\n    ^^^\n'
    )
    text = "\n\n-- Process 1 terminated with the following error:\n"
    text += (
        f"{frames}KeyError: 3\n\nDuring the handling of that:\n\n{frames}ValueError: bad\nof 20\n"
    )
    told = describe(caught(inside("torch.multiprocessing.spawn", f"raise RuntimeError({text!r})")))
    said = "-- Process 1 terminated with the following error:"
    assert told.message == f"{said} ValueError: bad"
    without = describe(caught(inside("torch.multiprocessing.spawn", f"raise ValueError({said!r})")))
    assert without.message == said


class Preempted(Exception):
    pass


def on_notice(number: int, frame: object) -> None:
    raise Preempted


@pytest.mark.parametrize(
    ("number", "asked"),
    [(signal.SIGUSR1, True), (signal.SIGHUP, True), (signal.SIGALRM, False)],
)
def test_who_asks_by_a_signal_is_told_from_a_timer_of_the_scripts_own(number, asked) -> None:
    before = signal.signal(number, on_notice)
    try:
        assert describe(caught(lambda: signal.raise_signal(number))).asked is asked
    finally:
        signal.signal(number, before)
    assert describe(caught(lambda: on_notice(number, None))).asked is False


def test_what_ends_a_loop_by_hand_is_no_reason() -> None:
    try:
        next(iter(()))
    except StopIteration:
        assert goodbye().error is None
    try:
        own()
    except ValueError:
        assert goodbye().error is not None


def test_what_is_handled_on_the_way_to_an_exit_code_is_its_reason() -> None:
    def leaving(code: object) -> ClosedEvent:
        said = []
        with pytest.raises(SystemExit):
            try:
                own()
            except ValueError:
                try:
                    sys.exit(code)
                finally:
                    said.append(goodbye())
        return said[0]

    said = leaving(1)
    assert (said.status, said.asked) == ("ok", False)
    assert said.error is not None
    assert said.error.message == "bad batch"
    assert leaving(0).error is None
    assert leaving(None).error is None


def test_type_message_and_the_innermost_place_outside_of_torch_are_told() -> None:
    told = describe(caught(own))
    assert (told.type, told.message) == ("ValueError", "bad batch")
    assert told.where.startswith("test_last_words.py:")
    assert told.where.endswith(" in own")
    torch = describe(caught(inside("torch.nn.functional", "raise ValueError('x')")))
    assert torch.where.endswith(" in caught")
    ours = describe(caught(inside("ddpprobe.rank.recorder", "raise ValueError('x')")))
    assert ours.where.endswith(" in caught")
    assert describe(ValueError("never raised")).where == ""
    nameless: dict[str, Any] = {}
    exec("def call():\n    raise ValueError('x')", nameless)
    assert describe(caught(nameless["call"])).where.endswith(" in call")


@pytest.mark.parametrize(
    ("text", "message"),
    [("", ""), ("\n  \n  told  \nmore", "told"), ("x" * 301, "x" * 297 + "...")],
)
def test_the_first_line_that_says_something_is_told(text, message) -> None:
    assert describe(ValueError(text)).message == message


def test_a_text_that_cannot_be_made_costs_the_text_only() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise OSError("odd")

    def odd() -> None:
        raise Odd

    told = describe(caught(odd))
    assert (told.type, told.message) == ("Odd", "<exception str() failed>")


@pytest.fixture
def on_term() -> Iterator[Callable[..., None]]:
    def handler(*_: object) -> None:
        raise InterruptedError("preempted")

    before = signal.signal(signal.SIGTERM, handler)
    yield handler
    signal.signal(signal.SIGTERM, before)


def test_what_a_handler_of_a_signal_raises_was_asked_for(on_term) -> None:
    assert describe(caught(lambda: signal.raise_signal(signal.SIGTERM))).asked
    assert not describe(caught(own)).asked
    assert goodbye().handles


def test_a_handler_that_the_script_calls_by_itself_was_asked_for_by_nobody() -> None:
    def save(signum: object = None, frame: object = None) -> None:
        raise OSError(28, "No space left on device")

    before = signal.signal(signal.SIGTERM, save)
    try:
        assert not describe(caught(save)).asked
        assert describe(caught(lambda: signal.raise_signal(signal.SIGTERM))).asked
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_loader_s_worker_that_was_told_to_end_with_its_script_was_asked_for() -> None:
    def told(by: str) -> bool:
        raising = inside("train", f"raise RuntimeError('DataLoader worker (pid 7) is {by}. ')")
        return describe(caught(raising)).asked

    def flag(*_: object) -> None:
        """Note that the training is to end after this step."""

    before = signal.signal(signal.SIGTERM, flag)
    try:
        assert not told("killed by signal: Terminated")  # nobody told the script
        signal.raise_signal(signal.SIGTERM)
        assert told("killed by signal: Terminated")
        assert not told("killed by signal: Killed")
        assert not told("killed by signal: Segmentation fault")
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ctrl_c_was_asked_for_and_is_no_handler_of_the_script_s() -> None:
    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    assert describe(caught(interrupt)).asked
    assert not goodbye().handles

    def while_saving() -> None:
        try:
            interrupt()
        finally:
            own()

    assert describe(caught(while_saving)).asked
    try:
        interrupt()
    except KeyboardInterrupt:
        told = goodbye()
    assert told.error is not None
    assert (told.error.asked, told.asked) == (True, False)


def test_a_keyboard_interrupt_that_a_script_raises_is_its_own() -> None:
    def by_hand() -> None:
        raise KeyboardInterrupt("enough")

    assert not describe(caught(by_hand)).asked
    of_a_worker = inside("torch._utils", "raise KeyboardInterrupt")  # of a DataLoader
    assert describe(caught(of_a_worker)).asked


def test_what_a_rank_handled_when_its_communication_broke_is_told() -> None:
    broken = inside(ENGINE, GONE)

    def waits_for_the_others() -> None:
        try:
            own()
        finally:
            broken()

    told = describe(caught(waits_for_the_others))
    assert (told.type, told.collective) == ("RuntimeError", True)
    assert told.behind.startswith("ValueError: bad batch at test_last_words.py:")
    for other in (lambda: while_handling(broken), lambda: from_it(broken), own, broken):
        assert describe(caught(other)).behind == ""


def of_a_checkpoint(failed: dict[int, BaseException]) -> Callable[[], object]:
    """Return what raises on rank 0, as torch does, that a checkpoint failed on some ranks."""
    told = {rank: (error, StackSummary.from_list([])) for rank, error in failed.items()}
    ranks = _DistWrapper(None, use_dist=False, coordinator_rank=0)
    ranks.broadcast_object = lambda _: CheckpointException("write", told)
    return lambda: ranks.all_reduce("write", lambda: 0, lambda _: 0)


def test_of_a_checkpoint_that_failed_each_rank_says_whether_it_was_its_own_failure() -> None:
    full = OSError(28, "No space left on device")
    told = describe(caught(of_a_checkpoint({0: full, 1: ValueError("no")})))
    text = "OSError: [Errno 28] No space left on device"
    assert (told.type, told.message, told.collective) == ("CheckpointException", text, False)
    told = describe(caught(of_a_checkpoint({1: full})))
    assert (told.message, told.collective) == (f"of another rank: {text}", True)
    assert told.is_retold
    gone = DistBackendError("connection closed by peer")
    assert describe(caught(of_a_checkpoint({0: gone}))).collective


def test_an_error_from_a_checkpoint_that_failed_elsewhere_is_none_of_its_own() -> None:
    def save() -> None:
        try:
            of_a_checkpoint({1: OSError("no room")})()
        except CheckpointException as error:
            raise RuntimeError("cannot save") from error

    told = describe(caught(save))
    assert (told.type, told.collective, told.is_retold) == ("RuntimeError", True, False)


def test_of_another_torch_s_checkpoint_that_failed_nobody_knows_whose_failure_it_was() -> None:
    error = CheckpointException("write", {1: (OSError("x"), StackSummary.from_list([]))})
    assert describe(error) == RaisedError("CheckpointException", describe(error).message)


def test_what_torch_raises_from_an_error_of_the_script_s_is_that_error() -> None:
    """A stage of a pipeline raises RuntimeError from whatever the user's module raises."""

    def stage() -> None:
        try:
            own()
        except ValueError as error:
            inside(
                "torch.distributed.pipelining.stage", "raise RuntimeError('stage 1') from args[0]"
            )(error)

    assert not describe(caught(stage)).collective


def test_an_error_that_is_under_way_is_told_and_does_not_count_as_uncaught(monkeypatch) -> None:
    for name in ("last_exc", "last_value"):
        monkeypatch.delattr(sys, name, raising=False)
    try:
        own()
    except ValueError:
        told = goodbye()
    assert (told.status, told.error.type) == ("ok", "ValueError")
    assert goodbye() == ClosedEvent()
    assert goodbye(at_exit=True) == ClosedEvent(at_exit=True)


@pytest.mark.parametrize("name", ["last_exc", "last_value"])  # the first one since Python 3.12
def test_an_error_that_nobody_caught_is_told_as_such(monkeypatch, name: str) -> None:
    for each in ("last_exc", "last_value"):
        monkeypatch.setattr(sys, each, None, raising=False)
    monkeypatch.setattr(sys, name, caught(own))
    with pytest.raises(OSError) as under_way:  # noqa: PT011
        raise OSError("under way")
    try:
        raise under_way.value
    except OSError:
        told = goodbye()
    assert (told.status, told.error) == ("exception", describe(caught(own)))


def test_in_a_notebook_the_error_of_a_cell_counts_only_within_a_step(monkeypatch) -> None:
    for each in ("last_exc", "last_value"):
        monkeypatch.setattr(sys, each, caught(own), raising=False)
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    assert goodbye() == ClosedEvent()
    assert goodbye(at_exit=True) == ClosedEvent(at_exit=True)
    assert goodbye(midway=True).status == "exception"


def test_an_exit_out_of_a_handler_was_asked_for_and_no_other_exit(on_term) -> None:
    def leave(*_: object) -> None:
        sys.exit(0)

    def leaving(by: Callable[[], object]) -> ClosedEvent:
        try:
            by()
        except SystemExit:
            return goodbye()  # as a `with` or a `finally` calls it
        raise AssertionError("nobody left")

    signal.signal(signal.SIGTERM, leave)
    told = leaving(lambda: signal.raise_signal(signal.SIGTERM))
    assert told.asked
    assert told.error is None
    assert not leaving(lambda: sys.exit(0)).asked


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("raise ValueError('own')", "exception ValueError own"),
        ("sys.excepthook = lambda *_: None\nraise ValueError('own')", "exception ValueError own"),
        ("sys.exit(3)", "ok"),
        ("pass", "ok"),
        ("try:\n    raise ValueError\nexcept ValueError:\n    pass", "ok"),
    ],
)
def test_at_the_end_of_the_interpreter_the_uncaught_error_is_known(script, says) -> None:
    report = (
        "import atexit, sys\nfrom ddpprobe.rank.last_words import goodbye\n"
        "def tell():\n    told = goodbye()\n    error = told.error\n"
        "    print(told.status, *((error.type, error.message) if error else ()))\n"
        "atexit.register(tell)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", report + script], capture_output=True, text=True, check=False
    )
    assert done.stdout.split("\n")[0] == says


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "17"}, "Slurm job 17: sacct -j 17 -o State,ExitCode,Timelimit"),
        (
            {"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": "0"},
            "Slurm job 17, whose time was to end at 1970-01-01 00:00:00 UTC: sacct -j 17 -o ",
        ),
        ({"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": "soon"}, "Slurm job 17: sacct"),
        ({"SLURM_JOB_ID": "1; rm -r /"}, ""),
        ({"PBS_JOBID": "4.host"}, "PBS job 4.host: qstat -xf 4.host"),
    ],
)
def test_the_scheduler_is_named_by_what_it_gave_to_the_process(environment, says) -> None:
    said = scheduler(environment)
    assert said.startswith(says)
    assert bool(said) == bool(says)


@pytest.mark.parametrize(
    ("limit", "count", "left"),
    [("3", "1", 2), ("0", "0", 0), ("1", "1", 0), ("1", "2", 0), ("", "", 0), ("1", "", 0),
     ("x", "0", 0), ("-1", "0", 0), ("9" * 5000, "0", 0)],
)  # fmt: skip
def test_torchrun_s_restarts_are_counted_and_nonsense_is_none(limit, count, left) -> None:
    said = {"TORCHELASTIC_MAX_RESTARTS": limit, "TORCHELASTIC_RESTART_COUNT": count}
    assert restarts_left({name: text for name, text in said.items() if text}) == left


def test_a_worker_that_ray_has_started_says_that_ray_ends_it(monkeypatch) -> None:
    assert goodbye().pool == ""
    monkeypatch.setenv("RAY_RAYLET_PID", str(os.getppid()))
    assert goodbye().pool == "Ray"


@pytest.mark.parametrize("said", [{}, {"RAY_RAYLET_PID": "11"}, {"RAY_RAYLET_PID": "no number"}])
def test_what_a_worker_of_ray_has_started_is_none(said: dict[str, str]) -> None:
    assert pool(said, 12) == ""
    assert pool(said | {"RAY_RAYLET_PID": "12"}, 12) == "Ray"
