"""`ddpprobe::record`, the operator through which a graph of torch.compile speaks to its probe.

Its body is Python that runs when the graph does. Who it speaks for is told by a 0-d int64 tensor on
the CPU, an input of the graph: an int would make a graph for each module (measured: the recompile
limit at the ninth block), a mutated row would forbid a second forward before the backward.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from ddpprobe.rank.hooks.outputs import leaves
from ddpprobe.rank.torch_private import dynamo

# What a graph may say, besides the words of its owner: an output without and with a gradient to
# come, and that gradient.
OUTPUT, TRAINED, GRADIENT = "output", "trained", "gradient"

_numbers = itertools.count()
_channels: weakref.WeakValueDictionary[int, RecordChannel] = weakref.WeakValueDictionary()


@final
class RecordChannel:
    """Where the operator's calls arrive; without its owner it is gone and the calls do nothing.

    Args:
        listener: called with (what, leaf, tensor) in the order of execution; wrapped in the fuse by
            its owner. The tensor is the graph's own buffer: it may be reused when this returns.

    Attributes:
        slot: int64 [] on the CPU, what the graph carries.
    """

    def __init__(self, listener: Callable[[str, str, Tensor], object]) -> None:
        self.listener = listener
        number = next(_numbers)
        self.slot = torch.tensor(number, dtype=torch.int64, device="cpu")
        _channels[number] = self


# Its body is Python, which a replay of a CUDA graph would not run. Inductor (2.13) does not look
# for the tag of an operator that has an effect, so it is told in another way below, too.
_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)
_OPTIONS: dict[str, Any] = {} if _UNSAFE is None else {"tags": (_UNSAFE,)}


@torch.library.custom_op("ddpprobe::record", mutates_args=(), **_OPTIONS)
def _record(x: Tensor, slot: Tensor, what: str, leaf: str) -> None:
    channel = _channels.get(int(slot))
    if channel is not None:
        channel.listener(what, leaf, x)


@_record.register_fake
def _(*_: object) -> None:
    return None


dynamo.keep_in_graphs("ddpprobe::record")

# A tensor of another class might refuse the operator, in the midst of the user's compilation.
_kinds: tuple[type, ...] = (Tensor, torch.nn.Parameter)


def admit_dtensors() -> None:
    """Before a graph is traced: let it tell DTensors, too, if the process has any."""
    global _kinds  # noqa: PLW0603  (traced code reads it)
    kind = dynamo.unwrap_dtensors(torch.ops.ddpprobe.record.default)
    if kind is not None and kind not in _kinds:
        _kinds = (*_kinds, kind)


def keep_out_of_cuda_graphs() -> None:
    """Before a graph is traced: let `mode="reduce-overhead"` run the operator as it is."""
    dynamo.keep_out_of_cuda_graphs("ddpprobe::record")


def trace_event(slot: Tensor, what: str) -> None:
    """While a graph is traced: let it say `what` here."""
    torch.ops.ddpprobe.record(slot, slot, what, "")


def trace_outputs(output: object, slot: Tensor) -> None:
    """While a graph is traced: let it tell each tensor of `output`, and the gradient to it."""
    for leaf, tensor in leaves(output):
        if type(tensor) not in _kinds:
            continue
        if tensor.requires_grad and not tensor.is_leaf:
            torch.ops.ddpprobe.record(tensor, slot, TRAINED, leaf)
            _trace_gradient(tensor, slot, leaf)
        elif tensor.is_floating_point() or tensor.is_complex():
            torch.ops.ddpprobe.record(tensor, slot, OUTPUT, leaf)


def _trace_gradient(tensor: Tensor, slot: Tensor, leaf: str) -> None:
    # A function of its own: the hooks of one loop would share its variables.
    def tell(gradient: Tensor) -> Tensor:
        torch.ops.ddpprobe.record(gradient, slot, GRADIENT, leaf)
        return gradient  # compiled autograd takes None for the gradient itself

    tensor.register_hook(tell)
