"""Whose failure an exception of `torch.distributed.checkpoint` was.

Each part of a save or a load is done by every rank. If it fails on one of them, all raise the same
CheckpointException, which holds what each rank raised by its number in the group. The number of the
rank that raises is known to the frame of torch's that raised it. Nothing of torch is imported here:
most jobs never import that package, and it takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType

_PACKAGE = "torch.distributed.checkpoint"
EXCEPTION = "CheckpointException"


@dataclass(frozen=True, slots=True)
class SharedFailure:
    """What the ranks of a save or a load raised.

    Attributes:
        own: by this rank; None: it was told of another rank's failure.
        first: by this rank, or else by another one.
    """

    own: BaseException | None
    first: BaseException


def shared_failure(error: BaseException) -> SharedFailure | None:
    """Return what is behind an exception of a save or a load; None: it is no such exception.

    Degradation: None; each rank that raises it then counts as one that failed by itself.
    """
    kinds = ((kind.__module__, kind.__name__) for kind in type(error).__mro__)
    failures = getattr(error, "failures", None)
    if (f"{_PACKAGE}.api", EXCEPTION) not in kinds or not isinstance(failures, Mapping):
        return None
    raised = {
        number: wrapped[0]
        for number, wrapped in failures.items()
        if isinstance(wrapped, tuple) and wrapped and isinstance(wrapped[0], BaseException)
    }
    number = next(_numbers(error), None)
    if number is None or not raised:
        return None
    own = raised.get(number)
    return SharedFailure(own, own or next(iter(raised.values())))


def _numbers(error: BaseException) -> Iterator[int]:
    """Yield the number of this rank in the group, as the frames that raised an error know it."""
    trace = error.__traceback__
    while trace is not None:
        number = _number_in(trace.tb_frame)
        if isinstance(number, int):
            yield number
        trace = trace.tb_next


def _number_in(frame: FrameType) -> object:
    """Return the number that the wrapper of a group has, if this is the frame of its method."""
    if frame.f_globals.get("__name__") != f"{_PACKAGE}.utils":
        return None
    return getattr(frame.f_locals.get("self"), "rank", None)
