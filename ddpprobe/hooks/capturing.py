"""Full tensors of chosen modules on chosen steps: which steps, which modules, what is kept when.

A step is captured if it is sampled and the user has named modules (`install(capture=...)`), or if
an order of the head names it. In such a step every call of the modules is kept (`calls`); their
parameters, buffers and gradients are, as the optimizer finds them. Between captured steps nothing
hangs on any module.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Container, Sequence
from typing import final

from torch import Tensor, nn

from ddpprobe.fuse import Fuse, logger
from ddpprobe.hooks.bundle import Bundle, Key
from ddpprobe.hooks.calls import CallHooks
from ddpprobe.hooks.culprit import Culprit
from ddpprobe.hooks.desk import Desk
from ddpprobe.hooks.eager import Clock
from ddpprobe.hooks.step_rows import StepRows
from ddpprobe.orders import Order
from ddpprobe.packs import FIRST_BAD
from ddpprobe.topology import parts
from ddpprobe.topology.describe import Topology

_NAMED = 20


@final
class Capturing:
    """The captures of one rank.

    Nothing of it raises into training, and a failure in here ends captures only.

    Args:
        globs: over FQNs, of the modules that are captured on every sampled step.
        desk: writes what is kept.
        rank: this rank.
    """

    def __init__(self, globs: tuple[str, ...], desk: Desk, rank: int) -> None:
        self._globs, self._desk, self._rank = globs, desk, rank
        self.fuse = Fuse("capture", on_blow=self._blown)
        self._orders: list[Order] = []
        self._found: Topology | None = None
        self._clock: Clock | None = None
        self._graphs: Container[nn.Module] = ()
        self._calls: CallHooks | None = None
        self._culprit: Culprit | None = None
        self._step = 0
        self._sampled = False
        self._bundle: Bundle | None = None
        self._chosen: dict[str, nn.Module] = {}
        self._scaled = False  # the last backward, by a GradScaler
        self._optimizes = True  # the last step was an optimizer's of torch
        self._taken = False  # the state that the optimizer found in this step
        self._compiled: set[str] = set()  # FQNs said to be missed
        guard = self.fuse.guard
        self.begin, self.attach = guard(self._begin), guard(self._attach)
        self.backward_ended = guard(self._backward_ended)
        self.gradients_ready = guard(self._gradients_ready)
        self.log_samples, self.end_step = guard(self._log_samples), guard(self._end_step)
        self.write, self.close = guard(self._desk.write), guard(self._close)

    def meet(
        self, found: Topology, clock: Clock, graphs: Container[nn.Module], rows: StepRows
    ) -> Callable[..., object]:
        """Get to know the model in its final form.

        Args:
            found: the model.
            clock: tells step, micro-batch and evaluation.
            graphs: the modules inside of graphs of torch.compile.
            rows: of the sampled step under way.

        Returns:
            What wants to hear of every call whose rows have been made, where the host sees them.
        """
        self._found, self._clock, self._graphs = found, clock, graphs
        self._calls = CallHooks(found, clock, self.fuse)
        self._culprit = Culprit(found, rows, clock, self._bundle_for, self.fuse)
        return self.fuse.guard(self._culprit.look)

    def capture(self, order: Order) -> None:
        """Follow an order, on every rank the same; its modules may be globs, none of them: all."""
        self._orders.append(order)

    def _begin(self, step: int, *, sampled: bool) -> None:
        """Decide whether the step that begins is captured."""
        self.drop()
        self._step, self._sampled, self._taken = step, sampled, False
        self._orders = [order for order in self._orders if step < order.stop]
        orders = [order for order in self._orders if order.start <= step]
        globs = [glob for order in orders for glob in order.modules or ("*",)]
        globs += self._globs if sampled else ()
        if not globs or self._calls is None:
            return
        self._bundle = self._desk.bundle(step, orders[0].reason if orders else "capture")
        self._chosen = self._choose(globs)
        self._calls.begin(self._bundle)

    def _attach(self) -> None:
        """Hang the hooks for the forward that begins, if its step is captured."""
        if self._chosen and self._calls is not None:
            self._calls.attach(self._chosen)
        if self._sampled and self._culprit is not None:
            self._culprit.begin_forward()

    def _backward_ended(self, scale: Tensor | None) -> None:
        """Keep the gradients, where the optimizer may never see them: a scaler skips its step."""
        self._desk.pump()
        self._scaled = scale is not None
        if self._bundle is not None and (self._scaled or not self._optimizes):
            self._bundle.log_scale(scale)
            self._keep_state(self._bundle)

    def _gradients_ready(self) -> None:
        """Keep parameters, buffers and gradients as the first optimizer of a step finds them."""
        if self._bundle is not None and not self._taken:
            self._taken = True
            self._keep_state(self._bundle)

    def _log_samples(self, samples: Tensor | Sequence[int]) -> None:
        """Keep which samples the micro-batch under way is made of."""
        if self._bundle is not None and self._clock is not None:
            self._bundle.log_samples(max(self._clock.micro, 0), samples)

    def _end_step(self) -> None:
        """Send what was kept on its way."""
        if self._sampled and self._culprit is not None:
            self._culprit.end_step(scaled=self._scaled)
        bundle, self._bundle = self._bundle, None
        if bundle is None or self._calls is None:
            return
        self._calls.end()
        self._optimizes = self._taken
        self._chosen = {}
        if len(bundle):
            self._desk.push(bundle)
        self._desk.write()

    def detach(self) -> None:
        """Take every hook off."""
        if self._calls is not None:
            self._calls.detach()
        if self._culprit is not None:
            self._culprit.detach()

    def drop(self) -> None:
        """Let go of a step that never came to its end."""
        if self._bundle is not None and self._calls is not None:
            self._calls.end()
        self._bundle, self._chosen = None, {}

    def _close(self) -> None:
        """Take every hook off, write what is left, let go of the model."""
        self.detach()
        self.drop()
        self._desk.write(wait=True)
        self._found = self._clock = self._calls = self._culprit = None
        self._graphs = ()

    def _choose(self, globs: Sequence[str]) -> dict[str, nn.Module]:
        """Return {FQN: module} of those that are named; says which of them nobody can hear."""
        found = dict(self._found.named_modules()) if self._found is not None else {}
        chosen = {
            fqn: module
            for fqn, module in found.items()
            if any(fqn == glob or fnmatch.fnmatchcase(fqn, glob) for glob in globs)
            and type(module).forward is not nn.Module.forward  # a container is never called
        }
        deaf = {fqn for fqn, module in chosen.items() if module in self._graphs}
        if deaf - self._compiled:
            self._compiled |= deaf
            names = sorted(deaf)[:_NAMED]
            self._desk.tell("uncaptured", modules=names, count=len(deaf), reason="compiled")
            logger.warning(
                "ddpprobe: %d modules are inside a graph of torch.compile, where their tensors "
                "cannot be captured (%s ...)", len(deaf), ", ".join(names[:3]),
            )  # fmt: skip
        return {fqn: module for fqn, module in chosen.items() if fqn not in deaf}

    def _bundle_for(self, fqn: str) -> Bundle | None:
        """Give the bundle for a module whose output is the first bad one; None: it is kept."""
        if self._bundle is None:
            self._bundle = self._desk.bundle(self._step, FIRST_BAD, whole=True)
        self._bundle.reason = FIRST_BAD
        return self._bundle if fqn not in self._chosen else None

    def _keep_state(self, bundle: Bundle) -> None:
        """Keep this rank's parts of what the modules hold, each once."""
        found, calls = self._found, self._calls
        if found is None or calls is None:
            return
        owners: dict[str, str] = {}
        for place, first in parts.names(found).items():
            for fqn, module in self._chosen.items():
                if not fqn or place.startswith(f"{fqn}."):
                    bundle.module(fqn, module)["state"][place.removeprefix(f"{fqn}.")] = first
                    owners.setdefault(first, fqn)
        for kind, held in (
            ("param", parts.parameters(found, self._rank)),
            ("buffer", parts.buffers(found)),
            ("grad", parts.gradients(found, self._rank, calls.of_parameter)),
        ):
            for part in held:
                owner = owners.get(part.fqn)
                if owner is not None and (part.first or bundle.whole):
                    bundle.add(Key(owner, kind, part.fqn), part.tensor, part.lies)

    def _blown(self) -> None:
        self.detach()
        self._bundle = None
        self._desk.tell("fuse", component=self.fuse.component, error=self.fuse.last_error)
