"""On a sampled step on the CPU: the module whose output is the first bad one, kept as it was.

There the row that a module's output has just become lies in host memory. The first bad one of a
step is noticed at once, and what the module was called with is copied there and then: a moment
later the inputs may be gone. If they were bad already, the code between the modules is to blame,
and the module around them is kept as well, once its call is over. A GPU would have to be waited
for, so there only modules that are captured anyway have their inputs kept; and so it is with a bad
number that is born in the backward, when the inputs of the forward are gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from torch import Tensor, nn

from ddpprobe import torch_private
from ddpprobe.hooks.bundle import Bundle, Key
from ddpprobe.hooks.calls import autocast, random_states
from ddpprobe.hooks.eager import Clock
from ddpprobe.hooks.outputs import leaves
from ddpprobe.hooks.step_rows import StepRows
from ddpprobe.hooks.structure import arguments
from ddpprobe.stats.dense import local
from ddpprobe.topology import parts, placing
from ddpprobe.topology.describe import Topology
from ddpprobe.topology.naming import clean
from ddpprobe.topology.parts import OWN, WHOLE
from ddpprobe.topology.placement import is_dtensor

MOST = 8  # modules that one attempt keeps: a run that goes bad again and again tells nothing new


@final
class Culprit:
    """Looks at the rows that `EagerHooks` makes of a module's outputs.

    Args:
        topology: the model.
        rows: of the step under way.
        clock: tells micro-batch and evaluation.
        bundle: gives the bundle that the module is to be kept in.
    """

    def __init__(
        self, topology: Topology, rows: StepRows, clock: Clock,
        bundle: Callable[[str], Bundle | None],
    ) -> None:  # fmt: skip
        self._topology, self._rows, self._clock, self._bundle = topology, rows, clock, bundle
        self._calls: Counter[str] = Counter()  # in the micro-batch under way
        self._began = 0  # rows of this step before the forward under way
        self._bad = self._was_bad = False  # this step, the sampled one before it
        self._inner: str | None = None  # of the bad modules so far the outermost, if bad came in
        self._keeps = False
        self._left = MOST

    def begin_forward(self) -> None:
        """Look at what comes from now on."""
        self._calls.clear()
        self._began = len(self._rows)

    def end_step(self, *, scaled: bool) -> None:
        """At the end of a sampled step: what comes behind a bad one is bad because of it.

        So it is where another rank's gradient was bad, but for a scaler, which skips such a step.
        """
        self._was_bad = self._bad or not (scaled or self._rows.are_finite())
        self._bad, self._inner = False, None

    def look(
        self, fqn: str, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, Any],
        output: object,
    ) -> None:  # fmt: skip
        """Look at the rows of a call that is over."""
        number = self._calls[fqn]
        self._calls[fqn] += 1
        if not self._rows.bad:
            return
        if self._bad:
            if self._inner is None or not (not fqn or self._inner.startswith(f"{fqn}.")):
                return
        elif not self._rows.bad_from(self._began):
            return
        if torch_private.in_backward() or self._clock.evaluating:
            return
        first, self._bad = not self._bad, True
        # What was bad when it came in was made so by the code around: in the module that calls it.
        self._inner = fqn if fqn and _are_bad((args, kwargs)) else None
        if first:
            self._keeps = bool(self._left) and not self._was_bad
            self._left -= self._keeps
        bundle = self._bundle(fqn) if self._keeps else None
        if bundle is not None:
            self._keep(bundle, number, fqn, module, args, kwargs, output)

    def _keep(
        self, bundle: Bundle, number: int, fqn: str, module: nn.Module,
        args: tuple[object, ...], kwargs: Mapping[str, Any], output: object,
    ) -> None:  # fmt: skip
        micro = max(self._clock.micro, 0)
        told = {
            "micro": micro, "call": number, "rng": "after", "autocast": autocast(),
            "inputs_changed": None, **arguments(args, kwargs),
        }  # fmt: skip
        header = bundle.module(fqn, module)
        header["calls"].append(told)
        for device, state in random_states(self._topology.device):
            bundle.add(Key(fqn, "rng", "", device, micro, number), state, OWN)
        for kind, value in (("input", args), ("input", kwargs), ("output", output)):
            for leaf, tensor in leaves(value):
                laid = placing.of(tensor) if is_dtensor(tensor) else None
                lies = parts.activation(self._topology, fqn, tensor, laid)
                bundle.add(Key(fqn, kind, fqn, leaf, micro, number), tensor, lies)
        for kind, name, tensor in self._state(module):
            header["state"][name] = held = f"{fqn}.{name}" if fqn else name
            lies = parts.dtensor(placing.of(tensor)) if is_dtensor(tensor) else WHOLE
            alone = kind == "param" or self._topology.world_size == 1
            bundle.add(Key(fqn, kind, held), tensor, lies if alone else OWN)

    def _state(self, module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (kind, name, tensor) of what the module holds now, unsharded if it is just so.

        FSDP1 holds views of its flat parameters, as parameters or as plain attributes.
        """
        flat = {id(unit.flat) for unit in self._topology.flat}
        prefixes = {id(inner): clean(name) for name, inner in module.named_modules()}
        views = set()
        for part in torch_private.flat_parts(self._topology.outer):
            held = getattr(part.module, part.name, None)
            prefix = prefixes.get(id(part.module))
            if prefix is not None and isinstance(held, Tensor) and held.shape == part.shape:
                views.add(name := f"{prefix}.{part.name}" if prefix else part.name)
                yield "param", name, held
        for name, parameter in module.named_parameters():
            if id(parameter) not in flat and clean(name) not in views:
                yield "param", clean(name), parameter
        for name, buffer in module.named_buffers():
            yield "buffer", clean(name), buffer


def _are_bad(values: object) -> bool:
    """Whether a floating tensor in them has a NaN or an infinity; read only where one came out."""
    return any(
        t.is_floating_point() and not bool(local(t).isfinite().all()) for _, t in leaves(values)
    )
