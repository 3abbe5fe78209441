"""Where two runs part: the first step, site (in execution order) and statistic.

Steps are aligned by their numbers, sites by name. A run that was started several times counts once:
of each step the last start that reached it holds, because that is what the model came from. Both
runs are read as streams; what is kept grows with the number of sites, not of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ddpprobe.reader.compare.difference import (
    BEFORE_ALL,
    PRESENT,
    VALUE,
    Comparison,
    Difference,
    Growth,
)
from ddpprobe.reader.compare.scalars import MICRO_BATCHES, OF_THE_INPUT, ScalarMatcher
from ddpprobe.reader.compare.site_matching import (
    PART_MISSING,
    WEIGHTS,
    SiteMatcher,
    SiteMatching,
    execution_order,
    renamed,
)
from ddpprobe.reader.compare.timeline import aligned, timeline
from ddpprobe.reader.compare.tolerance import ComparedRows, Floats, Tolerance, rounding
from ddpprobe.reader.run import Run
from ddpprobe.reader.series import matches
from ddpprobe.records.step import DIGEST, IN_TURN, NUMEL, OBSERVED, Site, StepRecord

Advance = Callable[[int], None]
Key = tuple[str, str, str]
ONE_NUMBER = "one number for each part of the batch, which was split in another way"


def _unheard(_: int) -> None:
    """Nobody wants to know how far it is."""


def compare(
    a: Run, b: Run, tolerance: Tolerance, glob: str = "*", advance: Advance = _unheard
) -> Comparison:
    """Compare two runs, live, sealed, or crashed.

    Args:
        a: a run.
        b: another one.
        tolerance: what counts as equal.
        glob: over sites, as `Run.series` takes it; scalars are compared if it is "*".
        advance: told 1 for each record that was read.
    """
    rewrapped = a.identity.get("wrapper") != b.identity.get("wrapper")
    work = _Comparing(tolerance, glob, ScalarMatcher(rewrapped=rewrapped))
    for one, two in aligned(_sampled(a, advance), _sampled(b, advance)):
        work.take(one, two)
    return work.result()


def _sampled(run: Run, advance: Advance) -> Iterator[StepRecord]:
    for record in timeline(run):
        advance(1)
        if record.sampled:
            yield record


@dataclass(frozen=True, slots=True)
class _Both:
    """The rows of two records of one step that are the same sites, side by side."""

    step: int
    pairing: SiteMatching
    one: ComparedRows
    two: ComparedRows
    left_out: NDArray[np.bool_] | None  # see `_is_one_number`; None: nothing is

    def differs(self) -> NDArray[np.bool_]:
        """Return which sites differ in anything at all: most often none do, or all."""
        a, b = self.one, self.two
        counts: NDArray[np.bool_] = (a.counts != b.counts).any(axis=1)
        values = (a.values != b.values) & ~(np.isnan(a.values) & np.isnan(b.values))
        other: NDArray[np.bool_] = values.any(axis=1)
        return counts | other

    def excess(self, tolerance: Tolerance, rows: NDArray[np.intp]) -> Floats:
        """Return what `Tolerance.excess` says of some of them; 0 of what cannot be compared."""
        found = tolerance.excess(self.one.of(rows), self.two.of(rows), self.pairing.limits.of(rows))
        if self.left_out is not None:
            found[self.left_out[rows]] = 0.0
        return found


@final
class _Comparing:
    """One comparison under way."""

    def __init__(self, tolerance: Tolerance, glob: str, scalars: ScalarMatcher) -> None:
        self._tolerance, self._glob, self._scalars = tolerance, glob, scalars
        self._pairer = SiteMatcher(tolerance, glob)
        self._out = Comparison()
        self._pairing: SiteMatching | None = None
        self._parted = np.zeros(0, bool)  # by the number of a pairing's `index`
        self._found: dict[object, Difference] = {}
        self._absent: tuple[dict[Site, Difference], dict[Site, Difference]] = ({}, {})
        self._known: tuple[set[Key], set[Key]] = (set(), set())
        self._left: dict[str, dict[Site, None]] = {}  # why -> sites, once at least not compared
        self._one_number: dict[Site, None] = {}  # the same, for this reason
        self._weights: set[str] = set()  # the kinds that are left out, and are there
        self._previous: int | None = None  # the compared step before this one
        self._before: dict[int, int | None] = {}  # a step with something new -> the one before it
        self._since = 0  # compared steps since the first difference
        self._tip: tuple[_Both, StepRecord, StepRecord] | None = None  # the newest, if not kept

    def take(self, a: StepRecord | None, b: StepRecord | None) -> None:
        """Take the next step of one run or of both."""
        out = self._out
        if a is None or b is None:
            out.only[a is None] += 1
            return
        if a.partial or b.partial:  # what it lacks, another exception or exit would have cut off
            for side, record in enumerate((a, b)):
                out.torn[side] += record.partial
            return
        out.first = a.step if out.first is None else out.first
        self._previous, out.last = out.last, a.step
        out.steps += 1
        out.incomplete += bool(a.missing or b.missing)
        resplit = _split(a) != _split(b)
        pairing = self._pairer.of(a, b, resplit=resplit)
        if pairing is not self._pairing:
            self._pairing = pairing
            self._meet(pairing, a, b)
        one = ComparedRows(a.counts, a.values).of(pairing.a)
        two = ComparedRows(b.counts, b.values).of(pairing.b)
        both = _Both(a.step, pairing, one, two, _is_one_number(one, two) if resplit else None)
        if both.left_out is not None:
            numbers = np.flatnonzero(both.left_out).tolist()
            self._one_number.update((pairing.sites[i], None) for i in numbers)
        self._compare_sites(both)
        if self._glob == "*":
            self._compare_scalars(pairing, a, b, resplit=resplit)
        if self._found:
            self._follow(both, a, b)

    def result(self) -> Comparison:
        """Return what came out."""
        out, found = self._out, self._found
        out.sites = len(self._pairer)
        for absent, alone, other in zip(self._absent, out.alone, self._known[::-1], strict=True):
            for site, gone in absent.items():
                if site.key not in other:
                    alone.append(site)
                elif site.key not in found or gone.when < found[site.key].when:
                    found[site.key] = gone
        for names, alone in zip(self._scalars.alone(), out.alone, strict=True):
            alone.extend(names)
        out.left_out = self._left_out()
        out.differences = sorted(found.values(), key=lambda p: (p.when, p.scalar, p.rank or 0))
        out.agreed = self._before[out.differences[0].step] if found else out.last
        out.growth += [self._growth(*self._tip)] if self._tip else []
        return out

    def _left_out(self) -> dict[str, list[Site | str]]:
        never: dict[str, list[Site | str]] = {
            why: [s for s in sites if s not in self._pairer] for why, sites in self._left.items()
        }
        never[ONE_NUMBER] = list(self._one_number)
        never[WEIGHTS] = [f"*:{kind}" for kind in IN_TURN if kind in self._weights]
        for why, names in self._scalars.left_out().items():
            never[why] = list(names)
        return {why: things for why, things in never.items() if things}

    def _keep(self, place: dict[Any, Difference], key: object, difference: Difference) -> None:
        """Keep a difference, unless there was an earlier one at this place."""
        if key not in place:
            place[key] = difference
            self._before.setdefault(difference.step, self._previous)

    def _meet(self, pairing: SiteMatching, a: StepRecord, b: StepRecord) -> None:
        """Take note of what two tables that are new say about sites."""
        out = self._out
        self._parted.resize(len(self._pairer), refcheck=False)  # with zeros
        for known, record in zip(self._known, (a, b), strict=True):
            known.update(site.key for site in record.sites)
            of_weights = (site for site in record.sites if site.kind in IN_TURN)
            self._weights |= {s.kind for s in of_weights if matches(s, self._glob)}
        for side, (absent, record) in enumerate(zip(self._absent, (a, b), strict=True)):
            order = execution_order(record.sites)
            if (b, a)[side].missing:  # which may have it: a stage of a pipeline, say
                self._left.setdefault(PART_MISSING, {}).update(
                    (site, None) for site, _ in pairing.alone[side]
                )
                continue
            for site, row in pairing.alone[side]:
                gone = Difference(
                    a.step, order[row], site, "", None, PRESENT, 1.0 - side, float(side), math.inf
                )
                self._keep(absent, site, gone)
        for site, why in pairing.left_out.items():
            self._left.setdefault(why, {})[site] = None
        out.recast.update(pairing.recast)
        if not out.renamed and all(pairing.alone):
            out.renamed = renamed(a, b, pairing, self._tolerance)

    def _compare_sites(self, both: _Both) -> None:
        """Keep what parts here for the first time."""
        rows = np.flatnonzero(both.differs() & ~self._parted[both.pairing.index])
        excess = both.excess(self._tolerance, rows)
        worst = excess.max(axis=1, initial=0.0)
        new = worst > 1
        for difference in self._differences(both, rows[new], excess[new]):
            self._keep(self._found, difference.site and difference.site.key, difference)
        self._parted[both.pairing.index[rows[new]]] = True
        if self._is_nearest(worst.max(initial=0.0)):
            at = slice(int(worst.argmax()), int(worst.argmax()) + 1)
            (self._out.nearest,) = self._differences(both, rows[at], excess[at])

    def _is_nearest(self, excess: float) -> bool:
        """Return whether nothing has parted, and nothing came nearer to that than this."""
        nearest = self._out.nearest
        return not self._found and excess > (nearest.excess if nearest else 0.0)

    def _differences(
        self, both: _Both, rows: NDArray[np.intp], excess: Floats
    ) -> Iterator[Difference]:
        columns, pairing = excess.argmax(axis=1).tolist(), both.pairing
        numbers = [self._tolerance.numbers(x.of(rows)) for x in (both.one, both.two)]
        for i, (row, column) in enumerate(zip(rows.tolist(), columns, strict=True)):
            x, y = (float(found[i, column]) for found in numbers)
            stat, order = self._tolerance.statistics[column], int(pairing.order[row])
            worst = float(excess[i, column])
            yield Difference(both.step, order, pairing.sites[row], "", None, stat, x, y, worst)

    def _compare_scalars(
        self, pairing: SiteMatching, a: StepRecord, b: StepRecord, *, resplit: bool
    ) -> None:
        r = float(pairing.limits.r.max(initial=rounding("")))
        r = r if self._tolerance.rtol is None else self._tolerance.rtol
        order = len(a.sites)
        for key, x, y in self._scalars.of(a, b, resplit=resplit, unlike=pairing.unlike):
            if key in self._found:
                continue
            (name, rank), excess = key, self._scalar_excess(x, y, r)
            place = BEFORE_ALL if name in OF_THE_INPUT or name == DIGEST else order
            difference = Difference(a.step, place, None, name, rank, VALUE, x, y, excess)
            if excess > 1:
                self._keep(self._found, key, difference)
            elif self._is_nearest(excess):
                self._out.nearest = difference

    def _scalar_excess(self, x: float, y: float, r: float) -> float:
        if x == y or (math.isnan(x) and math.isnan(y)):
            return 0.0
        if self._tolerance.exact or not (math.isfinite(x) and math.isfinite(y)):
            return math.inf
        allowed = r * max(abs(x), abs(y)) + self._tolerance.atol
        return abs(x - y) / allowed if allowed > 0 else math.inf

    def _follow(self, both: _Both, a: StepRecord, b: StepRecord) -> None:
        """Keep how far the runs are apart, at steps ever farther from the first difference."""
        is_kept = self._since & (self._since - 1) == 0
        self._since += 1
        self._tip = None if is_kept else (both, a, b)
        if is_kept:
            self._out.growth.append(self._growth(both, a, b))

    def _growth(self, both: _Both, a: StepRecord, b: StepRecord) -> Growth:
        sites = both.pairing.sites
        excess = both.excess(self._tolerance, np.arange(len(sites))).max(axis=1, initial=0.0)
        worst = int(excess.argmax()) if excess.any() else None
        return Growth(
            both.step, int((excess > 1).sum()), len(sites),
            None if worst is None else sites[worst],
            0.0 if worst is None else float(excess[worst]),
            _mean(a, "loss"), _mean(b, "loss"),
        )  # fmt: skip


def _is_one_number(one: ComparedRows, two: ComparedRows) -> NDArray[np.bool_]:
    """Return which sites are one number for each call, such as a loss, of unlike many calls."""
    a, b = (rows.counts[:, [NUMEL, OBSERVED]].T for rows in (one, two))
    found: NDArray[np.bool_] = (a[0] == a[1]) & (b[0] == b[1]) & (a[1] != b[1])
    return found


def _split(record: StepRecord) -> tuple[object, ...]:
    """Return how the batch of a step was split: over which ranks, in how many micro-batches."""
    ranks = sorted((*record.ranks, *record.missing))
    return (ranks, {cells.get(MICRO_BATCHES) for cells in record.scalars.values()})


def _mean(record: StepRecord, name: str) -> float | None:
    given = [cells[name] for cells in record.scalars.values() if name in cells]
    return sum(given) / len(given) if given else None
