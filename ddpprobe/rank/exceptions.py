"""One exception: its text, where it was raised, and which of those before it brought it about."""

from __future__ import annotations

import opcode
import re
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType

from ddpprobe.rank.frames import (
    OURS,
    is_of_a_package,
    is_of_the_script,
    line_in_words,
    module_of,
)
from ddpprobe.rank.shared_failure import shared_failure
from ddpprobe.records.fate import cut
from ddpprobe.rundir.fuse import first_line

MAX_MESSAGE = 300  # characters
MAX_CHAIN = 16  # exceptions, each raised while the one before it was handled
_RAISE = opcode.opmap["RAISE_VARARGS"]
_EXITS = ("__exit__", "__aexit__")
_OF_A_WORKER = re.compile(r"Caught (\w+) in ")
_BEHIND_FRAMES = re.compile(r"^  .*\n(\S.+)$", re.MULTILINE)  # in a traceback: what was raised
# By these a loop ends: a script that handles one is about to begin the next.
_ENDS_OF_LOOPS = (StopIteration, StopAsyncIteration, GeneratorExit)
# Their names alone say what happened, wherever they are raised.
_SPEAKING = (MemoryError, KeyboardInterrupt)


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


def places_of(trace: TracebackType | None) -> tuple[str, str]:
    """Return `file:line in function` of the innermost frame outside of torch, and of the script.

    The second one is "" where it is the first. A script may be a part of an installed package: one
    that is there counts where no other line of a script's is.
    """
    innermost = own = of_a_package = ""
    while trace is not None:
        frame = trace.tb_frame
        if not module_of(frame).startswith(OURS):
            innermost = line_in_words(frame.f_code, trace.tb_lineno)
        if is_of_the_script(frame):
            installed = is_of_a_package(frame.f_code.co_filename)
            of_a_package, own = (innermost, own) if installed else (of_a_package, innermost)
        trace = trace.tb_next
    script = own or of_a_package
    return innermost, "" if script == innermost else script


def reasons(chain: list[BaseException]) -> tuple[BaseException | None, BaseException | None]:
    """Return the root of what brought the first of a chain about, and of what was handled then.

    None where there is none that says anything. What is handled while another exception is raised
    may have nothing to do with it: a miss in a cache, and the file that is read instead is torn.
    """
    last = 0
    while last + 1 < len(chain) and _led_to(chain[last + 1], chain[last]):
        last += 1
    handled = [e for e in chain[last + 1 :] if not isinstance(e, _ENDS_OF_LOOPS)]
    return _root(chain[1 : last + 1], chain[0]), _root(handled, chain[0])


def _root(chain: Iterable[BaseException], raised: BaseException) -> BaseException | None:
    """Return the last one that says something, and something else than what was raised in the end.

    Libraries end a wait or a look-up by exceptions without words (`queue.Empty`), and raise others
    with words from them.
    """
    found = None
    for error in chain:
        said = message_of(error)
        frames = list(frames_of(error.__traceback__))
        tells = said or isinstance(error, _SPEAKING) or any(map(is_of_the_script, frames[-1:]))
        if tells and (type(error), said) != (type(raised), message_of(raised)):
            found = error
    return found


def _led_to(first: BaseException, then: BaseException) -> bool:
    """Whether one exception brought the next one about, and was not merely being handled.

    It did if that was raised from it, by a `raise` in the very function that handles it, or by the
    end of a `with` that it was about to leave: `torch.save` cannot end a file on a full disk.
    """
    if then.__cause__ is first:
        return True
    handler = next(frames_of(first.__traceback__), None)
    frames = list(frames_of(then.__traceback__))
    if handler is None or handler not in frames:
        return False
    below = frames[frames.index(handler) + 1 :]
    return below[0].f_code.co_name in _EXITS if below else is_raised_by_hand(then, torch_s=True)
