"""One sampled step on the device: a row per call, merged per site when it reaches the host.

Every hook call appends one row to a preallocated device buffer; the host remembers only which site
and micro-batch it belongs to. The position in the buffer is the execution order, so the first bad
row *is* the first bad tensor, and nothing has to be compared on the device.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpprobe.records import COUNTS, PHASE_OF_KIND, Counts, FirstBad, Site, Values
from ddpprobe.stats import rows as stats
from ddpprobe.stats.rows import Unsupported

_FIRST_CAPACITY = 1024
_SCALAR = -1  # the slot of a row that holds one number in its first column
_TAPPED = COUNTS.index("tapped")


class SiteTable:
    """Grows one slot per (fqn, kind, leaf), in the order of first sight; slots never change."""

    def __init__(self) -> None:
        self._slots: dict[tuple[str, str, str], int] = {}
        self._sites: list[Site] = []
        self._frozen: tuple[Site, ...] = ()

    def slot(self, site: Site) -> int:
        """Return the slot of `site`, taken by its first caller."""
        slot = self._slots.get(site.key)
        if slot is None:
            slot = self._slots[site.key] = len(self._sites)
            self._sites.append(site)
        return slot

    def find(self, key: tuple[str, str, str]) -> int | None:
        """Return the slot of (fqn, kind, leaf), None if it was never seen."""
        return self._slots.get(key)

    def site(self, slot: int) -> Site:
        """Return the site of a slot."""
        return self._sites[slot]

    def sites(self) -> tuple[Site, ...]:
        """All sites so far; the same object as long as none was added."""
        if len(self._frozen) != len(self._sites):
            self._frozen = tuple(self._sites)
        return self._frozen


@dataclass(frozen=True, slots=True)
class StepResult:
    """A sampled step on the host: rows per site, scalars, first bad tensor, what was left out."""

    sites: tuple[Site, ...]
    counts: Counts
    values: Values
    scalars: dict[str, float]
    first_bad: FirstBad | None
    unsupported: Counter[str]


class StepRows:
    """The rows of the step under way. Backward hooks may come from autograd's own threads."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self.table = SiteTable()
        self._rank = rank
        shape = _FIRST_CAPACITY, stats.WIDTH
        self._buffer = torch.empty(shape, dtype=torch.float64, device=device)
        self._lock = threading.Lock()
        self._slots: list[int] = []
        self._micros: list[int] = []
        self._names: dict[int, str] = {}
        self._tapped: Counter[int] = Counter()
        self._confirmed: set[int] = set()
        self._unsupported: Counter[str] = Counter()
        self._last: tuple[weakref.ref[Tensor], int, int] | None = None

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, slot: int, micro: int, tensor: Tensor) -> None:
        """Reduce `tensor` into the next row. A tensor seen just before is not read again."""
        with self._lock:
            index = self._next()
            try:
                self._reduce(index, tensor)
            except Unsupported as reason:
                self._unsupported[str(reason)] += 1
                return
            self._slots.append(slot)
            self._micros.append(micro)

    def tap(self, slot: int) -> None:
        """Note that a hook was placed for `slot`; if nothing arrives it is unobserved."""
        self._tapped[slot] += 1

    def confirm(self, micro: int) -> None:
        """A gradient arrived: this forward was a training micro-batch, not an evaluation."""
        self._confirmed.add(micro)

    def add_scalar(self, name: str, value: Tensor | float) -> None:
        """Keep one number of this step; several under one name are averaged."""
        with self._lock:
            index = self._next()
            self._buffer[index, 0].copy_(torch.as_tensor(value).detach(), non_blocking=True)
            self._names[index] = name
            self._slots.append(_SCALAR)
            self._micros.append(-1)

    def begin(self) -> None:
        """Forget the last step; the buffer and the site table stay."""
        self._slots, self._micros = [], []
        self._names.clear()
        self._tapped.clear()
        self._confirmed.clear()
        self._unsupported.clear()
        self._last = None

    def fetch(self) -> PendingRows:
        """Start the one device-to-host copy of this step and return what waits for it."""
        n = len(self._slots)
        return PendingRows(
            rows=_to_host(self._buffer[:n]),
            event=_record_event(self._buffer.device),
            slots=np.array(self._slots, np.int64),
            micros=np.array(self._micros, np.int64),
            names=dict(self._names),
            tapped=Counter(self._tapped),
            confirmed=frozenset(self._confirmed),
            unsupported=Counter(self._unsupported),
            table=self.table,
            rank=self._rank,
        )

    def _next(self) -> int:
        index = len(self._slots)
        if index == len(self._buffer):
            self._buffer = torch.cat((self._buffer, torch.empty_like(self._buffer)))
        return index

    def _reduce(self, index: int, tensor: Tensor) -> None:
        # A container often returns its last child's very tensor: same object, same version.
        if self._last is not None:
            ref, version, row = self._last
            if ref() is tensor and tensor._version == version:  # noqa: SLF001  (public by docs)
                self._buffer[index].copy_(self._buffer[row])
                return
        stats.reduce(tensor, self._buffer[index])
        if not tensor.is_inference():
            self._last = (weakref.ref(tensor), tensor._version, index)  # noqa: SLF001


