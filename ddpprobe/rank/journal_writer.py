"""What a rank writes: sampled steps once their rows have arrived, alarms at once.

The only way from the training process to the daemon is the journal; nothing waits for it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from ddpprobe.rank.hooks import stream_capture
from ddpprobe.rank.hooks.pending_rows import PendingRows, StepResult
from ddpprobe.rank.hooks.state_check import Looks
from ddpprobe.rank.hooks.steady import MINUS, PLUS
from ddpprobe.rank.passes import Passes
from ddpprobe.rank.torch_private import functorch
from ddpprobe.records import events
from ddpprobe.records.events import Event
from ddpprobe.records.identity_cache import IdentityCache
from ddpprobe.records.step import (
    ACTIVE,
    IN_TURN,
    KINDS,
    LOSS_OF_BAD,
    NAN,
    NONFINITE,
    NUMEL,
    OBSERVED,
    PHASES,
    STATE_KINDS,
    SUM_SQ,
    UNREAD_INPUT,
    ZEROS,
    FirstBad,
    Site,
    StepRecord,
    derive,
)
from ddpprobe.rundir.journal import JournalWriter

_SILENT_NAMED = 20
_MOST_CONFIG, _MOST_TEXT = 256, 500  # of a note: entries, characters of each text
_UNKEPT_NAMED = 20
_TABLES = 8  # of sites, from which steps come in turn
_LEAST_RMS = 1e-30  # what an output of zeros counts as
_SIGNS = ((PLUS, "+Inf"), (MINUS, "-Inf"))

logger = logging.getLogger("ddpprobe")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who records: one rank of one attempt."""

    rank: int
    world_size: int
    attempt: int


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A finished step whose rows may still be on their way to the host.

    `facts` are the scalars known on the host; `watched` what the every-step watch saw in it;
    `silent` the FQNs of chosen modules that were never called, None where it ended within a forward
    and they may have been about to be; `state` the looks at what the step left behind. A step that
    is not `sampled` has scalars at most: the optimizer skipped it, and this is worth a record.
    """

    pending: PendingRows
    step: int
    sampled: bool
    skipped: bool
    partial: bool
    wall_time_ns: int
    facts: dict[str, float]
    watched: FirstBad | None
    silent: tuple[str, ...] | None = ()
    state: Looks | None = None

    def ready(self) -> bool:
        """Whether everything of it has reached the host; never waits."""
        return self.pending.ready() and (self.state is None or self.state.ready())

    def wait(self) -> None:
        """Wait for it: only at the end of a run."""
        self.pending.wait()
        if self.state is not None:
            self.state.wait()


@final
class FrameWriter:
    """Turns ended steps and alarms into journal frames of one rank."""

    def __init__(self, journal: JournalWriter, who: Identity, passes: Passes) -> None:
        self._journal = journal
        self._passes = passes
        self._who = who
        self._ended: deque[EndedStep] = deque()
        # Of the last one shipped: step, skipped, FQN.
        self._last_bad: tuple[int, bool, str | None] | None = None
        self._alarmed: tuple[int, FirstBad] | None = None  # step and fault of the last alarm
        self._coverage: tuple[int, int, tuple[str, ...]] | None = None
        self._reported: Counter[str] = Counter()  # losses that stand in the journal
        self._rows_by_kind = IdentityCache(_rows_by_kind, _TABLES)
        self._warned = self._told_handlers = False
        self._unkept: set[str] = set()  # names of numbers of which it was said
        self._captured = -1  # the last step in which a CUDA graph was captured
        # The loss of an unsampled step, as far as it is known.
        self.loss_of: Callable[[int], float | None] = lambda _: None
        self.on_sampled: Callable[[StepRecord], object] | None = None  # told of what was shipped

    def push(self, ended: EndedStep) -> None:
        """Take a step; `ship` writes it when its rows are there."""
        self._ended.append(ended)

    def ship(self, *, wait: bool = False) -> None:
        """Write the steps whose rows have arrived; waits for the others only at the end."""
        if not self._ended:
            return
        with functorch.outside():  # where the next forward may be
            while self._ended and (wait or self._ended[0].ready()):
                ended = self._ended.popleft()
                if wait:
                    ended.wait()
                record = self._record(ended)
                self._append(record)
                if ended.sampled and self.on_sampled is not None:
                    self.on_sampled(record)

    def alarm(self, bad: FirstBad, at: int, *, partial: bool, skipped: bool, sampled: bool) -> None:
        """Write that step `at` went bad. `partial`: it is not over, but the process may be soon.

        Once the weights are NaN every step is bad: this is said when it begins, when another module
        is named, and when a step that a GradScaler gave up is followed by one that was taken.
        A parameter that an earlier step left bad (`bad.step` < `at`) is not another module: right
        after a bad step it says no more than that one did; nor does what a bad step leaves behind.
        """
        self._alarmed = at, bad
        if self._last_bad is not None:
            step, was_skipped, fqn = self._last_bad
            if bad.is_state and bad.step == at == step:
                return
            same = bad.fqn is None or bad.fqn == fqn or bad.step < at
            if at - step == 1 and same and not (was_skipped and not skipped and not partial):
                if not partial:
                    self._last_bad = (at, skipped, fqn)
                return
        facts, loss = dict(self._passes.told(at, bad)), self.loss_of(at)
        if loss is not None:
            facts[LOSS_OF_BAD] = loss
        self._append(
            StepRecord(
                attempt=self._who.attempt, step=at, ranks=(self._who.rank,),
                wall_time_ns=time.time_ns(), sampled=sampled, first_bad=bad,
                scalars={self._who.rank: facts} if facts else {},
                partial=partial, skipped=skipped,
            )
        )  # fmt: skip
        if not partial:
            self._last_bad = (at, skipped, bad.fqn)

    def life(self, event: Event) -> None:
        """Write that something happened to this rank."""
        self._journal.append_event(event)

    def note(self, step: int, what: str, config: Mapping[str, object]) -> None:
        """Write what the script says of its training, as texts of bounded length."""
        kept = list(config.items())[:_MOST_CONFIG]
        told = {_short(name): _short(value) for name, value in kept}
        self.life(events.NoteEvent(step=step, what=_short(what), config=told))

    def lose(self, reason: str, count: int) -> None:
        """Write how often something was lost, `count` times so far, unless that was written."""
        new = count - self._reported[reason]
        if new and self._journal.append_event(events.DroppedEvent(reason=reason, count=new)):
            self._reported[reason] = count

    def handles(self, *, present: bool) -> None:
        """Say once that the script handles signals itself: who ends there may not say goodbye."""
        if present and not self._told_handlers:
            self._told_handlers = True
            self.life(events.HandlesEvent())

    def blind(self, step: int, root: str) -> None:
        """Say loudly that no forward of the model is seen; `root`: its class."""
        self.life(events.BlindEvent(step=step))
        logger.warning(
            "ddpprobe: the optimizer steps, but no forward of %s with gradients to come was seen, "
            "so nothing is recorded. It runs under torch.no_grad() (as for forward-mode gradients, "
            "which no backward computes), its parts are called without it, or torch.compile hides "
            "the call: install() on the module that the loop calls, before its first call.",
            root,
        )

    def lost(self, step: int, fqns: list[str]) -> None:
        """Say loudly that compiled modules ran and were not heard."""
        named = tuple(fqns[:_SILENT_NAMED])
        self.life(events.BlindEvent(step=step, modules=named, count=len(fqns)))
        logger.warning(
            "ddpprobe: torch.compile runs %d modules without the hooks they carry, so they are not "
            "observed (%s ...). Call ddpprobe.install(model) before the first forward of the "
            "compiled model.",
            len(fqns), ", ".join(fqns[:3]),
        )  # fmt: skip

    def unkept(self, step: int, names: Iterable[str], why: str) -> None:
        """Say, once for a name, that logged numbers are in no record."""
        new = [name for name in names if name not in self._unkept]
        if not new or len(self._unkept) >= _UNKEPT_NAMED:
            return
        self._unkept.update(new)
        self.life(events.UnkeptEvent(step=step, names=tuple(new[:_UNKEPT_NAMED]), reason=why))
        logger.warning(
            "ddpprobe: what probe.log() was given as %s is not kept: %s",
            ", ".join(new[:_UNKEPT_NAMED]), why,
        )  # fmt: skip

    def captured(self, step: int, *, sampled: bool) -> None:
        """Say, once per step, that hooks did nothing because a CUDA graph was captured."""
        if step != self._captured:
            self._captured = step
            stream_capture.warn("a part of the model is")
            if sampled:
                reason = "a part of the model is captured in a CUDA graph: it has no rows"
                self.life(events.UnsampledEvent(step=step, reason=reason))

    def _record(self, ended: EndedStep) -> StepRecord:
        result = ended.pending.result(ended.step, partial=ended.partial, skipped=ended.skipped)
        self._report_learned(ended.step, result)
        bad = _earlier(result.first_bad, ended.watched)
        if bad is None and self._alarmed is not None and not ended.sampled:
            # Its losses come after the alarm, at the end of a run, and stand in its place.
            bad = self._alarmed[1] if self._alarmed[0] == ended.step else None
        if ended.state is not None:
            bad = ended.state.origin(bad)
        if bad is not None:
            self._last_bad = (ended.step, ended.skipped, bad.fqn)
        scalars = {**ended.facts, **result.scalars, **self._passes.told(ended.step, bad)}
        scalars |= {UNREAD_INPUT: 1.0} if result.unread and bad is result.first_bad else {}
        if ended.sampled:
            scalars |= self._report_coverage(result, ended)
        rows = self._rows_by_kind(result.sites)
        for name, kind in (("grad_norm_local", "grad_local"), ("grad_norm", "grad")):
            norm = _norm(result, rows[kind])
            if norm is None:
                continue
            if name in result.scalars:
                self.unkept(ended.step, [name], "this is measured; log yours by another name")
            scalars[name] = norm
        active = _active(result, rows["grad_local"])
        if active is not None:
            scalars[ACTIVE] = active
        rms = _output_rms(result, rows["output"])
        if rms is not None:
            scalars["output_rms"] = rms
        return StepRecord(
            attempt=self._who.attempt, step=ended.step, ranks=(self._who.rank,),
            wall_time_ns=ended.wall_time_ns, sampled=ended.sampled, sites=result.sites,
            counts=result.counts, values=result.values, scalars={self._who.rank: scalars},
            first_bad=bad, skipped=ended.skipped, partial=ended.partial, digests=result.digests,
            binned=result.binned, bins=result.bins,
        )  # fmt: skip

    def _report_learned(self, step: int, result: StepResult) -> None:
        """Say at which sites an infinity is known to do no harm from now on."""
        for one in result.learned:
            site, signs = one.site, tuple(name for sign, name in _SIGNS if one.signs & sign)
            self.life(
                events.SteadyEvent(
                    step=step, fqn=site.fqn, kind=site.kind, leaf=site.leaf, values=signs,
                    told=one.told,
                )
            )  # fmt: skip

    def _report_coverage(self, result: StepResult, ended: EndedStep) -> dict[str, float]:
        """Count sites that should deliver and those that did; say so when it has changed."""
        if ended.silent is None:
            return {}
        rows = self._rows_by_kind(result.sites)
        lasting = np.concatenate([rows[kind] for kind in KINDS if kind not in IN_TURN])
        expected = len(lasting) + len(ended.silent)
        observed = int((result.counts[lasting, OBSERVED] > 0).sum())
        if (expected, observed, ended.silent) != self._coverage:
            self._coverage = (expected, observed, ended.silent)
            self.life(
                events.SitesEvent(
                    expected=expected, observed=observed, step=ended.step,
                    unsupported=dict(result.unsupported), silent=ended.silent[:_SILENT_NAMED],
                )
            )  # fmt: skip
        return {"sites_expected": float(expected), "sites_observed": float(observed)}

    def _append(self, record: StepRecord) -> None:
        if self._journal.append_record(record):
            self._report_losses()
        elif not self._warned:
            self._warned = True
            logger.warning(
                "ddpprobe: rank %d cannot write %s (%s): its steps are lost until it can; training "
                "goes on",
                self._who.rank, self._journal.place, ", ".join(self._journal.dropped),
            )  # fmt: skip

    def _report_losses(self) -> None:
        """Write what the disk refused since the last time; what it refuses again waits."""
        for reason, count in list(self._journal.dropped.items()):
            self.lose(reason, count)


def _short(said: object) -> str:
    """Return what a script says as a text, or its beginning."""
    text = str(said)
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 4]} ..."


def _rows_by_kind(sites: tuple[Site, ...]) -> dict[str, NDArray[np.intp]]:
    """Return the rows of each kind in a table of sites, ascending."""
    kinds = np.array([site.kind for site in sites], np.str_)
    return {kind: np.flatnonzero(kinds == kind) for kind in KINDS}


def _norm(result: StepResult, rows: NDArray[np.intp]) -> float | None:
    """L2 norm over this rank's gradients; NaN if any is not finite, None without any."""
    if not len(rows) or not result.counts[rows, OBSERVED].any():
        return None
    if result.counts[rows][:, NONFINITE].any():
        return float("nan")
    return float(result.values[rows, SUM_SQ].sum() ** 0.5)


