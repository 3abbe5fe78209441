"""The every-step watch: on which step, and on which rank, did the first local value go bad?

After the all-reduce every rank is NaN, so this can only be seen on the step it happens, sampled or
not. Two witnesses are enough to name step, rank and phase: what the root module returns (forward)
and each parameter's gradient before it is reduced (backward; a NaN born anywhere in the backward
either reaches a parameter or harms nobody). The parameter hooks sit on the parameters, not on the
modules: the model stays clean.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ddpprobe import torch_private
from ddpprobe.fuse import Fuse
from ddpprobe.hooks import gradients
from ddpprobe.hooks.eager import Clock
from ddpprobe.records import FirstBad
from ddpprobe.stats import rows as stats
from ddpprobe.stats.dense import local
from ddpprobe.topology.describe import Topology
from ddpprobe.topology.flat import FlatUnit

_FORWARD, _BACKWARD = 0, 1
_PHASES = ("forward", "backward")


@final
class Watch:
    """Keeps the first non-finite local value of each step.

    On the CPU a bad value is reported to `on_bad` at once. On a GPU the two witnesses are kept as
    the largest magnitudes of the step, copied out asynchronously when it ends, and reported once
    the copy has arrived (usually one step later): no step waits for it.
    """

    def __init__(
        self,
        topology: Topology,
        clock: Clock,
        rank: int,
        fuse: Fuse,
        on_bad: Callable[[FirstBad], None],
    ) -> None:
        self._topology = topology
        self._clock = clock
        self._rank = rank
        self._fuse = fuse
        self._on_bad = on_bad
        self._check_gradient = fuse.guard(self._gradient)
        self._check_flat = fuse.guard(self._flat_gradient)
        self._handles: list[RemovableHandle] = []
        self._seekers: list[RemovableHandle] = []
        self._watched: set[int] = set()
        self._looks = 0  # in this step
        self._device = topology.device.type
        self._peaks = torch.zeros(2, dtype=torch.float32, device=topology.device)
        self._pending: deque[tuple[int, Tensor, torch.cuda.Event]] = deque(maxlen=8)

    @property
    def parameters(self) -> int:
        """How many parameters are watched."""
        return len(self._watched)

    def seek(self) -> None:
        """At a training forward: watch the parameters, as the forward sees them, if not yet so."""
        if self._watched or self._seekers:
            return
        self._seekers = gradients.seek(self._topology, self._fuse, self._watch, self._watch_flat)

    def found(self) -> None:
        """At the end of that forward: the model is clean again."""
        for handle in self._seekers:
            handle.remove()
        self._seekers.clear()

    def output(self, trained: list[Tensor]) -> None:
        """Look at what the root returned: its 0-d tensors (losses) if any, else all of it."""
        tensors = [t for t in trained if t.is_floating_point()]
        losses = [t for t in tensors if t.dim() == 0]
        for tensor in losses or tensors:
            self._look(tensor, _FORWARD, None)

    def end_step(self, step: int) -> None:
        """Send this step's peaks to the host (GPU), and start the next step's."""
        self._looks = 0
        if self._device != "cuda":
            return
        host = torch.empty(2, dtype=torch.float32, device="cpu", pin_memory=True)
        host.copy_(self._peaks, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._peaks.zero_()
        self._pending.append((step, host, event))

    def poll(self, *, wait: bool = False) -> None:
        """Report what has arrived from the device; waits only at the end of a run."""
        while self._pending:
            step, host, event = self._pending[0]
            if wait:
                event.synchronize()
            elif not event.query():
                return
            self._pending.popleft()
            for phase, peak in enumerate(host.tolist()):
                if not math.isfinite(peak):
                    self._report(phase, None, step, micro=0, counts=(0, 0, 0, 0))
                    break

    def close(self) -> None:
        """Take every hook off."""
        self.found()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watched.clear()

    def _watch(self, fqn: str, parameter: Tensor) -> None:
        if parameter.requires_grad and parameter.is_leaf and id(parameter) not in self._watched:
            self._watched.add(id(parameter))
            hook = _Watched(self._check_gradient, fqn)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _watch_flat(self, unit: FlatUnit) -> None:
        flat = unit.flat
        if flat.requires_grad and id(flat) not in self._watched:
            self._watched.add(id(flat))
            # Not the post-accumulate hook, which FSDP1 does not reach with use_orig_params=True.
            self._handles.append(flat.register_hook(_Watched(self._check_flat, unit)))

    def _flat_gradient(self, unit: FlatUnit, gradient: Tensor) -> None:
        """Look at the gradient of a whole unit; on the CPU, name the parameter if it is bad."""
        if gradient.device.type != "cpu":
            self._look(gradient, _BACKWARD, None)
        elif not math.isfinite(gradient.detach().sum(dtype=_sum_dtype(gradient)).item()):
            # It comes for the whole unit at once, and a NaN goes on to what lies before its origin:
            # the last parameter in forward order is the nearest to it.
            for fqn, part in reversed(tuple(unit.split(gradient))):
                self._look(part, _BACKWARD, fqn)

    def _gradient(self, fqn: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._look(parameter.grad, _BACKWARD, fqn)

    def _look(self, tensor: Tensor, phase: int, fqn: str | None) -> None:
        self._looks += 1
        if torch_private.is_functorch(tensor):
            return  # inside vmap or grad there is no number to read
        with torch.no_grad():
            tensor = local(tensor)
            if tensor.layout == torch.sparse_coo:
                tensor = tensor._values()  # noqa: SLF001  (values() needs a coalesced tensor)
            if tensor.numel() == 0:
                return
            if tensor.device.type != "cpu":
                peak = torch.linalg.vector_norm(tensor, torch.inf, dtype=torch.float32)
                torch.maximum(self._peaks[phase], peak, out=self._peaks[phase])  # NaN wins
                return
            # One pass: a sum is finite unless an element is not, or finite ones overflow it.
            if math.isfinite(tensor.sum(dtype=_sum_dtype(tensor)).item()):
                return
            row = torch.empty(stats.WIDTH, dtype=torch.float64, device="cpu")
            stats.reduce(tensor, row)
            numel, nan, pos_inf, neg_inf = (int(v) for v in row[:4].tolist())
            if nan or pos_inf or neg_inf:
                counts = (nan, pos_inf, neg_inf, numel)
                self._report(phase, fqn, None, self._clock.micro, counts)

    def _report(
        self,
        phase: int,
        parameter: str | None,
        step: int | None,
        micro: int,
        counts: tuple[int, int, int, int],
    ) -> None:
        nan, pos_inf, neg_inf, numel = counts
        self._on_bad(
            FirstBad(
                step=-1 if step is None else step,
                micro=max(micro, 0),
                phase=_PHASES[phase],
                # Pipeline stages run one after the other, so they are ordered by the clock; ranks
                # of a tensor-parallel group do the same things in the same order.
                order=time.time_ns() if self._topology.cut else self._looks,
                rank=self._rank,
                fqn=parameter,
                kind="grad_local" if parameter is not None else None,
                nan=nan,
                pos_inf=pos_inf,
                neg_inf=neg_inf,
                numel=numel,
            )
        )


@final
class _Watched:
    """The hook of a parameter or of a flat one: passes the tensor on, and answers None."""

    __slots__ = ("_check", "_what")

    def __init__(self, check: Callable[..., object], what: object) -> None:
        self._check, self._what = check, what

    def __call__(self, tensor: Tensor) -> None:
        self._check(self._what, tensor)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
