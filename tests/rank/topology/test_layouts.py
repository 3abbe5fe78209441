"""How single tensors lie, are followed, found again and shared, on any rank of four."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel

from ddpprobe.rank.topology import dtensor_spec, outliving, parts, replicas, stages
from ddpprobe.rank.topology.describe import describe, gathered_parameters, outermost
from ddpprobe.rank.topology.naming import own_class
from ddpprobe.rank.topology.placement import (
    layout_of,
    ranks_of,
    reduced_layout,
    shard_id,
    shard_name,
)
from ddpprobe.rank.topology.weights import weights
from ddpprobe.rank.torch_private import sharding
from ddpprobe.records.shard_spec import MeshAxis

from .wrapped_models import (
    HIDDEN,
    RANKS,
    WRAPPED,
    mesh,
    net,
    on_rank,
    put_gradients,
    sharded,
    whole,
)


def test_what_differs_by_rank_is_apart_unless_a_wrapper_vouches_for_it() -> None:
    for wrapper, apart in (("none", True), ("ddp", False)):
        with on_rank(0):
            topology = describe(WRAPPED[wrapper]())
            topology.differ = frozenset({"2"})
            assert [topology.is_apart(fqn) for fqn in ("2", "0")] == [apart, False]
            topology.cut = frozenset({"0"})  # stages of a pipeline: DDP is around each of them
            assert [topology.is_apart(fqn) for fqn in ("2", "0", "3")] == [True, True, False]


def test_of_a_plain_gradient_in_a_group_a_caller_says_whether_its_ranks_have_the_same() -> None:
    with on_rank(1), torch.no_grad():
        model = WRAPPED["tp of pairs"]()
        put_gradients(model)
        topology = describe(model)
        for said, kind in (("local", "dtensor"), ("unknown", "local")):
            found = {
                p.fqn: p for p in parts.gradients(topology, 1, lambda _, said=said: (said, True))
            }
            assert (found["3.weight"].spec["kind"], found["0.weight"].spec["kind"]) == (
                kind, "dtensor",
            )  # fmt: skip
            assert found["3.weight"].first == (said == "unknown")


def test_a_unit_that_is_gathered_gives_its_leaves_by_the_names_of_the_model() -> None:
    shapes = {"0.weight": (HIDDEN, 4), "0.bias": (HIDDEN,)}
    last = (HIDDEN - 3 * 2, 4)  # two rows to each rank before
    with on_rank(3):
        topology = describe(WRAPPED["fsdp2"]())
        unit = topology.root[0]
        assert list(gathered_parameters("0", unit)) == []  # sharded
        before = [id(p) for _, p in topology.named_parameters()]
        unit.unshard()
        found = dict(gathered_parameters("0", unit))
        assert {n: tuple(p.shape) for n, p in found.items()} == shapes
        assert all(p.is_leaf for p in found.values())
        assert [n for n, _ in gathered_parameters("", unit)] == ["weight", "bias"]
        held = {p.fqn: p.tensor for p in parts.parameters(topology, 3)}
        assert tuple(held["0.weight"].to_local().shape) == last  # its own shard all the same
        assert dict(topology.leaves()) == {}
        assert [id(p) for _, p in topology.named_parameters()] == before  # as the optimizer has it
        with torch.no_grad():
            mine = {w.fqn: tuple(w.tensor.shape) for w in weights(topology)}
            outlives = {o.fqn: tuple(o.tensor.shape) for o in outliving.parameters_of(topology)}
            alike = {f for f, *_ in topology.replicated_parameters()}
        assert mine["0.weight"] == outlives["0.weight"] == last
        assert alike == set()


def test_a_tied_parameter_is_told_by_its_first_name_and_known_at_every_place() -> None:
    def tie(model: nn.Sequential) -> nn.Sequential:
        model.add_module("last", nn.Linear(5, 6))
        model.last.weight = nn.Parameter(model[2].weight.detach())
        model[2].weight = model.last.weight
        return model

    for rank in RANKS:
        for wrap in (lambda m: m, lambda m: sharded(m, mesh(4)), FullyShardedDataParallel):
            with on_rank(rank):
                model = tie(net(frozen=False))
                if wrap is FullyShardedDataParallel:
                    model = wrap(model, device_id=torch.device("cpu"), use_orig_params=True)
                else:
                    model = wrap(model)
                topology = describe(model)
                names = [p.fqn for p in parts.parameters(topology, rank)]
                assert (names.count("2.weight"), names.count("last.weight")) == (1, 0)
                places = parts.names(topology)
                assert (places["last.weight"], places["last.bias"]) == ("2.weight", "last.bias")
                assert [n for n, _ in topology.named_parameters()].count("2.weight") <= 1
                for _, unit in topology.units():
                    unit.unshard()
                    assert parts.names(topology) == places


@pytest.mark.parametrize("wrapper", ["none", "tp"])
def test_an_activation_that_is_a_dtensor_says_how_it_lies(wrapper: str) -> None:
    with on_rank(1), torch.no_grad():
        topology = describe(WRAPPED[wrapper]())
        tensor = DTensor.from_local(torch.zeros(2, 3), mesh(4), [Shard(0)], run_check=False)
        told = dtensor_spec.of(tensor).to_json()
        other = replace(dtensor_spec.of(tensor), shape=(9, 9))
        assert told["kind"] == "dtensor"
        assert parts.activation(topology, "0", tensor) == told
        assert parts.activation(topology, "0", tensor, other) == told  # what is said of plain ones
        topology.cut = frozenset({"0"})
        assert parts.activation(topology, "0", tensor) == {"kind": "local"}


def test_devices_and_placements_that_a_mesh_tells() -> None:
    with on_rank(2), torch.no_grad():
        over = mesh(2, 2)
        assert ranks_of(over) == (0, 1, 2, 3)
        plain = torch.arange(12.0).view(4, 3)

        def lies(*placements: Placement) -> tuple:
            tensor = DTensor.from_local(plain, over, placements, run_check=False)
            return (
                layout_of(over, placements), reduced_layout(tensor), shard_name(tensor),
                shard_id(tensor),
            )  # fmt: skip

        # Rank 2 lies at (1, 0).
        assert lies(Replicate(), Replicate()) == (
            ("local", False), ("replicated", True), "", "",
        )  # fmt: skip
        assert lies(Shard(0), Replicate()) == (
            ("sharded", True), ("sharded", True), "1/2", "1/2",
        )  # fmt: skip
        assert lies(Replicate(), Shard(0)) == (
            ("sharded", False), ("sharded", False), "0/2", "0/2",
        )  # fmt: skip
        assert lies(Shard(1), Shard(0)) == (
            ("sharded", True), ("sharded", True), None, "2/4",
        )  # fmt: skip
        assert lies(Shard(0), Partial())[:3] == (("partial", True), ("partial", True), None)


def test_what_becomes_of_a_dtensor_is_followed() -> None:
    with on_rank(1):
        over = mesh(4)
        local = torch.arange(6.0).view(2, 3).requires_grad_()
        tensor = DTensor.from_local(local, over, [Shard(0)], run_check=False)
        origin = dtensor_spec.origin(tensor)
        spec = origin.shard_spec
        assert (spec.ranks, spec.mesh, spec.shape) == ((0, 1, 2, 3), (4,), (8, 3))
        assert spec.axes == (MeshAxis("shard", 0),)
        assert dtensor_spec.follow(origin, tensor.to_local()) == spec  # autograd remembers
        assert dtensor_spec.follow(origin, local.detach()) == spec  # the same memory

        def becomes(*shape: int) -> MeshAxis:
            found = dtensor_spec.follow(origin, torch.zeros(shape))
            assert replace(found, axes=spec.axes) == spec
            (axis,) = found.axes
            return axis

        assert becomes(8, 3) == MeshAxis("replicate")
        assert becomes(8, 1) == MeshAxis("shard", 1)
        assert becomes(4, 3) == MeshAxis("shard", 0)
        assert becomes(4, 1) == becomes(8, 3, 1) == becomes(8) == MeshAxis("unknown")
        empty = DTensor.from_local(torch.zeros(0, 3), over, [Partial("avg")], run_check=False)
        assert dtensor_spec.of(empty).axes == (MeshAxis("partial", op="avg"),)
        assert dtensor_spec.follow(dtensor_spec.origin(empty), torch.zeros(0, 3)) == (
            dtensor_spec.of(empty)
        )


def test_replicas_take_turns_in_which_each_is_compared_once() -> None:
    mebibyte = 1 << 18  # elements
    held = [(f"p{n}", "", torch.empty(size)) for n, size in enumerate(
        [mebibyte, 3 * mebibyte, mebibyte, 9 * mebibyte, 0, 2 * mebibyte, 16 * mebibyte, 5]
    )]  # fmt: skip
    turns = [[fqn for fqn, *_ in replicas.in_turn(held, turn)] for turn in range(9)]
    assert turns[:8] == [["p0", "p1", "p2"], ["p3"], [], ["p4", "p5", "p6"], [], [], [], ["p7"]]
    assert turns[8] == turns[0]
    assert replicas.in_turn([], 3) == []
    small = held[:2]
    assert list(replicas.in_turn(small, 0)) == list(replicas.in_turn(small, 7)) == small


def test_an_inventory_names_again_only_what_was_exchanged_and_holds_no_tensor() -> None:
    model = net()
    topology = describe(model)
    optimizer = torch.optim.Adam(p for p in model.parameters() if p.requires_grad)
    asked: list[int] = []

    def name() -> list[outliving.OutlivingTensor]:
        asked.append(1)
        return list(outliving.outliving(topology, [optimizer]))

    def take() -> dict[outliving.Key, Tensor]:
        keys, tensors = inventory.take()
        expected = list(outliving.outliving(topology, [optimizer]))
        assert keys == tuple(one.key for one in expected)
        assert all(
            held.data_ptr() == one.tensor.data_ptr() and torch.equal(held, one.tensor)
            for held, one in zip(tensors, expected, strict=True)
        )
        return dict(zip(keys, tensors, strict=True))

    with torch.no_grad():
        inventory = outliving.Inventory(topology, lambda: [optimizer], name)
        assert len(take()) == 11
        again = inventory.take()[0]
        assert inventory.take()[0] is again
        assert len(asked) == 1
        put_gradients(model)
        optimizer.step()
        assert ("optim_state", "0.weight", "exp_avg") in take()
        model[3].running_mean = torch.full((5,), 7.0)
        assert take()["buffer", "3.running_mean", ""].sum() == 35
        model[0].bias = nn.Parameter(torch.full((HIDDEN,), 2.0))
        assert take()["param", "0.bias", ""].sum() == 2 * HIDDEN
        assert len(asked) == 4
        freed = weakref.ref(model[3].running_mean)
        model[3].running_mean = None
        assert freed() is None
        assert ("buffer", "3.running_mean", "") not in take()


def test_whatever_is_exchanged_under_its_name_gives_other_keys() -> None:
    """By the object that they are a caller knows the tensors, whose sizes it remembers."""
    model = net()
    topology = describe(model)
    optimizer = torch.optim.Adam(p for p in model.parameters() if p.requires_grad)
    put_gradients(model)
    optimizer.step()
    asked: list[int] = []

    def name() -> list[outliving.OutlivingTensor]:
        asked.append(1)
        return list(outliving.outliving(topology, [optimizer]))

    def buffer() -> None:
        model[3].running_mean = torch.zeros(7)

    def parameter() -> None:
        model[4].bias = nn.Parameter(torch.zeros(9), requires_grad=False)

    def state() -> None:
        optimizer.state[model[0].bias]["exp_avg"] = torch.zeros(11)

    with torch.no_grad():
        inventory = outliving.Inventory(topology, lambda: [optimizer], name)
        before, _ = inventory.take()
        for exchange in (buffer, parameter, state):
            exchange()
            after, _ = inventory.take()
            assert (after is before, after == before) == (False, True)
            assert inventory.take()[0] is after
            before = after
    assert len(asked) == 4


def test_state_that_another_parameter_is_given_has_its_name() -> None:
    model = net()
    topology, held = describe(model), torch.ones(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inventory = outliving.Inventory(
        topology, lambda: [optimizer], lambda: outliving.outliving(topology, [optimizer])
    )
    for fqn, leaf in (("0.weight", "exp_avg"), ("0.bias", "exp_avg"), ("0.bias", "other")):
        optimizer.state.clear()
        optimizer.state[model.get_parameter(fqn)] = {leaf: held}
        with torch.no_grad():
            keys, tensors = inventory.take()
        (place,) = (i for i, (kind, *_) in enumerate(keys) if kind == "optim_state")
        assert keys[place] == ("optim_state", fqn, leaf)
        assert tensors[place] is held


@pytest.mark.parametrize("wrapper", ["fsdp2", "fsdp1"])
def test_what_fsdp_keeps_is_named_anew_each_time(wrapper: str) -> None:
    with on_rank(1), torch.no_grad():
        topology = describe(WRAPPED[wrapper]())
        asked: list[int] = []

        def name() -> list[outliving.OutlivingTensor]:
            asked.append(1)
            return list(outliving.parameters_of(topology))

        inventory = outliving.Inventory(topology, tuple, name)
        (keys, _), (again, tensors) = inventory.take(), inventory.take()
        assert keys is again
        assert set(keys) == {("param", fqn, "") for fqn in whole()}
        assert (len(tensors), len(asked)) == (8, 2)


@pytest.mark.parametrize("wrapper", ["none", "ddp", "tp", "fsdp1"])
def test_without_units_of_fsdp2_no_step_looks_for_what_they_gathered(
    wrapper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_rank(0), torch.no_grad():
        topology = describe(WRAPPED[wrapper]())
        topology.managed_by_ddp(topology.root[0].weight)  # is found out once

        def looks(_: nn.Module) -> None:
            raise AssertionError("all modules were walked for nothing")

        monkeypatch.setattr(sharding, "sharded_parameters", looks)
        for each in (
            topology.leaves(), topology.replicated_parameters(), weights(topology),
            outliving.parameters_of(topology), topology.reduced_gradients(),
        ):  # fmt: skip
            list(each)


def test_a_group_of_replicas_that_gathered_its_parameters_still_has_its_shards() -> None:
    with on_rank(3), torch.no_grad():
        topology = describe(WRAPPED["hsdp"]())
        before = {(f, s): t.clone() for f, s, t in topology.replicated_parameters()}
        topology.root[0].unshard()
        after = {(f, s): t for f, s, t in topology.replicated_parameters()}
        assert set(after) == set(before)
        assert all(torch.equal(after[key], before[key]) for key in before)


def test_a_rank_outside_of_a_mesh_holds_no_shard_of_it() -> None:
    with on_rank(3):
        over = DeviceMesh("cpu", [0, 1], mesh_dim_names=("outer",))
        assert over.get_coordinate() is None
        tensor = DTensor.from_local(torch.zeros(2), over, [Replicate()], run_check=False)
        assert shard_name(tensor) is None


def test_what_was_made_local_is_known_by_what_autograd_remembers() -> None:
    with on_rank(1):
        over = mesh(4)
        plain_ = torch.zeros(2, 3)
        origin = dtensor_spec.origin(DTensor.from_local(plain_, over, [Shard(0)], run_check=False))
        partial = DTensor.from_local(
            torch.zeros(8, 3, requires_grad=True), over, [Partial()], run_check=False
        )
        (axis,) = dtensor_spec.follow(origin, partial.to_local()).axes
        assert axis == MeshAxis("partial", op="sum")
        inner_ = DTensor.from_local(
            torch.zeros(8, 3, requires_grad=True), mesh(2, 2)["inner"], [Partial()],
            run_check=False,
        )  # fmt: skip
        (axis,) = dtensor_spec.follow(origin, inner_.to_local()).axes
        assert axis == MeshAxis("replicate")  # it is another mesh's: the shape tells


def test_wrappers_are_known_in_parts_and_behind_torch_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with on_rank(0):
        mixed = net()
        mixed[0] = DistributedDataParallel(mixed[0])
        fully_shard(mixed[2], mesh=mesh(4))
        assert describe(mixed).wrapper == "mixed"
        compiled = torch.compile(net(), backend="eager")
        around = describe(DistributedDataParallel(compiled))
        assert around.root is compiled._orig_mod
        assert around.wrapper == "ddp"
        assert [fqn for fqn, _ in around.ddps] == [""]
        unit = WRAPPED["fsdp2"]()
        assert own_class(unit[0]) is nn.Linear
        assert own_class(net()[0]) is nn.Linear
        # What torch keeps in private is not there any more.
        monkeypatch.setattr(sharding, "sharded_parameters", lambda _: iter(()))
        assert describe(unit).wrapper == "fsdp2+tp"  # its shards look like those of tensors


def test_of_tied_parameters_a_ddp_reduces_all_but_those_it_was_told_to_ignore() -> None:
    with on_rank(2):
        model = net()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.bias"])
        topology = describe(DistributedDataParallel(model))
        assert topology.managed_by_ddp(model[0].bias) is None
        assert topology.managed_by_ddp(model[0].weight) is False  # rank 2 is not the first
    with on_rank(0):
        model = net()
        topology = describe(DistributedDataParallel(model))
        assert topology.managed_by_ddp(model[0].weight) is True


def test_alone_every_gradient_is_the_whole_one() -> None:
    with torch.no_grad():
        model = net()
        put_gradients(model)
        topology = describe(model)
        assert {layout for _, _, layout in topology.reduced_gradients()} == {("replicated", True)}
        assert {w.layout for w in weights(topology)} == {("replicated", True)}
        assert {p.spec["kind"] for p in parts.parameters(topology, 0)} == {"replicated"}
        assert list(topology.replicated_parameters()) == []


def test_a_forward_remembers_the_modules_until_they_are_forgotten() -> None:
    model = net()
    topology = describe(model)
    topology.remember_modules()
    first = topology.own_parameters()
    assert topology.own_parameters() is first
    assert [fqn for fqn, *_ in first] == list(whole())
    model.append(nn.Linear(3, 2))
    model[0].bias = nn.Parameter(torch.zeros(HIDDEN))  # as FSDP2 exchanges them
    assert topology.own_parameters() is not first
    assert next(p for fqn, _, _, p in topology.own_parameters() if fqn == "0.bias").sum() == 0
    names = [fqn for fqn, _ in topology.named_modules()]
    topology.forget_modules()
    assert len([fqn for fqn, _ in topology.named_modules()]) == len(names) + 1


def test_two_ranks_with_other_values_differ_only_in_their_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.ones(2))
            self.same, self.other = nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
            self.plain = nn.ReLU()

    torch.manual_seed(0)
    model = Outer()
    topology = replace(describe(model), world_size=2)
    first = stages.parts(topology)
    with torch.no_grad():
        model.other[1].bias += 1
    second = stages.parts(topology)
    assert stages.compare([first, second]) == {
        "cut": [], "differ": ["", "other", "other.0", "other.1", "plain"],
    }  # fmt: skip
    with torch.no_grad():
        model.own += 1
    third = stages.parts(topology)
    assert stages.compare([second, third]) == {"cut": [], "differ": ["", "plain"]}
    meta = replace(describe(nn.Sequential(nn.Linear(2, 2, device="meta"))), world_size=2)
    assert stages.compare([stages.parts(meta)] * 2) == {"cut": [], "differ": []}


def test_a_part_of_a_model_that_is_replicated_is_reduced_and_what_fsdp_shards_is_not() -> None:
    for rank in (0, 2):
        with on_rank(rank):
            model = net()
            fully_shard(model[2], mesh=mesh(4))
            replicate(model)
            topology = describe(model)
            assert topology.managed_by_ddp(model[0].weight) is (rank == 0)
            assert topology.managed_by_ddp(model[2].weight) is None
            assert topology.wrapper == "mixed"
            plain = net()
            replicate(plain)
            assert describe(plain).wrapper == "ddp"


def test_alone_nothing_is_held_by_others_and_a_mesh_of_one_splits_nothing() -> None:
    with on_rank(0):
        topology = describe(WRAPPED["ddp"]())
        weight = topology.root[0].weight
        assert topology.replica_shard(weight) == ""
        topology.world_size = 2
        assert topology.replica_shard(weight) == ""
        topology.world_size = 1
        assert topology.replica_shard(weight) is None
        one = DeviceMesh("cpu", [[0]], mesh_dim_names=("outer", "inner"))
        tensor = DTensor.from_local(
            torch.zeros(2), one, [Replicate(), Replicate()], run_check=False
        )
        assert shard_name(tensor) is None  # there is nobody else


def test_inside_a_forward_the_wrapper_that_came_after_install_is_known() -> None:
    with on_rank(0):
        model = net(frozen=False)
        assert outermost(model) is model
        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        assert outermost(model) is wrapped


def test_parts_that_are_apart_are_this_ranks_own_tensors() -> None:
    with on_rank(0), torch.no_grad():
        model = WRAPPED["none"]()
        put_gradients(model)
        topology = describe(model)
        topology.cut = frozenset({"0"})
        held = {p.fqn: p.tensor for p in parts.parameters(topology, 0)}
        assert held["0.weight"] is model[0].weight
        reduced = {p.fqn: p.tensor for p in parts.gradients(topology, 0, lambda _: ("local", True))}
        assert reduced["0.weight"] is model[0].weight.grad