def _active(result: StepResult, rows: NDArray[np.intp]) -> float | None:
    """Count the parameters whose local gradient has an element that is not zero.

    The merged rows do not tell a rank whose gradient is lost from the others. None where no local
    gradient has a row.
    """
    if not len(rows):
        return None
    counts = result.counts[rows]
    return float(((counts[:, OBSERVED] > 0) & (counts[:, ZEROS] < counts[:, NUMEL])).sum())


def _output_rms(result: StepResult, rows: NDArray[np.intp]) -> float | None:
    """Geometric mean over this rank's outputs of their rms, so that each layer counts as much.

    The merged rows do not tell one rank's batch from another's. None without a finite output, and
    beside a NaN: the mean of what is left of them is another number than it was.
    """
    if result.counts[rows, NAN].any():
        return None
    rms = derive("rms", result.counts[rows], result.values[rows])
    rms = rms[np.isfinite(rms)]
    return float(np.exp(np.log(np.maximum(rms, _LEAST_RMS)).mean())) if len(rms) else None


def _earlier(rows: FirstBad | None, watched: FirstBad | None) -> FirstBad | None:
    """Of two witnesses of one step, the earlier in (micro, phase).

    In the same one the rows know the module, and a parameter was bad before all of its outputs.
    """
    if rows is None or watched is None:
        return rows or watched
    both = (watched, rows) if watched.kind in STATE_KINDS else (rows, watched)
    return min(both, key=lambda b: (b.step, b.micro, PHASES.index(b.phase)))
