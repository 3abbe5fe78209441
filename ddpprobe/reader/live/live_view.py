"""A run at one moment, as `ddpprobe top` shows it, from its directory or a daemon's metrics."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

LOOKS = 30  # over so many looks a rate is taken
# Of what is usual among sites of a kind; growth below it is noise. The gradient of a bias that the
# model takes back (of attention's keys, of a layer before a norm) is what rounding leaves: 1e-3 or
# less of its neighbours' in bfloat16, and a hundred times as much at the next step.
NEGLIGIBLE = 0.01
# Their growth says nothing of a model's health: Adam's second moment begins near zero and grows by
# decades on every healthy run, and a change of the weights grows with the learning rate.
NOT_RANKED = ("optim_state", "update")
UNREACHABLE = "unreachable"  # the beginning of what `LiveView.state` says of a daemon that is away
# Of a rank, the worst first.
STATES = ("dead", "late", "starting", "unknown", "up", "paused", "closed")


@dataclass(frozen=True, slots=True)
class RankNow:
    """One rank. None: not known.

    Attributes:
        rank: its number.
        state: one of `STATES`; `why` says more of it ("SIGKILL"). "unknown": a rank of a node that
            shares no directory with this one, of which nothing has come, or that nobody follows.
        step: optimizer step under way (of a daemon's metrics: steps finished; of a rank whose
            heartbeat is on another disk: the newest step of it that was merged).
        rate: steps per second, over the last looks.
        phase: where most of the time goes, and which share of 1 that is.
        loss, grad_norm: of the last sampled step; the norm is local, before the reduction.
        resident_bytes, cpus: of its process; cores kept busy.
        device: as the rank names it.
        pages: anomalies at level page that blame it; None: nobody has judged, and none is known.
        seen: seconds since its last sign of life.
    """

    rank: int
    state: str
    why: str = ""
    step: int | None = None
    rate: float | None = None
    phase: tuple[str, float] | None = None
    loss: float | None = None
    grad_norm: float | None = None
    resident_bytes: float | None = None
    cpus: float | None = None
    device: str = ""
    pages: int | None = 0
    seen: float | None = None


@dataclass(frozen=True, slots=True)
class SiteNow:
    """One site at the newest sampled step, over all ranks.

    `growth` is abs_max by what it was at the first sampled step that was read; None: not known, or
    no other one was read yet. `guilty`: a first cause names it.
    """

    site: str
    abs_max: float
    rms: float
    nonfinite: int | None = None
    growth: float | None = None
    guilty: bool = False


@dataclass(frozen=True, slots=True)
class LiveView:
    """The whole run.

    Attributes:
        name: of the run.
        state: one of `ends.end.STATES`, or what is wrong ("unreachable: ...").
        source: where this comes from.
        world_size: number of ranks, also of those that are not in `ranks`; 0: not known.
        ranks: worst first.
        sites: worst first.
        anomalies: one line each, first causes first.
        host: name -> number, of the first node; see `daemon.host`.
        sampled: whether a step was sampled yet; None: not known, nor what went wrong.
        sampled_step: the newest sampled step; None: not known.
        grad_norm: L2 norm of all reduced gradients of that step.
        notes: what a user may wonder about.
    """

    name: str
    state: str
    source: str
    world_size: int = 0
    ranks: tuple[RankNow, ...] = ()
    sites: tuple[SiteNow, ...] = ()
    anomalies: tuple[str, ...] = ()
    host: Mapping[str, float] = field(default_factory=dict)
    sampled: bool | None = False
    sampled_step: int | None = None
    grad_norm: float | None = None
    notes: tuple[str, ...] = ()


def worst_ranks(ranks: Iterable[RankNow]) -> tuple[RankNow, ...]:
    """Order ranks: dead and late ones first, then those that are blamed, then who is behind."""

    def key(r: RankNow) -> tuple[float, ...]:
        bad = any(x is not None and not math.isfinite(x) for x in (r.loss, r.grad_norm))
        behind = math.inf if r.step is None else r.step
        return STATES.index(r.state), -(r.pages or 0), -bad, behind, r.rank

    return tuple(sorted(ranks, key=key))


def worst_sites(sites: Iterable[SiteNow], guilty: Sequence[str] = ()) -> tuple[SiteNow, ...]:
    """Order sites: by non-finite elements, by how abs_max grew above what is noise, by abs_max.

    Before all others come those that a first cause names, as `guilty` has them: after a NaN all
    that follow in the forward pass have as many. One that has no numbers now is added without.
    What is less than `NEGLIGIBLE` of the median among the sites of its kind, at the first sampled
    step, counts as that much, before and after: a site has to become one that matters to count.
    Kinds that are `NOT_RANKED` are left out unless they have non-finite elements.
    """
    named = dict.fromkeys(guilty)
    met = {s.site: replace(s, guilty=s.site in named) for s in sites}
    absent = {name: SiteNow(name, math.nan, math.nan, guilty=True) for name in named}
    known = [s for s in (absent | met).values() if s.guilty or _is_ranked(s)]
    order = list(named)
    least = _least_that_matters(known)

    def key(s: SiteNow) -> tuple[float, ...]:
        first = order.index(s.site) if s.guilty else len(order)
        nothing_finite = math.isnan(s.abs_max)
        peak = 0.0 if nothing_finite else s.abs_max
        base = _base(s)
        floor = least.get(_kind(s), 0.0)
        growth = max(peak, floor) / max(base, floor) if base else 0.0
        return first, -(s.nonfinite or nothing_finite), -growth, -peak

    return tuple(sorted(known, key=key))


def _least_that_matters(sites: Iterable[SiteNow]) -> dict[str, float]:
    """Return, by kind, the magnitude below which growth is noise."""
    bases = defaultdict(list)
    for site in sites:
        base = _base(site)
        if base:
            bases[_kind(site)].append(base)
    return {kind: NEGLIGIBLE * sorted(found)[len(found) // 2] for kind, found in bases.items()}


def _is_ranked(site: SiteNow) -> bool:
    return _kind(site) not in NOT_RANKED or bool(site.nonfinite) or math.isnan(site.abs_max)


def _kind(site: SiteNow) -> str:
    return site.site.rpartition(":")[2]


def _base(site: SiteNow) -> float | None:
    """Return what abs_max was at the first sampled step that was read; None: not known."""
    known = site.growth is not None and 0 < site.growth < math.inf and site.abs_max < math.inf
    return site.abs_max / site.growth if known and site.growth else None


class Rates:
    """What counters did over the last looks; a counter that fell began anew."""

    def __init__(self) -> None:
        self._looks: dict[int, deque[tuple[float, Mapping[str, float]]]] = defaultdict(
            lambda: deque(maxlen=LOOKS)
        )

    def add(self, rank: int, seconds: float, counters: Mapping[str, float]) -> None:
        """Take a reading of one rank at a time in seconds; one of the same time is no news."""
        looks = self._looks[rank]
        if looks and any(looks[-1][1].get(name, 0.0) > x for name, x in counters.items()):
            looks.clear()
        if not looks or seconds > looks[-1][0]:
            looks.append((seconds, dict(counters)))

    def grown(self, rank: int) -> tuple[float, dict[str, float]]:
        """Return over how many seconds (0: one reading), and by how much each counter grew."""
        looks = self._looks[rank]
        if not looks:
            return 0.0, {}
        (first, before), (last, after) = looks[0], looks[-1]
        return last - first, {name: x - before.get(name, 0.0) for name, x in after.items()}


def pace(
    steps: float, phases: Mapping[str, float], window: tuple[float, Mapping[str, float]]
) -> tuple[float | None, tuple[str, float] | None]:
    """Return steps per second, and the phase that takes most, with its share.

    Args:
        steps: finished since the start.
        phases: host seconds in each phase since the start.
        window: what `Rates.grown` says of "steps" and the phases; at the first look it says
            nothing, and all since the start counts.
    """
    seconds, grown = window
    spent = {name: grown.get(name, 0.0) for name in phases}
    if seconds > 0:
        rate: float | None = grown.get("steps", 0.0) / seconds
    else:
        total = sum(phases.values())
        rate = steps / total if total > 0 else None
    if not sum(spent.values()):
        spent = dict(phases)
    total = sum(spent.values())
    if total <= 0:
        return rate, None
    phase = max(spent, key=lambda name: spent[name])
    return rate, (phase, spent[phase] / total)
