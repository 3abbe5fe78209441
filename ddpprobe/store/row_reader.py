"""Rows of one group, each read by itself: for arrays that are read later, and in any order."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ddpprobe.errors import StoreDamaged
from ddpprobe.records.step import COUNTS, VALUES
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store import format as fmt
from ddpprobe.store import regions
from ddpprobe.store.statistic_reader import Found, StatisticReader
from ddpprobe.store.verified_files import GroupArrays

ROW_COLUMNS = ("step", "wall_time", "sampled", "skipped", "partial")


@final
class RowReader:
    """Reads rows of a group when asked; may be pickled, and used by several threads.

    A group that grows keeps the rows that it had. What is damaged raises here, and is not left out:
    whoever reads a part of an array has no place for a list of what is lost.

    Args:
        path: the run directory.
        key: of the group, such as `attempt_000/merged`.
    """

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key
        self._lock = threading.Lock()
        self._arrays: GroupArrays | None = None

    def __getstate__(self) -> tuple[Path, str]:
        return self._path, self._key

    def __setstate__(self, state: tuple[Path, str]) -> None:
        self.__init__(*state)  # opened anew where it is used

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the columns `ROW_COLUMNS`, each [rows].

        Raises:
            StoreDamaged: one of them is damaged.
        """
        with self._lock:
            arrays = self._group()
            parts = [
                {name: arrays.read(name, a, min(a + fmt.COLUMN_CHUNK, arrays.rows))
                 for name in ROW_COLUMNS}
                for a in range(0, arrays.rows, fmt.COLUMN_CHUNK)
            ]  # fmt: skip
            empty = {name: arrays.read(name, 0, 0) for name in ROW_COLUMNS}
        return {n: np.concatenate([empty[n], *(part[n] for part in parts)]) for n in ROW_COLUMNS}

    @property
    def exists(self) -> bool:
        """False if nothing was committed to the group when it was opened."""
        with self._lock:
            return self._group().exists

    def sizes(self) -> dict[str, int]:
        """Return how long each dimension is, as the rows below are cut."""
        with self._lock:
            return dict(self._group().sizes)

    def blocks(self) -> list[tuple[int, int]]:
        """Return what is stored together, as spans of rows [start, stop), but what expired."""
        with self._lock:
            arrays = self._group()
            block = arrays.chunks.get("counts", {}).get("step", fmt.BLOCK)
            spans = regions.cuts(0, arrays.rows, block, arrays.sizes["site"])
            return [(a, b) for a, b in spans if not arrays.has_expired(a // block)]

    def read(self, name: str, start: int, stop: int, *sizes: int) -> NDArray[Any]:
        """Return rows [start, stop) of an array, and of its other dimensions the first `sizes`.

        Raises:
            StoreDamaged: they are damaged, or retention took them away since.
        """
        with self._lock:
            try:
                inner = tuple(slice(0, size) for size in sizes)
                return self._group().read(name, start, stop, inner)
            except StoreDamaged as error:
                raise self._damaged(start, stop, str(error)) from error

    def statistic(self, stat: str, start: int, stop: int, sites: int) -> Found:
        """Return (is there a row, counts, values) of the first `sites`, as `StatisticReader`.

        Raises:
            StoreDamaged: they are damaged, or retention took them away since.
        """
        rows = stop - start
        if not sites:
            return (
                np.zeros((rows, 0), bool),
                np.zeros((rows, 0, len(COUNTS)), np.int64),
                np.zeros((rows, 0, len(VALUES))),
            )
        with self._lock:
            arrays = self._group()
            found = StatisticReader(arrays, stat, range(sites)).read((0, 0), start, stop)
            if found is None:
                why = arrays.lost[-1].why if arrays.lost else "it has expired"
                raise self._damaged(start, stop, why)
            return found

    def _group(self) -> GroupArrays:
        if self._arrays is None:
            self._arrays = GroupArrays(RunDir(self._path), self._key)
        return self._arrays

    def _damaged(self, start: int, stop: int, why: str) -> StoreDamaged:
        self._arrays = None  # it may have been written anew meanwhile
        return StoreDamaged(
            f"{self._key}: rows {start} to {stop - 1} cannot be read: {why}. Select others with "
            ".isel(step=...), or leave chunks= out: then what is damaged is left out and listed"
        )
