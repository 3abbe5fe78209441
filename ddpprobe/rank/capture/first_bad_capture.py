"""On a sampled step on the CPU: the module whose output is the first bad one, kept as it was.

There the row that a module's output has just become lies in host memory. The first bad one of a
step is noticed at once, and what the module was called with is copied there and then: a moment
later the inputs may be gone. If they were bad already, the code between the modules is to blame,
and the module around them is kept as well, once its call is over. Of what FSDP units inside of it
hold the rank has only its shards by then; the backward gathers every unit again, and what it
gathers takes the place of the shards. A GPU would have to be waited for, so there only modules that
are captured anyway have their inputs kept; and so it is with a bad number that is born in the
backward, when the inputs of the forward are gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ddpprobe.rank import torch_private
from ddpprobe.rank.capture.calls import autocast, random_states
from ddpprobe.rank.capture.module_state import Holding, state_of
from ddpprobe.rank.capture.step_capture import PackKey, StepCapture
from ddpprobe.rank.capture.structure import arguments
from ddpprobe.rank.hooks import lanes
from ddpprobe.rank.hooks.copy_safe_hook import CopySafeObserver, take_off
from ddpprobe.rank.hooks.eager import StepPosition
from ddpprobe.rank.hooks.outputs import leaves
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.stats.dense import Unsupported, dense
from ddpprobe.rank.topology import parts
from ddpprobe.rank.topology.describe import Topology
from ddpprobe.records.shard_spec import OWN, WHOLE
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.stopwatch import Caller

MOST = 8  # modules that one attempt keeps: a run that goes bad again and again tells nothing new


@final
class FirstBadCapture:
    """Looks at the rows that `EagerHooks` makes of a module's outputs.

    Args:
        topology: the model.
        rows: of the step under way.
        clock: tells micro-batch and evaluation.
        step_capture: gives the step capture that the module is to be kept in.
        fuse: contains whatever goes wrong in here.
    """

    def __init__(
        self, topology: Topology, rows: StepRows, clock: StepPosition,
        step_capture: Callable[[str], StepCapture | None], fuse: Fuse,
    ) -> None:  # fmt: skip
        self._topology, self._rows, self._clock = topology, rows, clock
        self._step_capture, self._fuse = step_capture, fuse
        self._handles: list[RemovableHandle] = []
        self._gathered: dict[str, list[Holding]] = {}  # of the call under way, by FQN
        # Kept of the step, by their place.
        self._shards: dict[str, list[tuple[StepCapture, PackKey]]] = {}
        self._calls: Counter[str] = Counter()  # in the micro-batch under way
        self._began = 0  # rows of this step before the forward under way
        self._bad = self._was_bad = False  # this step, the sampled one before it
        self._inner: str | None = None  # of the bad modules so far the outermost, if bad came in
        self._left = MOST

    def begin_forward(self) -> None:
        """Look at what comes from now on."""
        self._calls.clear()
        self._began = len(self._rows)
        self.detach()
        if lanes.is_near(self._topology.device):
            for fqn, unit in self._topology.units():
                guest = CopySafeObserver(
                    self._fuse.guard(partial(self._keep_gathered, fqn), Caller.MODULE)
                )
                self._handles.append(unit.register_forward_hook(guest, prepend=True))
                self._await_gathering(fqn, unit)
            for fqn, unit in self._topology.walk() if self._topology.flat else ():
                if torch_private.is_a(unit, "torch.distributed.fsdp", "FullyShardedDataParallel"):
                    self._await_gathering(fqn, unit)

    def end_step(self, *, scaled: bool) -> None:
        """At the end of a sampled step: what comes after a bad one is bad because of it.

        So it is where another rank's gradient was bad, but for a scaler, which skips such a step.
        """
        self._was_bad = self._bad or not (scaled or self._rows.are_finite())
        self._bad, self._inner = False, None
        self._shards.clear()

    def detach(self) -> None:
        """Take every hook off."""
        take_off(self._handles)
        self._gathered.clear()

    def look(
        self, fqn: str, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, Any],
        output: object,
    ) -> None:  # fmt: skip
        """Look at the rows of a call that is over."""
        held = self._gathered.pop(fqn, None)
        number = self._calls[fqn]
        self._calls[fqn] += 1
        if not self._rows.bad:
            return
        if self._bad:
            if not self._encloses(fqn):
                return
        elif not self._rows.bad_from(self._began):
            return
        if torch_private.in_backward() or self._clock.evaluating:
            return
        if not self._bad:
            self._bad = True
            if self._was_bad or not self._left:
                return
            self._left -= 1
        # What was bad when it came in was made so by the code around: in the module that calls it.
        self._inner = fqn if fqn and _are_bad((args, kwargs)) else None
        step_capture = self._step_capture(fqn)
        if step_capture is not None:
            self._keep(step_capture, number, fqn, module, args, kwargs, output, held)

    def _encloses(self, fqn: str) -> bool:
        """Whether a module is around the bad ones so far, which were given what was bad."""
        return self._inner is not None and (not fqn or self._inner.startswith(f"{fqn}."))

    def _keep_gathered(self, fqn: str, unit: nn.Module, args: object, output: object) -> None:
        """Copy what an FSDP2 unit has gathered, if it is to be kept: in front of FSDP's own hook.

        That one frees it, before the rows of the unit's outputs are made after all other hooks.
        """
        if torch_private.in_backward() or self._clock.evaluating:
            return
        new = bool(self._left) and not self._was_bad
        if (self._encloses(fqn) if self._bad else new) and _are_bad(output):
            state = state_of(self._topology, fqn, unit)
            self._gathered[fqn] = [h._replace(tensor=h.tensor.detach().clone()) for h in state]

    def _await_gathering(self, fqn: str, unit: nn.Module) -> None:
        """Hang a hook on a unit for what may have to be kept when it is gathered the next time.

        That is in its backward, after FSDP's hooks on its outputs, in its recomputation, or in the
        forward of another micro-batch: until the optimizer's step the parameters are the same.
        """
        complete = CopySafeObserver(
            self._fuse.guard(partial(self._complete, fqn, unit), Caller.TENSOR)
        )

        def follow(_unit: object, _args: object, output: object) -> None:
            if self._clock.evaluating:
                return
            complete()
            for _, tensor in leaves(output):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(complete)

        guest = CopySafeObserver(self._fuse.guard(follow, Caller.MODULE))
        self._handles.append(unit.register_forward_hook(guest, prepend=True))

    def _complete(self, fqn: str, unit: nn.Module, *_: object) -> None:
        """Put in the place of shards what a unit has gathered now."""
        if not self._shards:
            return
        for one in state_of(self._topology, fqn, unit):
            for step_capture, key in self._shards.pop(one.place, ()) if one.spec is WHOLE else ():
                step_capture.add(key, one.tensor, WHOLE)

    def _keep(
        self, step_capture: StepCapture, number: int, fqn: str, module: nn.Module,
        args: tuple[object, ...], kwargs: Mapping[str, Any], output: object,
        held: Sequence[Holding] | None,
    ) -> None:  # fmt: skip
        micro = max(self._clock.micro, 0)
        call = {
            "micro": micro, "call": number, "rng": "after", "autocast": autocast(),
            "inputs_changed": None, **arguments(args, kwargs),
        }  # fmt: skip
        header = step_capture.module(fqn, module)
        header["calls"].append(call)
        for device, state in random_states(module, self._topology.device):
            step_capture.add(PackKey(fqn, "rng", "", device, micro, number), state, OWN)
        for kind, value in (("input", args), ("input", kwargs), ("output", output)):
            for leaf, tensor in leaves(value):
                spec = parts.activation(self._topology, fqn, tensor)
                step_capture.add(PackKey(fqn, kind, fqn, leaf, micro, number), tensor, spec)
        for one in held or state_of(self._topology, fqn, module):
            key = PackKey(fqn, one.kind, one.fqn)
            header["state"][one.place.removeprefix(f"{fqn}.")] = one.fqn
            step_capture.add(key, one.tensor, one.spec)
            if one.spec["kind"] in ("dtensor", "flat"):
                self._shards.setdefault(one.place, []).append((step_capture, key))


def _are_bad(values: object) -> bool:
    """Whether a tensor in them has a NaN or an infinity; read only where one came out."""
    return any(t.is_cpu and _is_bad(t) for _, t in leaves(values))


def _is_bad(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    try:
        flat, _ = dense(tensor)  # PyTorch has no `isfinite` for some of the 8-bit dtypes
    except Unsupported:  # it has no row either, so nobody called it bad
        return False
    return not bool(flat.isfinite().all())
