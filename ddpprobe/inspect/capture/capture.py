"""`ddpprobe.capture`: look at a model's activations and gradients, whole, while it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ddpprobe.errors import CaptureError
from ddpprobe.inspect.capture.held_tensor import Apply, Holder
from ddpprobe.inspect.capture.inference import Inference
from ddpprobe.inspect.capture.opening import Opening
from ddpprobe.inspect.capture.result import Capture
from ddpprobe.inspect.capture.series import TensorMeter
from ddpprobe.inspect.capture.session import CaptureSession
from ddpprobe.inspect.capture.sites import CapturedSites
from ddpprobe.inspect.capture.targets import Selector, choose
from ddpprobe.inspect.capture.watcher import ModuleWatcher
from ddpprobe.rank.hooks.stream_capture import outside_capture, warn
from ddpprobe.rank.stats import native
from ddpprobe.rundir.fuse import Fuse

TIMEOUT_SECONDS = 60.0
HISTORY = 256  # rows of statistics per tensor with keep="stats": 150 KiB with 64 bins


def capture(
    model: nn.Module,
    *modules: Selector,
    exclude: Selector | Sequence[Selector] = (),
    paramless: bool = True,
    input: bool = False,  # noqa: A002  (the kind's name)
    grad: bool = False,
    keep: str | int = "last",
    every: int = 1,
    copy: bool = True,
    detach: bool = True,
    to: str | torch.device | None = None,
    apply: Apply | None = None,
    bins: int = 64,
    range: tuple[float, float] | None = None,  # noqa: A002  (as numpy and matplotlib call it)
    near_zero: float = 0.05,
    compiled: str = "refuse",
    timeout: float = TIMEOUT_SECONDS,
) -> Capture:
    """Capture outputs of modules, and gradients with respect to them, while it is open.

    ::

        with ddpprobe.capture(model, "layers.*.attn", grad=True) as seen:
            loss_of(model(x)).backward()
        y = seen["layers.0.attn"].output.full()    # on all ranks: the whole tensor
        g = seen["layers.0.attn"].grad.local()     # this rank's part, asks nobody

    On several ranks open it on all of them. Training is bit-identical with and without it: hooks
    are there only while it is open, return nothing, and use no group of the training.

    Args:
        model: plain, DDP, FSDP, tensor-parallel; a pipeline stage on each rank.
        modules: globs over FQNs without wrapper prefixes (`*` crosses dots), module objects, or
            classes such as nn.Linear; none: every module.
        exclude: one of these or several, to leave out.
        paramless: whether modules without parameters of their own are captured.
        input: whether to take what the modules are called with.
        grad: whether to take the gradients with respect to the outputs (tensor hooks on them).
        keep: which calls stay in memory: "last", "all", the last N, or "stats": no tensors, only
            statistics and histograms of every call, in bounded memory.
        every: take each N-th forward of the model; on the others its modules carry no hook.
        copy: whether to copy each tensor. Without, one that is later changed in place raises when
            it is read.
        detach: whether to leave the autograd graph behind.
        to: device to keep tensors on, "cpu" to spare a GPU's memory; None: where they are.
        apply: a function of each rank's local tensor whose result is kept instead.
        bins: bins of the histograms: a power of two from 4 up, any number with `range`; 0: none.
        range: fixed lower and upper end of the histograms; None: the symmetric power of two that
            fits all values seen.
        near_zero: largest magnitude that counts as near zero.
        compiled: "refuse" modules inside torch.compile, where hooks are lost, or run them "eager"
            while the capture is open.
        timeout: seconds to wait for the other ranks.

    Returns:
        A context manager that is also the mapping FQN -> captured module; or use `.open()` and
        `.close()`.

    Raises:
        CaptureError: `model` is no module; the rest on opening, on every rank: see `Capture.open`.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"capture() takes a torch.nn.Module first, got {type(model).__name__}. "
            'Write ddpprobe.capture(model, "layers.*").'
        )
    if any(parameter.is_cpu for parameter in model.parameters()):
        native.prepare()
    statistics = keep == "stats"
    calls = None if keep == "all" else keep if isinstance(keep, int) and keep > 0 else 1
    meter = TensorMeter(bins, range, near_zero)
    left_out = _several(exclude)
    targets = choose(model, modules, left_out, paramless=paramless)
    holder = Holder(copy=copy, detach=detach, to=_device(to), apply=apply)
    sites = CapturedSites(targets.modules, None if statistics else holder, meter, calls, HISTORY)
    fuse = Fuse("capture")
    inference = Inference(model, fuse)
    outside = outside_capture(fuse, partial(warn, "a part of the model is"))
    watcher = ModuleWatcher(
        targets, sites, outside, inference, inputs=input, grad=grad, every=every
    )
    kinds = ("output", *(["input"] if input else []), *(["grad"] if grad else []))
    session = CaptureSession(
        sites, meter, kinds, statistics, lambda: fuse.last_error, watcher.groups, inference
    )
    options = {
        "input": input, "grad": grad, "keep": keep, "every": every, "bins": bins,
        "range": list(range) if isinstance(range, tuple) else range, "near_zero": near_zero,
        "apply": apply is not None, "timeout": timeout,
    }  # fmt: skip
    wrong = partial(
        _refuse_wrong, keep, every, bins, range, compiled, timeout, apply,
        partial(_refuse_what, (*modules, *left_out), to, near_zero),
        {"paramless": paramless, "input": input, "grad": grad, "copy": copy, "detach": detach},
    )  # fmt: skip
    opening = Opening(targets, watcher, options, wrong, eager=compiled == "eager", timeout=timeout)
    return Capture(session, opening)


