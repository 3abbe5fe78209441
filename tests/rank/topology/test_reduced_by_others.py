"""Gradients that an engine reduces, or a DDP of some of the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpprobe.rank.topology import parts
from ddpprobe.rank.topology.describe import describe
from ddpprobe.rank.topology.engine import EngineGradient
from ddpprobe.rank.topology.weights import weights

from .wrapped_models import HIDDEN, net, on_rank, put_gradients


class Zero:
    """An engine as DeepSpeed's, of which each rank has a stretch of a gradient."""

    wrapper = "zero1"

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.weight, self.elements = model[0].weight, torch.full((3,), float(rank))
        self.other = nn.Linear(2, 2).weight  # of another model

    def gradients(self) -> Iterator[EngineGradient]:
        yield EngineGradient(self.weight, self.elements, 5)
        yield EngineGradient(self.other, self.elements, 0)


@pytest.mark.parametrize("rank", [0, 2])
def test_an_engine_keeps_parameters_equal_and_tells_stretches_of_gradients(rank: int) -> None:
    with on_rank(rank), torch.no_grad():
        model = net()
        put_gradients(model)  # which are nobody's
        engine = Zero(model, rank)
        topology = describe(model, engine=engine)  # type: ignore[arg-type]
        assert (topology.wrapper, topology.gradients_are_reduced()) == ("zero1", False)
        assert topology.managed_by_ddp(model[0].weight) is (rank == 0)
        assert {shard for _, shard, _ in topology.replicated_parameters()} == {""}
        ((fqn, gradient, layout),) = topology.reduced_gradients()
        assert (fqn, gradient, layout) == ("0.weight", engine.elements, ("sharded", True))
        (part,) = parts.gradients(topology, rank, lambda _: ("local", True))
        assert (part.fqn, part.tensor, part.first) == ("0.weight", engine.elements, True)
        assert part.spec == {"kind": "flat", "start": 5, "stop": 8, "shape": [HIDDEN, 4]}
        firsts = {p.fqn: p.first for p in parts.parameters(topology, rank)}
        assert set(firsts.values()) == {rank == 0}
        assert {w.layout for w in weights(topology)} == {("replicated", True)}


@pytest.mark.parametrize(("rank", "first"), [(1, None), (2, True), (3, False)])
def test_a_ddp_of_some_ranks_has_its_first_rank_count(rank: int, first: bool | None) -> None:
    with on_rank(rank):
        group = dist.new_group([2, 3])
        model = net()
        if first is not None:
            model[0] = DistributedDataParallel(model[0], process_group=group)
        topology = describe(model)
        weights_ = dict(topology.named_parameters())
        assert topology.managed_by_ddp(weights_["0.weight"]) is first
        assert topology.managed_by_ddp(weights_["2.weight"]) is None
