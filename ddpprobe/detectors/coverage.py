"""`coverage`: a place that used to report has fallen silent.

A probe that sees nothing looks exactly like a healthy run. What is not seen any more is said, once,
before somebody relies on its silence: a module compiled after `install()`, a part that is frozen or
not called any more, hooks that another library took off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.settings import at_least
from ddpprobe.detectors.sites_of_kind import grown
from ddpprobe.detectors.subtrees import (
    by_subtree,
    common_module,
    named,
    nearest_loss,
    replaced,
    without_indices,
)
from ddpprobe.records.derived import is_in_expert
from ddpprobe.records.rank_names import ranks_text
from ddpprobe.records.step import (
    IN_TURN,
    OBSERVED,
    PHASE_OF_KIND,
    PHASES,
    Anomaly,
    Site,
    StepRecord,
)

MOST_SITES = 1 << 16  # bounds the state: 50 bytes a site, and its key
OF_PARAMETERS = ("grad_local", "grad")  # kinds of site
FEWEST_ABSENT = 3
MOST_STEADY = 1 << 13  # bounds the table of how patient to be
NEVER = 1 << 30

Key = tuple[str, str, str]


class Coverage(SampledDetector):
    """Warns when sites that always reported do not any more; once for all that stopped together.

    Of experts alone it is an information: a router may choose one no more (see `router`).

    A site is steady if it reported at every sampled step since it was first seen, or at the last
    `steady` ones; what comes and goes (LayerDrop, an expert without tokens, a branch) is not. A
    steady site is lost after some sampled steps in a row without it, the fewer the longer it has
    reported (see `patience`). Where sites of its peers come and go (the same names but for the
    indices: `blocks.*`), it may be away by the same chance, so their rate of absences counts, too.
    What comes and goes itself is lost when an absence is far too unlikely at that rate, and far
    longer than any before. A rank that reports none of its sites at all is blind, which is said
    at once. Where a rank is missing or blind, an absence says nothing. A parameter in whose module
    another reports its gradient for the first time at that very step was renamed (pruning, a
    parametrization), and is not lost.

    Args:
        odds: how unlikely an absence by chance must be, one in so many; of what comes and goes, one
            in the square of it.
        least: sampled steps at which a site must have reported.
        steady: sampled steps after which a site that was away is steady again.
        fewest_absent: absences in a row without which no site is lost.
        longer: how many times the longest absence of its peers what comes and goes must be away.
    """

    name = "coverage"
    title = "Something fell silent"

    def __init__(
        self, *, odds: int = 20_000, least: int = 8, steady: int = 256,
        fewest_absent: int = FEWEST_ABSENT, longer: int = 4,
    ) -> None:  # fmt: skip
        at_least(
            1, odds=odds, least=least, steady=steady, fewest_absent=fewest_absent, longer=longer
        )
        if steady > MOST_STEADY:
            raise ValueError(f"steady={steady}: expected a number up to {MOST_STEADY}")
        self._needed = np.array(
            [patience(n, odds, least, fewest_absent) for n in range(steady + 1)]
        )
        self._chance = math.log(odds), longer
        self._reset()

    def _reset(self) -> None:
        self._seeing: dict[int, int] = {}  # rank -> sites that it reported when it last did
        self._blind: set[int] = set()
        self._history = _History(self._needed, *self._chance)

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record: a warning for ranks gone blind, or one for sites gone silent."""
        found = self._blind_ranks(record)
        lost = self._history.add(record, judge=not record.missing and not self._blind)
        if lost:
            found.append(_lost_sites(record, lost, self._history.kept(), self._history.reporting))
        return found

    def _blind_ranks(self, record: StepRecord) -> list[Anomaly]:
        before = dict(self._seeing)
        fresh = []
        for rank, sites in _observed_by(record).items():
            if sites:
                self._seeing[rank] = sites
                self._blind.discard(rank)
            elif rank in before and rank not in self._blind:
                self._blind.add(rank)
                fresh.append(rank)
        return [_gone_blind(record, fresh, max(before[r] for r in fresh))] if fresh else []


