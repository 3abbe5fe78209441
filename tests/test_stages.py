"""Ranks merge what is one module; stages of a pipeline are told apart, whatever they are called."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from ddpprobe import stages, topology


def parts(model: nn.Module) -> stages.Parts:
    found = topology.describe(model)
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
