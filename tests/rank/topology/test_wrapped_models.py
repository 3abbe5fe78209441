"""Under every wrapper each element of the model is told once, by the rank that holds it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from ddpprobe.inspect.capture.assemble import region
from ddpprobe.rank.topology import outliving, parts, stages
from ddpprobe.rank.topology.describe import Topology, describe
from ddpprobe.rank.topology.parts import LocalPart
from ddpprobe.rank.topology.placement import LOCAL, UNKNOWN
from ddpprobe.rank.topology.weights import buffers, weights
from ddpprobe.records.shard_spec import MeshAxis, ShardSpec, SpecJson

from .wrapped_models import CPU, HIDDEN, RANKS, WRAPPED, mesh, net, on_rank, put_gradients, whole

EVERY = pytest.mark.parametrize("wrapper", WRAPPED)
ALL, FIRST, PAIRS = {0, 1, 2, 3}, {0}, {0, 2}
# Ranks that count: a layer that is split, one whose bias is not, one that no wrapper knows of.
COUNTING = {
    "none": (ALL, ALL, ALL),
    "ddp": (FIRST, FIRST, FIRST),
    "ddp of a part": (ALL, FIRST, ALL),
    "fsdp2": (ALL, ALL, ALL),
    "hsdp": ({0, 1}, {0, 1}, {0, 1}),
    "tp": (ALL, FIRST, FIRST),
    "tp of pairs": (ALL, PAIRS, PAIRS),
    "fsdp2+tp": (ALL, PAIRS, PAIRS),
    "fsdp1": (ALL, ALL, ALL),
    "fsdp1 flattened": (ALL, ALL, ALL),
    "fsdp1 whole": (FIRST, FIRST, FIRST),
    "fsdp1 hybrid": ({0, 1}, {0, 1}, {0, 1}),
}
OF_LAYERS = ("0.weight", "2.bias", "3.weight")


def on_each_rank(wrapper: str, look: Callable[[Topology, int], object]) -> list:
    """Return what `look` says of the model on every rank, with gradients in their places."""
    found = []
    for rank in RANKS:
        with on_rank(rank), torch.no_grad():
            model = WRAPPED[wrapper]()
            put_gradients(model)
            found.append(look(describe(model), rank))
    return found


def place(spec: SpecJson, rank: int, tensor: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Return where in the whole a part says that it lies, as a mask, and the part's elements."""
    mask = torch.zeros(whole.shape, dtype=torch.bool)
    if spec["kind"] in ("replicated", "local"):
        mask[...] = True
    elif spec["kind"] == "flat":
        assert tuple(spec["shape"]) == tuple(whole.shape)
        mask.view(-1)[spec["start"] : spec["stop"]] = True
    else:
        told = ShardSpec.from_json(spec)
        assert told.shape == tuple(whole.shape)
        mask[torch.meshgrid(*region(told, told.coordinate(rank)), indexing="ij")] = True
    return mask, plain(tensor)


