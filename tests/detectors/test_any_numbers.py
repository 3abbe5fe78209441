"""No number of a record makes a detector raise, or NumPy warn, after a quiet past either.

The scalars are all that `records.step` names, and those that `StepRecord` lists. A stream is quiet
first, so that windows are full, and then each number is now and then one of the extremes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from ddpprobe.detectors.suite import default_suite
from ddpprobe.records import step as names
from ddpprobe.records.every_loss import name_of
from ddpprobe.records.step import (
    COUNTS,
    KINDS,
    PHASES,
    SEVERAL,
    STEP_PHASES,
    VALUES,
    FirstBad,
    Site,
    StepRecord,
)
from tests.detectors.made_records import record

RANKS, LOSSES = (0, 1, 2), ("loss", name_of(1))
QUIET, WILD, HELD = 70, 70, 10  # steps; for so many an extreme is held
EXTREMES = (
    *(np.nan, np.inf, -np.inf, 1e300, -1e300, 1e-300, 5e-324, 1e-20, 1e16, 0.0, -1.0, 1.0),
    *(2**63, 10**30),
)
PAIRS = ((np.inf, -np.inf), (1e300, 1e-20), (1e300, 1e300))  # of two ranks
CONSTANT = ("lr", "trainable_parameters", "training_share", "micro_batches")  # in a quiet run
NOT_SCALARS = {"ELEMENTS", "TENSORS", "OWN", "SQUARED", "ROOT", "BUFFER", "UNWRAPPED", "NOTED"}
SCALARS = sorted(
    {
        value + ("blocks" if value.endswith("@") else "")
        for name, value in vars(names).items()
        if name.isupper() and isinstance(value, str) and name not in NOT_SCALARS
    }
    | {*names.QUEUED.values(), *(f"{phase}_seconds" for phase in STEP_PHASES)}
    | {*LOSSES, "grad_norm", "grad_norm_local", "output_rms", "micro_batches"}
    | {"loss_scale", "probe_seconds", *(f"{names.OPTION}{option}" for option in names.OPTIONS)}
)
FQNS = ("", "blocks.0", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight")
EXPERTS = tuple(f"moe.experts.{i}" for i in range(3))
MIXED = (np.nan, np.inf, -np.inf, 1e300, -1e300, 1e-300, 0.0, 1.0, -1.0)
Held = dict[tuple[int, str], float]  # what a rank says under a name, for some steps


def _sites(chance: random.Random) -> tuple[Site, ...]:
    """Return a few sites of each kind, each kind in any placement."""
    placed = {kind: chance.choice(("local", "sharded", "replicated")) for kind in KINDS}
    return tuple(
        Site(fqn, kind, placement=placed[kind], dtype=chance.choice(("float32", "bfloat16")))
        for kind in KINDS
        for fqn in (*FQNS, *EXPERTS)
    )


def _rows(
    chance: random.Random, table: Sequence[Site], bad: Sequence[int]
) -> tuple[names.Counts, names.Values]:
    """Return rows of 100 elements about 1, or 1e-6 of a change; the bad ones have any numbers."""
    shape = len(table), len(VALUES)
    counts = np.tile(np.array([100, 0, 0, 0, 0, 1, 1], np.int64), (len(table), 1))
    values = np.random.default_rng(chance.randrange(2**32)).uniform(0.9, 1.1, shape)
    values *= [-3.0, 3.0, 1.0, 100.0]
    values[[site.kind == "update" for site in table]] *= [1e-6, 1e-6, 1e-6, 1e-12]
    for row in bad:
        values[row] = [chance.choice(MIXED) for _ in VALUES]
        if chance.random() < 0.5:
            counts[row] = [chance.choice((0, 1, 100, 2**40, 2**62)) for _ in COUNTS]
    return counts, values


def _held(chance: random.Random) -> Held:
    """Return extremes that ranks say for some steps: under many names or few, or of one a pair."""
    share = chance.choice((0.0, 0.01, 0.3))
    if not share:
        name = chance.choice((*LOSSES, chance.choice(SCALARS)))
        return {(rank, name): number for rank, number in enumerate(chance.choice(PAIRS))}
    return {
        (rank, name): chance.choice(EXTREMES)
        for rank in RANKS
        for name in SCALARS
        if chance.random() < share
    }


def _stream(seed: int) -> Iterator[StepRecord]:
    """Yield two attempts of three ranks."""
    chance = random.Random(seed)
    table = _sites(chance)
    for attempt, quiet in enumerate((QUIET, WILD // 4)):
        held, bad, scattered = Held(), list[int](), 0.0
        usual = 1.0 if attempt else 1e-20  # the loss
        for at in range(quiet + WILD):
            if at >= quiet and at % HELD == 0:
                held, scattered = _held(chance), chance.choice((0.0, 0.0, 0.05))
                if at == quiet:
                    pair = enumerate(PAIRS[seed % len(PAIRS)])
                    held = {(rank, name): number for rank, number in pair for name in LOSSES}
                    scattered = 0.0
                bad = chance.sample(range(len(table)), chance.choice((0, 1, 30)))
            said = {}
            for rank in RANKS:
                mine = {name: chance.uniform(0.9, 1.1) for name in SCALARS}
                mine |= dict.fromkeys(CONSTANT, 1.0)
                mine |= {name: mine[name] * usual for name in LOSSES}
                mine |= {name: number for (r, name), number in held.items() if r == rank}
                for name in SCALARS:
                    if chance.random() < scattered:
                        mine[name] = chance.choice(EXTREMES)
                    elif chance.random() < scattered:
                        del mine[name]
                said[rank] = mine | ({names.NOTED: 1.0} if chance.random() < scattered / 9 else {})
            counts, values = _rows(chance, table, bad)
            site = table[chance.choice(bad)] if bad and chance.random() < 0.1 else None
            yield StepRecord(
                attempt, at * 2 + 20 * attempt, RANKS, at, sites=table, counts=counts,
                values=values, scalars=said, skipped=chance.random() < scattered,
                partial=chance.random() < scattered,
                first_bad=None if site is None else FirstBad(
                    at * 2 + 20 * attempt, 0, chance.choice(PHASES), 3, chance.choice((0, SEVERAL)),
                    site.fqn, site.kind, nan=1, numel=100,
                ),
                digests={("blocks.0.weight", ""): {1: 1, 2: 2}} if chance.random() < scattered
                else {},
            )  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_no_number_makes_a_detector_raise_or_numpy_warn(seed: int) -> None:
    suite = default_suite()
    for each in _stream(seed):
        suite.update(each)
    suite.finish()


def test_losses_that_are_infinite_in_both_directions_are_a_page() -> None:
    suite = default_suite()
    usual = [record(at, {rank: {"loss": 1.0} for rank in (0, 1)}) for at in range(5)]
    bad = record(5, {0: {"loss": np.inf}, 1: {"loss": -np.inf}})
    found = [(a.detector, a.level, a.step) for each in (*usual, bad) for a in suite.update(each)]
    assert found == [("nonfinite", "page", 5)]
