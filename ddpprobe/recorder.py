"""The training side of ddpprobe on one rank: events in, journal frames out.

Wires the clock, the hooks, the watch and the journal together. It opens no port, joins no
collective, starts no thread, and imports neither zarr nor prometheus_client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import final

from torch import Tensor

from ddpprobe import topology
from ddpprobe.fuse import Fuse, logger
from ddpprobe.heartbeat import STATES, STEP_PHASES, HeartbeatWriter
from ddpprobe.hooks.eager import EagerHooks, gradient_norm
from ddpprobe.hooks.full import FullHooks
from ddpprobe.hooks.outputs import leaves
from ddpprobe.hooks.step_rows import StepRows
from ddpprobe.hooks.watch import Watch
from ddpprobe.journal import JournalWriter
from ddpprobe.records import FirstBad
from ddpprobe.sampling import Schedule
from ddpprobe.shipping import EndedStep, Identity, Shipper
from ddpprobe.steps import StepClock


@final
class Recorder:
    """Records one model on one rank.

    Args:
        found: the model as `install` found it; looked at again at its first training forward,
            because it may be wrapped, moved or sharded in between.
        who: this rank.
        schedule: which steps are sampled.
        select: whether a module FQN is observed.
        journal: where frames go.
        heartbeat: where the present goes.
        full_backward: also `grad_input`, by full backward hooks where proven safe.
        first_step: number of the first step.
        after_step: called at the end of each sampled step (keeps the daemon alive).
    """

    def __init__(
        self, found: topology.Topology, who: Identity, schedule: Schedule,
        select: Callable[[str], bool], journal: JournalWriter, heartbeat: HeartbeatWriter, *,
        full_backward: bool = False, first_step: int = 0,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.fuse = Fuse("hooks", on_blow=self._blown)
        self._found = found
        self._who = who
        self._schedule = schedule
        self._select = select
        self._journal = journal
        self._shipper = Shipper(journal, who)
        self._heartbeat = heartbeat
        self._full_backward = full_backward
        self._after_step = after_step
        self._clock_fuse = Fuse("steps", on_blow=self._blown)
        self._clock = StepClock(found, self, self._clock_fuse, heartbeat, first_step)
        self._parts: _Parts | None = None
        self._sampling = False
        self._logged: set[str] = set()
        self._bad: FirstBad | None = None
        self._base = self._readings()
        self._open = True

    def start(self) -> None:
        """Begin to listen to the model and its optimizers."""
        self._clock.start()

    # -- the user's face --------------------------------------------------------------------------

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Keep named numbers with the step, if it is sampled; tensors stay on their device."""
        if self._sampling and self._parts is not None:
            for name, value in values.items():
                self._parts.rows.add_scalar(name, value)
                self._logged.add(name)

    def declare_step(self) -> None:
        """End the step here."""
        self._clock.declare_step()

    def pause(self, reason: str) -> None:
        """Take every hook off the model until `resume`."""
        if self._parts is not None:
            self._parts.detach()
        self._clock.unhang()
        self._clock.beat(STATES.index("paused"))
        self._shipper.life("paused", reason=reason, time_ns=time.time_ns())

    def resume(self) -> None:
        """Go on after a pause; the time in between belongs to no phase."""
        self._clock.hang()
        self._clock.leave_out()
        self._clock.beat()
        self._shipper.life("resumed", time_ns=time.time_ns())

    def close(self, status: str = "ok") -> None:
        """Write what is left, take every hook off, close every file. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._clock.stop()
        if self._parts is not None:
            if self._sampling:
                self._finish_sampled(skipped=False, partial=True)
            elif self._bad is not None:
                self._alarm(partial=True, skipped=False)
            self._parts.watch.poll(wait=True)
            self._shipper.ship(wait=True)
            self._parts.close()
        self._shipper.life("closed", status=status)
        self._clock.beat(STATES.index("closed"))
        self._journal.close()
        self._heartbeat.close()

    def abandon(self) -> None:
        """In a forked child: let go of everything without a trace in the parent's files."""
        self._open = False
        self.fuse.blown = self._clock_fuse.blown = True
        self._journal.close()
        self._heartbeat.close()

    # -- steps.Events -----------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """Attach what this step needs."""
        started = time.perf_counter()
        parts = self._prepare()
        parts.watch.poll()
        self._shipper.ship()
        if self._clock.micro == 0:
            self._begin_step(parts)
        if self._sampling:
            parts.attach()
        parts.watch.seek()
        self._clock.probe_seconds += time.perf_counter() - started

    def forward_ended(self, output: object) -> None:
        """Look at the loss."""
        started = time.perf_counter()
        parts = self._prepare()
        parts.watch.found()
        parts.watch.output(output)
        if self._sampling:
            parts.full.probed()
            losses = [t for _, t in leaves(output) if t.dim() == 0 and t.is_floating_point()]
            if len(losses) == 1 and "loss" not in self._logged:
                parts.rows.add_scalar("loss", losses[0])
        self._clock.probe_seconds += time.perf_counter() - started

    def backward_ended(self) -> None:
        """Read the reduced gradients, before the user clips them."""
        parts = self._prepare()
        if self._sampling and parts.topology.gradients_are_reduced():
            started = time.perf_counter()
            parts.eager.read_gradients()
            parts.gradients_read = True
            self._clock.probe_seconds += time.perf_counter() - started

    def gradients_ready(self, optimizer: object) -> None:
        """Read what the optimizer will use."""
        parts = self._prepare()
        if not self._sampling:
            return
        started = time.perf_counter()
        if not parts.gradients_read:
            parts.eager.read_gradients()
        norm = gradient_norm(parts.topology)
        if norm is not None:
            parts.rows.add_scalar("grad_norm", norm)
        self._clock.probe_seconds += time.perf_counter() - started

    def step_ended(self, *, skipped: bool) -> None:
        """Ship the step and leave the model clean."""
        started = time.perf_counter()
        parts = self._prepare()
        parts.watch.end_step(self._clock.step)
        if self._sampling:
            self._clock.sampled += 1
            self._finish_sampled(skipped=skipped, partial=False)
            self._shipper.ship()
            self._after_step()
        elif self._bad is not None:
            self._alarm(partial=False, skipped=skipped)
        self._bad = None
        self._clock.probe_seconds += time.perf_counter() - started
        self._base = self._readings()

    def blind(self) -> None:
        """Say loudly that nothing can be observed: silence would look like health."""
        self._shipper.life("blind", step=self._clock.step)
        logger.warning(
            "ddpprobe: the optimizer steps, but no training forward of %s was seen, so nothing is "
            "recorded. It was compiled with torch.compile after install(), or its parts are called "
            "without it: leave torch.compile off, or install() on the module that is called.",
            type(self._found.root).__name__,
        )

    # -- inside -----------------------------------------------------------------------------------

    def _prepare(self) -> _Parts:
        if self._parts is None:
            given = self._found.ddp or self._found.root
            found = topology.describe(topology.outermost(given))
            self._parts = _Parts(self, found)
            self._shipper.life("topology", wrapper=found.wrapper, device=str(found.device))
        return self._parts

    def _begin_step(self, parts: _Parts) -> None:
        self._sampling = self._schedule.sampled(self._clock.step)
        self._bad = None
        if self._sampling:
            parts.rows.begin()
            parts.gradients_read = False
            self._logged.clear()

    def on_bad(self, bad: FirstBad) -> None:
        """Hear the watch: a local value of this step (or, from a GPU, of an earlier one) is bad."""
        late = bad.step >= 0
        if late and self._schedule.sampled(bad.step):
            return  # its rows say it better
        if late:
            self._shipper.alarm(bad, partial=False, skipped=False, sampled=False)
        elif self._bad is None:
            self._bad = replace(bad, step=self._clock.step)
            self._alarm(partial=True, skipped=False)

    def _alarm(self, *, partial: bool, skipped: bool) -> None:
        """Journal the bad step at once: the process may not live to its end."""
        if self._bad is not None:
            self._shipper.alarm(self._bad, partial=partial, skipped=skipped, sampled=self._sampling)

    def _finish_sampled(self, *, skipped: bool, partial: bool) -> None:
        parts = self._prepare()
        parts.detach()
        self._sampling = False
        now = self._readings()
        facts = {name: now[name] - self._base[name] for name in now}
        facts["micro_batches"] = float(self._clock.micro + 1)
        self._shipper.push(
            EndedStep(
                parts.rows.fetch(),
                self._clock.step,
                skipped,
                partial,
                time.time_ns(),
                facts,
                self._bad,
            )
        )

    def _readings(self) -> dict[str, float]:
        clock = self._clock
        readings = {
            f"{p}_seconds": s for p, s in zip(STEP_PHASES, clock.phase_seconds, strict=True)
        }
        return {**readings, "probe_seconds": clock.probe_seconds}

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


@final
class _Parts:
    """What can be built once the model is known in its final form."""

    def __init__(self, recorder: Recorder, found: topology.Topology) -> None:
        clock, fuse = recorder._clock, recorder.fuse  # noqa: SLF001  (same room)
        who, select = recorder._who, recorder._select  # noqa: SLF001
        self.topology = found
        self.rows = StepRows(found.device, who.rank)
        self.eager = EagerHooks(found, select, self.rows, clock, fuse)
        self.full = FullHooks(found, select, self.rows, clock, fuse)
        self.watch = Watch(found, clock, who.rank, fuse, recorder.on_bad)
        self.gradients_read = False
        self._use_full = recorder._full_backward  # noqa: SLF001

    def attach(self) -> None:
        """Hang the hooks of a sampled step; at each forward anew, so that ours are the last.

        A hook of the user's that changes an output must have run when we look at it.
        """
        self.detach()
        self.eager.attach()
        if self._use_full:
            self.full.attach()

    def detach(self) -> None:
        """Take the hooks of a sampled step off."""
        self.eager.detach()
        self.full.detach()

    def close(self) -> None:
        """Take everything off."""
        self.detach()
        self.watch.close()
