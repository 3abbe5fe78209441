"""What it takes to be called at all, which passes before and after what a stopwatch can see.

A module that has a hook is called by a longer way through torch, autograd makes a Python object of
a gradient for a hook, and Python enters our wrappers. All of it is measured once, in a millisecond
or two, on throw-aways: a module without parameters, and a small graph on the CPU. Nothing of the
user's is called or changed: no random number, no mode, no `.grad`, no hook that is not ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from ddpprobe.rank import torch_private
from ddpprobe.rank.hooks.copy_safe_hook import CopySafeObserver
from ddpprobe.rank.torch_private import dynamo
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.stopwatch import Caller, Stopwatch

_ROUNDS, _CALLS = 5, 8

Seconds = float


def teach(watch: Stopwatch) -> bool:
    """Tell a stopwatch what calls of ours take besides; False: torch is not at rest here."""
    if can_be_measured():
        watch.way = measure()
        return True
    return False


def can_be_measured() -> bool:
    """Whether torch is at rest here: outside of a backward, a transform and what is compiled.

    A backward of the user's must have been: the first one in a process starts autograd's threads,
    and a process that forks after that has none of them. That is not for us to do.
    """
    return not (
        torch_private.in_backward() or torch_private.in_functorch()
        or dynamo.in_a_compiled_call() or dynamo.compiles_backwards()
    )  # fmt: skip


def measure() -> list[Seconds]:
    """Return the seconds that a call takes besides what passes inside, by `Caller`."""
    watch = Stopwatch()
    fuse = Fuse("measuring what hooks take", stopwatch=watch)
    entry = {caller: fuse.guard(_nothing, caller) for caller in Caller}
    python = _difference(watch, lambda: _loop(entry[Caller.PYTHON]), lambda: _loop(_nothing))
    with torch_private.outside_modes():
        return [
            python,
            _of_a_module(watch, entry[Caller.MODULE]),
            max(python, _of_a_tensor(watch, entry[Caller.TENSOR])),
        ]


def _of_a_module(watch: Stopwatch, entry: Callable[..., object]) -> Seconds:
    """Return what a hook makes a call of its module longer by.

    The user's hooks on all modules would be called for ours; but then every module goes the longer
    way without us, and what is left is the call of the hook.
    """
    guest = CopySafeObserver(entry, 4)
    if torch_private.has_global_hooks():
        return _difference(watch, lambda: _loop(guest, None, (), {}, None), lambda: _loop(_nothing))
    bare, hooked = nn.Identity(), nn.Identity()
    hooked.register_forward_hook(guest, with_kwargs=True)
    return _difference(watch, lambda: _loop(hooked, None), lambda: _loop(bare, None))


def _of_a_tensor(watch: Stopwatch, entry: Callable[..., object]) -> Seconds:
    """Return what a hook of a tensor makes a backward longer by."""

    class Hook:
        def __call__(self, gradient: Tensor) -> None:
            entry(gradient)

    def backward(hook: Hook | None) -> Callable[[], None]:
        with torch.inference_mode(mode=False), torch.enable_grad():
            first = last = torch.zeros(1, device="cpu", requires_grad=True)
            for _ in range(_CALLS):
                last = last + 0.0
                if hook is not None:
                    last.register_hook(hook)

        def run() -> None:
            torch.autograd.grad(last, first, retain_graph=True)

        return run

    return _difference(watch, backward(Hook()), backward(None))


def _loop(call: Callable[..., object], *args: object) -> None:
    for _ in range(_CALLS):
        call(*args)


def _difference(
    watch: Stopwatch, with_us: Callable[[], None], without: Callable[[], None]
) -> Seconds:
    """Return by how much `_CALLS` calls are longer with us than without, beyond the stopwatch's."""
    found = []
    for round_ in range(_ROUNDS + 1):
        start = time.perf_counter()
        without()
        middle, seen = time.perf_counter(), watch.seconds
        with_us()
        end = time.perf_counter()
        if round_:  # the first one warms up
            found.append((end - middle - (watch.seconds - seen)) - (middle - start))
    return max(median(found), 0.0) / _CALLS


def _nothing(*_: object) -> None:
    """Be called."""
