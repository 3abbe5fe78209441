"""The training side of ddpprobe on one rank: events in, journal frames out.

Wires the clock, the hooks, the watch and the journal together. It opens no port, joins no
collective, waits for no disk (`record_files`), and imports neither zarr nor prometheus_client.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from ddpprobe.rank.capture.capturing import Capturing
from ddpprobe.rank.hooks import call_cost, loss_scale, step_facts
from ddpprobe.rank.hooks.compiled import renew_graphs
from ddpprobe.rank.hooks.depth import Room
from ddpprobe.rank.hooks.pending_rows import PendingRows, unless_logged
from ddpprobe.rank.hooks.state_check import Looks
from ddpprobe.rank.interval import Pacer
from ddpprobe.rank.join import Joined
from ddpprobe.rank.journal_writer import EndedStep, FrameWriter, Identity
from ddpprobe.rank.listener import tell
from ddpprobe.rank.logged_numbers import LoggedNumbers, returned_loss
from ddpprobe.rank.observers import Observers
from ddpprobe.rank.options import InstallOptions
from ddpprobe.rank.order_handler import OrderHandler
from ddpprobe.rank.quiet_fuse import QuietFuse
from ddpprobe.rank.signal_handlers import OF_THE_SCRIPT
from ddpprobe.rank.step_clock import StepClock
from ddpprobe.rank.step_times import StepTimes
from ddpprobe.rank.topology import stages
from ddpprobe.rank.topology.describe import Topology, describe, outermost
from ddpprobe.rank.topology.refusals import refuse_taken
from ddpprobe.rank.topology.replicas import in_turn
from ddpprobe.rank.torch_private import dynamo, functorch
from ddpprobe.records import events
from ddpprobe.records.step import CHECKED, NOTED, TRAINABLE, UNREDUCED, FirstBad
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.heartbeat import STATES
from ddpprobe.rundir.stopwatch import Caller, Stopwatch

_GRAPH_TOO_EARLY = "the model is inside a compiled function, whose graph was chosen before the step"
_TOO_FAR_BEHIND = "watch: the device is too far behind"
_NO_WORD = "end: no word from the device"


@final
class Recorder:
    """Records one model on one rank.

    Args:
        topology: the model as `install` found it; looked at again at its first training forward,
            because it may be wrapped, moved or sharded in between.
        who: this rank.
        options: of `install()`.
        joined: where frames and the present go; looks after the daemon.
        pacer: which steps are sampled.
        order_handler: does what the head orders.
        capturing: keeps full tensors.
        stopwatch: times whatever enters from the training.
    """

    def __init__(
        self, topology: Topology, who: Identity, options: InstallOptions, joined: Joined,
        pacer: Pacer, order_handler: OrderHandler, capturing: Capturing, stopwatch: Stopwatch,
    ) -> None:  # fmt: skip
        journal, heartbeat = joined.record_files.journal, joined.record_files.heartbeat
        self.fuse = QuietFuse("hooks", on_blow=self._blown, stopwatch=stopwatch)
        self._topology, self._names = topology, stages.Names(topology)
        self._who = who
        self._pacer = pacer
        self.capturing = capturing
        self._options = options
        self._heartbeat = heartbeat
        self._after_step, self._unlike = joined.after_step, joined.unlike
        self._clock_fuse = QuietFuse("steps", on_blow=self._blown, stopwatch=stopwatch)
        self._order_handler = order_handler
        self._clock = StepClock(
            topology, self, self._clock_fuse, heartbeat, stopwatch, options.first_step,
            order_handler.act, options.host, follows=options.follows,
        )  # fmt: skip
        self._frame_writer = FrameWriter(journal, who, self._clock.passes)
        self.declare_step = self._clock.declare_step
        self._logged = LoggedNumbers(self._clock, self._frame_writer)
        self._observers: Observers | None = None
        self._sampling = self._noted = self._trains = self._renewed = False  # noted: since a sample
        self._set_up: dict[str, float] = {}  # how the loop is, in the sampled step
        self._optimizers = step_facts.OptimizerFacts()
        self._bad: FirstBad | None = None
        self._stopwatch = stopwatch
        self._times = StepTimes(self._clock.phases, stopwatch)
        self._files = (journal, heartbeat, pacer, order_handler, self._clock.phases)
        self.is_reducing = self._times.is_reducing
        self._calls_are_measured, self._open = False, True
        self._room = Room()

    def start(
        self, inside: nn.Module | None = None, first: Callable[[nn.Module], bool] | None = None
    ) -> None:
        """Begin to listen to the model and its optimizers; arguments as of `StepClock.start`."""
        self._frame_writer.handles(present=OF_THE_SCRIPT.present)
        self._clock.start(inside, first)

    # -- the user's face --------------------------------------------------------------------------

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Keep named numbers with their step; tensors stay on their device."""
        if self.fuse.blown:
            return
        rows = self._observers.rows if self._observers is not None else None
        self._logged.take(values, rows, sampling=self._sampling)

    def note(self, what: str, config: Mapping[str, object]) -> None:
        """Write down what the script says; what it announces is marked on the next sampled step."""
        self._noted |= bool(what)
        self._frame_writer.note(self._clock.step, what, config)

    def listen(self, sampled: Callable[[int, Mapping[str, float]], object]) -> None:
        """Have a `Listener` told of sampled steps; its errors must be contained already."""
        told = functools.partial(tell, sampled, self._who.world_size, self._heartbeat)
        self._frame_writer.on_sampled = told

    def pause(self, reason: str) -> None:
        """Take every hook off the model until `resume`."""
        self._logged.rest()
        if self._observers is not None:
            self._observers.pause()
        self._pacer.pause()
        self._clock.unhang()
        self._clock.beat(STATES.index("paused"))
        self._frame_writer.life(events.PausedEvent(reason=reason, time_ns=time.time_ns()))

    def resume(self) -> None:
        """Go on after a pause; the time in between belongs to no phase."""
        self._clock.hang()
        self._clock.leave_out()
        self._clock.beat()
        self._frame_writer.life(events.ResumedEvent(time_ns=time.time_ns()))

    def close(self, words: events.ClosedEvent | None = None) -> None:
        """Write what is left and the goodbye, take every hook off, close every file. Idempotent."""
        if not self._open:
            return
        self._open = False
        words = words or events.ClosedEvent()
        broken = words.error is not None or words.asked
        logged = self._logged.has_any(self._clock.step, sampling=self._sampling)
        self._clock.settle(keep=broken or logged or self._bad is not None)
        place = self._clock.place()
        self._clock.stop()
        if self._observers is not None:
            # A device that has failed gives nothing more; one may wait for a rank that is gone.
            rest = Fuse("the rest of the record")
            idle = rest.guard(self._observers.rows.await_device)(broken=broken)
            if idle:
                rest.guard(self._flush)()
            elif idle is not None:
                self._frame_writer.lose(_NO_WORD, 1)
            if rest.blown:
                told = events.FuseEvent(component=rest.component, error=rest.last_error)
                self._frame_writer.life(told)
            Fuse("hooks").guard(self._observers.close)(idle=bool(idle))
        self._frame_writer.life(replace(words, sampled=self._clock.sampled, **place))
        self._clock.beat(STATES.index("closed"))
        for file in self._files:
            file.close()
        self._room.give_back()
        # torch goes over the hooks that there were when a call began: one of ours may be still due.
        self.fuse.blown = self._clock_fuse.blown = True

    def _flush(self) -> None:
        """Write what the journal does not have yet; waits for the device."""
        observers = self._prepare()
        self._logged.held.send()
        if self._sampling and self._clock.is_inside_a_step:
            self._finish_sampled(skipped=False, partial=True)
        elif self._bad is not None:
            self._alarm(partial=True, skipped=False)
        if self._logged.losses.has_bad():
            self._tell_unsampled(skipped=False, partial=self._clock.is_inside_a_step)
        if self._clock.is_inside_a_step:  # what a device has seen of it is not sent yet
            observers.watch.end_step(self._clock.step)
        observers.watch.poll(wait=True)
        self._frame_writer.lose(_TOO_FAR_BEHIND, observers.watch.lost)
        self._frame_writer.ship(wait=True)
        Fuse("the last look at the weights").guard(self._look_at_what_is_left)()

    @property
    def is_inside_a_step(self) -> bool:
        """Whether a step has begun and is not known to have ended."""
        return self._clock.is_inside_a_step

    def abandon(self) -> None:
        """In a forked child: let go of everything without a trace in the parent's files."""
        self._open = False
        self.fuse.blown = self._clock_fuse.blown = True
        for file in self._files:
            file.close()

    # -- step_events.Events -----------------------------------------------------------------------

    def forward_begins(self) -> None:
        """Attach what this step needs."""
        self._logged.forward_begins()
        observers = self._prepare()
        observers.watch.poll()
        self._frame_writer.lose(_TOO_FAR_BEHIND, observers.watch.lost)
        self._frame_writer.ship()
        self.capturing.write()
        if self._clock.micro == 0:
            self._begin_step(observers)
        observers.attach(sampled=self._sampling)
        observers.watch.seek()

    def forward_ended(self, outputs: list[Tensor], trained: list[Tensor]) -> None:
        """Look at the loss."""
        observers = self._prepare()
        observers.watch.found()
        observers.watch.output(trained)
        loss = returned_loss(outputs)
        if self._sampling:
            if self._bad is None and observers.rows.bad:  # and the root's output does not show it
                self._bad = self._explain(observers)
            observers.full.probed()
            if self._clock.micro == self._clock.lent or self._clock.trains != self._trains:
                self._set_up |= step_facts.modes(observers.topology)  # the last pass is what counts
            self._trains = self._clock.trains
            if loss is not None and "loss" not in self._logged.names:
                observers.rows.add_scalar(unless_logged("loss"), loss)
        elif loss is not None:
            self._logged.losses.add(self._clock.step, loss, logged=False)

    def evaluation_begins(self) -> None:
        """Write what is held: an evaluation may take long."""
        self._logged.rest()
        if self._observers is not None:
            self._observers.eager.evaluation_begins()

    def forward_raised(self, error: BaseException) -> None:
        """Look for a NaN in what the code that raised had at hand."""
        observers = self._prepare()
        observers.watch.found()
        if self._bad is None:
            observers.watch.look_at_hand(error)

    def backward_computed(self) -> None:
        """Look at the gradients before any of them is reduced."""
        self._prepare().backward_computed(sampled=self._sampling)
        self._times.backward_computed()

    def backward_ended(self) -> None:
        """Read the reduced gradients, before the user clips them."""
        self._times.backward_ended()
        observers = self._prepare()
        observers.loss_scale.remember(
            told="loss_scale" in self._logged.names, owned=self._clock.owners.stepped_by,
            may_own=self._clock.owners.may_own,
        )  # fmt: skip
        self.capturing.backward_ended(observers.loss_scale.last)
        if self._sampling:
            observers.weights.remember()
            self._add_loss_scale(observers)
            observers.backward_ended()

    def gradients_ready(self, optimizer: Optimizer, *, by_engine: bool = False) -> None:
        """Read what the optimizer will use; what an engine has reduced it has not clipped yet."""
        observers = self._prepare()
        self.capturing.gradients_ready()
        if not self._sampling:
            return
        observers.weights.remember()
        owners = self._clock.owners
        if not self._set_up.get(TRAINABLE):  # frozen for the first pass, and not for this step
            self._set_up |= step_facts.modes(observers.topology)
        self._set_up |= observers.unregistered.told(owners.all_parameters)
        scale = loss_scale.of_optimizer(optimizer)
        self._optimizers.add(optimizer, observers.topology, scale, observers.rows, owners.first)
        mine = None if by_engine else owners.parameters_of(optimizer)
        if not observers.gradients_are_current:
            observers.read_gradients(mine, scaled=by_engine or scale is not None)
            observers.gradients_read |= by_engine
        observers.eager.reduced.take(mine or ())

    def given_up(self, *, vanished: bool) -> bool:
        """Ask the scalers; if the user told the scale of one that is not torch's, the gradients."""
        gave_up = self._prepare().loss_scale.gave_up(self._clock.owners.may_own)
        return gave_up or (vanished and self._logged.told_scale and self._bad is not None)

    def lent(self, until: int) -> None:
        """Count the first micro-batches out: what was bad in them stays known."""
        observers = self._prepare()
        self._logged.losses.forget(self._clock.step)
        if self._sampling:
            observers.rows.lend(until)
            observers.gradients_read = False
            self._set_up = step_facts.modes(observers.topology)

    def step_ended(self, *, skipped: bool) -> None:
        """Ship the step and leave the model clean."""
        observers, sampled = self._prepare(), self._sampling
        observers.watch.end_step(self._clock.step, skipped=skipped)
        if sampled:
            self._clock.sampled += 1
            turn = self._pacer.turn(self._clock.step)
            observers.rows.add_checksums(in_turn(observers.compared(), turn))
            if unreduced := observers.unreduced:
                observers.rows.add_scalar(UNREDUCED, unreduced)  # so replicas may part: local SGD
            observers.weights.tell(self._clock.micro, skipped=skipped)
            self._set_up |= self._optimizers.tell(observers.rows, alone=not observers.eager.reduced)
            self._finish_sampled(skipped=skipped, partial=False)
            self._after_step()
        else:
            self._end_unsampled(observers, skipped=skipped)
        observers.end_step()
        OF_THE_SCRIPT.step_ended()
        self._frame_writer.handles(present=OF_THE_SCRIPT.present)
        self._bad = None
        if not self._calls_are_measured and self._stopwatch.calls[Caller.TENSOR]:
            teach = Fuse("measuring what hooks take").guard(call_cost.teach)
            self._calls_are_measured = teach(self._stopwatch) is not False
        self._pacer.end_step(*self._clock.reading(), sampled=sampled)
        self._order_handler.hear(self._clock.step)
        self._times.end_step(sampled=sampled, following=self._pacer.sampled(self._clock.step + 1))

    def forward_is_next(self) -> None:
        """An optimizer has stepped: choose the graphs of the next step."""
        if self._observers is None:
            return
        self._observers.eager.reduced.end_take()
        if self._clock.in_graph:
            self._observers.choose_graphs(sampled=self._pacer.sampled(self._clock.step + 1))

    def blind(self) -> bool:
        """Try the one remedy, or say loudly that nothing is observed: silence looks like health."""
        if not self._renewed and dynamo.has_graphs():
            self._renewed = True
            renew_graphs("the function that calls the model")
            return True
        self._frame_writer.blind(self._clock.step, type(self._topology.root).__name__)
        return False

    # -- inside -----------------------------------------------------------------------------------

    def _prepare(self) -> Observers:
        if self._observers is None:
            given = outermost(self._topology.outer)
            topology = describe(given, self._options.select, self._topology.engine)
            refuse_taken(topology.named_parameters(), topology.engine)
            topology.cut = self._topology.cut | self._names.cut(topology)
            topology.differ = self._topology.differ
            self._observers = Observers(
                topology, self._options.select, self._clock, self._who.rank,
                self.fuse, self.on_bad, self.on_late,
                lambda fqns: self._frame_writer.lost(self._clock.step, fqns), self._captured,
                self.capturing, full_backward=self._options.backward == "full",
                named=self._options.has_histogram if self._options.histograms else None,
            )  # fmt: skip
            wrapper = "pipeline" if topology.cut else topology.wrapper
            told = events.TopologyEvent(wrapper=wrapper, device=str(topology.device))
            self._frame_writer.life(told)
        return self._observers

    def _begin_step(self, observers: Observers) -> None:
        wanted = self._pacer.sampled(self._clock.step)
        self._sampling = observers.begin_step(sampled=wanted)
        self._bad = None
        if self._sampling:
            self._clock.look_again()
            observers.weights.begin(self._pacer.turn(self._clock.step))
            step_facts.add_stale_units(observers.topology, observers.rows)
            self._logged.names.clear()
            self._set_up = {}
            self._optimizers.begin_step()
        elif wanted:
            told = events.UnsampledEvent(step=self._clock.step, reason=_GRAPH_TOO_EARLY)
            self._frame_writer.life(told)

    def _captured(self) -> None:
        self._frame_writer.captured(self._clock.step, sampled=self._sampling)

    def on_late(self, bad: FirstBad, skipped: bool) -> None:  # noqa: FBT001  (of a callback)
        """Hear, from a device, that a local value of an earlier step is bad."""
        if not self._pacer.sampled(bad.step):  # else its rows say it better
            self._frame_writer.alarm(bad, bad.step, partial=False, skipped=skipped, sampled=False)

    def on_bad(self, bad: FirstBad) -> None:
        """Hear that a local value of this step is bad."""
        if self._sampling and self._observers is not None and bad.fqn is None:
            bad = self._observers.rows.first_fault() or bad
        if self._bad is None or bad.names(self._bad):
            now = self._clock.step
            born = self._explain(self._prepare()) if bad.phase == "forward" else None
            self._bad = born or replace(bad, step=now)
            self._alarm(partial=True, skipped=False)

    def _explain(self, observers: Observers) -> FirstBad | None:
        """Return the parameter that made this forward bad, if one was bad before it."""
        micro = self._clock.micro if self._bad is None else 0
        return observers.state.explain(self._clock.step, micro)

    def _alarm(self, *, partial: bool, skipped: bool) -> None:
        """Journal the bad step at once: the process may not live to its end."""
        if self._bad is not None:
            told = {"partial": partial, "skipped": skipped, "sampled": self._sampling}
            self._frame_writer.alarm(self._bad, self._clock.step, **told)

    def _look_at_what_is_left(self) -> None:
        """Tell what a last step that was not sampled has left: no later one will show it."""
        bad = None if self._clock.is_inside_a_step else self._prepare().state.left()
        if bad is not None:
            self._frame_writer.alarm(bad, bad.step, partial=False, skipped=False, sampled=False)

    def _add_loss_scale(self, observers: Observers) -> None:
        if "loss_scale" not in self._logged.names and observers.loss_scale.last is not None:
            observers.rows.add_scalar("loss_scale", observers.loss_scale.last)

    def _end_unsampled(self, observers: Observers, *, skipped: bool) -> None:
        observers.state.end(self._clock.step, self._clock.micro, self._bad)
        if skipped:
            self._tell_unsampled(skipped=True, partial=False)
            return
        if self._bad is not None:
            self._alarm(partial=False, skipped=False)
        if self._logged.losses.full:
            self._tell_unsampled(skipped=False, partial=False)

    def _tell_unsampled(self, *, skipped: bool, partial: bool) -> None:
        """Write the losses so far, or that the optimizer skipped a step: an event, no anomaly."""
        observers = self._prepare()
        observers.rows.begin()
        if skipped:
            self._add_loss_scale(observers)
            observers.loss_scale.look_again()
        facts = self._logged.losses.take(self._clock.step, observers.rows)
        self._push(self._ended(skipped=skipped, partial=partial, sampled=False, facts=facts))

    def _finish_sampled(self, *, skipped: bool, partial: bool) -> None:
        observers = self._prepare()
        observers.tell()
        observers.detach()
        self._sampling = False
        facts = self._facts() | self._set_up
        facts |= self._logged.losses.take(self._clock.step, observers.rows)
        looks = observers.state.look(self._clock.step, self._clock.micro, over=not partial)
        if looks.after is not None:
            facts[CHECKED] = float(looks.after.count)
        ended = self._ended(
            skipped=skipped, partial=partial, sampled=True, facts=facts,
            silent=None if self._clock.in_forward else observers.eager.silent(), state=looks,
        )  # fmt: skip
        if partial:
            self._push(ended)
        else:
            self._logged.held.hold(functools.partial(self._push, ended))

    def _ended(
        self, *, skipped: bool, partial: bool, sampled: bool, facts: dict[str, float],
        silent: tuple[str, ...] | None = (), state: Looks | None = None,
    ) -> Callable[[PendingRows], EndedStep]:  # fmt: skip
        """Return the step that is over, but for its rows."""
        return functools.partial(
            EndedStep, step=self._clock.step, sampled=sampled, skipped=skipped, partial=partial,
            wall_time_ns=time.time_ns(), facts=facts, watched=self._bad, silent=silent, state=state,
        )  # fmt: skip

    def _push(self, ended: Callable[[PendingRows], EndedStep]) -> None:
        with functorch.outside():  # where the next forward may be
            self._frame_writer.push(ended(self._prepare().rows.fetch()))
        self._frame_writer.ship()

    def _facts(self) -> dict[str, float]:
        """Return what is known of this step without its rows."""
        facts = self._times.told()
        facts["micro_batches"] = float(self._clock.micro + 1 - self._clock.lent)
        if self._noted:
            self._noted, facts[NOTED] = False, 1.0
        self._unlike, unlike = {}, self._unlike
        return facts | unlike

    def _blown(self) -> None:
        """A fuse has blown: leave the model clean, and say so in the journal."""
        fuse = self.fuse if self.fuse.blown else self._clock_fuse
        self.fuse.blown = self._clock_fuse.blown = True
        self._sampling = False
        # Each on its own: what broke the component may break one of these, but not the others.
        Fuse("journal").guard(self._logged.held.send)()
        told = events.FuseEvent(component=fuse.component, error=fuse.last_error)
        Fuse("journal").guard(self._frame_writer.life)(told)
        if self._observers is not None:
            Fuse("hooks").guard(self._observers.close)()
        # torch may be inside its loop over the global optimizer hooks, which taking ours off now
        # would end with an error in the user's step(): they stay, dead, until `close`.
        Fuse("steps").guard(self._clock.unhang)()
