"""Where the training thread is in its code while a rank stands still.

A rank that hangs cannot say so itself. Its disk thread can: Python keeps the frames of all threads,
and whoever waits in C, for other ranks or for a disk, has let the interpreter go.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import final

import torch

from ddpprobe.rank.frames import is_of_the_script, line_in_words, module_of, stack
from ddpprobe.records.events import StandsEvent
from ddpprobe.records.step import STEP_PHASES
from ddpprobe.rundir.heartbeat import Heartbeat

# Half of what makes a rank a late one (`ends.stalls`), so that it is known where all of them stand
# before anybody is blamed.
STILL_SECONDS = 5.0
STILL_STEPS = 5
# Where ranks talk to one another: the name of a module, or its beginning.
_TALKING = ("torch.distributed.", "torch.nn.parallel.distributed.")
# What is below it and talks to nobody by itself: it writes and reads files, and waits for its own
# threads. Its collectives are in the frames of others.
_FILES = "torch.distributed.checkpoint."
# Calls that may take long and wait for no other rank: module and function of the frame, and what it
# is called. The last one is Python's, when the script is over.
_CALLS = {
    ("torch.serialization", "save"): "torch.save",
    ("torch.serialization", "load"): "torch.load",
    ("torch.distributed.checkpoint.state_dict_saver", "save"): "torch.distributed.checkpoint.save",
    ("torch.distributed.checkpoint.state_dict_saver", "async_save"):
        "torch.distributed.checkpoint.async_save",
    ("torch.distributed.checkpoint.state_dict_loader", "load"): "torch.distributed.checkpoint.load",
    ("threading", "_shutdown"): "the wait for threads at exit",
}  # fmt: skip
_ENGINE = "torch.autograd.graph."  # of a backward: DDP waits for the others in its C++


@final
class StandingLook:
    """Looks, about once a second, whether this rank still moves; see `StandsEvent`.

    It looks again each time that it has stood for twice as long, and tells if the place is another
    one. The thread that makes it is the one that trains.

    Args:
        beat: returns the rank's last heartbeat.
        tell: takes an event.
        is_reducing: whether a backward has its gradients, and waits for their reduction.
    """

    def __init__(
        self, beat: Callable[[], Heartbeat | None], tell: Callable[[StandsEvent], object],
        is_reducing: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._beat, self._tell, self._is_reducing = beat, tell, is_reducing
        self._thread = threading.get_ident()
        self._since = 0  # time of the last beat, Unix ns
        self._due = 0.0  # seconds after it at which to look
        self._told = ""

    def __call__(self) -> None:
        """Look."""
        beat = self._beat()
        if beat is None or beat.state not in STEP_PHASES or beat.steps <= 0:
            return
        if beat.time_ns != self._since:
            usual = sum(beat.phase_seconds) / beat.steps
            self._since, self._told = beat.time_ns, ""
            self._due = max(STILL_SECONDS, STILL_STEPS * usual)
        silent = (time.time_ns() - beat.time_ns) / 1e9
        if silent < self._due:
            return
        self._due = 2 * silent
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001  (its documented name)
        if frame is None:
            return
        where, waits = place(frame, reducing=self._is_reducing())
        if where != self._told:
            self._told = where
            self._tell(
                StandsEvent(
                    step=beat.step, steps=beat.steps, micro=beat.micro, state=beat.state,
                    where=where, waits=waits, within=within(frame), time_ns=time.time_ns(),
                )
            )  # fmt: skip


def place(innermost: FrameType, *, reducing: bool = False) -> tuple[str, bool | None]:
    """Return where a thread is, and whether that is in communication; as of `Standing`.

    `reducing`: what the engine of a backward still waits for is the reduction.
    """
    module = f"{module_of(innermost)}."
    script = next((f for f in stack(innermost) if is_of_the_script(f)), innermost)
    where = line_in_words(script.f_code, script.f_lineno)
    if script is not innermost:
        where += f" ({line_in_words(innermost.f_code, innermost.f_lineno)})"
    talks = module.startswith(_TALKING) and not module.startswith(_FILES)
    if talks or (reducing and module == _ENGINE):
        return where, True
    return where, None if torch.cuda.is_initialized() else False


def within(innermost: FrameType) -> str:
    """Return which of torch's calls for a checkpoint a thread is in, the outermost; as `Standing`.

    A `torch.save` of its own may be a part of another one. Or that it waits for threads at exit.
    """
    calls = ((module_of(frame), frame.f_code.co_name) for frame in stack(innermost))
    found = [_CALLS[call] for call in calls if call in _CALLS]
    return found[-1] if found else ""