def plain(tensor: Tensor) -> Tensor:
    """Return the elements on this rank."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().reshape(-1)


def check_parts(
    wrapper: str, look: Callable[[Topology, int], Iterable[LocalPart]], factor: int
) -> set[str]:
    """Check that what all ranks hold is the model, told once; returns the names."""
    counts: dict[str, Tensor] = {}
    expected = {name: tensor * factor for name, tensor in whole().items()}
    for rank, held in enumerate(on_each_rank(wrapper, lambda t, r: [
        (p.fqn, p.first, *place(p.spec, r, p.tensor, expected[p.fqn])) for p in look(t, r)
    ])):  # fmt: skip
        names = [fqn for fqn, *_ in held]
        assert len(names) == len(set(names))
        for fqn, first, mask, local in held:
            assert torch.equal(expected[fqn][mask], local), (fqn, rank)
            counts.setdefault(fqn, torch.zeros_like(expected[fqn]))
            counts[fqn] += mask * first
    split_, bias, other = (len(ranks) for ranks in COUNTING[wrapper])
    copies = {"0": 1, "2.weight": 1, "2.bias": bias, "3": other, "4": other}
    if wrapper in ("none", "ddp of a part"):
        copies |= {"0": split_, "2.weight": bias}
    elif wrapper == "tp of pairs":  # two models, of which nobody knows that they are the same
        copies |= {"0": 2, "2.weight": 2}
    elif "fsdp" in wrapper or wrapper == "hsdp":
        copies = dict.fromkeys(copies, 1)
    for fqn, count in counts.items():
        times = next(n for start, n in copies.items() if fqn.startswith(start))
        assert torch.equal(count, torch.full_like(count, times)), fqn
    return set(counts)


@EVERY
def test_the_parameters_of_all_ranks_are_the_model_and_each_element_is_counted_once(
    wrapper: str,
) -> None:
    assert check_parts(wrapper, parts.parameters, 1) == set(whole())


@EVERY
def test_the_gradients_of_all_ranks_are_those_of_the_model_and_each_is_counted_once(
    wrapper: str,
) -> None:
    def look(topology: Topology, rank: int) -> Iterable[LocalPart]:
        # Of a group of tensor parallelism one rank counts a plain gradient, as a caller says.
        return parts.gradients(topology, rank, lambda _: ("local", True))

    trained = {n for n, p in net().named_parameters() if p.requires_grad}
    trained |= set(whole()) if wrapper == "fsdp1 flattened" else set()
    assert check_parts(wrapper, look, 2) == trained


@EVERY
def test_the_part_of_a_second_moment_is_that_of_its_weight_element_by_element(
    wrapper: str,
) -> None:
    for rank in RANKS:
        with on_rank(rank):
            model = WRAPPED[wrapper]()
            put_gradients(model)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.0, 0.75))
            before = {}
            with torch.no_grad():
                for weight in weights(describe(model)):
                    before[weight.fqn] = weight.tensor.clone()
            optimizer.step()
            with torch.no_grad():
                for weight in weights(describe(model)):
                    state = optimizer.state.get(weight.owner)
                    if not weight.tensor.numel() and not state:
                        continue
                    moment = weight.part_of(state["exp_avg_sq"])
                    # The gradient is twice the weight, so it keeps a quarter of four squares.
                    assert torch.allclose(moment.reshape(-1), before[weight.fqn].reshape(-1) ** 2)


def test_buffers_are_each_ranks_own_and_of_a_tensor_parallel_group_the_first_ones_count() -> None:
    for wrapper, counting in (("none", ALL), ("ddp", ALL), ("fsdp2", ALL), ("tp of pairs", PAIRS),
                              ("tp", FIRST), ("fsdp2+tp", PAIRS)):  # fmt: skip
        for rank in RANKS:
            with on_rank(rank), torch.no_grad():
                model = WRAPPED[wrapper]()
                topology = describe(model)
                topology.root.register_buffer("mean", torch.arange(3.0))
                topology.root.register_buffer("count", torch.arange(3))
                named = {buffer.fqn: buffer for buffer in buffers(topology)}
                assert "count" not in named
                held = named["mean"]
                assert torch.equal(held.tensor, torch.arange(3.0))
                assert held.layout == ("local", rank in counting)


def test_buffers_of_stages_that_are_called_alike_are_not_known_to_be_one() -> None:
    with on_rank(1), torch.no_grad():
        topology = describe(net())
        topology.cut = frozenset({"3"})
        topology.root.register_buffer("mean", torch.arange(3.0))
        layouts = {buffer.fqn: buffer.layout for buffer in buffers(topology)}
    assert layouts["3.running_mean"] == UNKNOWN
    assert layouts["mean"] == LOCAL


@EVERY
def test_weights_say_who_counts_them_and_all_ranks_deal_turns_by_the_same_sizes(
    wrapper: str,
) -> None:
    ranks = on_each_rank(
        wrapper,
        lambda t, _: {w.fqn: (w.layout, w.size) for w in weights(t)},
    )
    for fqn, counting in zip(OF_LAYERS, COUNTING[wrapper], strict=True):
        layouts = [held[fqn][0] for held in ranks]
        if layouts[0] == ("replicated", True) and wrapper not in ("tp", "tp of pairs"):
            assert layouts == [("replicated", True)] * 4
        else:
            assert {r for r, (_, counts) in enumerate(layouts) if counts} == counting
        assert len({held[fqn][1] for held in ranks}) == 1
    frozen = {"4.weight", "4.bias"} if wrapper != "fsdp1 flattened" else set()
    assert {fqn for held in ranks for fqn in held} == set(whole()) - frozen
    parts_ = {"fsdp2": 4, "hsdp": 2, "tp": 4, "tp of pairs": 2, "fsdp2+tp": 4}
    assert ranks[0]["0.weight"][1] == HIDDEN * 4 * 4 // parts_.get(wrapper, 1)


_WHOLE, _SPLIT, _OWN = (("replicated", ALL),) * 3, (("sharded", ALL),) * 3, ("local", ALL)
REDUCED = {  # of these layers: the placement, and the ranks that count
    "none": (_OWN, _OWN, _OWN),
    "ddp": _WHOLE,
    "ddp of a part": (_OWN, ("replicated", ALL), _OWN),
    "fsdp2": _SPLIT,
    "hsdp": (("sharded", {0, 1}),) * 3,
    "tp": (("sharded", ALL), ("local", FIRST), _OWN),
    "tp of pairs": (("sharded", ALL), ("local", PAIRS), _OWN),
    "fsdp2+tp": (("sharded", ALL), ("sharded", PAIRS), ("sharded", ALL)),
    "fsdp1": _SPLIT,
    "fsdp1 flattened": _SPLIT,
    "fsdp1 whole": _WHOLE,
    "fsdp1 hybrid": (("sharded", {0, 1}),) * 3,
}


@EVERY
def test_reduced_gradients_say_how_they_lie_and_who_counts_them(wrapper: str) -> None:
    """But where a plain one lies within a group of tensor parallelism, which they do not know."""
    ranks = on_each_rank(wrapper, lambda t, _: {f: lay for f, _, lay in t.reduced_gradients()})
    for fqn, expected in zip(OF_LAYERS, REDUCED[wrapper], strict=True):
        (placement,) = {held[fqn][0] for held in ranks}
        counting = {rank for rank, held in enumerate(ranks) if held[fqn][1]}
        assert (placement, counting) == expected, fqn


SHARED = {
    "none": {},
    "ddp": {"0.weight": {"": ALL}, "2.bias": {"": ALL}, "3.weight": {"": ALL}},
    "ddp of a part": {"2.bias": {"": ALL}},
    "fsdp2": {},
    "tp": {"2.bias": {"": ALL}, "3.weight": {"": ALL}},
    "tp of pairs": {"2.bias": {"": ALL}, "3.weight": {"": ALL}},
    "fsdp2+tp": {
        "2.bias": {"0/2": {0, 1}, "1/2": {2, 3}}, "3.weight": {"0/2": {0, 1}, "1/2": {2, 3}},
    },
    "fsdp1": {},
    "fsdp1 flattened": {},
}  # fmt: skip
SHARED["fsdp1 whole"] = SHARED["ddp"]
SHARED["hsdp"] = {fqn: {"0/2": {0, 2}, "1/2": {1, 3}} for fqn in OF_LAYERS}
SHARED["fsdp1 hybrid"] = SHARED["hsdp"]


@EVERY
def test_what_several_ranks_hold_alike_has_the_name_of_its_shard_and_is_alike(wrapper: str) -> None:
    holders: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    values: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    for rank, held in enumerate(
        on_each_rank(wrapper, lambda t, _: [(*k, v.clone()) for *k, v in t.replicated_parameters()])
    ):
        for fqn, shard, tensor in held:
            holders[fqn][shard].add(rank)
            values[fqn, shard].append(tensor)
    assert {f: dict(s) for f, s in holders.items() if f in OF_LAYERS} == SHARED[wrapper]
    assert all(torch.equal(each[0], other) for each in values.values() for other in each)


@EVERY
def test_what_outlives_a_step_is_this_ranks_part_with_its_state_under_the_same_name(
    wrapper: str,
) -> None:
    def look(topology: Topology, rank: int) -> None:
        optimizer = torch.optim.Adam([p for p in topology.outer.parameters() if p.requires_grad])
        optimizer.step()
        held = list(outliving.outliving(topology, [optimizer]))
        keys = [one.key for one in held]
        assert len(keys) == len(set(keys))
        told = [kind for kind, _, _ in keys]
        assert told == sorted(told, key=["buffer", "optim_state", "param"].index)
        sizes = {one.fqn: one.tensor.numel() for one in held if one.kind == "param"}
        assert set(sizes) == set(whole())
        shapes = {one.key: one.tensor.numel() for one in held}
        for fqn in ("0.weight", "2.bias", "3.weight"):
            for leaf in ("exp_avg", "exp_avg_sq"):
                assert shapes["optim_state", fqn, leaf] == sizes[fqn]
        by_name = {p.fqn: plain(p.tensor) for p in parts.parameters(topology, rank)}
        for one in held:
            if one.kind == "param":
                assert torch.equal(one.tensor.reshape(-1), by_name[one.fqn])

    on_each_rank(wrapper, look)


def test_state_of_an_optimizer_beside_its_parameters_shape_is_told_once() -> None:
    with on_rank(1), torch.no_grad():
        topology = describe(WRAPPED["fsdp1 flattened"]())
        (unit,) = topology.flat
        state = {"exp_avg": unit.flat.detach() * 3, "step": torch.tensor(5.0), "lr": 0.1}
        optimizer = torch.optim.SGD(topology.outer.parameters())
        optimizer.state[unit.flat] = state
        held = {one.key: one for one in outliving.outliving(topology, [optimizer])}
        leaves = {key for key in held if key[0] == "optim_state"}
        first = unit.parts[0][0]
        assert leaves == {
            *(("optim_state", fqn, "exp_avg") for fqn in whole()),
            ("optim_state", first, "step"),
        }
        for fqn in whole():
            part = held["param", fqn, ""]
            assert torch.equal(held["optim_state", fqn, "exp_avg"].tensor, part.tensor * 3)
            assert part.owner == id(unit.flat)
        assert held["optim_state", first, "step"].owner == id(state["step"])
        assert sum(held["param", fqn, ""].tensor.numel() for fqn in whole()) > 0


def test_a_unit_of_fsdp1_that_is_gathered_shows_this_ranks_elements_of_the_whole() -> None:
    """As the root unit is from its forward until its backward."""
    with on_rank(2), torch.no_grad():
        (unit,) = describe(WRAPPED["fsdp1"]()).flat
        alone = {o.fqn: o.tensor.numel() for o in outliving.parts_of(unit)}
        size = max(part.start + part.shape.numel() for _, part in unit.parts)
        flat = torch.arange(float(size))
        unit = replace(unit, flat=flat)
        gathered = {o.fqn: o.tensor for o in outliving.parts_of(unit)}
        for fqn, part in unit.parts:
            numel = part.shape.numel()
            assert torch.equal(gathered[fqn], flat[part.start : part.start + numel])
        assert sum(alone.values()) < size
        split_ = dict(unit.split(flat))
        assert set(split_) == {fqn for fqn in whole() if not fqn.startswith("4")}
        assert all(torch.equal(split_[fqn], gathered[fqn]) for fqn in split_)


def test_a_gradient_that_fsdp1_has_not_reduced_is_not_told() -> None:
    with on_rank(0), torch.no_grad():
        topology = describe(WRAPPED["fsdp1 flattened"]())
        assert topology.gradients_are_reduced()
        (unit,) = topology.flat
        assert list(unit.gradients()) == []
        unit = replace(unit, flat=(wide := nn.Parameter(unit.flat.detach().clone())))
        wide.grad = wide.detach() * 2
        assert [fqn for fqn, *_ in unit.gradients()] == list(whole())
        narrow = replace(unit, flat=(held := nn.Parameter(wide.detach()[:-1].clone())))
        held.grad = None
        assert list(narrow.gradients()) == []
        topology.outer._sync_gradients = False  # as in no_sync()
        assert not topology.gradients_are_reduced()


@pytest.mark.parametrize("wrapper", ["ddp", "ddp of a part"])
def test_in_no_sync_gradients_are_not_reduced(wrapper: str) -> None:
    with on_rank(0):
        topology = describe(WRAPPED[wrapper]())
        assert topology.gradients_are_reduced()
        ((_, ddp),) = topology.ddps
        with ddp.no_sync():
            assert not topology.gradients_are_reduced()


@EVERY
def test_the_same_model_on_all_ranks_is_one_model_whatever_wraps_it(wrapper: str) -> None:
    """Ranks of other groups hold other parts; where no wrapper vouches for these they are apart."""
    heard = on_each_rank(wrapper, lambda t, _: stages.parts(t))
    assert set(heard[0]) == {"", *map(str, range(5))}
    apart = {"tp of pairs": ["", "0", "2"], "fsdp2+tp": [""]}.get(wrapper, [])
    compared = stages.compare(heard)
    assert compared["cut"] == []
    assert [fqn for fqn in compared["differ"] if fqn in ("", "0", "2")] == apart


@EVERY
def test_names_wrapper_and_leaves_are_those_of_the_model(wrapper: str) -> None:
    units = wrapper in ("fsdp2", "hsdp", "fsdp2+tp")
    flat = wrapper.startswith("fsdp1")
    of_tensors = {"tp": [RANKS], "tp of pairs": [(0, 1)], "fsdp2+tp": [(0, 1)]}

    def look(topology: Topology, rank: int) -> None:
        name = {"ddp of a part": "ddp", "tp of pairs": "tp"}.get(wrapper, wrapper)
        assert topology.wrapper == ("fsdp1" if flat else name)
        assert [n for n, _ in topology.named_modules()] == ["", *map(str, range(5))]
        places = parts.names(topology)
        assert set(places) == {n for n, _ in net().named_parameters()} | {
            f"3.{b}" for b in ("running_mean", "running_var", "num_batches_tracked")
        }
        assert places == {n: n for n in places}
        buffers = {p.fqn: p for p in parts.buffers(topology)}
        assert set(buffers) == set(places) - set(whole())
        assert all(p.spec == {"kind": "local"} and p.first for p in buffers.values())
        assert [n for n, _ in topology.units()] == (["", "0"] if units else [])
        leaves = [n for n, _ in topology.leaves()]
        assert leaves == ([] if units or flat else list(whole()))
        assert (topology.ddp is None) == (wrapper != "ddp")
        plain = torch.zeros(2, 3)
        tensors = "tp" in wrapper
        assert topology.layout("0", plain) == ("unknown" if tensors else "local", True)
        batch = {"kind": "batch", "dim": 0, "ranks": list(RANKS)}
        own = {"kind": "local"}
        assert parts.activation(topology, "0", plain) == (own if tensors else batch)
        assert parts.activation(topology, "0", plain.sum()) == own
        spec = ShardSpec((0, 1), (2,), (4, 3), (MeshAxis("shard", 0),))
        assert parts.activation(topology, "0", plain, spec) == spec.to_json()
        topology.cut = frozenset({"0"})
        assert parts.activation(topology, "0", plain, spec) == own
        assert topology.layout("0", plain) == ("unknown", True)
        if not flat:
            assert topology.weight_layout("0.weight", plain) == ("unknown", True)
            cut = {p.fqn: p for p in parts.parameters(topology, rank) if p.fqn[0] == "0"}
            assert [(p.spec, p.first) for p in cut.values()] == [(own, True)] * 2
        if rank == 0 and wrapper in of_tensors:
            (group,) = topology.tensor_meshes
            assert tuple(group.mesh.flatten().tolist()) == tuple(of_tensors[wrapper][0])
            alike = parts.over_tensor_group(topology, (2, 3))
            assert alike == {
                "kind": "dtensor", "ranks": tuple(of_tensors[wrapper][0]), "shape": (2, 3),
                "mesh": (len(of_tensors[wrapper][0]),), "axes": [["replicate", 0, 1, ""]],
            }  # fmt: skip

    on_each_rank(wrapper, look)


class Lone(nn.Module):
    """A model whose only tensors are its own, as a module in another one would have them."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 1 + math.prod(shape)).view(shape))
        self.register_buffer("mean", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("shape", [(4,), (5, 3), (8, 2)])
@pytest.mark.parametrize("wrapper", ["none", "ddp", "fsdp1", "fsdp1 flattened", "fsdp2"])
def test_what_the_model_itself_holds_has_no_prefix_and_is_held_once(
    wrapper: str, shape: tuple[int, ...]
) -> None:
    wrap = {
        "none": lambda model: model,
        "ddp": nn.parallel.DistributedDataParallel,
        "fsdp1": lambda m: FullyShardedDataParallel(m, device_id=CPU, use_orig_params=True),
        "fsdp1 flattened": lambda m: FullyShardedDataParallel(m, device_id=CPU),
        "fsdp2": lambda m: fully_shard(m, mesh=mesh(4)),
    }[wrapper]
    pieces: list[Tensor] = []
    for rank in RANKS:
        with on_rank(rank), torch.no_grad():
            topology = describe(wrap(Lone(*shape)))
            assert parts.names(topology) == {"weight": "weight", "mean": "mean"}
            assert [p.fqn for p in parts.buffers(topology)] == ["mean"]
            (part,) = parts.parameters(topology, rank)
            (outlives,) = outliving.parameters_of(topology)
            (weight,) = weights(topology)
            assert part.fqn == outlives.fqn == weight.fqn == "weight"
            pieces.append(plain(part.tensor))
            for other in (outlives.tensor, weight.tensor):
                assert torch.equal(plain(other), pieces[-1])
    whole_ = Lone(*shape).weight.detach().view(-1)
    copies = 4 if wrapper in ("none", "ddp") else 1
    assert torch.equal(torch.cat(pieces), whole_.repeat(copies))
