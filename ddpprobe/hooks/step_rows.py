"""One sampled step on the device: a row per call, merged per site when it reaches the host.

Every hook call appends one row to a preallocated device buffer; the host remembers only which site
and micro-batch it belongs to. The position in the buffer is the execution order, so the first bad
row *is* the first bad tensor, and nothing has to be compared on the device.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter

import numpy as np
import torch
from torch import Tensor

from ddpprobe.hooks.loss_scale import SCALED_KINDS
from ddpprobe.hooks.pending_rows import SCALAR, PendingRows
from ddpprobe.hooks.site_table import SiteTable
from ddpprobe.stats import rows as stats
from ddpprobe.stats.checksum import checksum
from ddpprobe.stats.rows import Unsupported

_FIRST_CAPACITY = 1024


class StepRows:
    """The rows of the step under way. Backward hooks may come from autograd's own threads.

    Args:
        device: of the model.
        rank: this rank.
        timed: order the first bad tensor by the clock rather than by its place in this rank's
            execution: the stages of a pipeline run one after the other, not side by side.

    Attributes:
        grad_is_scaled: `.grad` was read before anybody divided it by the loss scale.
    """

    def __init__(self, device: torch.device, rank: int, *, timed: bool = False) -> None:
        self.table = SiteTable()
        self._rank = rank
        self._times: list[int] | None = [] if timed else None
        shape = _FIRST_CAPACITY, stats.WIDTH
        self._buffer = torch.empty(shape, dtype=torch.float64, device=device)
        self._lock = threading.Lock()
        self._slots: list[int] = []
        self._micros: list[int] = []
        self._names: dict[int, str] = {}
        self._digests: dict[int, tuple[str, str]] = {}
        self._tapped: Counter[int] = Counter()
        self._confirmed: set[int] = set()
        self._unsupported: Counter[str] = Counter()
        self.grad_is_scaled = False
        self._last: tuple[weakref.ref[Tensor], int, int] | None = None

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, slot: int, micro: int, tensor: Tensor, *, reused: bool = False) -> None:
        """Reduce `tensor` into the next row. A tensor seen just before is not read again.

        `reused`: it is a buffer of a compiled graph, written in place without a new version.
        """
        with self._lock:
            index = self._next()
            if reused:
                self._last = None
            try:
                self._reduce(index, tensor)
            except Unsupported as reason:
                self._unsupported[str(reason)] += 1
                return
            if reused:
                self._last = None
            self._note(slot, micro)

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
            if isinstance(value, Tensor):
                self._buffer[index, 0].copy_(value.detach(), non_blocking=True)
            else:
                self._buffer[index, 0].fill_(value)
            self._names[index] = name
            self._note(SCALAR, -1)

    def add_checksum(self, fqn: str, shard: str, tensor: Tensor) -> None:
        """Take the checksum of a parameter, or shard of one, that other ranks hold as well."""
        with self._lock:
            index = self._next()
            checksum(tensor, self._buffer.view(torch.int64)[index, 0])
            self._digests[index] = (fqn, shard)
            self._note(SCALAR, -1)

    def forget(self, kind: str) -> None:
        """Leave out the rows of `kind` so far: what is read anew contains them."""
        for index, slot in enumerate(self._slots):
            if slot != SCALAR and self.table.site(slot).kind == kind:
                self._micros[index] = -1

    def begin(self) -> None:
        """Forget the last step; the buffer and the site table stay."""
        self._slots, self._micros = [], []
        if self._times is not None:
            self._times.clear()
        self._names.clear()
        self._digests.clear()
        self._tapped.clear()
        self._confirmed.clear()
        self._unsupported.clear()
        self.grad_is_scaled = False
        self._last = None

    def fetch(self) -> PendingRows:
        """Start the one device-to-host copy of this step and return what waits for it."""
        n = len(self._slots)
        return PendingRows(
            rows=_to_host(self._buffer[:n]),
            event=_record_event(self._buffer.device),
            slots=np.array(self._slots, np.int64),
            micros=np.array(self._micros, np.int64),
            times=np.array(self._times, np.int64) if self._times is not None else None,
            names=dict(self._names),
            digests=dict(self._digests),
            scaled_kinds=(*SCALED_KINDS, "grad") if self.grad_is_scaled else SCALED_KINDS,
            tapped=Counter(self._tapped),
            confirmed=frozenset(self._confirmed),
            unsupported=Counter(self._unsupported),
            table=self.table,
            rank=self._rank,
        )

    def _note(self, slot: int, micro: int) -> None:
        self._slots.append(slot)
        self._micros.append(micro)
        if self._times is not None:
            self._times.append(time.time_ns())

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


def _to_host(rows: Tensor) -> Tensor:
    if rows.device.type == "cpu":
        return rows.clone()
    host = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)
    return host.copy_(rows, non_blocking=True)


def _record_event(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
