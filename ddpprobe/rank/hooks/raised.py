"""What the code that ended a forward by an exception had at hand, which may be why it did.

`torch.distributions` refuses parameters that are NaN, and so does many a check of the user's own.
On a step that is not sampled no hook has seen the tensor; the frames of the traceback hold it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType

from torch import Tensor, nn

from ddpprobe.rank.hooks.outputs import leaves

MOST_TENSORS = 64


def tensors_at_hand(error: BaseException) -> Iterator[Tensor]:
    """Yield floating tensors of the frames that raised, innermost first, each once.

    From where it was raised out to the `forward` of the module around it, which is included: what
    is further out did not raise.
    """
    seen: set[int] = set()
    for frame in reversed(_frames(error)):
        for value in list(frame.f_locals.values()):
            for _, tensor in leaves(value):
                if tensor.is_floating_point() and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor
                if len(seen) >= MOST_TENSORS:
                    return
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(owner, nn.Module):
            return


def _frames(error: BaseException) -> list[FrameType]:
    found, at = [], error.__traceback__
    while at is not None:
        found.append(at.tb_frame)
        at = at.tb_next
    return found
