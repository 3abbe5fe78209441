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

from ddpprobe.rank.capture.calls import CallHooks
from ddpprobe.rank.capture.first_bad_capture import FirstBadCapture
from ddpprobe.rank.capture.pack_writer import PackWriter
from ddpprobe.rank.capture.step_capture import PackKey, StepCapture
from ddpprobe.rank.hooks import fast_path
from ddpprobe.rank.hooks.eager import StepPosition
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.quiet_fuse import QuietFuse
from ddpprobe.rank.topology import parts
from ddpprobe.rank.topology.describe import Topology
from ddpprobe.records import events
from ddpprobe.rundir.fuse import logger
from ddpprobe.rundir.orders import Order
from ddpprobe.rundir.stopwatch import Stopwatch
from ddpprobe.rundir.tensor_pack import FIRST_BAD

_NAMED = 20


@final
class Capturing:
    """The captures of one rank.

    Nothing of it raises into training, and a failure in here ends captures only.

    Args:
        globs: over FQNs, of the modules that are captured on every sampled step.
        pack_writer: writes what is kept.
        rank: this rank.
        stopwatch: times whatever enters from the training.
    """

    def __init__(
        self, globs: tuple[str, ...], pack_writer: PackWriter, rank: int, stopwatch: Stopwatch
    ) -> None:
        self._globs, self._pack_writer, self._rank = globs, pack_writer, rank
        self.fuse = QuietFuse("capture", on_blow=self._blown, stopwatch=stopwatch)
        self._orders: list[Order] = []
        self._topology: Topology | None = None
        self._clock: StepPosition | None = None
        self._graphs: Container[nn.Module] = ()
        self._calls: CallHooks | None = None
        self._first_bad_capture: FirstBadCapture | None = None
        self._step = 0
        self._sampled = False
        self._step_capture: StepCapture | None = None
        self._chosen: dict[str, nn.Module] = {}
        self._scaled = False  # the last backward, by a GradScaler
        self._optimizes = True  # the last step was an optimizer's of torch
        self._taken = False  # the state that the optimizer found in this step
        self._told_samples = False  # that they are none
        self._missed: set[str] = set()  # FQNs said to be
        guard = self.fuse.guard
        self.begin, self.attach = guard(self._begin), guard(self._attach)
        self.backward_ended = guard(self._backward_ended)
        self.gradients_ready = guard(self._gradients_ready)
        self.log_samples, self.end_step = guard(self._log_samples), guard(self._end_step)
        self.write, self.close = guard(self._pack_writer.write), guard(self._close)

    def meet(
        self, topology: Topology, clock: StepPosition, graphs: Container[nn.Module], rows: StepRows
    ) -> Callable[..., object]:
        """Get to know the model in its final form.

        Args:
            topology: the model.
            clock: tells step, micro-batch and evaluation.
            graphs: the modules inside of graphs of torch.compile.
            rows: of the sampled step under way.

        Returns:
            What wants to hear of every call whose rows have been made, where the host sees them.
        """
        self._topology, self._clock, self._graphs = topology, clock, graphs
        self._calls = CallHooks(topology, clock, self.fuse)
        self._first_bad_capture = FirstBadCapture(
            topology, rows, clock, self._bundle_for, self.fuse
        )
        return self.fuse.guard(self._first_bad_capture.look)

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
        self._step_capture = self._pack_writer.step_capture(
            step, orders[0].reason if orders else "capture"
        )
        self._chosen = self._choose(globs)
        self._calls.begin(self._step_capture)

    def _attach(self) -> None:
        """Hang the hooks for the forward that begins, if its step is captured."""
        if self._chosen and self._calls is not None:
            self._calls.attach(self._chosen)
        if self._sampled and self._first_bad_capture is not None:
            self._first_bad_capture.begin_forward()

    def _backward_ended(self, scale: Tensor | None) -> None:
        """Keep the gradients, where the optimizer may never see them: a scaler skips its step."""
        self._pack_writer.pump()
        self._scaled = scale is not None
        if self._step_capture is not None and (self._scaled or not self._optimizes):
            self._step_capture.log_scale(scale)
            self._keep_state(self._step_capture)

    def _gradients_ready(self) -> None:
        """Keep parameters, buffers and gradients as the first optimizer of a step finds them."""
        if self._step_capture is not None and not self._taken:
            self._taken = True
            self._keep_state(self._step_capture)

    def _log_samples(self, samples: Tensor | Sequence[int]) -> None:
        """Keep which samples the micro-batch under way is made of."""
        if self._step_capture is None or self._clock is None:
            return
        try:
            self._step_capture.log_samples(max(self._clock.micro, 0), samples)
        except TypeError as error:  # the script's: no reason to end all captures
            if not self._told_samples:
                self._told_samples = True
                logger.warning(
                    "ddpprobe: what probe.log() was given as indices is not kept: %s", error
                )

    def _end_step(self) -> None:
        """Send what was kept on its way."""
        if self._sampled and self._first_bad_capture is not None:
            self._first_bad_capture.end_step(scaled=self._scaled)
        step_capture, self._step_capture = self._step_capture, None
        if step_capture is None or self._calls is None:
            return
        self._calls.end()
        self._optimizes = self._taken
        self._chosen = {}
        if len(step_capture):
            self._pack_writer.push(step_capture)
        self._pack_writer.write()

    def detach(self) -> None:
        """Take every hook off."""
        if self._calls is not None:
            self._calls.detach()
        if self._first_bad_capture is not None:
            self._first_bad_capture.detach()

    def drop(self) -> None:
        """Let go of a step that never came to its end."""
        if self._step_capture is not None and self._calls is not None:
            self._calls.end()
        self._step_capture, self._chosen = None, {}

    def _close(self, *, idle: bool = True) -> None:
        """Take every hook off, write what is left, let go of the model.

        `idle`: the device has done its work; else what is on its way from it will not come.
        """
        self.detach()
        self.drop()
        if not idle:
            self._pack_writer.abandon()
        self._pack_writer.write(wait=True)
        self._topology = self._clock = self._calls = self._first_bad_capture = None
        self._graphs = ()

    def _choose(self, globs: Sequence[str]) -> dict[str, nn.Module]:
        """Return {FQN: module} of those that are named; says which of them nobody can hear."""
        modules = list(self._topology.named_modules()) if self._topology is not None else []
        chosen = {
            fqn: module
            for fqn, module in modules
            if any(fqn == glob or fnmatch.fnmatchcase(fqn, glob) for glob in globs)
            and type(module).forward is not nn.Module.forward  # a container is never called
        }
        compiled = {fqn for fqn, module in chosen.items() if module in self._graphs}
        bare = fast_path.fused(module for _, module in modules)
        fused = {fqn for fqn, module in chosen.items() if module in bare}
        self._tell_missed(compiled, "compiled", "inside a graph of torch.compile")
        self._tell_missed(fused, "fused", f"in {fast_path.REASON}")
        return {fqn: m for fqn, m in chosen.items() if fqn not in compiled | fused}

    def _tell_missed(self, missed: set[str], reason: str, where: str) -> None:
        """Say once that the tensors of modules cannot be captured; `where`: these are."""
        if missed - self._missed:
            self._missed |= missed
            names = sorted(missed)[:_NAMED]
            self._pack_writer.tell(
                events.UncapturedEvent(modules=tuple(names), count=len(missed), reason=reason)
            )
            logger.warning(
                "ddpprobe: %d modules are %s, where their tensors cannot be captured (%s ...)",
                len(missed), where, ", ".join(names[:3]),
            )  # fmt: skip

    def _bundle_for(self, fqn: str) -> StepCapture | None:
        """Give the capture for a module whose output is the first bad one; None: it is kept."""
        if self._step_capture is None:
            self._step_capture = self._pack_writer.step_capture(self._step, FIRST_BAD, whole=True)
        self._step_capture.reason = FIRST_BAD
        return self._step_capture if fqn not in self._chosen else None

    def _keep_state(self, step_capture: StepCapture) -> None:
        """Keep this rank's parts of what the modules hold, each once."""
        topology, calls = self._topology, self._calls
        if topology is None or calls is None:
            return
        owners: dict[str, str] = {}
        for place, first in parts.names(topology).items():
            for fqn, module in self._chosen.items():
                if not fqn or place.startswith(f"{fqn}."):
                    step_capture.module(fqn, module)["state"][place.removeprefix(f"{fqn}.")] = first
                    owners.setdefault(first, fqn)
        for kind, held in (
            ("param", parts.parameters(topology, self._rank)),
            ("buffer", parts.buffers(topology)),
            ("grad", parts.gradients(topology, self._rank, calls.of_parameter)),
        ):
            for part in held:
                owner = owners.get(part.fqn)
                if owner is not None and (part.first or step_capture.whole):
                    step_capture.add(PackKey(owner, kind, part.fqn), part.tensor, part.spec)

    def _blown(self) -> None:
        self.detach()
        self._step_capture = None
        self._pack_writer.tell(
            events.FuseEvent(component=self.fuse.component, error=self.fuse.last_error)
        )
