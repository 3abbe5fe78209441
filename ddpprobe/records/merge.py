"""Merging what ranks say of one step: one law, whoever merges whom, in whatever grouping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.histogram import BINS, Bins, is_whole, no_histograms
from ddpprobe.records.identity_cache import IdentityCache
from ddpprobe.records.step import (
    PLACEMENTS,
    SEVERAL,
    UNORDERED,
    Counts,
    Digests,
    FirstBad,
    Site,
    StepRecord,
    Values,
    empty_rows,
    merge_counts,
    merge_values,
)

Index = slice | NDArray[np.intp]
Sites = tuple[Site, ...]

_ADDITIVE = ("local", "sharded")
_PLANS = 256  # more tables than that, one after the other, are merged without a memory


def merge_all(records: Sequence[StepRecord]) -> StepRecord:
    """Merge one step's records of any number of disjoint ranks; one record is itself.

    Associative, and commutative up to the order of the sites; in time linear in the rows. The
    primaries of `local` and `sharded` rows are merged, and other replicas of them dropped; of
    `replicated`, `partial` and `unknown` ones the lowest rank's row is kept. Where the ranks do not
    agree, nothing is added up either: the site is `unknown` if one of them says that or
    `replicated`, and otherwise `partial`.

    Raises:
        ValueError: they are of several steps, or share ranks.
    """
    first, *others = parts = sorted(records, key=lambda r: r.ranks[:1])
    if not others:
        return first
    ranks = tuple(sorted(chain.from_iterable(r.ranks for r in parts)))
    for other in others:
        if (first.attempt, first.step) != (other.attempt, other.step):
            msg = (
                f"cannot merge step {first.step} (attempt {first.attempt}) with {other.step} "
                f"({other.attempt})"
            )
            raise ValueError(msg)
    if len(set(ranks)) < len(ranks):
        msg = f"cannot merge records that share ranks: {' and '.join(str(r.ranks) for r in parts)}"
        raise ValueError(msg)
    sites, counts, values = _merge_rows(parts)
    binned, bins = _merge_bins(parts, counts)
    return StepRecord(
        attempt=first.attempt,
        step=first.step,
        ranks=ranks,
        wall_time_ns=max(r.wall_time_ns for r in parts),
        sampled=any(r.sampled for r in parts),
        sites=sites,
        counts=counts,
        values=values,
        scalars=dict(chain.from_iterable(r.scalars.items() for r in parts)),
        first_bad=_first_bad([r.first_bad for r in parts if r.first_bad]),
        skipped=any(r.skipped for r in parts),
        partial=any(r.partial for r in parts),
        missing=tuple(sorted(set(chain.from_iterable(r.missing for r in parts)) - set(ranks))),
        digests=merge_digests(*(r.digests for r in parts)),
        binned=binned,
        bins=bins,
    )


def _first_bad(found: Sequence[FirstBad]) -> FirstBad | None:
    """Return the earliest; where several ranks have theirs, the sum, which blames none of them.

    What was reduced (phase `step`) is the same tensor on all ranks, and no sum. Of what a step left
    behind, any other rank with something bad takes the blame from the first; the counts are then
    the most of any rank, as it may be replicas or parts.
    """
    ordered = sorted(found, key=lambda bad: (bad.place, bad.rank))
    if ordered and ordered[0].is_state:
        return _first_of_state(ordered)
    if _is_undecided(ordered):
        # Nor whose numbers it would be.
        return FirstBad(ordered[0].step, ordered[0].micro, ordered[0].phase, UNORDERED, SEVERAL)
    same = [bad for bad in ordered if bad.place == ordered[0].place]
    if len(same) < 2 or same[0].phase == "step":
        return ordered[0] if ordered else None
    return _of_several(same, sum)


def _first_of_state(ordered: Sequence[FirstBad]) -> FirstBad:
    first = ordered[0]
    of_step = [bad for bad in ordered if bad.is_state and bad.step == first.step]
    if len(of_step) < 2:
        return first
    same = [bad for bad in of_step if bad.place == first.place]
    return _of_several(same, max)


def _is_undecided(ordered: Sequence[FirstBad]) -> bool:
    """Whether another one may be before the first, in the same phase of the same micro-batch."""
    if not ordered or ordered[0].phase == "step":
        return False
    near = [bad for bad in ordered if bad.place[:4] == ordered[0].place[:4]]
    return len(near) > 1 and any(bad.order == UNORDERED for bad in near)


def _of_several(same: Sequence[FirstBad], join: Callable[[list[int]], int]) -> FirstBad:
    """Return the fault that several ranks have, with their counts joined."""
    return replace(
        same[0], rank=SEVERAL, nan=join([bad.nan for bad in same]),
        pos_inf=join([bad.pos_inf for bad in same]), neg_inf=join([bad.neg_inf for bad in same]),
        numel=join([bad.numel for bad in same]),
    )  # fmt: skip


def merge_digests(*parts: Digests) -> Digests:
    """Merge sets of checksums: per parameter and checksum, the union of the ranks."""
    some = [digests for digests in parts if digests]
    if len(some) < 2:
        return some[0] if some else {}
    out: dict[tuple[str, str], dict[int, int]] = {}
    for digests in some:
        for key, held in digests.items():
            mine = out.get(key)
            if mine is None:
                out[key] = dict(held)
                continue
            for checksum, ranks in held.items():
                mine[checksum] = mine.get(checksum, 0) | ranks
    return out


def disagreements(digests: Digests) -> Digests:
    """Keep the entries in which ranks that hold the same shard do not agree."""
    return {key: held for key, held in digests.items() if len(held) > 1}


def ranks_of(mask: int) -> tuple[int, ...]:
    """Return the ranks in a bit mask, ascending."""
    return tuple(rank for rank in range(mask.bit_length()) if mask >> rank & 1)


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the rows of one more record enter those that are merged already.

    Attributes:
        sites: of the result; the first ones are those of before.
        new: rows of the record that are appended.
        added: (row of the result, row of the record) to merge; no row of the result comes twice
            in one pair.
        kept: (row of the result, row of the record) to overwrite.
    """

    sites: Sites
    new: Index
    added: tuple[tuple[Index, Index], ...]
    kept: tuple[Index, Index]