def _refuse_wrong(
    keep: object, every: object, bins: object, limits: object, compiled: object, timeout: object,
    apply: object, first: Callable[[], None], switches: Mapping[str, object],
) -> None:  # fmt: skip
    """Complain about arguments; called where an error on one rank becomes one on all."""
    first()
    for name, given in switches.items():
        if not isinstance(given, bool):
            raise ValueError(  # noqa: TRY004  (told to all ranks alike)
                f"{name} must be True or False, got {given!r:.80}"
            )
    if keep not in ("last", "all", "stats") and not _whole(keep, 1):
        raise ValueError(f'keep must be "last", "all", "stats" or a number of calls, got {keep!r}')
    if not _whole(every, 1):
        raise ValueError(f"every must be an integer of at least 1, got {every!r}")
    if limits is not None and not _ascending(limits):
        raise ValueError(f"range must be (low, high) with low < high, both finite, got {limits!r}")
    power = isinstance(bins, int) and bins >= 4 and bins & (bins - 1) == 0
    if not _whole(bins, 0) or not (bins == 0 or limits is not None or power):
        raise ValueError(
            f"bins must be 0 or a power of two from 4 up, got {bins!r}; "
            "with range=(low, high) any number will do"
        )
    if compiled not in ("refuse", "eager"):
        raise ValueError(f'compiled must be "refuse" or "eager", got {compiled!r}')
    if not isinstance(timeout, int | float) or not timeout > 0:
        raise ValueError(f"timeout must be a number of seconds above 0, got {timeout!r}")
    if apply is not None and (keep == "stats" or not callable(apply)):
        raise ValueError(
            f'apply must be a function of a tensor, without keep="stats", got {apply!r}'
        )


def _refuse_what(selectors: Sequence[object], to: object, near_zero: object) -> None:
    """Complain about what is to be captured, where it is kept, and what counts as near zero."""
    for selector in selectors:
        if not isinstance(selector, str | type | nn.Module):
            raise ValueError(  # noqa: TRY004  (told to all ranks alike)
                "modules and exclude= are globs such as 'layers.*.attn', modules of the model, or "
                f"classes such as nn.Linear, one or several, got {selector!r:.80}"
            )
    if to is not None and _device(to) is None:
        raise ValueError(f"to must be a device such as 'cpu' or 'cuda:0', or None, got {to!r:.80}")
    if not isinstance(near_zero, int | float) or not 0 <= near_zero < math.inf:
        raise ValueError(f"near_zero must be a number of at least 0, got {near_zero!r:.80}")


def _several(selectors: object) -> tuple[Any, ...]:
    """Return one selector or several as a tuple; what is neither, too, to be refused."""
    if isinstance(selectors, Iterable) and not isinstance(selectors, str | type | nn.Module):
        return tuple(selectors)
    return (selectors,)


def _device(to: object) -> torch.device | None:
    """Return a device, None of what names none."""
    try:
        return torch.device(to) if to is not None else None  # type: ignore[call-overload]  # that is the question
    except (RuntimeError, TypeError):
        return None


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _ascending(limits: object) -> bool:
    if not isinstance(limits, tuple | list) or len(limits) != 2:
        return False
    low, high = limits
    numbers = all(isinstance(v, int | float) and math.isfinite(v) for v in limits)
    return numbers and bool(low < high)
