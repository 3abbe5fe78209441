"""What several ranks hold alike: who reduces it, and which of it a sampled step compares.

A checksum is one more pass over memory: of all parameters it would cost as much as all the
statistics of a small step. So they take turns, the same on all ranks. Whatever ranks once differ
in stays different, so it is found all the same, a few sampled steps later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpprobe.rank.torch_private import sharding

TURNS = 8  # sampled steps at most until each parameter had its turn
ENOUGH = 4 << 20  # bytes that a turn has at least: a small model is compared whole


def in_turn(
    held: Iterable[tuple[str, str, Tensor]], turn: int
) -> Sequence[tuple[str, str, Tensor]]:
    """Return those of (FQN, shard, tensor) whose turn it is: a pure function of sizes and `turn`.

    They come in the order of the model, cut where a turn is full.
    """
    parameters = list(held)
    starts = [0, *accumulate(t.numel() * t.element_size() for _, _, t in parameters)]
    size = max(ENOUGH, -(-starts.pop() // TURNS))
    turns = starts[-1] // size + 1 if starts else 1
    return [p for p, at in zip(parameters, starts, strict=True) if at // size == turn % turns]


def parameters_of(ddp: DistributedDataParallel) -> Iterator[nn.Parameter]:
    """Yield the parameters that `ddp` keeps equal: all but those it was told to ignore."""
    ignored = getattr(ddp, "parameters_to_ignore", ())
    return (p for name, p in ddp.module.named_parameters() if name not in ignored)


def reduced_by_ddp(
    root: nn.Module, ddps: Iterable[tuple[str, DistributedDataParallel]]
) -> Iterator[tuple[int, bool]]:
    """Yield (id of a parameter, whether this rank is the first of its replicas)."""
    for _, ddp in ddps:
        first = dist.get_rank(ddp.process_group) == 0
        for parameter in parameters_of(ddp):
            yield id(parameter), first
    sharded = sharded_ids(root)
    for module in root.modules():
        if sharding.is_replicated(module):
            for parameter in module.parameters():
                if id(parameter) not in sharded:
                    yield id(parameter), dist.get_rank() == 0


def sharded_ids(root: nn.Module) -> set[int]:
    """Ids of the parameters that FSDP2 units go back to between their forwards."""
    return {id(p) for _, _, p in sharding.sharded_parameters(root)}
