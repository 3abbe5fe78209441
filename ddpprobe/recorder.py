"""The training side of ddpprobe on one rank: events in, journal frames out.

Wires the clock, the hooks, the watch and the journal together. It opens no port, joins no
collective, waits for no disk (`writing`), and imports neither zarr nor prometheus_client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import final

from torch import Tensor

from ddpprobe.fuse import Fuse, logger
from ddpprobe.heartbeat import STATES, STEP_PHASES, HeartbeatWriter
from ddpprobe.hooks import gradients, loss_scale
from ddpprobe.hooks.capturing import Capturing
from ddpprobe.hooks.compiled import renew_graphs
from ddpprobe.hooks.depth import Room
from ddpprobe.hooks.state_check import Looks
from ddpprobe.journal import JournalWriter
from ddpprobe.observers import Observers
from ddpprobe.pacing import Pacer
from ddpprobe.records import CHECKED, UNREDUCED, FirstBad
from ddpprobe.responder import Responder
from ddpprobe.shipping import EndedStep, Identity, Shipper
from ddpprobe.steps import StepClock
from ddpprobe.topology import stages
from ddpprobe.topology.describe import Topology, describe, outermost
from ddpprobe.topology.replicas import in_turn
from ddpprobe.torch_private import dynamo

_GRAPH_TOO_EARLY = "the model is inside a compiled function, whose graph was chosen before the step"
_TOO_FAR_BEHIND = "watch: the device is too far behind"


@final
class Recorder:
    """Records one model on one rank.

    Args:
        found: the model as `install` found it; looked at again at its first training forward,
            because it may be wrapped, moved or sharded in between.
        who: this rank.
        pacer: which steps are sampled.
        responder: does what the head orders.
        capturing: keeps full tensors.
        select: whether a module FQN is observed.
        journal: where frames go.
        heartbeat: where the present goes.
        full_backward: also `grad_input`, by full backward hooks where proven safe.
        first_step: number of the first step.
        after_step: called at the end of each sampled step (keeps the daemon alive).
    """

    def __init__(
        self, found: Topology, who: Identity, pacer: Pacer, responder: Responder,
        capturing: Capturing, select: Callable[[str], bool], journal: JournalWriter,
        heartbeat: HeartbeatWriter, *,
        full_backward: bool = False, first_step: int = 0,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.fuse = Fuse("hooks", on_blow=self._blown)
        self._found, self._names = found, stages.Names(found)
        self._who = who
        self._pacer = pacer
        self.capturing = capturing
        self._select = select
        self._shipper = Shipper(journal, who)
        self._heartbeat = heartbeat
        self._files = (journal, heartbeat, pacer, responder)
        self._full_backward = full_backward
        self._after_step = after_step
        self._clock_fuse = Fuse("steps", on_blow=self._blown)
        self._responder = responder
        self._clock = StepClock(found, self, self._clock_fuse, heartbeat, first_step, responder.act)
        self.declare_step = self._clock.declare_step
        self._parts: Observers | None = None
        self._sampling = False
        self._logged: set[str] = set()
        self._told_scale = False  # ever, by the user
        self._renewed = False
        self._bad: FirstBad | None = None
        self._base = self._readings()
        self._open = True
        self._room: Room | None = None

    def start(self) -> None:
        """Begin to listen to the model and its optimizers."""
        self._room = Room(self._found.root)
        self._clock.start()

    # -- the user's face --------------------------------------------------------------------------

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Keep named numbers with the step, if it is sampled; tensors stay on their device."""
        self._told_scale |= "loss_scale" in values
        if self._sampling and self._parts is not None:
            for name, value in values.items():
                self._parts.rows.add_scalar(name, value)
                self._logged.add(name)

    def pause(self, reason: str) -> None:
        """Take every hook off the model until `resume`."""
        if self._parts is not None:
            self._parts.pause()
        self._pacer.pause()
        self._clock.unhang()
        self._clock.beat(STATES.index("paused"))
        self._shipper.life("paused", reason=reason, time_ns=time.time_ns())

    def resume(self) -> None:
        """Go on after a pause; the time in between belongs to no phase."""
        self._clock.hang()
        self._clock.leave_out()
        self._clock.beat()
        self._shipper.life("resumed", time_ns=time.time_ns())

    def close(self, words: Mapping[str, object] | None = None) -> None:
        """Write what is left, take every hook off, close every file. Idempotent.

        Args:
            words: of the goodbye, see `ends.last_words`.
        """
        if not self._open:
            return
        self._open = False
        place = self._clock.place()
        self._clock.settle()
        self._clock.stop()
        if self._parts is not None:
            if self._sampling:
                self._finish_sampled(skipped=False, partial=True)
            elif self._bad is not None:
                self._alarm(partial=True, skipped=False)
            if self._clock.is_inside_a_step:  # what a device has seen of it is not sent yet
                self._parts.watch.end_step(self._clock.step)
            self._parts.watch.poll(wait=True)
            self._shipper.lose(_TOO_FAR_BEHIND, self._parts.watch.lost)
            self._shipper.ship(wait=True)
            self._parts.close()
        told = {"status": "ok", **(words or {}), **place}
        self._shipper.life("closed", sampled=self._clock.sampled, **told)
        self._clock.beat(STATES.index("closed"))
        for file in self._files:
            file.close()
        if self._room is not None:
            self._room.give_back()

    def abandon(self) -> None:
        """In a forked child: let go of everything without a trace in the parent's files."""
        self._open = False
        self.fuse.blown = self._clock_fuse.blown = True
        for file in self._files:
            file.close()

    # -- steps.Events -----------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """Attach what this step needs."""
        started = time.perf_counter()
        parts = self._prepare()
        parts.watch.poll()
        self._shipper.lose(_TOO_FAR_BEHIND, parts.watch.lost)
        self._shipper.ship()
        self.capturing.write()
        if self._clock.micro == 0:
            self._begin_step(parts)
        parts.attach(sampled=self._sampling)
        parts.watch.seek()
        self._clock.probe_seconds += time.perf_counter() - started

    def forward_ended(self, outputs: list[Tensor], trained: list[Tensor]) -> None:
        """Look at the loss."""
        started = time.perf_counter()
        parts = self._prepare()
        parts.watch.found()
        parts.watch.output(trained)
        if self._sampling:
            if self._bad is None and parts.rows.bad:  # and the root's output does not show it
                self._bad = self._explain(parts)
            parts.full.probed()
            losses = [t for t in outputs if t.dim() == 0 and t.is_floating_point()]
            if len(losses) == 1 and "loss" not in self._logged:
                parts.rows.add_scalar("loss", losses[0])
        self._clock.probe_seconds += time.perf_counter() - started

    def forward_raised(self, error: BaseException) -> None:
        """Look for a NaN in what the code that raised had at hand."""
        parts = self._prepare()
        parts.watch.found()
        if self._bad is None:
            parts.watch.look_at_hand(error)

    def backward_computed(self) -> None:
        """Look at the gradients before any of them is reduced."""
        started = time.perf_counter()
        self._prepare().backward_computed(sampled=self._sampling)
        self._clock.probe_seconds += time.perf_counter() - started

    def backward_ended(self) -> None:
        """Read the reduced gradients, before the user clips them."""
        started = time.perf_counter()
        parts = self._prepare()
        parts.loss_scale.remember(told="loss_scale" in self._logged)
        self.capturing.backward_ended(parts.loss_scale.last)
        if self._sampling:
            self._add_loss_scale(parts)
            if parts.topology.gradients_are_reduced():
                parts.read_gradients(scaled=True)
                parts.gradients_read = True
        self._clock.probe_seconds += time.perf_counter() - started

    def gradients_ready(self, optimizer: object) -> None:
        """Read what the optimizer will use."""
        parts = self._prepare()
        self.capturing.gradients_ready()
        if not self._sampling:
            return
        started = time.perf_counter()
        scale = loss_scale.of_optimizer(optimizer)
        if not parts.gradients_read:
            parts.read_gradients(scaled=scale is not None)
        if not parts.eager.gradients:  # no rows that tell it
            norm = gradients.norm(parts.topology)
            if norm is not None:
                norm = norm if scale is None else gradients.divided(norm, scale)
                parts.rows.add_scalar("grad_norm", norm)
        self._clock.probe_seconds += time.perf_counter() - started

    def given_up(self, *, vanished: bool) -> bool:
        """Ask the scalers; if the user told the scale of one that is not torch's, the gradients."""
        gave_up = self._prepare().loss_scale.gave_up(self._clock.optimizers_of_others)
        return gave_up or (vanished and self._told_scale and self._bad is not None)

    def step_ended(self, *, skipped: bool) -> None:
        """Ship the step and leave the model clean."""
        started = time.perf_counter()
        parts, sampled = self._prepare(), self._sampling
        parts.watch.end_step(self._clock.step)
        if sampled:
            self._clock.sampled += 1
            turn = self._pacer.turn(self._clock.step)
            parts.rows.add_checksums(in_turn(parts.topology.replicated_parameters(), turn))
            if not parts.gradients_read and parts.topology.world_size > 1:
                parts.rows.add_scalar(UNREDUCED, 1.0)  # so replicas may part: local SGD
            self._finish_sampled(skipped=skipped, partial=False)
            self._shipper.ship()
            self._after_step()
        else:
            self._end_unsampled(parts, skipped=skipped)
        parts.end_step()
        self._bad = None
        self._clock.probe_seconds += time.perf_counter() - started
        self._pacer.end_step(*self._clock.reading(), sampled=sampled)
        self._responder.hear(self._clock.step)
        self._base = self._readings()

    def forward_is_next(self) -> None:
        """Choose the graphs of the next step."""
        if self._parts is not None and self._clock.in_graph:
            self._parts.choose_graphs(sampled=self._pacer.sampled(self._clock.step + 1))

    def blind(self) -> bool:
        """Try the one remedy, or say loudly that nothing is observed: silence looks like health."""
        if not self._renewed and dynamo.has_graphs():
            self._renewed = True
            renew_graphs("the function that calls the model")
            return True
        self._shipper.life("blind", step=self._clock.step)
        logger.warning(
            "ddpprobe: the optimizer steps, but no training forward of %s was seen, so nothing is "
            "recorded. Its parts are called without it, or torch.compile hides the call: install() "
            "on the module that the training loop calls, before its first call.",
            type(self._found.root).__name__,
        )
        return False

    # -- inside -----------------------------------------------------------------------------------

    def _prepare(self) -> Observers:
        if self._parts is None:
            given = outermost(self._found.outer)
            found = describe(given, self._select)
            found.cut = self._found.cut | self._names.cut(found)
            found.differ = self._found.differ
            self._parts = Observers(
                found, self._select, self._clock, self._who.rank, self.fuse, self.on_bad,
                lambda fqns: self._shipper.lost(self._clock.step, fqns), self._captured,
                self.capturing, full_backward=self._full_backward,
            )  # fmt: skip
            wrapper = "pipeline" if found.cut else found.wrapper
            self._shipper.life("topology", wrapper=wrapper, device=str(found.device))
        return self._parts

    def _begin_step(self, parts: Observers) -> None:
        wanted = self._pacer.sampled(self._clock.step)
        self._sampling = parts.begin_step(sampled=wanted)
        parts.state.begin(sampled=self._sampling)
        self._bad = None
        if self._sampling:
            self._logged.clear()
        elif wanted:
            self._shipper.life("unsampled", step=self._clock.step, reason=_GRAPH_TOO_EARLY)

    def _captured(self) -> None:
        self._shipper.captured(self._clock.step, sampled=self._sampling)

    def on_bad(self, bad: FirstBad) -> None:
        """Hear that a local value of this step (or, from a GPU, of an earlier one) is bad."""
        late = bad.step >= 0
        if late and self._pacer.sampled(bad.step):
            return  # its rows say it better
        if late:
            self._shipper.alarm(bad, bad.step, partial=False, skipped=False, sampled=False)
            return
        if self._sampling and self._parts is not None and bad.fqn is None:
            bad = self._parts.rows.first_fault() or bad
        if self._bad is None or _names(bad, self._bad):
            now = self._clock.step
            born = self._explain(self._prepare()) if bad.phase == "forward" else None
            self._bad = born or replace(bad, step=now)
            self._alarm(partial=True, skipped=False)

    def _explain(self, parts: Observers) -> FirstBad | None:
        """Return the parameter that made this forward bad, if one was bad before it."""
        return parts.state.explain(self._clock.step, self._clock.micro if self._bad is None else 0)

    def _alarm(self, *, partial: bool, skipped: bool) -> None:
        """Journal the bad step at once: the process may not live to its end."""
        if self._bad is not None:
            told = {"partial": partial, "skipped": skipped, "sampled": self._sampling}
            self._shipper.alarm(self._bad, self._clock.step, **told)

    def _add_loss_scale(self, parts: Observers) -> None:
        if "loss_scale" not in self._logged and parts.loss_scale.last is not None:
            parts.rows.add_scalar("loss_scale", parts.loss_scale.last)

    def _end_unsampled(self, parts: Observers, *, skipped: bool) -> None:
        parts.state.end(self._clock.step, self._clock.micro, self._bad)
        if skipped:
            self._tell_skipped(parts)
        elif self._bad is not None:
            self._alarm(partial=False, skipped=skipped)

    def _tell_skipped(self, parts: Observers) -> None:
        """Write that the optimizer skipped an unsampled step: an event, no anomaly by itself."""
        parts.rows.begin()
        self._add_loss_scale(parts)
        parts.loss_scale.look_again()
        self._push(skipped=True, partial=False, sampled=False, facts={})
        self._shipper.ship()

    def _finish_sampled(self, *, skipped: bool, partial: bool) -> None:
        parts = self._prepare()
        parts.detach()
        self._sampling = False
        names = [*(f"{phase}_seconds" for phase in STEP_PHASES), "probe_seconds"]
        spent = zip(self._readings(), self._base, strict=True)
        facts = {name: now - then for name, (now, then) in zip(names, spent, strict=True)}
        facts["micro_batches"] = float(self._clock.micro + 1)
        looks = parts.state.look(self._clock.step, self._clock.micro, over=not partial)
        if looks.after is not None:
            facts[CHECKED] = float(looks.after.count)
        self._push(skipped=skipped, partial=partial, sampled=True, facts=facts, state=looks)

    def _push(
        self, *, skipped: bool, partial: bool, sampled: bool, facts: dict[str, float],
        state: Looks | None = None,
    ) -> None:  # fmt: skip
        parts = self._prepare()
        self._shipper.push(
            EndedStep(
                parts.rows.fetch(), self._clock.step, sampled, skipped, partial, time.time_ns(),
                facts, self._bad, parts.eager.silent() if sampled else (), state,
            )
        )  # fmt: skip

    def _readings(self) -> tuple[float, ...]:
        return *self._clock.phase_seconds, self._clock.probe_seconds

    def _blown(self) -> None:
        """A fuse has blown: leave the model clean, and say so in the journal."""
        fuse = self.fuse if self.fuse.blown else self._clock_fuse
        self.fuse.blown = self._clock_fuse.blown = True
        self._sampling = False
        # Each on its own: what broke the component may break one of these, but not the others.
        Fuse("journal").guard(self._shipper.life)(
            "fuse", component=fuse.component, error=fuse.last_error
        )
        if self._parts is not None:
            Fuse("hooks").guard(self._parts.close)()
        # torch may be inside its loop over the global optimizer hooks, which taking ours off now
        # would end with an error in the user's step(): they stay, dead, until `close`.
        Fuse("steps").guard(self._clock.unhang)()


def _names(bad: FirstBad, known: FirstBad) -> bool:
    """Whether a witness names the module of one that could not: the root's row is made last."""
    same = (bad.micro, bad.phase) == (known.micro, known.phase)
    return same and known.fqn is None and bad.fqn is not None
