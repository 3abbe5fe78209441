"""What a sampled step does to the weights: a row of each, of its change, and of its second moment.

The second moment is what Adam and its kin keep of the squares of all gradients, those of the steps
between two sampled ones among them. A floating buffer has a row of its own.

The change is the weight after the optimizer less the weight before it, so a copy is needed, and
parameters take turns, as for the checksums: a turn copies about 4 MiB, and no more than 8. Up to
64 MiB each parameter has its turn at every 16th sampled step at the latest; of more than that, less
is copied of each. A parameter of more than 4 MiB, or of more than this, is not copied whole: the
change is that of `BLOCKS` stretches of elements, evenly spread. The other rows are of all elements.

A buffer has the turn that its name gives it, of as many as the parameters take: a rank may have
more buffers than another, or larger ones, and all must look at the same tensor in the same step.
Of what is the same on all ranks as long as nothing changes it a checksum is taken, too.

The copy is taken at the end of the step's first backward in which something is to be trained, or
before the first optimizer if that steps inside the backward. So the change is right for several
optimizers, for closures, and for loops that have none and call `probe.step()`. A step that a
GradScaler gave up has no rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.hooks.sweep import is_plain
from ddpprobe.rank.stats.dense import dtype_name
from ddpprobe.rank.stats.many import KernelTable
from ddpprobe.rank.topology.describe import Topology
from ddpprobe.rank.topology.weights import Weight, buffers, weights
from ddpprobe.records.step import BUFFER, Site

TURN = 4 << 20  # bytes of copies; of one parameter no more than that
TURNS = 16  # sampled steps at most until each parameter had its turn
BLOCKS = 256  # stretches of elements that stand for a large parameter
COMPARED = 1 << 16  # bytes of a buffer, in such stretches, of which a checksum is taken
# Names under which torch's optimizers keep a running mean of squared gradients: Adam, AdamW, NAdam
# and RAdam; RMSprop and Adadelta.
SECOND_MOMENTS = ("exp_avg_sq", "square_avg")


@final
class WeightLook:
    """Makes the rows of `IN_TURN`'s kinds, of the parameters and buffers whose turn it is.

    Args:
        topology: the model.
        select: whether a module FQN is observed.
        rows: where rows go.
        optimizers: those that own some of its parameters.
        is_mask: whether a buffer has infinities that are meant: it has no row.
    """

    def __init__(
        self, topology: Topology, select: Callable[[str], bool], rows: StepRows,
        optimizers: Callable[[], Iterable[Optimizer]] = tuple,
        is_mask: Callable[[str], bool] = lambda _: False,
    ) -> None:  # fmt: skip
        self._topology, self._select, self._rows = topology, select, rows
        self._optimizers, self._is_mask = optimizers, is_mask
        self._turn: int | None = None
        self._most = TURN
        self._now: tuple[int, int] | None = None  # which turn it is, of how many
        self._copies: dict[str, Tensor] = {}
        self._table = KernelTable()

    def begin(self, turn: int) -> None:
        """Get ready for a sampled step, `turn` being its number among these."""
        self.forget()
        self._turn = turn

    def remember(self) -> None:
        """Copy what the step is about to change; only the first call that finds something does.

        A loop may freeze the model for a pass of its own, as an attack, or for another model's.
        """
        if self._turn is None:
            return
        with torch.no_grad():
            held = self._held(weights)
            self._most, turns = deal([weight.size for weight in held])
            many = max(turns, default=0) + 1
            now = self._turn % many
            self._now = now, many
            mine = {
                weight.fqn: sample(weight.tensor, self._most)
                for weight, turn in zip(held, turns, strict=True)
                if turn == now
            }
            self._copies = {fqn: torch.empty_like(part) for fqn, part in mine.items()}
            if mine:  # all together: on a GPU a few launches
                torch._foreach_copy_(list(self._copies.values()), list(mine.values()))
        if held:
            self._turn = None

    def tell(self, micro: int, *, skipped: bool) -> None:
        """Make the rows of a step that is over, and let go of the copies."""
        copies, turn = self._copies, self._now
        self.forget()
        if skipped or turn is None:
            return
        with torch.no_grad():
            now = [weight for weight in self._held(weights) if weight.fqn in copies]
            parts, changes, slots = list[Tensor](), list[Tensor](), list[int]()
            for weight in now:
                part, copy = sample(weight.tensor, self._most), copies[weight.fqn]
                if part.shape == copy.shape and part.device == copy.device:
                    parts.append(part)
                    changes.append(copy)
                    slots.append(self._slot(weight, "update", weight.tensor))
            if changes:  # -before + after is after - before to the bit, and needs no more memory
                torch._foreach_neg_(changes)
                torch._foreach_add_(changes, parts)
            found = [(self._slot(weight, "param", weight.tensor), weight.tensor) for weight in now]
            found += zip(slots, changes, strict=True)
            found += self._second_moments(now)
            mine = [b for b in self._held(buffers) if is_turn_of(b.fqn, *turn)]
            found += [
                (self._slot(buffer, "buffer", buffer.tensor), buffer.tensor)
                for buffer in mine
                if not self._is_mask(buffer.fqn)
            ]
            self._rows.add_all(micro, found, self._table)
            self._rows.add_checksums(
                (buffer.fqn, BUFFER, sample(buffer.tensor, COMPARED))
                for buffer in mine
                if self._topology.is_alike(buffer.fqn.rpartition(".")[0])
            )

    def forget(self) -> None:
        """Let go of a step that will not end."""
        self._copies = {}
        self._turn = self._now = None

    def _second_moments(self, now: Sequence[Weight]) -> Iterator[tuple[int, Tensor]]:
        """Yield (slot, this rank's part) of those that an optimizer of torch's keeps."""
        kept: dict[Tensor, object] = {}
        for optimizer in self._optimizers():
            if isinstance(optimizer.state, Mapping):
                kept.update(optimizer.state)
        for weight in now:
            state = kept.get(weight.owner)
            for name in SECOND_MOMENTS:
                moment = state.get(name) if isinstance(state, Mapping) else None
                if not isinstance(moment, Tensor):
                    continue
                part = weight.part_of(moment)
                # One that is spread in another way than its parameter has another layout.
                if part.numel() == weight.tensor.numel() and _is_readable(part):
                    yield self._slot(weight, "optim_state", part, name), part

    def _held(self, kind: Callable[[Topology], Iterable[Weight]]) -> list[Weight]:
        return [
            weight
            for weight in kind(self._topology)
            if self._select(weight.fqn.rpartition(".")[0]) and _is_readable(weight.tensor)
        ]

    def _slot(self, weight: Weight, kind: str, tensor: Tensor, leaf: str = "") -> int:
        """Return the slot of a row, which is counted on from now on."""
        table = self._rows.table
        slot = table.find((weight.fqn, kind, leaf))
        if slot is None:
            dtype = dtype_name(tensor.dtype)
            slot = table.slot(Site(weight.fqn, kind, leaf, *weight.layout, dtype))
        table.amend(slot, weight.layout)
        self._rows.tap(slot)
        return slot


def _is_readable(tensor: Tensor) -> bool:
    return is_plain(tensor) or not tensor.numel()


def deal(sizes: Sequence[int]) -> tuple[int, list[int]]:
    """Return the most bytes to copy of one tensor, and the turn of each: a pure function of sizes.

    Args:
        sizes: bytes of each tensor, in the order of the model.
    """
    most = TURN
    while most > 1 and sum(min(size, most) for size in sizes) > TURNS * TURN:
        most //= 2
    starts = accumulate((min(size, most) for size in sizes), initial=0)
    return most, [at // TURN for at, _ in zip(starts, sizes, strict=False)]


def is_turn_of(name: str, now: int, turns: int) -> bool:
    """Whether a buffer has its turn now, one of so many: a pure function of its name."""
    return zlib.crc32(name.encode(errors="surrogatepass")) % turns == now


def sample(tensor: Tensor, most: int) -> Tensor:
    """Return a view of a plain tensor that is no larger than `most` bytes.

    That is the whole of it, or stretches of elements that are evenly spread over it.
    """
    elements = max(1, most // tensor.element_size())
    if tensor.numel() <= elements:
        return tensor.detach()
    if not tensor.is_contiguous():
        first = tensor.shape[0]
        return tensor.detach()[: max(1, first * elements // tensor.numel())]
    blocks = min(BLOCKS, elements)
    whole = tensor.detach().view(-1)
    every = tensor.numel() // blocks
    return whole[: blocks * every].view(blocks, every)[:, : elements // blocks]
