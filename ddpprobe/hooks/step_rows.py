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
from ddpprobe.torch_private import functorch

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
        bad: the host has seen NaN or Inf in a row of this step.
    """

    def __init__(self, device: torch.device, rank: int, *, timed: bool = False) -> None:
        self.table = SiteTable()
        self._rank = rank
        self._times: list[int] | None = [] if timed else None
        shape = _FIRST_CAPACITY, stats.WIDTH
        with functorch.outside():  # where the first forward may be
            self._buffer = torch.zeros(shape, dtype=torch.float64, device=device)
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._lock = threading.Lock()
        self._slots: list[int] = []
        self._micros: list[int] = []
        self._names: dict[int, str] = {}
        self._digests: dict[int, tuple[str, str]] = {}
        self._tapped: list[int] = []
        self._confirmed: set[int] = set()
        self._unsupported: Counter[str] = Counter()
        self.grad_is_scaled = self.bad = False
        self._last: tuple[weakref.ref[Tensor], int, int] | None = None

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, slot: int, micro: int, tensor: Tensor, *, reused: bool = False) -> None:
        """Reduce `tensor` into the next row. A tensor seen just before is not read again.

        `reused`: it is a buffer of a compiled graph, written in place without a new version.
        """
        with self._lock:
            index, last = self._next(), self._last
            # A container often returns its last child's very tensor: same object, same version.
            if (
                last is not None
                and last[0]() is tensor
                and last[1] == tensor._version  # noqa: SLF001  (public by documentation)
                and not reused
            ):
                self._buffer[index].copy_(self._buffer[last[2]])
            else:
                try:
                    self.bad |= stats.reduce_into(tensor, self._buffer, index)
                except Unsupported as reason:
                    self._unsupported[str(reason)] += 1
                    return
                self._last = None
                if not (reused or tensor.is_inference()):
                    self._last = weakref.ref(tensor), tensor._version, index  # noqa: SLF001
            self._note(slot, micro)

    def tap(self, slot: int) -> None:
        """Note that a hook was placed for `slot`; if nothing arrives it is unobserved."""
        self._tapped.append(slot)

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

    def are_finite(self) -> bool:
        """Whether nothing that was read so far is NaN or infinite; False: perhaps (a GPU knows)."""
        rows = self._buffer[: len(self._slots), stats.NONFINITE]
        return rows.device.type == "cpu" and not rows.any()

    def bad_from(self, index: int) -> bool:
        """Whether the host can see NaN or Inf in a row from `index` on."""
        if not self._buffer.is_cpu:
            return False
        return bool(self._buffer.numpy()[index : len(self._slots), stats.NONFINITE].any())

    def end_finite(self, slot: int) -> bool:
        """Whether the row made last is of `slot` and, as the host can see, has no NaN or Inf."""
        last = len(self._slots) - 1
        if last < 0 or self._slots[last] != slot or not self._buffer.is_cpu:
            return False
        return not self._buffer.numpy()[last, stats.NONFINITE].any()

    def begin(self) -> None:
        """Forget the last step; the buffer and the site table stay."""
        if self._copied is not None:  # the device waits, not the host, and by now for nothing
            torch.cuda.current_stream(self._buffer.device).wait_event(self._copied)
            self._copied = None
        self._slots, self._micros = [], []
        if self._times is not None:
            self._times.clear()
        self._names.clear()
        self._digests.clear()
        self._tapped.clear()
        self._confirmed.clear()
        self._unsupported.clear()
        self.grad_is_scaled = self.bad = False
        self._last = None

    def fetch(self) -> PendingRows:
        """Start the one device-to-host copy of this step and return what waits for it."""
        return PendingRows(
            rows=self._to_host(self._buffer[: len(self._slots)]),
            event=self._copied,
            slots=np.array(self._slots, np.int64),
            micros=np.array(self._micros, np.int64),
            times=np.array(self._times, np.int64) if self._times is not None else None,
            names=dict(self._names),
            digests=dict(self._digests),
            scaled_kinds=(*SCALED_KINDS, "grad") if self.grad_is_scaled else SCALED_KINDS,
            tapped=np.array(self._tapped, np.int64),
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
        if index == self._buffer.shape[0]:
            with functorch.outside():
                self._buffer = torch.cat((self._buffer, torch.zeros_like(self._buffer)))
        return index

    def _to_host(self, rows: Tensor) -> Tensor:
        """Copy on a stream of its own: the training's goes on meanwhile."""
        if self._copies is None:
            return rows.to("cpu", copy=True)
        host = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)
        self._copies.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(self._copies):
            host.copy_(rows, non_blocking=True)
            self._copied = self._copies.record_event()
        rows.record_stream(self._copies)
        return host