class _History:
    """How long each site has reported, and has not since; arrays over the sites ever seen.

    `run` counts sampled steps in a row at which it reported (up to `steady`), `absent` those since;
    `present` counts all at which it did, `gaps` those of absences that ended, `longest` is the
    longest of them. `peers` numbers the sites that are named alike.

    Args:
        needed: absences that make a steady site lost, by `run`.
        log_odds: natural logarithm of how unlikely an absence must be.
        longer: see `Coverage`.
    """

    def __init__(self, needed: NDArray[np.int64], log_odds: float, longer: int) -> None:
        self._needed, self._log_odds, self._longer = needed, log_odds, longer
        self._index: dict[Key, int] = {}
        self._sites: list[Site] = []
        self._groups: dict[tuple[str, str], int] = {}
        self._run, self._absent = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._present, self._gaps = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._longest, self._peers = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._steady, self._lost = np.zeros(0, bool), np.zeros(0, bool)
        self._table: tuple[Site, ...] = ()
        self._places = np.zeros(0, np.int64)
        self.reporting = 0

    def add(self, record: StepRecord, *, judge: bool) -> list[Site]:
        """Take a record in; return the sites that are lost as of it, if absences are to count."""
        if record.sites is not self._table:
            self._table, self._places = record.sites, self._places_of(record.sites)
        here = np.zeros(len(self._sites), bool)
        here[self._places[(record.counts[:, OBSERVED] > 0) & (self._places >= 0)]] = True
        self.reporting = int(here.sum())
        self._lost |= self._renamed(here)
        self._take(here)
        if not judge:
            return []
        away = ~here & (self._run > 0)
        self._absent[away] += 1
        long = self._absent >= np.where(self._steady, self._needed[self._run], self._needed[-1])
        new = np.flatnonzero(away & ~self._lost & long)
        new = new[self._absent[new] >= self._by_chance(new)] if len(new) else new
        new = new[[bool(self._steady[i]) or self._is_gone(i) for i in new]]
        self._lost[new] = True
        return [self._sites[i] for i in new]

    def _renamed(self, here: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the gradients that others of the same module report in place of, as of now."""
        fresh = np.flatnonzero(here & (self._present == 0))
        gone = np.flatnonzero(~here & (self._run > 0) & (self._absent == 0))
        renamed = np.zeros(len(here), bool)
        for kind in OF_PARAMETERS if len(fresh) and len(gone) else ():
            of = [[i for i in group if self._sites[i].kind == kind] for group in (gone, fresh)]
            names = [[self._sites[i].fqn for i in group] for group in of]
            renamed[np.array(of[0], np.intp)] = replaced(*names)
        return renamed

    def kept(self) -> list[Site]:
        """Return the sites that are not lost, in the order in which they were first seen."""
        return [self._sites[i] for i in np.flatnonzero(~self._lost)]

    def _by_chance(self, sites: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return how many absences in a row are more than chance, at the rate of site and peers.

        Of a site that comes and goes this is the least; see `_is_gone` for its own past.
        """
        groups = len(self._groups)
        gaps = np.bincount(self._peers, self._gaps, groups)
        present = np.bincount(self._peers, self._present, groups)
        longest = np.zeros(groups, np.int64)
        np.maximum.at(longest, self._peers, self._longest)
        of = self._peers[sites]
        pooled = (gaps[of] + 1) / (gaps[of] + present[of] + 2)  # rule of succession
        own = (self._gaps[sites] + 1) / (self._gaps[sites] + self._present[sites] + 2)
        steady = self._steady[sites]
        # A steady site's own rate is what `patience` is about.
        rate = np.where(steady, pooled, np.maximum(pooled, own))
        few = self._log_odds * np.where(steady, 1, 2) / -np.log(rate)
        return np.where(steady, np.where(gaps[of] > 0, few, 0.0),
                        np.maximum(few, self._longer * longest[of]))  # fmt: skip

    def _is_gone(self, site: np.intp) -> bool:
        """Whether an absence of a site that comes and goes is too unlikely by its own past.

        After n presences and m absences the next k are absences with a probability of
        B(m + k + 1, n + 1) / B(m + 1, n + 1), if nothing else is known (rule of succession).
        """
        n, m = int(self._present[site]), int(self._gaps[site])
        k = int(self._absent[site])
        log_chance = (
            math.lgamma(m + k + 1) - math.lgamma(m + 1)
            + math.lgamma(m + n + 2) - math.lgamma(m + n + k + 2)
        )  # fmt: skip
        return log_chance < -2 * self._log_odds

    def _take(self, here: NDArray[np.bool_]) -> None:
        back = here & (self._absent > 0)
        self._gaps[back] += self._absent[back]
        self._longest[back] = np.maximum(self._longest[back], self._absent[back])
        self._run[back], self._absent[back] = 0, 0
        self._steady[back] = self._lost[back] = False
        top = len(self._needed) - 1
        self._run[here] = np.minimum(self._run[here] + 1, top)
        self._present[here] += 1
        self._steady |= here & (self._run == top)

    def _places_of(self, sites: Sequence[Site]) -> NDArray[np.int64]:
        peers = []
        for site in sites:
            if site.kind in IN_TURN:  # they are away most of the time
                continue
            if site.key not in self._index and len(self._index) < MOST_SITES:
                self._index[site.key] = len(self._sites)
                self._sites.append(site)
                alike = (without_indices(site.fqn), site.kind)
                peers.append(self._groups.setdefault(alike, len(self._groups)))
        for name in ("_run", "_absent", "_present", "_gaps", "_longest"):
            setattr(self, name, grown(getattr(self, name), len(self._sites), 0))
        self._peers = np.append(self._peers, np.array(peers, np.int64))
        self._steady = grown(self._steady, len(self._sites), 1)
        self._lost = grown(self._lost, len(self._sites), 0)
        return np.array([self._index.get(site.key, -1) for site in sites], np.int64)


def patience(reported: int, odds: int, least: int, fewest_absent: int = FEWEST_ABSENT) -> int:
    """Return how many absences in a row mean that a site is lost, after so many reports.

    Whoever has been present n times of n is absent the next k times with a probability of one in
    C(n + k, k), if nothing else is known (rule of succession). At least `fewest_absent`.
    """
    if reported < least:
        return NEVER
    absent = fewest_absent
    while math.comb(reported + absent, absent) <= odds:
        absent += 1
    return absent


def _observed_by(record: StepRecord) -> dict[int, int]:
    """Return how many sites each rank reported; where ranks do not say, as all of them together."""
    said = {
        rank: int(scalars["sites_observed"])
        for rank, scalars in record.scalars.items()
        if math.isfinite(scalars.get("sites_observed", math.nan))
    }
    together = int((record.counts[:, OBSERVED] > 0).sum())
    return said or dict.fromkeys(record.ranks, together)


def _gone_blind(record: StepRecord, ranks: list[int], sites: int) -> Anomaly:
    who = ranks_text(tuple(sorted(ranks)))
    report = "report" if len(ranks) > 1 else "reports"
    message = (
        f"{who} {report} none of {sites} sites at a sampled step; if the model was compiled, "
        "replaced or stripped of its hooks after install(), install() again: until then nothing of "
        "it is observed"
    )
    rank = ranks[0] if len(ranks) == 1 else None
    values = {"sites": sites}
    return Coverage.anomaly(record, "warn", message, values, rank=rank, phase="forward")


def _lost_sites(record: StepRecord, lost: list[Site], kept: list[Site], reporting: int) -> Anomaly:
    """Return what is to be said of sites that are lost; `kept` are those known that are not."""
    kinds = {site.kind for site in lost}
    phase = min((PHASE_OF_KIND.get(k, "step") for k in kinds), key=PHASES.index)
    if phase == "forward":
        why = "not called any more (a branch, an expert), or compiled, replaced, stripped of hooks"
    else:
        why = "frozen (requires_grad=False), detached, or left out of the loss or the optimizer"
    # A subtree of one lost site only is named by it, and not by all that lies around it.
    silent = by_subtree((s.fqn for s in lost), (s.fqn for s in kept if s.kind in kinds))
    modules = [common_module(names) for names in silent.values()]
    first = next(iter(silent)) if phase == "forward" else nearest_loss(silent)
    many = "1 site" if len(lost) == 1 else f"{len(lost)} sites"
    report = "reports" if len(lost) == 1 else "report"
    message = (
        f"{many} in {named(modules)} {report} no more ({', '.join(sorted(kinds))}), {reporting} "
        f"others do; maybe {why}; if that was meant, all is well"
    )
    values = {"lost": len(lost), "reporting": reporting, "modules": len(modules)}
    kind = next(iter(kinds)) if len(kinds) == 1 else None
    level = "info" if all(is_in_expert(site.fqn) for site in lost) else "warn"
    return Coverage.anomaly(
        record, level, message, values, module=common_module(silent[first]), kind=kind, phase=phase
    )
