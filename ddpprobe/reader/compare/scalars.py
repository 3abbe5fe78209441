"""Which scalars of two runs can be compared, and why others cannot."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import final

from ddpprobe.records.environment import SCALAR as ENVIRONMENT
from ddpprobe.records.step import (
    ACTIVE,
    CHECKED,
    CLASS_LABELLED,
    CLASS_LOOKED,
    CLASS_OF_ALL,
    CLASS_POWER,
    CLASS_RIGHT,
    CLASS_ROWS,
    CLASS_SEEN,
    CLASS_SURE,
    CLASS_WEIGHT,
    COPIED,
    DIGEST,
    EXTRA_ACTIVATION,
    INPUT_ELEMENTS,
    INPUT_MAX,
    INPUT_MEAN,
    INPUT_MIN,
    INPUT_RMS,
    INPUT_SPREAD,
    INPUT_ZEROS,
    NORM_MOMENTUM,
    NORM_VALUES,
    OUTPUT_SPREAD,
    PASS,
    PASS_OF_BAD,
    PULL,
    PULL_REST,
    PULLED_MEAN,
    PULLED_RMS,
    RECOMPUTED,
    RECOMPUTED_AT,
    TARGET,
    UNREAD_INPUT,
    USED_NORM,
    StepRecord,
)

# Of how long something took, and of how the batch was split: no numbers of the model.
MICRO_BATCHES, _TIMES = "micro_batches", "_seconds"
# Nor is the order of its samples, and which of them are looked at.
OF_THE_BATCH = {
    MICRO_BATCHES, DIGEST, INPUT_SPREAD, OUTPUT_SPREAD, NORM_VALUES,
    COPIED, PULL, PULL_REST, PULLED_MEAN, PULLED_RMS, TARGET,
    CLASS_LABELLED, CLASS_LOOKED, CLASS_OF_ALL, CLASS_POWER, CLASS_RIGHT, CLASS_ROWS, CLASS_SEEN,
    CLASS_SURE, CLASS_WEIGHT, EXTRA_ACTIVATION, INPUT_ELEMENTS, INPUT_MAX, INPUT_MEAN, INPUT_MIN,
    INPUT_RMS, INPUT_ZEROS, RECOMPUTED, RECOMPUTED_AT,
}  # fmt: skip
# But for the numbers of what was given to the model, if the batch is split alike.
OF_THE_INPUT = {INPUT_ELEMENTS, INPUT_MAX, INPUT_MEAN, INPUT_MIN, INPUT_RMS, INPUT_ZEROS}
# Nor is how much of the model is observed, and of how many models. The sites are compared.
_OF_THE_PROBE = {"sites_expected", "sites_observed", PASS, PASS_OF_BAD, UNREAD_INPUT}
# Of two checksums all that can be said is that they are unlike.
_BUT_THE_INPUT, _BUT_THE_DIGEST = (
    (OF_THE_BATCH - given) | _OF_THE_PROBE for given in (OF_THE_INPUT, {DIGEST})
)
NORM_BY_SPLIT = "grad_norm"  # one rank's gradients, or its part of all
# The mean over the ranks is no number of the whole batch.
MEAN_BY_SPLIT = {"output_rms"}
_BY_SPLIT = {*MEAN_BY_SPLIT, *OF_THE_INPUT, DIGEST}
# Over what a rank holds: everything under DDP, its shards under FSDP.
_BY_WRAPPER = {"grad_norm", USED_NORM, CHECKED}
# Over all sites of a kind that the run observes.
_OVER_KIND = {
    "output_rms": "output", NORM_MOMENTUM: "output",
    "grad_norm_local": "grad_local", ACTIVE: "grad_local", "grad_norm": "grad",
}  # fmt: skip
OTHER_WRAPPER = "over what a rank holds, under another wrapper"
OTHER_PARTS = "numbers of one rank's part of the batch, which was split in another way"
OTHER_SITES = "over the observed sites, which differ"

Scalar = tuple[str, int | None]  # name; whose it is, None for the mean over the ranks


@final
class ScalarMatcher:
    """Pairs the scalars of two runs, and keeps which cannot be compared.

    Args:
        rewrapped: the runs have different wrappers.
    """

    def __init__(self, *, rewrapped: bool) -> None:
        self._rewrapped = rewrapped
        self._known: tuple[set[str], set[str]] = (set(), set())
        self._compared: set[str] = set()
        self._left: dict[str, set[str]] = {}  # why -> names, once at least not compared

    def of(
        self, a: StepRecord, b: StepRecord, *, resplit: bool, unlike: Collection[str]
    ) -> Iterator[tuple[Scalar, float, float]]:
        """Yield what can be compared of one step.

        Args:
            a: of one run.
            b: of the other one.
            resplit: the batch is split in another way; then means over the ranks are compared.
            unlike: kinds of which not the same sites are observed in both.
        """
        numbers = []
        for known, record in zip(self._known, (a, b), strict=True):
            cells = {rank: _of_training(cells) for rank, cells in record.scalars.items()}
            names = {name for of_rank in cells.values() for name in of_rank}
            known.update(names)
            left = {name for name in names if self._leaves(name, resplit=resplit, unlike=unlike)}
            numbers.append(_numbers(cells, left, resplit=resplit))
        yield ("skipped", None), float(a.skipped), float(b.skipped)
        one, two = numbers
        for key in one.keys() & two.keys():
            self._compared.add(key[0])
            yield key, one[key], two[key]

    def left_out(self) -> dict[str, list[str]]:
        """Return why scalars were at no step compared -> their names."""
        found = {why: sorted(names - self._compared) for why, names in self._left.items()}
        return {why: names for why, names in found.items() if names}

    def alone(self) -> tuple[list[str], list[str]]:
        """Return the names of scalars that one run has in no compared step, and the other has."""
        left = set[str]().union(*self._left.values())
        one, two = ({n for n in names if "@-" not in n} - left for names in self._known)
        return sorted(one - two), sorted(two - one)

    def _leaves(self, name: str, *, resplit: bool, unlike: Collection[str]) -> bool:
        """Return whether a scalar cannot be compared at this step, and keep why."""
        if self._rewrapped and name in _BY_WRAPPER:
            why = OTHER_WRAPPER
        elif resplit and (name.startswith(NORM_BY_SPLIT) or name in _BY_SPLIT):
            why = OTHER_PARTS
        elif _OVER_KIND.get(name) in unlike:
            why = OTHER_SITES
        else:
            return False
        self._left.setdefault(why, set()).add(name)
        return True


def _of_training(cells: Mapping[str, float]) -> dict[str, float]:
    """Return those of a rank's scalars that say something of the training alone."""
    never = _BUT_THE_INPUT if INPUT_RMS in cells else _BUT_THE_DIGEST
    return {
        name: value
        for name, value in cells.items()
        if not (name in never or name.endswith(_TIMES) or name.startswith(ENVIRONMENT))
    }


def _numbers(
    cells: Mapping[int, Mapping[str, float]], left: Collection[str], *, resplit: bool
) -> dict[Scalar, float]:
    """Return scalars by name and rank, or their means over the ranks."""
    found: dict[str, dict[int, float]] = {}
    for rank, of_rank in cells.items():
        for name, value in of_rank.items():
            if name not in left:
                found.setdefault(name, {})[rank] = value
    if resplit:
        return {(name, None): sum(by.values()) / len(by) for name, by in found.items()}
    return {(name, rank): value for name, by in found.items() for rank, value in by.items()}
