"""`grad_spike`: a gradient norm far above its own history, and the rank and module that grew.

The rule (thresholds as measured on 63 healthy and 90 faulty runs, see docs/reference/detectors.md):
robust z of log10 norm > 10, and > 4 x the median, and above everything in the window. It warns; it
pages if the loss spikes too (within 8 steps), or at the third spike within 50 steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.groups import GroupNorms
from ddpprobe.detectors.history import LogHistory, WindowedValue
from ddpprobe.detectors.loss import PositiveLoss
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.statistics_of import placements_of, rows_of_kind
from ddpprobe.records.step import SUM_SQ, Anomaly, StepRecord

ROUNDING = 0.05  # relative: a reduction in bfloat16 rounds by 0.01
Source = tuple[str, int | None]  # ("grad" | "grad_norm" | "grad_norm_local" | "loss", rank or None)


@dataclass(frozen=True, slots=True)
class _Spike:
    """A spike as a warning, and the rank whose local norm alone it is (None: the global norm's)."""

    anomaly: Anomaly
    only: int | None


@dataclass
class _Episode:
    """What is remembered from spike to spike, within one attempt."""

    recent: list[_Spike] = field(default_factory=list)  # spikes of the last `repeat_steps`
    last: int | None = None  # step of the latest spike, reported or not
    worst: float = 0.0  # ratio of the worst one reported
    paged: bool = False
    told: int = -1  # up to this step no spike is paged again


class GradSpike(SampledDetector):
    """Robust outliers of the global gradient norm and of each rank's local one.

    Args:
        z: robust standard deviations in log10 space.
        ratio: how many times the median of the window.
        loss_z: as `z`, for the loss spike that makes it a page.
        loss_ratio: as `ratio`, for that loss spike.
        window: sampled records that a norm is compared with.
        least: sampled records of them without which there is no verdict.
        least_steps: steps of the attempt before which there is no verdict.
        floor_dex: the least standard deviation that is believed, in decades.
        join_steps: how far apart, in steps, a gradient spike and a loss spike may lie.
        repeats: so many spikes within `repeat_steps` are a page.
        repeat_steps: steps that they may be spread over.
        quiet_steps: steps without a spike after which one is reported again.
        worse: a spike so many times the reported one is reported at once (after a page: it warns).
        peer_ratio: a rank is named if it grew so many times as much as any other.
    """

    name = "grad_spike"
    title = "Gradient spike"

    def __init__(
        self,
        *,
        z: float = 10.0,
        ratio: float = 4.0,
        loss_z: float = 8.0,
        loss_ratio: float = 2.0,
        window: int = 64,
        least: int = 12,
        least_steps: int = 32,
        floor_dex: float = 0.05,
        join_steps: int = 8,
        repeats: int = 3,
        repeat_steps: int = 50,
        quiet_steps: int = 100,
        worse: float = 10.0,
        peer_ratio: float = 2.0,
    ) -> None:
        above_zero(
            z=z, ratio=ratio, loss_z=loss_z, loss_ratio=loss_ratio, floor_dex=floor_dex,
            worse=worse, peer_ratio=peer_ratio,
        )  # fmt: skip
        at_least(1, window=window, least=least, repeats=repeats, repeat_steps=repeat_steps)
        at_least(0, join_steps=join_steps, quiet_steps=quiet_steps, least_steps=least_steps)
        at_least(least, window=window)
        self._norm_rule = (z, math.log10(ratio))
        self._loss_rule = (loss_z, math.log10(loss_ratio))
        self._memory = (window, least, floor_dex)
        self._least_steps = least_steps
        self._join = join_steps
        self._repeats, self._repeat_steps = repeats, repeat_steps
        self._quiet, self._worse = quiet_steps, worse
        self._peer_dex = math.log10(peer_ratio)
        self._reset()

    def _reset(self) -> None:
        self._histories: dict[Source, LogHistory] = {}
        self._groups = GroupNorms(*self._memory[:2])
        self._summed: set[int] = set()  # ranks whose part was larger than a mean, without a spike
        self._loss = PositiveLoss()  # of one below zero a fall would look like a spike
        self._loss_spike: int | None = None  # step of the latest one
        self._begun: int | None = None  # the first step
        self._episode = _Episode()

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; a warning, a page, or a page for an earlier step's warning."""
        if record.skipped:
            return []
        self._begun = record.step if self._begun is None else self._begun
        long = record.step - self._begun >= self._least_steps
        spike = self._spike(record) if long else None
        self._watch_loss(record)
        for source, value in _norms(record).items():
            self._history(source).add(value)
        if not _is_torn(record):
            self._groups.add(record)
        if spike is None:
            self._summed.update(_beyond_mean(record))
        return self._report(record.step, spike)

    def _history(self, source: Source) -> LogHistory:
        if source not in self._histories:
            self._histories[source] = LogHistory(*self._memory)
        return self._histories[source]

    def _spike(self, record: StepRecord) -> _Spike | None:
        readings = {s: r for s, v in _norms(record).items() if (r := self._history(s).read(v))}
        highest = {
            local: max((r.highest for s, r in readings.items() if _is_local(s) == local), default=0)
            for local in (True, False)
        }
        z, dex = self._norm_rule
        spikes = {
            source: r
            for source, r in readings.items()
            if r.z > z and r.dex > dex and r.value > highest[_is_local(source)]
        }
        if not spikes:
            return None
        rank = _guilty(spikes, readings, self._peer_dex)
        if rank is None and len(record.ranks + record.missing) == 1:
            rank = record.ranks[0]
        source = max(spikes, key=lambda s: spikes[s].dex)
        one_rank = rank is not None and all(_is_local(s) for s in spikes)
        # Of what one rank has alone, the rows of all of them show the less, the more they are.
        of_one = len(record.ranks) if rank is not None else 1
        module = None if _is_torn(record) else self._groups.largest(record, of_one=of_one)
        if rank is None and not any(_is_local(s) for s in spikes):
            rank = self._shard(record)
        anomaly = _anomaly(record, spikes[source], rank, module, local=_is_local(source))
        return _Spike(anomaly, rank if one_rank else None)

    def _shard(self, record: StepRecord) -> int | None:
        """Return the one rank whose part of the reduced gradient no mean of local ones can be.

        None where another rank's is, too, or this one's has been: they may be summed.
        """
        found = _beyond_mean(record)
        return found[0] if len(found) == 1 and found[0] not in self._summed else None

    def _watch_loss(self, record: StepRecord) -> None:
        history = self._history(("loss", None))
        z, dex = self._loss_rule
        for step, loss in self._loss.read(record):  # also of the steps that were not sampled
            reading = history.read(loss)
            if reading and reading.z > z and reading.dex > dex:
                self._loss_spike = step
            history.add(loss)

    def _report(self, step: int, spike: _Spike | None) -> list[Anomaly]:
        episode, found = self._episode, []
        recent = [s for s in episode.recent if step - s.anomaly.step < self._repeat_steps]
        if spike:
            ratio = spike.anomaly.values["ratio"]
            quiet = episode.last is None or step - episode.last > self._quiet
            if quiet or ratio > self._worse * episode.worst:
                episode.worst = ratio
                episode.paged &= not quiet  # what is worse after a page only warns
                found = [spike.anomaly]
            recent.append(spike)
            episode.last = step
        episode.recent = recent
        page = None if episode.paged else self._page(recent)
        if page is None:
            return found
        episode.paged, episode.told = True, page.step
        return [a for a in found if a.step != page.step] + [page]

    def _page(self, recent: list[_Spike]) -> Anomaly | None:
        """Return the earliest recent spike that a loss spike or repetition makes a page."""
        at = self._loss_spike
        for spike in recent:
            step = spike.anomaly.step
            if step <= self._episode.told:
                continue
            if at is not None and abs(at - step) <= self._join:
                return _raise(spike.anomaly, f"the loss spiked too, at step {at}")
            # Chance outliers of different ranks do not add up to a fault.
            same = [s.anomaly.step for s in recent if s.only == spike.only]
            if len(same) >= self._repeats:
                steps = ", ".join(map(str, same))
                why = f"{len(same)} spikes within {self._repeat_steps} steps: {steps}"
                return _raise(spike.anomaly, why)
        return None


def _is_local(source: Source) -> bool:
    """Whether a source is one rank's local norm.

    Those have to exceed what *any* rank showed in the window: with heavy-tailed data the chance
    that some rank beats its own record grows with the number of ranks.
    """
    return source[0] == "grad_norm_local"


def _norms(record: StepRecord) -> dict[Source, float]:
    """Return the global gradient norm (one source) and each rank's local one; L2."""
    out: dict[Source, float] = {}
    gradients = rows_of_kind(record, "grad")
    if len(gradients.rows) and not _is_torn(record):
        with np.errstate(over="ignore", invalid="ignore"):
            square = float(record.values[gradients.rows, SUM_SQ].sum())
        finite = gradients.finite is None
        out["grad", None] = math.sqrt(max(square, 0.0)) if finite else math.inf
    elif reported := [float(s["grad_norm"]) for s in record.scalars.values() if "grad_norm" in s]:
        out["grad_norm", None] = max(reported)
    for rank, scalars in record.scalars.items():
        if "grad_norm_local" in scalars:
            out["grad_norm_local", rank] = float(scalars["grad_norm_local"])
    return out


def _is_torn(record: StepRecord) -> bool:
    """Whether a shard of the gradients is missing, so that rows and norms are of a part of them."""
    return bool(record.missing) and "sharded" in placements_of(record, "grad")


def _beyond_mean(record: StepRecord) -> list[int]:
    """Return the ranks that hold a part of the reduced gradient larger than a mean can be.

    A mean of gradients has no part with a larger norm than the largest of them (triangle
    inequality). Nothing where gradients are not all sharded, or some rank's norms are not known.
    """
    if placements_of(record, "grad") != {"sharded"} or record.missing:
        return []
    said = {rank: record.scalars.get(rank, {}) for rank in record.ranks}
    parts = {rank: float(s.get("grad_norm", math.nan)) for rank, s in said.items()}
    largest = max(
        (float(s.get("grad_norm_local", math.nan)) for s in said.values()),
        key=lambda x: (math.isnan(x), x),
    )
    one = all(s.get("micro_batches") == 1 for s in said.values())
    if not (one and math.isfinite(largest) and all(map(math.isfinite, parts.values()))):
        return []
    return [rank for rank, part in parts.items() if part > (1 + ROUNDING) * largest]


def _guilty(
    spikes: dict[Source, WindowedValue], readings: dict[Source, WindowedValue], peer_dex: float
) -> int | None:
    """Return the one rank whose local norm spiked, if it grew clearly more than its peers'."""
    ranks = [s[1] for s in spikes if _is_local(s)]
    if len(ranks) != 1:
        return None
    own = spikes["grad_norm_local", ranks[0]].dex
    peers = [r.dex for s, r in readings.items() if _is_local(s) and s[1] != ranks[0]]
    return ranks[0] if own > max(peers, default=-math.inf) + peer_dex else None


def _anomaly(
    record: StepRecord, reading: WindowedValue, rank: int | None, module: str | None, *, local: bool
) -> Anomaly:
    what = "local gradient norm" if local else "gradient norm"
    message = (
        f"{what} {reading.value:.3g} is {reading.ratio:.3g} x the median {reading.median:.3g} "
        f"of the last {reading.points} sampled steps (robust z {reading.z:.3g})"
    )
    values = {
        "norm": reading.value,
        "median": reading.median,
        "highest": reading.highest,
        "ratio": reading.ratio,
        "z": reading.z,
        "points": reading.points,
    }
    kind, phase = ("grad_local", "backward") if local else ("grad", "step")
    return GradSpike.anomaly(
        record, "warn", message, values, rank=rank, module=module, kind=kind, phase=phase
    )


def _raise(spike: Anomaly, why: str) -> Anomaly:
    return replace(spike, level="page", first_cause=True, message=f"{spike.message}; {why}")