@dataclass(frozen=True, slots=True)
class PendingRows:
    """Rows on their way to the host; `ready()` before `result()` keeps the host from waiting."""

    rows: Tensor
    event: torch.cuda.Event | None
    slots: NDArray[np.int64]
    micros: NDArray[np.int64]
    names: dict[int, str]
    tapped: Counter[int]
    confirmed: frozenset[int]
    unsupported: Counter[str]
    table: SiteTable
    rank: int

    def ready(self) -> bool:
        """Whether the copy is over; never waits."""
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        """Wait for the copy: only at the end of a run."""
        if self.event is not None:
            self.event.synchronize()

    def result(self, step: int, *, partial: bool) -> StepResult:
        """Merge the rows per site. `partial` keeps forwards whose backward never came."""
        rows = self.rows.numpy()
        keep = self._kept(partial=partial)
        sites = self.table.sites()
        counts, values = stats.split_rows(rows[keep], self.slots[keep], len(sites))
        for slot, times in self.tapped.items():
            counts[slot, _TAPPED] += times
        scalars: dict[str, list[float]] = {}
        for index, name in self.names.items():
            scalars.setdefault(name, []).append(float(rows[index, 0]))
        return StepResult(
            sites,
            counts,
            values,
            {name: sum(v) / len(v) for name, v in scalars.items()},
            self._first_bad(rows, keep, step),
            self.unsupported,
        )

    def _kept(self, *, partial: bool) -> NDArray[np.intp]:
        """Indices of the rows that belong to the step, in execution order."""
        kinds = [self.table.site(s).kind if s != _SCALAR else "" for s in self.slots]
        reduced = [m for m, k in zip(self.micros, kinds, strict=True) if k == "grad"]
        last = max(reduced, default=-1)  # each backward reads `grad` anew: the last one is the sum
        kept = [
            i
            for i, (micro, kind) in enumerate(zip(self.micros, kinds, strict=True))
            if kind
            and (kind != "grad" or micro == last)
            and (partial or PHASE_OF_KIND[kind] != "forward" or micro in self.confirmed)
        ]
        return np.array(kept, np.intp)

    def _first_bad(
        self, rows: NDArray[np.float64], keep: NDArray[np.intp], step: int
    ) -> FirstBad | None:
        bad = [int(i) for i in keep if rows[i, stats.NONFINITE].any()]
        if not bad:
            return None
        # A reduced gradient is bad on all ranks at once: it counts only without a local witness.
        first = min(bad, key=lambda i: (self._phase(i) == "step", i))
        site = self.table.site(int(self.slots[first]))
        numel, nan, pos_inf, neg_inf = (int(v) for v in rows[first, :4])
        return FirstBad(
            step=step, micro=int(self.micros[first]), phase=self._phase(first), order=first,
            rank=self.rank, fqn=site.fqn, kind=site.kind, leaf=site.leaf,
            nan=nan, pos_inf=pos_inf, neg_inf=neg_inf, numel=numel,
        )  # fmt: skip

    def _phase(self, index: int) -> str:
        return PHASE_OF_KIND[self.table.site(int(self.slots[index])).kind]


def _to_host(rows: Tensor) -> Tensor:
    if rows.device.type == "cpu":
        return rows.clone()
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    return host.copy_(rows, non_blocking=True)


def _record_event(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
