"""Ranks merge what is one module; stages of a pipeline are told apart, whatever they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from ddpprobe.rank.topology import stages
from ddpprobe.rank.topology.describe import describe

from .wrapped_models import WRAPPED, on_rank


def parts(model: nn.Module) -> stages.Parts:
    found = describe(model)
    return stages.parts(replace(found, world_size=2))


def make(seed: int, *kinds: type[nn.Module]) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(kind() if kind is nn.ReLU else kind(2, 2) for kind in kinds))


def test_equal_replicas_are_one_model() -> None:
    heard = [parts(make(0, nn.Linear, nn.ReLU)) for _ in range(3)]
    assert stages.compare(heard) == {"cut": [], "differ": []}


def test_stages_of_one_shape_differ_by_their_values_down_to_the_modules_without_parameters() -> (
    None
):
    heard = [parts(make(seed, nn.Linear, nn.ReLU)) for seed in (0, 1)]
    assert stages.compare(heard) == {"cut": [], "differ": ["", "0", "1"]}


def test_of_stages_with_names_of_their_own_only_what_contains_them_is_cut() -> None:
    whole = nn.ModuleDict(
        {"layers": nn.ModuleDict({"0": nn.Linear(2, 2), "1": nn.Linear(2, 2)}), "act": nn.ReLU()}
    )
    first, second = nn.ModuleDict(whole), nn.ModuleDict(whole)
    first["layers"] = nn.ModuleDict({"0": whole["layers"]["0"]})
    second["layers"] = nn.ModuleDict({"1": whole["layers"]["1"]})
    assert stages.compare([parts(first), parts(second)]) == {
        "cut": ["", "layers", "act"], "differ": [],
    }  # fmt: skip


def test_a_rank_with_a_further_expert_shares_the_rest() -> None:
    shared = nn.Linear(2, 2)
    heard = [
        parts(nn.ModuleDict({"shared": shared, f"expert{rank}": nn.Linear(2, 2)}))
        for rank in (0, 1)
    ]
    assert stages.compare(heard) == {"cut": [""], "differ": []}


class Block(nn.Module):
    """A layer of a transformer, whose norms are all alike as they begin."""

    def __init__(self, **experts: nn.Module) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(4), nn.Linear(4, 4)
        self.attn.norms = nn.ModuleDict({"q": nn.LayerNorm(4)})
        self.experts = nn.ModuleDict(experts)


def seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def test_the_norms_of_two_stages_are_two_though_they_begin_alike() -> None:
    heard = [parts(seeded(seed, lambda: nn.Sequential(Block(), Block()))) for seed in (0, 1)]
    found = stages.compare(heard)
    assert found["cut"] == []
    assert set(found["differ"]) == set(heard[0])


def test_the_norms_beside_experts_of_one_rank_each_are_one() -> None:
    def layer(rank: int) -> nn.Module:
        shared = seeded(0, Block)
        shared.experts = nn.ModuleDict({str(rank): seeded(rank + 1, lambda: nn.Linear(4, 4))})
        return nn.ModuleDict({"embed": seeded(5, lambda: nn.Embedding(3, 4)), "layer": shared})

    heard = [parts(layer(rank)) for rank in (0, 1)]
    assert set(stages.compare(heard)["cut"]) == {"", "layer", "layer.experts"}
    assert stages.compare(heard)["differ"] == []


def test_where_nothing_beside_a_norm_tells_what_is_beside_its_parent_does() -> None:
    def model(seed: int, common: int) -> nn.Module:
        inner = nn.ModuleDict({"norm": nn.LayerNorm(4), f"own{seed}": nn.Linear(2, 2)})
        beside = seeded(common, lambda: nn.Linear(2, 2))
        return seeded(seed, lambda: nn.ModuleDict({"beside": beside, "inner": inner}))

    alike = stages.compare([parts(model(seed, 7)) for seed in (0, 1)])
    assert alike == {"cut": ["", "inner"], "differ": []}
    stage = stages.compare([parts(model(seed, seed)) for seed in (0, 1)])
    assert (stage["cut"], set(stage["differ"])) == (["", "inner"], {"beside", "inner.norm"})
    alone = [parts(nn.ModuleDict({"n": nn.LayerNorm(4), str(r): nn.Linear(2, 2)})) for r in (0, 1)]
    assert stages.compare(alone) == {"cut": [""], "differ": ["n"]}


def test_a_replica_whose_weights_are_all_uniform_is_one_model() -> None:
    def model() -> nn.Module:
        made = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
        for parameter in made.parameters():
            nn.init.ones_(parameter)
        return made

    assert stages.compare([parts(model()) for _ in range(2)]) == {"cut": [], "differ": []}


def carve(model: nn.ModuleDict, cut: Callable[[nn.ModuleDict], object]) -> frozenset[str]:
    """What is known to be cut of a model that loses parts after `install`."""
    found = replace(describe(model), world_size=2)
    names = stages.Names(found)
    cut(model)
    return names.cut(replace(describe(model), world_size=found.world_size))


def deep() -> nn.ModuleDict:
    layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(2, 2)}) for _ in range(3))
    return nn.ModuleDict({"layers": layers, "act": nn.ReLU(), "head": nn.Linear(2, 2)})


def test_a_model_that_loses_layers_after_install_is_cut_where_it_lost_them() -> None:
    def drop(model: nn.ModuleDict) -> None:
        model["layers"][1] = None

    assert carve(deep(), drop) == {"", "layers", "act"}


def test_layers_that_are_renumbered_after_install_are_other_ones() -> None:
    def slice_(model: nn.ModuleDict) -> None:
        model["layers"] = model["layers"][1:]

    every_layer = {"layers.0", "layers.0.up", "layers.1", "layers.1.up"}
    assert carve(deep(), slice_) == {"", "layers", "act", *every_layer}


def test_wrapping_replacing_and_adding_modules_after_install_cuts_nothing() -> None:
    def change(model: nn.ModuleDict) -> None:
        model["head"] = nn.Linear(2, 2)
        model["further"] = nn.Linear(2, 2)
        model["layers"][1] = checkpoint_wrapper(model["layers"][1])

    assert carve(deep(), change) == frozenset()


def test_a_sequence_that_loses_a_layer_is_cut_at_its_root() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    found = replace(describe(model), world_size=2)
    names = stages.Names(found)
    del model[2]
    assert names.cut(replace(describe(model), world_size=2)) == {""}


@pytest.mark.parametrize(("ranks", "cut"), [(range(4), set()), ((0, 2), {"", "layers", "act"})])
def test_a_ddp_over_all_ranks_vouches_for_a_model_that_lost_layers_alike(
    ranks: Iterable[int], cut: set[str]
) -> None:
    with on_rank(0):
        model = deep()
        ddp = DistributedDataParallel(model, process_group=dist.new_group(list(ranks)))
        names = stages.Names(describe(ddp))
        model["layers"][1] = None
        assert names.cut(describe(ddp)) == cut


def test_any_text_is_a_name() -> None:
    def named(name: str) -> nn.ModuleDict:
        model = nn.ModuleDict({"a": make(0, nn.Linear)})
        model.add_module(name, make(1, nn.Linear))
        return model

    heard = [parts(named("\ud800")) for _ in range(2)]
    assert stages.compare(heard) == {"cut": [], "differ": []}
    assert stages.compare([heard[0], parts(named("\ud801"))]) == {"cut": [""], "differ": []}


def test_alone_nothing_is_cut() -> None:
    model = deep()
    names = stages.Names(describe(model))
    model["layers"][1] = None
    assert names.cut(describe(model)) == frozenset()


def test_values_are_not_compared_where_ranks_hold_other_parts_by_design() -> None:
    """Of tensor parallelism and of FSDP1; a shape says what can be said."""
    for wrapper in ("tp", "fsdp1 flattened"):
        with on_rank(0), torch.no_grad():
            model = WRAPPED[wrapper]()
            before = stages.parts(describe(model))
            for parameter in model.parameters():
                parameter.mul_(3)
            assert stages.parts(describe(model)) == before
    with on_rank(0), torch.no_grad():
        model = WRAPPED["none"]()
        before = stages.parts(describe(model))
        model[0].bias[0] += 1
        assert {f for f, p in stages.parts(describe(model)).items() if p != before[f]} == {
            "", "0", "1",
        }  # fmt: skip
