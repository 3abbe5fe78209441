"""The every-step watch: on which step, and on which rank, did the first local value go bad?

After the all-reduce every rank is NaN, so this can only be seen on the step it happens, sampled or
not. Two witnesses are enough to name step, rank and phase: what the root module returns (forward)
and each parameter's gradient before it is reduced (backward; a NaN born anywhere in the backward
either reaches a parameter or harms nobody).

A gradient is looked at by a hook of its parameter, which costs 3 us. Where all of them are still
local when the backward is over (one process; DDP with buckets of their own) one `Sweep` looks at
them then, for a tenth of that, and the hooks go. Nothing of this hangs on a module.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container
from typing import final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ddpprobe.rank import torch_private
from ddpprobe.rank.hooks import gradients, lanes
from ddpprobe.rank.hooks.carried import Carried
from ddpprobe.rank.hooks.copy_safe_hook import take_off
from ddpprobe.rank.hooks.eager import StepPosition
from ddpprobe.rank.hooks.execution_order import ExecutionOrder
from ddpprobe.rank.hooks.nearness import Nearness
from ddpprobe.rank.hooks.peaks import Peaks
from ddpprobe.rank.hooks.raised import tensors_at_hand
from ddpprobe.rank.hooks.steady import SteadyOutput
from ddpprobe.rank.hooks.sweep import Sweep, is_plain, sweeps_of, total
from ddpprobe.rank.stats.dense import Unsupported, dense, local
from ddpprobe.rank.stats.rows import Nonfinite, nonfinite_of
from ddpprobe.rank.topology.describe import Topology
from ddpprobe.rank.topology.flat import FlatUnit
from ddpprobe.rank.torch_private import dynamo, leaf_hooks
from ddpprobe.records.step import FirstBad
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.stopwatch import Caller

_FORWARD, _BACKWARD, _CARRIED = 0, 1, 2
_PHASES = ("forward", "backward")
_NOT_COUNTED: Nonfinite = (0, 0, 0, 0)


@final
class Watch:
    """Keeps the first non-finite local value of each step.

    On the CPU a bad value is reported to `on_bad` at once. On a GPU the two witnesses are kept as
    the largest magnitudes of the step, copied out asynchronously when it ends, and reported once
    the copy has arrived (usually one step later): no step waits for it.

    Args:
        topology: the model.
        clock: tells the micro-batch.
        rank: this rank.
        fuse: contains whatever goes wrong in here.
        on_bad: hears of a bad value of the step under way.
        on_late: hears of one of an earlier step, from a device, and whether a GradScaler skipped
            that step.
        was_read: whether the gradient that has just arrived at the parameter of this FQN was read
            by the hooks of a sampled step: where the host can see it, and found it finite.
        flat_was_read: the same of a flat one on a device, whose rows tell what is bad.
        order: of a bad value among the ranks.
    """

    def __init__(
        self,
        topology: Topology,
        clock: StepPosition,
        rank: int,
        fuse: Fuse,
        on_bad: Callable[[FirstBad], None],
        on_late: Callable[[FirstBad, bool], None] = lambda *_: None,
        was_read: Callable[[str], bool] = lambda _: False,
        flat_was_read: Callable[[FlatUnit], bool] = lambda _: False,
        order: ExecutionOrder | None = None,
    ) -> None:
        self._topology = topology
        self._clock = clock
        self._rank = rank
        self._fuse = fuse
        self._on_bad, self._on_late = on_bad, on_late
        self._order = order or ExecutionOrder()
        self._was_read, self._flat_was_read = was_read, flat_was_read
        self._check_gradient = fuse.guard(self._gradient, Caller.TENSOR)
        self._check_arriving = fuse.guard(self._arriving, Caller.TENSOR)
        self._check_flat = fuse.guard(self._flat_gradient, Caller.TENSOR)
        self._seekers: list[RemovableHandle] = []
        self._handles: dict[int, RemovableHandle] = {}  # by the id of what is hooked
        self._early: dict[int, RemovableHandle] = {}  # of those whose `.grad` is not for us to see
        self._swept: list[tuple[str, Tensor]] = []  # parameters without a hook of their own
        self._sweeps: list[Sweep] = []  # one for each device
        self._frozen: list[tuple[str, Tensor]] = []  # they left the sweep, and take no hook now
        # Of the first backward, by parameter: FQN, parameter, its gradient's id and version.
        self._first: dict[int, tuple[str, Tensor, int, int]] | None = {}
        self._came = False  # the end of a backward, in this step
        self._looks = 0  # in this step
        self._names: dict[int, str] = {}  # FQNs of what is watched, by id
        self._told = False  # this step is bad, and so reported
        self._backward_is_bad = False
        self._carried = Carried(topology)
        self._spoilt = False  # `.grad` was bad before the backward that adds to it
        self._output = SteadyOutput()  # what the root returns, if that is no loss
        self._far_output = SteadyOutput()
        self._returns_losses = True
        self._peaks = Peaks(self._judge_peaks)
        self._now = 0  # the micro-batch whose peaks are kept

    @property
    def lost(self) -> int:
        """Steps of which nobody knows, as the device was too far behind to tell of them."""
        return self._peaks.lost

    def seek(self) -> None:
        """At a training forward: watch the parameters, as the forward sees them, if not yet so."""
        self._order.look()
        if self._clock.micro > 0 and not self._spoilt:
            self._look_at_carried()
        if self._frozen:
            frozen, self._frozen = self._frozen, []
            self._hook(frozen)
        if not (self._handles or self._early or self._sweeps or self._seekers):
            seek = gradients.seek
            self._seekers = seek(self._topology, self._fuse, self._watch, self._watch_flat)

    def _look_at_carried(self) -> None:
        self._spoilt, peaks = self._carried.look()
        self._backward_is_bad |= self._spoilt
        for peak in peaks:
            self._keep(_CARRIED, peak)

    def _keep(self, phase: int, peak: Tensor) -> None:
        """Keep a magnitude among those of its micro-batch."""
        micro = self._micro_of(phase)
        if micro != self._now:
            self._peaks.end_micro(self._now)
            self._now = micro
        self._peaks.keep(phase, peak)

    def _micro_of(self, phase: int) -> int:
        micro = self._clock.micro
        return max(self._clock.backward.micro_or(micro) if phase == _BACKWARD else micro, 0)

    def found(self) -> None:
        """At the end of that forward: the model is clean again."""
        take_off(self._seekers)

    def backward_ends(self, clean: Container[int] = (), told: Container[int] = ()) -> None:
        """Before anything is reduced: look at the parameters that have no hook of their own.

        Args:
            clean: ids of parameters whose gradients a sampled step has read, all of them finite.
            told: ids of those that it has read; of what is not near its rows will tell.
        """
        self._came = True
        self._carried.backward_ends()
        self._look_at_swept(clean, told)

    def _look_at_swept(self, clean: Container[int], told: Container[int]) -> None:
        if self._spoilt:
            return
        if not self._sweeps:
            self._settle()  # in this backward all had hooks
            return
        for sweep in self._sweeps:
            near = lanes.is_near(sweep.device)
            read = clean if near else told
            if all(id(p) in read for p in sweep.parameters):
                continue
            if not (sweep.is_clean() if near else self._keep_peak(sweep)):
                self._look_closer(sweep)

    def _keep_peak(self, sweep: Sweep) -> bool:
        with torch.no_grad():
            peak = sweep.peak()
        if peak is not None:
            self._keep(_BACKWARD, peak)
        return peak is not None

    def output(self, trained: list[Tensor]) -> None:
        """Look at what the root returned: its 0-d tensors (losses) if any, else all of it."""
        tensors = [t for t in trained if t.is_floating_point()]
        losses = [t for t in tensors if t.dim() == 0]
        self._returns_losses = bool(losses)
        for tensor in losses:
            self._look(tensor, _FORWARD, None)
        for tensor in () if losses else tensors:
            self._look_at_output(tensor)

    def _look_at_output(self, tensor: Tensor) -> None:
        """Look at what is no loss: an infinity in it may belong to the model (masked logits)."""
        if not lanes.is_near(tensor.device):
            self._look(tensor, _FORWARD, None)
            return
        self._looks += 1
        if not is_plain(tensor) and torch_private.is_functorch(tensor):
            return
        counts = self._counts(tensor.detach())
        if counts is None:
            self._output.clean()
        elif self._output.is_fault(counts):
            self._report(_FORWARD, None, counts)

    def look_at_hand(self, error: BaseException) -> None:
        """The forward raised: look for a NaN in what the code that did had at hand.

        On a step that is not sampled nobody looked before. An infinity may be a mask.
        """
        for tensor in tensors_at_hand(error):
            if torch_private.is_functorch(tensor) or tensor.is_meta:
                continue
            if not lanes.is_near(tensor.device):
                self._weigh_nan(tensor)
            elif (counts := self._counts(tensor.detach())) is not None and counts[0]:
                self._report(_FORWARD, None, counts)
                return

    @torch.no_grad()
    def _weigh_nan(self, tensor: Tensor) -> None:
        tensor = local(tensor)
        if tensor.layout == torch.strided:
            bad = tensor.isnan().any()
            self._keep(_FORWARD, torch.zeros_like(bad, dtype=torch.float64).masked_fill_(
                bad, math.nan))  # fmt: skip

    def end_step(self, step: int, *, skipped: bool = False) -> None:
        """Send this step's peaks to the host (GPU), and start the next step's."""
        self._output.end_step(harmless=self._came and not self._backward_is_bad)
        self._looks, self._told = 0, False
        self._backward_is_bad = self._spoilt = False
        self._carried.end_step()
        if self._sweeps and not self._came:  # losses are made of something else now
            self._hook(self._swept)
            self._swept, self._sweeps = [], []
        self._came = False
        self._peaks.end_step(step, self._now, skipped=skipped)
        self._now = 0

    def poll(self, *, wait: bool = False) -> None:
        """Report what has arrived from the device; waits only at the end of a run."""
        self._peaks.poll(wait=wait)

    def close(self) -> None:
        """Take every hook off."""
        self.found()
        for handle in (*self._handles.values(), *self._early.values()):
            handle.remove()
        self._handles.clear()
        self._early.clear()
        self._swept, self._sweeps, self._frozen, self._first = [], [], [], None

    def _watch(self, fqn: str, parameter: Tensor) -> None:
        if parameter.requires_grad and parameter.is_leaf and id(parameter) not in self._handles:
            hook = _Watched(self._check_gradient, fqn)
            handle = parameter.register_post_accumulate_grad_hook(hook)
            self._handles[id(parameter)] = handle
            self._names[id(parameter)] = fqn

    def _hook(self, parameters: list[tuple[str, Tensor]]) -> None:
        """Look at gradients when they arrive: before anybody else can take them out of `.grad`."""
        for fqn, parameter in parameters:
            if not parameter.requires_grad:
                self._frozen.append((fqn, parameter))
            elif id(parameter) not in self._early:
                hook = _Arriving(self._check_arriving, fqn)
                self._early[id(parameter)] = parameter.register_hook(hook)

    def _settle(self) -> None:
        """At the end of the first backward: which gradients are as their hooks saw them?"""
        first, self._first = self._first, None
        if not first or not gradients.stay_local(self._topology):
            return
        self._swept = [
            (fqn, parameter)
            for fqn, parameter, known, version in first.values()
            if (g := parameter.grad) is not None
            and (id(g), g._version) == (known, version)  # noqa: SLF001  (public by documentation)
            and is_plain(g)
            and g.device == parameter.device
            and not g.is_meta
        ]
        for _, parameter in self._swept:
            self._handles.pop(id(parameter)).remove()
            leaf_hooks.forget_empty(parameter)
        self._renew()

    def _renew(self) -> None:
        self._sweeps = sweeps_of(parameter for _, parameter in self._swept)

    def _look_closer(self, sweep: Sweep) -> None:
        """Look at each gradient of a sweep; a parameter that has none, or no more, gets a hook."""
        mine = {id(parameter) for parameter in sweep.parameters}
        bad: list[tuple[str, Tensor]] = []
        for fqn, parameter in self._swept:
            gradient = parameter.grad
            if id(parameter) not in mine:
                continue
            if gradient is None:
                self._hook([(fqn, parameter)])
            elif not lanes.is_near(sweep.device):
                self._look(gradient, _BACKWARD, fqn)
            elif self._counts(gradient) is not None:
                bad.append((fqn, parameter))
        if bad:
            self._looks += 1
            self._report_nearest(bad)
        kept = [(fqn, p) for fqn, p in self._swept if p.grad is not None or id(p) not in mine]
        if len(kept) < len(self._swept):
            self._swept = kept
            self._renew()

    def _report_nearest(self, bad: list[tuple[str, Tensor]]) -> None:
        """Report a backward by the nearest of its bad gradients, in order of arrival, if known."""
        if self._told:
            return
        named = Nearness(self._clock.backward.entered, self._names).nearest(bad)
        gradient = next((p.grad for fqn, p in bad if fqn == named), None)
        counts = None if gradient is None else self._counts(gradient)
        self._report(_BACKWARD, named, counts or _NOT_COUNTED)

    def _watch_flat(self, unit: FlatUnit) -> None:
        flat = unit.flat
        if flat.requires_grad and id(flat) not in self._handles:
            # Not the post-accumulate hook, which FSDP1 does not reach with use_orig_params=True.
            self._handles[id(flat)] = flat.register_hook(_Arriving(self._check_flat, unit))

    def _flat_gradient(self, unit: FlatUnit, gradient: Tensor) -> None:
        """Look at the gradient of a whole unit; on the CPU, name the parameter if it is bad."""
        if not lanes.is_near(gradient.device):
            if not self._flat_was_read(unit):
                self._look(gradient, _BACKWARD, None)
        elif not math.isfinite(total(gradient.detach())):
            # It comes for the whole unit at once: which of several modules is the nearest to the
            # origin is not known.
            bad = [(f, part) for f, part in unit.split(gradient) if self._counts(part) is not None]
            if len({fqn.rpartition(".")[0] for fqn, _ in bad}) == 1:
                self._look(bad[0][1], _BACKWARD, bad[0][0])
            elif bad:
                self._looks += 1
                self._report(_BACKWARD, None, _NOT_COUNTED)

    def _gradient(self, fqn: str, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            self._hook([(fqn, parameter)])
            return
        if self._spoilt:
            return
        if self._first is not None:
            known = fqn, parameter, id(gradient), gradient._version  # noqa: SLF001
            self._first[id(parameter)] = known
        elif self._was_read(fqn):
            return
        self._look(gradient, _BACKWARD, fqn, parameter)

    def _arriving(self, fqn: str, gradient: Tensor) -> None:
        self._look(gradient, _BACKWARD, fqn)

    def _look(
        self, tensor: Tensor, phase: int, fqn: str | None, parameter: Tensor | None = None
    ) -> None:
        self._looks += 1
        near = lanes.is_near(tensor.device)
        if near and is_plain(tensor):
            if math.isfinite(total(tensor.detach() if tensor.requires_grad else tensor)):
                return
        elif torch_private.is_functorch(tensor):
            return  # inside vmap or grad there is no number to read
        if not near:
            with torch.no_grad():
                self._weigh(tensor, phase)
        elif (counts := self._counts(tensor)) is not None:
            if parameter is not None and not self._told:
                nearness = Nearness(self._clock.backward.entered, self._names)
                fqn = fqn if nearness.is_nearest(parameter) else None
            self._report(phase, fqn, counts)

    def _weigh(self, tensor: Tensor, phase: int) -> None:
        """Keep the largest magnitude of a tensor of any kind, on a device."""
        tensor = local(tensor)
        if tensor.layout == torch.sparse_coo:
            tensor = tensor._values()  # noqa: SLF001  (values() needs a coalesced tensor)
        try:
            flat, _ = dense(tensor)
        except Unsupported:
            return  # sampled steps count these
        if flat.numel():
            self._keep(phase, torch.linalg.vector_norm(flat, torch.inf))

    @torch.no_grad()
    def _counts(self, tensor: Tensor) -> Nonfinite | None:
        """Count NaN, +Inf, -Inf and elements of a tensor of any kind, on the host; None: finite.

        None too where it cannot be read at once.
        """
        tensor = local(tensor)
        if tensor.layout == torch.sparse_coo:
            tensor = tensor._values()  # noqa: SLF001  (values() needs a coalesced tensor)
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        if tensor.numel() == 0:
            return None
        try:
            if math.isfinite(total(tensor)):
                return None
            counts = nonfinite_of(tensor)
        except (Unsupported, NotImplementedError):
            return None  # sampled steps count these
        return counts if any(counts[:3]) else None

    def _judge_peaks(
        self,
        step: int,
        parts: list[tuple[int, list[float]]],
        skipped: bool,  # noqa: FBT001
    ) -> None:
        """Judge the largest magnitudes of a step, by micro-batch; an infinity has no sign."""
        told = came = spoilt = tainted = False
        for micro, (forward, backward, carried) in parts:
            if forward != 0 or carried != 0:  # else of a backward alone
                tainted = not math.isfinite(carried)
            bad, fault = not math.isfinite(backward), False
            if not math.isfinite(forward):
                counts = (int(math.isnan(forward)), 1, 1, 0)
                fault = self._returns_losses or self._far_output.is_fault(counts)
                fault |= bad and self._far_output.held is not None
            elif forward > 0:
                self._far_output.clean()
            if not told and (fault or (bad and not tainted)):
                told, phase = True, _FORWARD if fault else _BACKWARD
                # Of a phase there is one peak: it has no place, and the same on all ranks.
                at = {"step": step, "micro": micro, "place": 0}
                self._on_late(self._witness(phase, None, _NOT_COUNTED, **at), skipped)
            came, spoilt = came or backward > 0, spoilt or bad
        self._far_output.end_step(harmless=came and not spoilt)

    def _report(self, phase: int, parameter: str | None, counts: Nonfinite) -> None:
        """Tell of a bad value of the step under way."""
        self._told = True
        if phase == _BACKWARD:
            self._backward_is_bad = True
            held, self._output.held = self._output.held, None
            if held is not None:  # it did harm
                self._report(_FORWARD, None, held)
        place = time.time_ns() if self._order.timed else self._looks
        at = {"step": -1, "micro": self._micro_of(phase), "place": place}
        self._on_bad(self._witness(phase, parameter, counts, **at))

    def _witness(
        self, phase: int, parameter: str | None, counts: Nonfinite, *,
        step: int, micro: int, place: int,
    ) -> FirstBad:  # fmt: skip
        nan, pos_inf, neg_inf, numel = counts
        return FirstBad(
            step=step,
            micro=micro,
            phase=_PHASES[phase],
            order=self._order.number(_PHASES[phase], place),
            rank=self._rank,
            fqn=parameter,
            kind="grad_local" if parameter is not None else None,
            nan=nan,
            pos_inf=pos_inf,
            neg_inf=neg_inf,
            numel=numel,
        )


class _Watched:
    """The hook of a parameter for after its accumulation, which must answer None."""

    __slots__ = ("_check", "_what")

    def __init__(self, check: Callable[..., object], what: object) -> None:
        self._check, self._what = check, what

    @dynamo.run_as_python
    def __call__(self, tensor: Tensor | None) -> Tensor | None:
        if dynamo.may_break_off():
            self._tell(tensor)
        return None

    @dynamo.never_traced
    def _tell(self, tensor: Tensor | None) -> None:
        if tensor is not None:  # the loss may leave out what DDP has returned of a parameter
            self._check(self._what, tensor)


@final
class _Arriving(_Watched):
    """The hook of a parameter, or of a flat one, for a gradient that arrives at it."""

    @dynamo.hands_back
    def __call__(self, tensor: Tensor | None) -> None:
        self._tell(tensor)