def _merge_rows(parts: Sequence[StepRecord]) -> tuple[Sites, Counts, Values]:
    sites: Sites = ()
    counts, values = empty_rows(0)
    for part in parts:
        plan = _plan(sites, part.sites)
        if len(plan.sites) > len(sites):
            counts = np.concatenate((counts, part.counts[plan.new]))
            values = np.concatenate((values, part.values[plan.new]))
        for to, row in plan.added:
            counts[to] = merge_counts(counts[to], part.counts[row])
            values[to] = merge_values(values[to], part.values[row])
        to, row = plan.kept
        counts[to], values[to] = part.counts[row], part.values[row]
        sites = plan.sites
    return sites, counts, values


def _merge_bins(parts: Sequence[StepRecord], counts: Counts) -> tuple[NDArray[np.int64], Bins]:
    """Merge the histograms as `_merge_rows` merges the rows.

    A site of which some rank has elements and no histogram has none: a part would pass for all.
    """
    if not any(len(part.binned) for part in parts):
        return no_histograms()
    sites: Sites = ()
    bins, has = np.zeros((len(counts), BINS), np.int64), np.zeros(len(counts), bool)
    for part in parts:
        plan, known = _plan(sites, part.sites), len(sites)
        mine, mine_has = (
            np.zeros((len(part.sites), BINS), np.int64),
            np.zeros(len(part.sites), bool),
        )
        if len(part.binned):
            mine[part.binned], mine_has[part.binned] = part.bins, True
        sites = plan.sites
        bins[known : len(sites)], has[known : len(sites)] = mine[plan.new], mine_has[plan.new]
        for to, row in plan.added:
            bins[to] += mine[row]
            has[to] |= mine_has[row]
        to, row = plan.kept
        bins[to], has[to] = mine[row], mine_has[row]
    rows = np.flatnonzero(has & is_whole(counts, bins))
    return rows, bins[rows]


def _make_plan(merged: Sites, more: Sites) -> _Plan:
    index = {site.key: row for row, site in enumerate(merged)}
    sites, new = list(merged), list[int]()
    kept: tuple[list[int], list[int]] = [], []
    rounds: list[dict[int, int]] = []
    for row, site in enumerate(more):
        additive = site.placement in _ADDITIVE
        if additive and not site.primary:
            continue
        to = index.setdefault(site.key, len(sites))
        if to == len(sites):
            sites.append(site if site.primary else replace(site, primary=True))
            new.append(row)
            continue
        known = sites[to].placement
        if additive and known in _ADDITIVE:
            free = next((r for r in rounds if to not in r), None)
            if free is None:
                rounds.append(free := {})
            free[to] = row
            continue
        if known != site.placement:
            sites[to] = replace(sites[to], placement=_disputed(known, site.placement))
        if PLACEMENTS.index(site.placement) > PLACEMENTS.index(known):
            kept[0].append(to)
            kept[1].append(row)
    same = next((table for table in (merged, more) if list(table) == sites), None)
    return _Plan(
        tuple(sites) if same is None else same,
        _index(new),
        tuple((_index(list(r)), _index(list(r.values()))) for r in rounds),
        (_index(kept[0]), _index(kept[1])),
    )


_plan = IdentityCache(_make_plan, _PLANS)


def _index(rows: list[int]) -> Index:
    """Return an index for these rows, a slice where one will do: it needs no copy."""
    first = rows[0] if rows else 0
    if rows == list(range(first, first + len(rows))):
        return slice(first, first + len(rows))
    return np.array(rows, np.intp)


def _disputed(a: str, b: str) -> str:
    """Placement of a site of which the ranks say two things, not both of them additive.

    The row to keep is that of the later word in `PLACEMENTS`: it is never a sum.
    """
    return "unknown" if {a, b} & {"unknown", "replicated"} else "partial"
