"""The last values of many series, and which of them moved to another level and stayed there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddpprobe.detectors.sites_of_kind import Floats

LEAST_NOISE = 0.01  # decades: a series that hardly moves is not judged by its own rounding
# Of values in any order two of three are higher, or lower, than both beside them. Where that is so
# for fewer than these, as where several steps are taken on each batch, what moved must be so many
# times as clear.
FEWEST_TURNS, CORRELATED = 0.4, 3.0


@dataclass(frozen=True, slots=True)
class Shifts:
    """Which series have shifted, and how each lies against its past; arrays [shifted].

    Attributes:
        places: of the series, ascending.
        size: from the median of the block before to that of the last one, in decades where logs are
            pushed; negative: down.
        clear: how many times the largest such move between two blocks before it, each as far as it
            would have gone over as many steps as lie between the last two; infinite where nothing
            has ever moved and there is no `least_noise`.
        certain: the same; a third of it where values that are of batches follow from each other.
    """

    places: NDArray[np.intp]
    size: Floats
    clear: Floats
    certain: Floats


_NONE = Shifts(np.zeros(0, np.intp), np.zeros(0), np.zeros(0), np.zeros(0))


class LevelWindow:
    """The last `length` values of each series, as log10 or plain; NaN where there was none.

    A series has shifted if all of its last k values lie beyond all of the n before. Of values that
    come in any order the last k are the largest by chance once in (n + k)! / (n! k!). A trend does
    it all the time, so the move between the medians of the last two blocks of k is compared with
    those between the blocks before. Where values come more rarely than before, a trend goes further
    from one to the next: so a move over fewer steps counts as far as it would have gone over more.

    Args:
        length: values that are remembered of each series.
        least_noise: what a series is taken to move by at least, in its unit.
        of_batches: whether a value is mostly of its batch, as a loss is: then those that follow
            from the ones before them are fewer than it seems.
    """

    def __init__(
        self, length: int, *, least_noise: float = LEAST_NOISE, of_batches: bool = False
    ) -> None:
        self._least_noise, self._of_batches = least_noise, of_batches
        self._past = np.full((length, 0), np.nan, np.float32)
        self._steps = np.full(length, np.nan)

    def push(self, logs: Floats, step: int) -> None:
        """Remember the value of each series [n] at the next step; more than before, never fewer."""
        self._steps = np.append(self._steps[1:], step)
        more = len(logs) - self._past.shape[1]
        if more:
            fresh = np.full((len(self._past), more), np.nan, np.float32)
            self._past = np.concatenate((self._past, fresh), axis=1)
        self._past[:-1] = self._past[1:]
        with np.errstate(over="ignore"):  # a loss that is no logarithm
            self._past[-1] = logs

    def holds(self, values: int) -> bool:
        """Return whether so many have been pushed."""
        return bool(np.isfinite(self._steps[-values]))

    def step_of(self, values: int) -> float:
        """Return the step of the first of the last `values`; NaN if there are fewer."""
        return float(self._steps[-values])

    def last(self, values: int) -> Floats:
        """Return the last `values` of each series [values, n]."""
        return self._past[-values:].astype(np.float64)

    def values_since(self, step: float) -> Floats:
        """Return the values [looks, n] from the last one before a step on; NaN: nothing known."""
        earlier = int((~(self._steps >= step)).sum())  # and places that hold nothing yet
        return self._past[max(earlier - 1, 0) :].astype(np.float64)

    def shifts(self, recent: int, blocks: int) -> Shifts:
        """Return what has shifted: the last `recent` values against `blocks` times as many."""
        if not self.holds(recent * (blocks + 1)):
            return _NONE
        past = self._past[-recent * (blocks + 1) :]
        # Few series pass a look at the ends of both parts, which costs little.
        first, last, end, start = past[-recent], past[-1], past[-recent - 1], past[0]
        up = np.minimum(first, last) > np.maximum(end, start)
        down = np.maximum(first, last) < np.minimum(end, start)
        places = (up | down).nonzero()[0]
        if len(places):
            now, before = past[-recent:, places], past[:-recent, places]
            # A NaN makes both comparisons false: such a series is not known.
            places = places[(now.min(0) > before.max(0)) | (now.max(0) < before.min(0))]
        if not len(places):
            return _NONE
        values = past[:, places].astype(np.float64)
        moves = _moves(values, recent)
        apart = _moves(self._steps[-len(past) :, None], recent)
        longer = np.maximum(apart[-1] / apart[:-1], 1.0)
        noise = np.maximum((np.abs(moves[:-1]) * longer).max(0), self._least_noise)
        with np.errstate(divide="ignore"):
            clear = np.abs(moves[-1]) / noise
        certain = clear
        if self._of_batches:
            certain = clear / np.where(_are_in_order(values[:-recent]), CORRELATED, 1.0)
        return Shifts(places, moves[-1], clear, certain)

    def largest_move(self, recent: int) -> Floats:
        """Return the largest move between the medians of two blocks that are known [n], decades."""
        whole = self._past[len(self._past) % recent :].astype(np.float64)
        moves: Floats = np.fmax.reduce(np.abs(_moves(whole, recent)), axis=0, initial=0.0)
        return moves


def _are_in_order(values: Floats) -> NDArray[np.bool_]:
    """Whether the values [n] of a series follow from those before them; not where they stay."""
    ways = np.sign(np.diff(values, axis=0))
    both = (ways[1:] != 0) & (ways[:-1] != 0)
    turns = (both & (ways[1:] != ways[:-1])).sum(0)
    known = both.sum(0)
    in_order: NDArray[np.bool_] = (known >= len(values) / 2) & (turns < FEWEST_TURNS * known)
    return in_order


def _moves(past: Floats, recent: int) -> Floats:
    """Return the moves between the medians of neighbouring blocks of the values [blocks - 1, n]."""
    medians = np.median(past.reshape(-1, recent, past.shape[1]), axis=1)
    moves: Floats = np.diff(medians, axis=0)
    return moves
