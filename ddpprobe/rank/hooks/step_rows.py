"""One sampled step on the device: a row per call, merged per site when it reaches the host.

Every hook call appends one row to a preallocated device buffer; the host remembers only which site
and micro-batch it belongs to. The position in the buffer is the execution order, so the first bad
row *is* the first bad tensor, and nothing has to be compared on the device.

A row is made where its tensor is, whatever other devices the model is spread over: to bring it to
another would make one of the two wait. So each device has a buffer, and the host joins them.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpprobe.rank.hooks import lanes
from ddpprobe.rank.hooks.bin_rows import BinRows
from ddpprobe.rank.hooks.constants import Constants
from ddpprobe.rank.hooks.execution_order import ExecutionOrder
from ddpprobe.rank.hooks.lanes import Arrival
from ddpprobe.rank.hooks.pending_rows import SCALAR, CameIn, PendingRows, as_input, witness
from ddpprobe.rank.hooks.row_buffer import RowBuffer
from ddpprobe.rank.hooks.site_table import SiteTable
from ddpprobe.rank.hooks.steady import Steady
from ddpprobe.rank.stats import rows as stats
from ddpprobe.rank.stats.checksum import checksum
from ddpprobe.rank.stats.dense import FLOATS, dense, is_copy, lies_on, local
from ddpprobe.rank.stats.many import KernelTable, checksum_many
from ddpprobe.rank.stats.rows import Unsupported
from ddpprobe.records.step import BACKWARD_KINDS, PHASE_OF_KIND, FirstBad

_HOST = torch.device("cpu")
_FAKE = "FakeTensor"


class StepRows:
    """The rows of the step under way. Backward hooks may come from autograd's own threads.

    Args:
        device: where the model computes, or most of it.
        rank: this rank.
        order: of the first bad tensor among the ranks.
        bins: makes the histograms, if there are any to be made.

    Attributes:
        grad_is_scaled: `.grad` was read before anybody divided it by the loss scale.
        on_bad: called with the first fault of a step at once, where the host sees it.
    """

    def __init__(
        self, device: torch.device, rank: int, *,
        order: ExecutionOrder | None = None, bins: BinRows | None = None,
    ) -> None:  # fmt: skip
        self._order = order or ExecutionOrder()
        self._bins = bins
        self.table, self._steady, self._constants = SiteTable(), Steady(), Constants()
        self.on_bad: Callable[[FirstBad], object] = lambda _: None
        self._told = False  # the first fault of this step
        self._bad: list[int] = []  # rows in which the host has seen NaN or Inf, in their order
        self._came_in: dict[int, CameIn] = {}  # of those that are of a call which was given such
        self._made_of: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # away from the host, by id
        self._unread: set[int] = set()  # rows of calls whose input nobody has read
        self._rank = rank
        self._times: list[int] | None = [] if self._order.timed else None
        self._main = RowBuffer(device)
        self._others: dict[torch.device, RowBuffer] = {}
        self._elsewhere: dict[int, RowBuffer] = {}  # the rows that are not in the main one
        self._lock = threading.Lock()
        self._slots: list[int] = []
        self._micros: list[int] = []
        self._names: dict[int, str] = {}
        self._digests: dict[int, tuple[str, str]] = {}
        self._tapped: list[int] = []
        self._confirmed: set[int] = set()
        self._lent = 0  # micro-batches, the first ones, that were for another model
        self._unsupported: Counter[str] = Counter()
        self.grad_is_scaled = False
        self._last: tuple[weakref.ref[Tensor], int, int] | None = None
        self._together = _take_together(device)
        self._gradients, self._checksums = KernelTable(), KernelTable()

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def bad(self) -> bool:
        """The host has seen NaN or Inf in a row of this step."""
        return bool(self._bad)

    def add(
        self, slot: int, micro: int, tensor: Tensor, *,
        reused: bool = False, again: bool = False, tell: bool = True,
    ) -> None:  # fmt: skip
        """Reduce `tensor` into the next row. A tensor seen just before is not read again.

        `reused`: it is a buffer of a compiled graph, written in place without a new version.
        `again`: read it even so, as code that may write without a new version ran meanwhile.
        `tell`: of a fault at once; else `tell_call` is to follow.
        """
        with self._lock:
            index, last = len(self._slots), self._last
            # A container often returns its last child's very tensor: same object, same version.
            if (
                last is not None
                and last[0]() is tensor
                and last[1] == tensor._version  # noqa: SLF001  (public by documentation)
                and not (reused or again)
            ):
                buffer = self._elsewhere.get(last[2], self._main)
                buffer.reach(index)
                buffer.rows[index].copy_(buffer.rows[last[2]])
                bad = last[2] in self._bad
            else:
                try:
                    buffer = self._main
                    if not (buffer.near and tensor.is_cpu and index < buffer.capacity):
                        buffer = self._buffer_of(tensor, index)
                    bad = buffer.reduce(tensor, index)
                except Unsupported as reason:
                    self._unsupported[str(reason)] += 1
                    return
                self._last = None
                if not (reused or tensor.is_inference()):
                    self._last = weakref.ref(tensor), tensor._version, index  # noqa: SLF001
                    if not buffer.near:
                        self._made_of[id(tensor)] = self._last[:2]
            self._note(slot, micro, buffer)
            if self._bins is not None:
                self._bins.add(slot, self.table.site(slot), index, tensor)
            if bad:
                self._bad.append(index)
        if bad and tell:
            self._tell(index)

    def add_all(
        self, micro: int, found: Iterable[tuple[int, Tensor]], table: KernelTable | None = None
    ) -> int:
        """Do as `add` does for each (slot, tensor) of `found`, and return how many there were.

        Away from the CPU all together, as a launch for each would cost the host more than the
        numbers are worth: so none of them may change, or go, before this returns. `table`: what a
        kernel knows of tensors that are not the gradients.
        """
        count = 0
        if not self._together:
            for slot, tensor in found:
                self.add(slot, micro, tensor)
                count += 1
            return count
        tensors = list(found)
        with self._lock, torch.no_grad():
            first, together = len(self._slots), []
            for slot, tensor in tensors:
                index = len(self._slots)
                try:
                    buffer = self._buffer_of(tensor, index)
                    one = self._one_of_many(tensor) if buffer is self._main else None
                    if one is not None:
                        together.append((*one, index - first))
                    else:
                        buffer.reduce(tensor, index)
                except Unsupported as reason:
                    self._unsupported[str(reason)] += 1
                    continue
                self._note(slot, micro, buffer)
                if self._bins is not None:
                    self._bins.add(slot, self.table.site(slot), index, tensor)
            if together:
                known = self._gradients if table is None else table
                stats.reduce_all(together, self._main.rows[first:], known)
            self._last = None
        return len(tensors)

    def tap(self, slot: int) -> None:
        """Note that a hook was placed for `slot`; if nothing arrives it is unobserved."""
        self._tapped.append(slot)

    def leave_out(self, reason: str) -> None:
        """Note that there is no row of something that could have had one."""
        self._unsupported[reason] += 1

    def confirm(self, micro: int) -> None:
        """A gradient arrived: this forward was a training micro-batch, not an evaluation."""
        self._confirmed.add(micro)

    def lend(self, until: int) -> None:
        """Leave the micro-batches below `until` out of the statistics, but not what is bad there.

        Numbers that came before the others' first row, such as a loss, were theirs as well.
        """
        with self._lock:
            self._lent = until
            own = next((i for i, micro in enumerate(self._micros) if micro >= until), len(self))
            self._names = {index: name for index, name in self._names.items() if index > own}

    def add_scalar(self, name: str, value: Tensor | float) -> None:
        """Keep one number of this step; several under one name are averaged."""
        with self._lock:
            index = len(self._slots)
            if isinstance(value, Tensor):
                buffer = self._buffer_of(value, index)
                buffer.rows[index, 0].copy_(value.detach(), non_blocking=True)
            else:  # to a device this would be a launch
                buffer = self._buffer_on(_HOST, index)
                buffer.rows[index, 0].fill_(value)
            self._names[index] = name
            self._note(SCALAR, -1, buffer)

    def add_scalars(self, names: Sequence[str], values: Tensor) -> None:
        """Keep one number under each name; `values` [names], on any device."""
        with self._lock:
            index = len(self._slots)
            end = index + len(names)
            buffer = self._buffer_of(values, end - 1)
            buffer.rows[index:end, 0].copy_(values.detach(), non_blocking=True)
            for name in names:
                self._names[len(self._slots)] = name
                self._note(SCALAR, -1, buffer)

    def add_checksum(self, fqn: str, shard: str, tensor: Tensor) -> None:
        """Take the checksum of a parameter, a shard of one, or a buffer that other ranks hold."""
        with self._lock:
            index = len(self._slots)
            buffer = self._buffer_of(tensor, index)
            checksum(tensor, buffer.rows.view(torch.int64)[index, 0])
            self._digests[index] = (fqn, shard)
            self._note(SCALAR, -1, buffer)

    def add_checksums(self, held: Iterable[tuple[str, str, Tensor]]) -> None:
        """Take the checksums of all (FQN, shard, tensor), away from the CPU together."""
        if not self._together:
            for fqn, shard, tensor in held:
                self.add_checksum(fqn, shard, tensor)
            return
        with self._lock, torch.no_grad():
            first, together = len(self._slots), []
            for fqn, shard, tensor in held:
                index, part = len(self._slots), local(tensor)
                buffer = self._buffer_of(part, index)
                if buffer is self._main and lies_on(part, buffer.device):
                    together.append((part, index - first))
                else:
                    checksum(part, buffer.rows.view(torch.int64)[index, 0])
                self._digests[index] = (fqn, shard)
                self._note(SCALAR, -1, buffer)
            words = self._main.rows.view(torch.int64)[first:]
            if together and not checksum_many(together, words, self._checksums):
                for part, index in together:
                    checksum(part, words[index, 0])

    def _one_of_many(self, tensor: Tensor) -> tuple[Tensor, int] | None:
        """Return what `reduce_all` takes of a tensor; None: it is better taken alone."""
        device = self._main.device
        if tensor.dtype in FLOATS and lies_on(tensor, device):
            return tensor, 1
        if tensor.layout != torch.strided:
            return None
        flat, repeats = dense(tensor)
        # A copy that `dense` had to make is not kept until all are there.
        alone = flat.dtype not in FLOATS or is_copy(flat, tensor)
        return None if alone or not lies_on(flat, device) else (flat, repeats)

    def forget(self, slots: Container[int]) -> None:
        """Leave out the rows of these slots so far: what is read anew contains them."""
        for index, slot in enumerate(self._slots):
            if slot in slots:
                self._micros[index] = -1

    def are_finite(self) -> bool:
        """Whether nothing that was read so far on the host is NaN or infinite."""
        return not self._bad

    def bad_from(self, index: int) -> bool:
        """Whether the host has seen NaN or Inf in a row from `index` on."""
        return bool(self._bad) and self._bad[-1] >= index

    def first_fault(self) -> FirstBad | None:
        """Return the first bad tensor of the forward that the host can see; its step is not set.

        An infinity of which only the end of the step tells whether it does harm counts as one: ask
        where there is harm.
        """
        for index in self._bad:
            if not self._steady.excuses(self._slots[index], self._row(index)):
                found = self._witness(index)
                return found if found.phase == "forward" else None
        return None

    @property
    def is_near(self) -> bool:
        """Whether the host can read the rows at once."""
        return self._main.near

    def has_read(self, tensors: Iterable[Tensor]) -> bool:
        """Whether each of these, as it is now, has a row in this step, away from the host."""
        for tensor in tensors:
            made, version = self._made_of.get(id(tensor), (None, 0))
            if made is None or made() is not tensor or tensor._version != version:  # noqa: SLF001
                return False
        return True

    def unread(self, index: int) -> None:
        """Note that the rows from `index` on are of a call whose input nobody has read."""
        self._unread.update(range(index, len(self._slots)))

    def tell_call(self, index: int, came_in: Callable[[], CameIn | None]) -> None:
        """Tell of a fault in the rows from `index` on, which are the outputs of one call.

        Args:
            index: of the first of them.
            came_in: asked only if one of them is bad: what bad tensor was the module given?
        """
        bad = [row for row in self._bad if row >= index]
        found = came_in() if bad else None
        if found is not None:
            self._came_in.update(dict.fromkeys(bad, found))
        for row in bad:
            self._tell(row)

    def _tell(self, index: int) -> None:
        """Tell of a bad row, unless it is known or may prove to be of no harm; once in a step."""
        slot, row = self._slots[index], self._row(index)
        if self._told or PHASE_OF_KIND[self.table.site(slot).kind] == "step":
            return  # such a one is bad on all ranks at once
        if self._steady.excuses(slot, row) or self._steady.may_excuse(self.table, slot, row):
            return
        self._told = True
        self.on_bad(self._witness(index))

    def _witness(self, index: int) -> FirstBad:
        site, micro = self.table.site(self._slots[index]), self._micros[index]
        place = index if self._times is None else self._times[index]
        order = self._order.number(PHASE_OF_KIND[site.kind], place)
        row = self._row(index)
        found = witness(site, row, step=-1, micro=micro, order=order, rank=self._rank)
        return as_input(found, self._came_in.get(index))

    def _row(self, index: int) -> NDArray[np.float64]:
        """Return a row that the host can see, float64 [9]."""
        row: NDArray[np.float64] = self._elsewhere.get(index, self._main).rows[index].numpy()
        return row

    def end_told(self, slot: int) -> bool:
        """Whether the row made last is of `slot`, and has no NaN or Inf or will tell it itself."""
        last = len(self._slots) - 1
        if last < 0 or self._slots[last] != slot:
            return False
        buffer = self._elsewhere.get(last, self._main)
        return not buffer.near or not buffer.rows.numpy()[last, stats.NONFINITE].any()

    def begin(self) -> None:
        """Forget the last step; the buffers and the site table stay."""
        self.table.begin()
        self._main.begin()
        for buffer in self._others.values():
            buffer.begin()
        if self._bins is not None:
            self._bins.begin()
        self._elsewhere.clear()
        self._slots, self._micros = [], []
        if self._times is not None:
            self._times.clear()
        self._names.clear()
        self._digests.clear()
        self._tapped.clear()
        self._confirmed.clear()
        self._lent = 0
        self._came_in.clear()
        self._unread.clear()
        self._bad.clear()
        self._unsupported.clear()
        self.grad_is_scaled = self._told = False
        self.let_go()

    def let_go(self) -> None:
        """Hold no tensor, weakly either: torch swaps none that has a weak reference."""
        self._made_of.clear()
        self._last = None

    def await_device(self, *, broken: bool) -> bool:
        """Wait until the devices have done their work; False: one takes too long.

        Raises what a device has failed with. `broken`: the training did not come to its end.
        """
        until = time.monotonic() + (lanes.BROKEN_SECONDS if broken else lanes.END_SECONDS)
        return all(buffer.await_device(until) for buffer in (self._main, *self._others.values()))

    def fetch(self) -> PendingRows:
        """Start the copy of this step from each device and return what waits for it."""
        rows, arrival = self._main.to_host(len(self._slots))
        parts = self._parts()
        bins = self._bins.fetch() if self._bins is not None else ()
        arrivals = (arrival, *(a for _, _, a in parts), *(each.arrival for each in bins))
        return PendingRows(
            rows=rows,
            parts=tuple((indices, host) for indices, host, _ in parts),
            bins=bins,
            arrivals=tuple(a for a in arrivals if a is not None),
            slots=np.array(self._slots, np.int64),
            micros=np.array(self._micros, np.int64),
            times=np.array(self._times, np.int64) if self._times is not None else None,
            order=self._order,
            names=dict(self._names),
            digests=dict(self._digests),
            # `grad` too, as long as nobody has unscaled it.
            scaled_kinds=(*BACKWARD_KINDS, "grad") if self.grad_is_scaled else BACKWARD_KINDS,
            tapped=np.array(self._tapped, np.int64),
            confirmed=frozenset(self._confirmed),
            lent=self._lent,
            came_in=dict(self._came_in),
            unread=frozenset(self._unread),
            unsupported=self._unsupported
            + (self._bins.left_out if self._bins is not None else Counter()),
            table=self.table,
            steady=self._steady,
            constants=self._constants,
            rank=self._rank,
        )

    def _note(self, slot: int, micro: int, buffer: RowBuffer) -> None:
        if buffer is not self._main:
            index = len(self._slots)
            self._elsewhere[index] = buffer
            self._main.reach(index)
        self._slots.append(slot)
        self._micros.append(micro)
        if self._times is not None:
            self._times.append(time.time_ns())

    def _buffer_of(self, tensor: Tensor, index: int) -> RowBuffer:
        """Return the buffer in which the row of a tensor is made, with room for it."""
        device = tensor.device
        if device != self._main.device and (tensor.is_meta or type(tensor).__name__ == _FAKE):
            device = self._main.device  # it only claims to be there: nothing will be made of it
        return self._buffer_on(device, index)

    def _buffer_on(self, device: torch.device, index: int) -> RowBuffer:
        buffer = self._main
        if device != buffer.device:
            other = self._others.get(device)
            buffer = self._others[device] = other if other is not None else RowBuffer(device)
        buffer.reach(index)
        return buffer

    def _parts(self) -> list[tuple[NDArray[np.int64], Tensor, Arrival | None]]:
        """Start the copies of the rows that are not in the main buffer: with their indices."""
        found = []
        for buffer in self._others.values():
            mine = [index for index, home in self._elsewhere.items() if home is buffer]
            if mine:
                host, arrival = buffer.to_host(mine[-1] + 1)
                found.append((np.array(mine, np.int64), host, arrival))
        return found


def _take_together(device: torch.device) -> bool:
    """Whether reading tensors one by one costs the host more than what it reads them with."""
    return device.type != "cpu"
