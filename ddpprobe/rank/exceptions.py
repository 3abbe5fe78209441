"""One exception: its text, its frames, and those before it."""

from __future__ import annotations

import opcode
import re
from collections.abc import Iterator
from types import FrameType, TracebackType

from ddpprobe.rank.frames import module_of
from ddpprobe.rank.shared_failure import shared_failure
from ddpprobe.records.fate import cut
from ddpprobe.rundir.fuse import first_line

MAX_MESSAGE = 300  # characters
MAX_CHAIN = 16  # exceptions, each raised while the one before it was handled
_RAISE = opcode.opmap["RAISE_VARARGS"]
_OF_A_WORKER = re.compile(r"Caught (\w+) in ")
_BEHIND_FRAMES = re.compile(r"^  .*\n(\S.+)$", re.MULTILINE)  # in a traceback: what was raised


def chain_of(raised: BaseException) -> Iterator[BaseException]:
    """Yield an exception, what it was raised from or while handling, and so on."""
    error: BaseException | None = raised
    for _ in range(MAX_CHAIN):
        if error is None:
            return
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def frames_of(trace: TracebackType | None) -> Iterator[FrameType]:
    """Yield the frames of a traceback, the outermost first."""
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def is_raised_by_hand(error: BaseException, *, torch_s: bool = False) -> bool:
    """Whether a `raise` of the script's made it; a signal comes between other instructions.

    torch raises the KeyboardInterrupt of a worker of a DataLoader anew: only `torch_s` counts that.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or (module_of(trace.tb_frame).startswith("torch.") and not torch_s):
        return False
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] == _RAISE


def message_of(raised: BaseException) -> str:
    """Return the first line of what an exception says; of one that a worker raised, what it said.

    torch raises what a worker of a DataLoader raised anew, with its traceback for a text; and of a
    checkpoint that failed anywhere the same on every rank, with the numbers of those where it did.
    """
    return cut(_whole_message(raised), MAX_MESSAGE)


def _whole_message(raised: BaseException) -> str:
    shared = shared_failure(raised)
    if shared is not None:
        whose = "" if shared.own is not None else "of another rank: "
        text = f"{type(shared.first).__name__}: {first_line(shared.first)}".removesuffix(": ")
        return f"{whose}{text}"
    said = first_line(raised)
    if said.endswith("terminated with the following error:"):  # of `torch.multiprocessing.spawn`
        return " ".join([said, *_BEHIND_FRAMES.findall(str(raised))[-1:]])
    caught = _OF_A_WORKER.match(said)
    own = re.findall(rf"^(?:\w+\.)*{caught[1]}: (.+)$", str(raised), re.MULTILINE) if caught else []
    return f"{said.rstrip('.')}: {own[-1]}" if own else said
