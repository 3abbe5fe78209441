"""Optimizer steps and micro-batches, seen from outside the user's loop.

torch calls global hooks around every `optimizer.step()`; two hooks on the root module see its
forwards. From these few events follow: the step (one `optimizer.step()` over this model's
parameters, however many optimizers share it), the micro-batches inside it, evaluation passes (root
forwards without grad), and steps the optimizer never took (a GradScaler that found inf).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from ddpprobe.rank import torch_private
from ddpprobe.rank.backward import Backward
from ddpprobe.rank.hooks.copy_safe_hook import take_off
from ddpprobe.rank.hooks.loss_scale import found_inf
from ddpprobe.rank.hooks.root import RootHooks
from ddpprobe.rank.hooks.stream_capture import is_captured
from ddpprobe.rank.host import Clock, Host
from ddpprobe.rank.lending import Lending
from ddpprobe.rank.owners import Owners
from ddpprobe.rank.passes import Passes
from ddpprobe.rank.phase_times import BACKWARD, DATA, FORWARD, OPTIMIZER, PhaseTimes
from ddpprobe.rank.step_events import Events
from ddpprobe.rank.topology.describe import Topology
from ddpprobe.rank.torch_private import dynamo
from ddpprobe.rank.unstepped import Unstepped
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.heartbeat import STATES, HeartbeatWriter
from ddpprobe.rundir.stopwatch import Stopwatch

_STATE = tuple(STATES.index(s) for s in ("data", "forward", "backward", "optimizer"))
_BLIND_STEPS = 3

_listening: weakref.WeakSet[StepClock] = weakref.WeakSet()  # one for each model of this process

Args = tuple[Any, ...]  # of an optimizer's `step`, itself included
Kwargs = dict[str, Any]
Call = tuple[Args, Kwargs]


@final
class StepClock:
    """Counts steps and micro-batches, and tells its owner.

    Args:
        host: whose steps a frozen model takes for its own, if this one `follows`; else it is this.
        act: called after each event at which a step may be over, outside of the fuse: what it
            raises is meant for the training loop.

    Attributes:
        step: the optimizer step under way, from `first_step`.
        micro: index of the training forward within the step, -1 before the first.
        lent: how many of them, the first ones, were no part of the step: see `Lending`.
        evaluating: a root forward without grad is running.
        passes: the order of this model's forwards and backwards among those of other models.
        backward: the one under way.
        owners: the optimizers whose steps are steps of this model.
        without_grad: the last forward of the root was one of a model that follows, and counts.
        phases: what data, forward, backward, optimizer take on the host.
    """

    def __init__(
        self, topology: Topology, events: Events, fuse: Fuse, heartbeat: HeartbeatWriter,
        stopwatch: Stopwatch, first_step: int = 0, act: Callable[[], object] = lambda: None,
        host: Host | None = None, *, follows: bool = False,
    ) -> None:  # fmt: skip
        self.step = first_step
        self.micro = -1
        self.lent = 0
        self._ahead = 0  # 1: a wrapper has begun the next micro-batch, and not its model
        self.evaluating = False
        self.passes = Passes()
        self.backward = Backward()
        self.steps = self.skipped = self.sampled = 0
        self.phases = PhaseTimes()
        self._stopwatch = stopwatch
        self._topology = topology
        self._events = events
        self._heartbeat = heartbeat
        self._ended = False
        self._open = False  # a training forward has begun, and no gradient has come since
        self._manual = False
        self._queued = False
        self._late = False  # it may have begun to listen inside an optimizer's step
        self._ready = False  # the optimizer under way has its gradients
        self._running: list[int] = []  # ids of optimizers inside step(), outermost first
        self._blind = 0  # optimizer steps before any forward of the root was seen
        self.owners = Owners(topology)
        self._lending = Lending(topology, self.owners)
        self._unstepped = Unstepped(self.owners.are_to_come)
        self._handles: list[RemovableHandle] = []
        self._act = act
        self._host, self._follows = host, follows
        self.without_grad = False
        self._root = RootHooks(
            topology, fuse, self._arrive, self._begin_forward, self._end_forward,
            self._output_gradient, act, events.forward_raised,
        )  # fmt: skip
        self._guards = {
            name: fuse.guard(getattr(self, f"_{name}"))
            for name in ("before_step", "closure_ended", "after_step", "settle",
                         "engine_ready", "engine_stepped", "host_stepped")
        }  # fmt: skip
        self._closure_over = dynamo.run_beside_graphs(self._guards["closure_ended"])
        self._computed = fuse.guard(events.backward_computed)
        self._over = fuse.guard(self._backward_over)

    @property
    def probe_seconds(self) -> float:
        """Cumulative seconds that were ours: of the training's own time, and of the disk thread."""
        return self._stopwatch.seconds + self._stopwatch.beside

    @property
    def in_graph(self) -> bool:
        """Whether the root's last event came from a graph of torch.compile, chosen before it."""
        return self._root.in_graph

    def is_the_model(self, fqn: str, module: nn.Module) -> bool:
        """Whether a call of this module is one of the model: the root, or all that is called."""
        return not fqn or self._root.is_only_part(module)

    @property
    def is_inside_a_step(self) -> bool:
        """Whether a step has begun and is not known to have ended."""
        return self.micro >= 0 and not self._ended

    def start(
        self, inside: nn.Module | None = None, first: Callable[[nn.Module], bool] | None = None
    ) -> None:
        """Begin to listen.

        Args:
            inside: the module whose first training forward has just begun.
            first: see `RootHooks`.
        """
        self._root.first = first
        self.passes.begin()
        self.hang()
        _listening.add(self)
        if self._host is not None:
            self._host.hear(self, self._guards["host_stepped"] if self._follows else None)
        if self._follows:
            self._root.counts = self._counts_here
        else:
            before = dynamo.run_beside_graphs(self._guards["before_step"])
            behind = dynamo.run_beside_graphs(self._behind_step)
            self._handles.append(register_optimizer_step_pre_hook(before))
            self._handles.append(register_optimizer_step_post_hook(behind))
        engine = self._topology.engine
        if engine is not None:  # whose optimizer owns no parameter of the model
            self._manual = True
            ready, over = self._guards["engine_ready"], self._guards["engine_stepped"]
            engine.listen(ready, over, self._act)
        self.beat()
        if inside is not None:
            self._late = True
            self._root.begin(inside)

    def hang(self) -> None:
        """Hang the two hooks on the root module."""
        self._root.hang()

    def unhang(self) -> None:
        """Take them off: for `pause()`, in which the model must be all the user's."""
        self._root.unhang(for_good=False)
        self.owners.let_go()

    def look_again(self) -> None:
        """At a sampled step: look whether the model and its optimizers are as they were."""
        self.owners.look_again()
        self._lending.anchors.look_again()

    def settle(self, *, keep: bool = True) -> None:
        """At the end of the run: end a step that is over, which only the next forward would tell.

        An optimizer of some of the parameters took it, or a scaler gave it up. Passes after the
        last step that were all lent have begun none, unless they are to be kept: something has cut
        the run off, or is to be told of them.
        """
        self._guards["settle"](keep)

    def stop(self) -> None:
        """Stop listening; every hook is gone."""
        if self in _listening:
            self.passes.close()
            if self._host is not None:
                self._host.leave(self)
        _listening.discard(self)
        if self._topology.engine is not None:
            self._topology.engine.mute()
        self._root.unhang(for_good=True)
        take_off(self._handles)

    def declare_step(self) -> None:
        """The user says that a step is over (a loop without a torch optimizer)."""
        self._manual = True
        self._end_step(skipped=False)

    def _engine_ready(self) -> None:
        engine = self._topology.engine
        if engine is not None and self.micro >= 0 and not self._ended:
            self._enter(OPTIMIZER)
            self._events.gradients_ready(engine.optimizer, by_engine=True)

    def _engine_stepped(self, skipped: bool) -> None:  # noqa: FBT001  (a callback's argument)
        if not self._ended and self.micro < 0:
            self._stepped_unseen()
            return
        self._end_step(skipped=skipped)

    def beat(self, state: int | None = None) -> None:
        """Write the heartbeat."""
        phases = self.phases.seconds
        self._heartbeat.beat(
            step=self.step, micro=max(self.micro + self._ahead, 0),
            state=_STATE[self.phases.phase] if state is None else state,
            steps=self.steps, skipped=self.skipped, sampled=self.sampled,
            phase_seconds=(phases[0], phases[1], phases[2], phases[3]),
            probe_seconds=self._stopwatch.seconds + self._stopwatch.beside,
        )  # fmt: skip

    @property
    def in_forward(self) -> bool:
        """Whether a training forward of the model has begun, and not come to its end."""
        return self.phases.phase == FORWARD

    def place(self) -> dict[str, Any]:
        """Return where the loop is, as a heartbeat says it: `step`, `steps`, `micro`, `state`."""
        micro, state = max(self.micro + self._ahead, 0), STATES[_STATE[self.phases.phase]]
        return {"step": self.step, "steps": self.steps, "micro": micro, "state": state}

    def reading(self) -> tuple[int, float, float, float]:
        """Return the step, and seconds up to now: of all phases, of them ours, of our threads."""
        watch = self._stopwatch
        return self.step, self.phases.total(), watch.seconds, watch.beside

    def leave_out(self) -> None:
        """Start the stopwatch anew: the time since the last event belongs to no phase."""
        self.phases.leave_out()

    def _enter(self, phase: int) -> None:
        self.phases.enter(phase)
        self.beat()

    def _arrive(self) -> None:
        """Hear that a forward is about to begin, before which ranks may wait for each other.

        Who waits there is in the forward, and who has not come so far is still at its data.
        """
        if self._running or self._follows:
            return
        if self._ended:
            self._begin_step()
        self._ahead = 1
        self._enter(FORWARD)

    def _begin_forward(self, training: bool) -> None:  # noqa: FBT001  (a callback's argument)
        self._ahead = 0
        if not training:
            self._enter(self.phases.phase)
            self.evaluating = True
            self._events.evaluation_begins()
            return
        self.evaluating = False
        self._follow()
        if self._root.by_parts and self._open and not self._ended:
            self._enter(FORWARD)  # the same forward goes on in another part
            return
        if not self._running:
            if not self._ended and self.owners.some_stepped:
                self._end_step(skipped=False)  # some parameters belong to no optimizer
            elif not self._ended and self._lending.has_left:
                vanished = self._lending.anchors.vanished()
                skipped = self._events.given_up(vanished=vanished)
                if skipped or (vanished and not self._lending.throws_away()):
                    self._end_step(skipped=skipped)
            self._go_on()
        self._throw_away()
        if self._ended:  # inside a running step() too: LBFGS calls its closure there
            self._begin_step()
        if self._blind and self._root.in_a_part:  # so the steps before were steps of this model
            self.step, self._blind = self.step + self._blind, 0
        self.micro += 1
        self.passes.forward()
        self._open = True
        self._enter(FORWARD)
        self._events.forward_begins()

    def _settle(self, keep: bool) -> None:  # noqa: FBT001  (of a guard)
        if self._ended or self._running:
            return
        if self.owners.some_stepped:
            self._end_step(skipped=False)
        elif self._lending.has_left:
            vanished = self._lending.anchors.vanished()
            if self._events.given_up(vanished=vanished):
                self._end_step(skipped=True)
        if keep or self._ended:
            return
        if self._lending.is_left_over():
            self._lend()
        if 0 <= self.micro < self.lent:  # all of them
            self.step, self._ended = self.step - 1, True
            self._enter(DATA)

    def _begin_step(self) -> None:
        self.step += 1
        self.micro, self.lent = -1, 0
        self._ended = False
        self.owners.begin_step()
        self._lending.begin_step()

    def _end_forward(self, tensors: list[Tensor], trained: list[Tensor]) -> None:
        if self.evaluating:
            self.evaluating = False
            self.leave_out()
            return
        self._enter(BACKWARD)
        self._root.follow(trained, self.micro)
        self._queued = False
        self.backward.forget()
        told = tensors if self._follows else trained  # nothing else tells of what it returns
        self._events.forward_ended(tensors, told)

    def _output_gradient(self, micro: int | None) -> None:
        self._open = False
        self.backward.comes_to(micro)
        if not (self._queued or is_captured()):  # any output may be the one the loss came from
            if not self._lending.is_further(self.micro):
                self._throw_away()  # many loops call zero_grad() between forward and backward
            self._queued = True
            self._lending.backward_begins()
            self.passes.backward(self.backward.micro_or(self.micro))
            torch_private.after_backward(self._computed, self._over)

    def _backward_over(self) -> None:
        self._queued = False
        self.passes.backward_over()
        self.backward.forget()
        self._lending.backward_over(self.micro + 1, in_a_step=bool(self._running))
        if self.trains and not self._running:
            self._unstepped.backward()
        self._events.backward_ended()
        if not self._ended and self._lending.was_frozen():
            self._lend()

    def _before_step(self, optimizer: Optimizer, args: Args, kwargs: Kwargs) -> Call | None:
        """Hear that an optimizer's `step` begins; returns what torch is to call it with, or None.

        Where it has a closure the gradients are there when that is through: Lightning computes
        forward and backward in it. So torch gets one that tells us then.
        """
        self._late = False
        if self._manual or is_captured():
            return None
        if not self.owners.parameters_of(optimizer):
            if self.owners.any or self._is_anothers(optimizer):
                self._lending.another_steps()
            self.passes.another_steps()
            self._unstepped.another_steps()
            return None
        if id(optimizer) in self._running:  # its last step() raised and never ended
            del self._running[self._running.index(id(optimizer)) :]
        self._running.append(id(optimizer))
        if len(self._running) > 1:
            return None
        self._ready = False
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._closure_ended(optimizer)
            return None

        def told() -> object:
            loss = closure()
            self._closure_over(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": told}
        return (args[0], told, *args[2:]), kwargs

    def _closure_ended(self, optimizer: Optimizer) -> None:
        """Hear that the gradients are what the optimizer is to use; at first, of several times."""
        if not (self._ready or self._ended) and self.micro >= 0:
            self._ready = True
            self._enter(OPTIMIZER)
            self.passes.take(summed_by_hand=self._lending.anchors.replaced())
            self._events.gradients_ready(optimizer)

    def _behind_step(self, *args: object) -> None:
        self._guards["after_step"](*args)
        self._act()

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._late and self.owners.parameters_of(optimizer):
            self._late = False
            self._running = [id(optimizer)]  # a closure, as Lightning's, had the first forward
        if id(optimizer) not in self._running or is_captured():
            return
        del self._running[self._running.index(id(optimizer)) :]
        if self._running or self._ended:  # in a pause, optimizers step on
            return
        if self.micro < 0:
            self._stepped_unseen()
            return
        self._events.forward_is_next()
        if self.owners.have_all_stepped(optimizer):
            self._end_step(skipped=found_inf(optimizer))

    def _stepped_unseen(self) -> None:
        """Hear of a step without a forward; loading a checkpoint may take one to make the state."""
        if self._root.deaf:  # in a pause, in which the model is the user's
            return
        self._blind += 1
        self._root.listen_to_parts()
        if self._blind == _BLIND_STEPS and self._events.blind():
            self._blind = 0

    def _end_step(self, *, skipped: bool, unstepped: bool = False) -> None:
        if self._ended:
            return
        self._ended = True
        if not unstepped:
            self._unstepped.step()
        self.passes.end_step(self.step)
        self.steps += 1
        self.skipped += skipped
        self._enter(DATA)
        self._events.step_ended(skipped=skipped)
        self._root.end_step()
        self._events.forward_is_next()
        if self._host is not None:
            self._host.stepped(self, skipped=skipped)

    @property
    def next_step(self) -> int:
        """The step that a forward now belongs to."""
        return self.step + self._ended

    @property
    def trains(self) -> bool:
        """Whether the model is in training mode."""
        return self._topology.root.training

    def _leader(self) -> Clock | None:
        """Return the clock that this one follows; None: none, or one that is over."""
        return self._host.clock if self._host is not None and self._follows else None

    def _counts_here(self) -> bool:
        clock = self._leader()
        self.without_grad = clock is None or clock.trains
        return self.without_grad

    def _follow(self) -> None:
        clock = self._leader()
        if clock is not None and (self._ended or self.micro < 0):
            self._begin_step()
            self.step = clock.next_step

    def _host_stepped(self, skipped: bool) -> None:  # noqa: FBT001  (a callback's argument)
        if self.micro >= 0:
            self._end_step(skipped=skipped)

    def _is_anothers(self, optimizer: Optimizer) -> bool:
        return any(
            clock is not self and bool(clock.owners.parameters_of(optimizer))
            for clock in _listening
        )

    def _go_on(self) -> None:
        """End a step that no optimizer takes any more, in a loop that goes on without."""
        if self._ended or self._manual or self._follows or not self._unstepped.goes_on:
            return
        if self._unstepped.end(gone=self._lending.was_thrown_away()):
            self._end_step(skipped=False, unstepped=True)

    def _throw_away(self) -> None:
        """Take for lent what came before a `zero_grad` that no step of this model's followed."""
        if not self._ended and self._lending.was_thrown_away():
            self.passes.throw_away()
            self._unstepped.throw_away()
            self._lend()

    def _lend(self) -> None:
        self.lent = self._lending.lend()
        self.passes.lend(self.lent)
        self._events.lent(self.lent)
