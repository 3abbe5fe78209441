"""What looks at the model on this rank, built once the model is known in its final form."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import final

from torch import Tensor

from ddpprobe.rank import torch_private
from ddpprobe.rank.capture.capturing import Capturing
from ddpprobe.rank.hooks import lanes
from ddpprobe.rank.hooks.bin_rows import BinRows
from ddpprobe.rank.hooks.compiled import CompiledHooks
from ddpprobe.rank.hooks.eager import EagerHooks
from ddpprobe.rank.hooks.execution_order import ExecutionOrder
from ddpprobe.rank.hooks.full import FullHooks
from ddpprobe.rank.hooks.kept_gradients import KeptGradients
from ddpprobe.rank.hooks.loss_scale import LossScaleReader
from ddpprobe.rank.hooks.root import called
from ddpprobe.rank.hooks.state_check import StateCheck
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.hooks.stream_capture import outside_capture
from ddpprobe.rank.hooks.unregistered import Unregistered
from ddpprobe.rank.hooks.watch import Watch
from ddpprobe.rank.hooks.weight_look import WeightLook
from ddpprobe.rank.stats import checksum
from ddpprobe.rank.step_clock import StepClock
from ddpprobe.rank.topology.describe import Topology
from ddpprobe.rank.topology.flat import FlatUnit
from ddpprobe.rank.topology.placement import is_dtensor
from ddpprobe.rank.torch_private import dynamo, functorch, graph
from ddpprobe.records.step import HELD_BACK, NOTHING_REDUCES, UNWRAPPED, FirstBad
from ddpprobe.rundir.fuse import Fuse


@final
class Observers:
    """The hooks of a model and where their rows go.

    Args:
        topology: the model.
        select: whether a module FQN is observed.
        clock: tells step and micro-batch.
        rank: this rank.
        fuse: contains whatever goes wrong in hooks.
        on_bad: called when the every-step watch sees a bad local value.
        on_late: called when it hears of one of an earlier step, see `Watch`.
        lost: called with the FQNs of compiled modules that cannot be heard.
        captured: called when a hook does nothing because a CUDA graph is captured.
        capturing: keeps full tensors; told of everything that the hooks are told of.
        full_backward: also `grad_input`, by full backward hooks where proven safe.
        named: whether a module or parameter of this FQN has histograms; None: none has.

    Attributes:
        gradients_read: the gradients in the rows of this step are as a backward left them.
    """

    def __init__(
        self, topology: Topology, select: Callable[[str], bool], clock: StepClock, rank: int,
        fuse: Fuse, on_bad: Callable[[FirstBad], None], on_late: Callable[[FirstBad, bool], None],
        lost: Callable[[list[str]], None], captured: Callable[[], None], capturing: Capturing, *,
        full_backward: bool, named: Callable[[str], bool] | None = None,
    ) -> None:  # fmt: skip
        self.topology = topology
        # The forward of a DDP may be around this one.
        self._nobody_reduces = topology.wrapper == "none" and torch_private.active_ddp() is None
        fuse = outside_capture(fuse, captured)
        bins = BinRows(named) if named is not None else None
        near = lanes.is_near(topology.device)
        order = ExecutionOrder(pipelined=bool(topology.cut), near=near)
        self.rows = StepRows(topology.device, rank, order=order, bins=bins)
        self.rows.on_bad = on_bad
        self.compiled = CompiledHooks(select, fuse, lost)
        self.eager = EagerHooks(topology, select, self.rows, clock, fuse, self.compiled)
        self.kept = KeptGradients(clock, self.rows)
        self.eager.backward_begins = self.kept.backward_begins
        self.full = FullHooks(topology, select, self.rows, clock, fuse, self.compiled)
        self._select = select
        told = self._was_read, self._flat_was_read
        self.watch = Watch(topology, clock, rank, fuse, on_bad, on_late, *told, order)
        self.loss_scale = LossScaleReader()
        self.state = StateCheck(topology, clock.owners.optimizers, rank)
        self.weights = WeightLook(
            topology, select, self.rows, clock.owners.optimizers, self.state.may_be_mask
        )
        self.unregistered = Unregistered(topology)
        self.gradients_read = False
        self._held_back = False  # the last backward was one in `no_sync`
        self.capturing = capturing
        after_call = capturing.meet(topology, clock, self.compiled, self.rows)
        if near:
            self.eager.after_call = after_call
        elif topology.world_size > 1:
            with functorch.outside():
                checksum.prepare(topology.device)
        self._clock = clock
        self._use_full = full_backward
        self._warm = True  # the next step makes the graphs that observe
        self._late = False  # the root is inside a graph, which can only be renewed between steps

    def begin_step(self, *, sampled: bool) -> bool:
        """Get ready for a step, in its first forward. False: it cannot be observed as wished."""
        if self._clock.in_graph:
            self._late |= not len(self.compiled)
            sampled = sampled and self.compiled.flag.on
        elif sampled or self._warm:
            # Older torches call the hooks of what is compiled around the model as any module's.
            around = called(self.topology) is not self.topology.root
            inside = around or dynamo.in_a_compiled_call()
            if self.compiled.find(self.topology, root_is_in_one=inside):
                self.compiled.renew()
                self._warm = True
        if not self._clock.in_graph:
            self.compiled.flag.on = sampled or self._warm
        if sampled:
            self.rows.begin()
            self.eager.begin()
            self.kept.begin()
            self.gradients_read = self._held_back = self.eager.arrived = False
        self.capturing.begin(self._clock.step, sampled=sampled)
        self.state.begin(sampled=sampled)
        return sampled

    @property
    def unreduced(self) -> float:
        """What the scalar of this name is of the step under way; 0: it has none."""
        if self.topology.world_size == 1:
            return 0.0
        if self._nobody_reduces:
            return NOTHING_REDUCES
        if self.gradients_read:
            return 0.0
        return HELD_BACK if self._held_back else 1.0

    def compared(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (FQN, shard, tensor) of the parameters that are held against other ranks'."""
        topology = self.topology
        yield from topology.replicated_parameters()
        alone = topology.world_size == 1 or topology.engine is not None or topology.tensor_meshes
        if alone or not self._nobody_reduces:
            return
        for fqn, _, _, parameter in topology.own_parameters():
            plain = fqn.rpartition(".")[0] not in topology.cut and not is_dtensor(parameter)
            if plain and topology.replica_shard(parameter) is None:
                yield fqn, UNWRAPPED, parameter

    def backward_ended(self) -> None:
        """Read the gradients if they are what this backward has made, and reduced."""
        topology = self.topology
        reduced = topology.gradients_are_reduced()
        self._held_back = not reduced and topology.engine is None
        if reduced and not graph.returns_gradients(p for _, p in topology.leaves()):
            self.read_gradients(scaled=True)
            self.gradients_read = True
        self.rows.let_go()

    def read_gradients(self, of: Collection[int] | None = None, *, scaled: bool) -> None:
        """Read the reduced gradients; `scaled`: nobody has divided them by the loss scale yet.

        `of`: ids of the parameters whose optimizer is about to step; None: of all of them.
        """
        if of is None:
            self.eager.reduced.read(self._clock.micro)
        else:
            self.eager.reduced.read_of(self._clock.micro, of)
        self.rows.grad_is_scaled, self.eager.arrived = scaled, False

    @property
    def gradients_are_current(self) -> bool:
        """Whether `.grad` is as it was read, or somebody has clipped it since.

        Not so after a backward that came by no output of the model, whose end nobody hears: that
        of a penalty on its gradients, or on its weights.
        """
        return self.gradients_read and not self.eager.arrived

    def _was_read(self, fqn: str) -> bool:
        """Whether the row made last tells of this parameter's local gradient if it is bad.

        On the CPU it has told already that it is finite.
        """
        slot = self.rows.table.find((fqn, "grad_local", ""))
        first = self._clock.micro == 0  # of later ones `.grad` is the sum
        return self.eager.attached and first and slot is not None and self.rows.end_told(slot)

    def _flat_was_read(self, unit: FlatUnit) -> bool:
        """Whether rows tell of all local gradients in a flat one of FSDP1."""
        return id(unit.flat) in self.eager.tapped and all(
            self._select(fqn.rpartition(".")[0]) for fqn, _ in unit.parts
        )

    def backward_computed(self, *, sampled: bool) -> None:
        """Let the watch look at the gradients that the rows of this step do not tell of."""
        if sampled:
            self.kept.backward_ends()
        told = self.eager.tapped if sampled else ()
        self.watch.backward_ends(told if sampled and self.rows.are_finite() else (), told)

    def tell(self) -> None:
        """At the end of a sampled step: add the facts that are known only then."""
        self.eager.recomputation.tell()
        self.kept.tell()

    def end_step(self) -> None:
        """Judge whether compiled modules were heard; between steps is the time to renew graphs."""
        self.capturing.end_step()
        self.topology.forget_modules()
        renew = self.compiled.flag.on and self.compiled.judge()
        self._warm = False
        if self._late:
            self._late = False
            self.compiled.find(self.topology, root_is_in_one=True)
            renew = True
        if renew:
            self.compiled.renew()
            self._warm = True

    def choose_graphs(self, *, sampled: bool) -> None:
        """Say which graphs the next forward takes: a root inside a graph cannot say it itself."""
        self.compiled.flag.on = sampled or self._warm

    def attach(self, *, sampled: bool) -> None:
        """Hang the hooks that a step needs; at each forward anew, so that ours are the last.

        A hook of the user's that changes an output must have run when we look at it.
        """
        if sampled:
            self._attach()
        self.capturing.attach()

    def _attach(self) -> None:
        self.detach()
        self.topology.remember_modules()
        self.compiled.eager = self.eager
        self.eager.attach()
        # The views that a full hook makes are torch's: a mode would see them.
        if self._use_full and not (torch_private.in_functorch() or torch_private.in_a_mode()):
            self.full.attach()

    def detach(self) -> None:
        """Take the hooks of a sampled step off."""
        self.compiled.eager = None
        self.eager.detach()
        self.full.detach()
        self.capturing.detach()
        self.rows.let_go()

    def pause(self) -> None:
        """Let go of the model until the next step that is observed."""
        self.detach()
        self.weights.forget()
        self.topology.forget_modules()
        self.compiled.mute()

    def close(self, *, idle: bool = True) -> None:
        """Take everything off; `idle`: the device has done its work, and can be waited for."""
        self.detach()
        self.capturing.close(idle=idle)
        self.compiled.close()
        self.watch.close()
