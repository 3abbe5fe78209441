"""What is refused is said whole: what came, why it cannot be observed, and what to do instead."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ddpprobe.errors import ModelRefused
from ddpprobe.rank.topology import parts
from ddpprobe.rank.topology.describe import describe
from ddpprobe.rank.topology.refusals import refuse, refuse_parameter, refuse_taken
from ddpprobe.rank.torch_private import sharding

from .test_describe import Packed, elsewhere, engine, partitioned, scripted, subclassed
from .wrapped_models import WRAPPED, net, on_rank, put_gradients, sharded

SUBCLASS = f"{Packed.__module__}.{Packed.__qualname__}"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            nn.ReLU,
            (
                "ReLU has no parameters, so there is nothing to train and nothing to observe. Pass "
                "the model that the optimizer updates."
            ),
        ),
        (
            lambda: nn.DataParallel(nn.Linear(2, 2)),
            (
                "the model is a DataParallel: its replicas live for one forward only. Use "
                "DistributedDataParallel."
            ),
        ),
        (scripted, "the model is a ScriptModule, which takes no hooks. Pass the eager model."),
        (
            lambda: nn.Sequential(scripted()),
            (
                "module '0' is a ScriptModule, which takes no hooks. Pass the eager model, or "
                "leave it out with exclude='0*'."
            ),
        ),
        (
            lambda: nn.Sequential(nn.LazyLinear(2)),
            (
                "parameter '0.weight' is not initialized yet. Run one forward of the model before "
                "ddpprobe.install(model), as its optimizer needs, too."
            ),
        ),
        (
            partitioned,
            (
                "parameter '1.weight' is partitioned by DeepSpeed ZeRO-3: an empty tensor stands "
                "in its place. Use torch's fully_shard, or leave it out with exclude='1*'."
            ),
        ),
        (
            subclassed,
            (
                f"parameter '1.weight' is a {SUBCLASS}, a tensor subclass whose elements ddpprobe "
                "cannot read. Convert it to a plain tensor, or leave it out with exclude='1*'."
            ),
        ),
        (
            elsewhere,
            (
                "parameter '1.weight' is on 'xpu'. ddpprobe observes models on the CPU and on CUDA "
                "devices (NVIDIA, and AMD through ROCm). On others it has never run: a NaN might "
                "pass without a word. Set DDPPROBE_DISABLE=1 to train there without it."
            ),
        ),
        (
            engine,
            (
                "the model is a Engine of deepspeed, which keeps gradients where torch does not "
                "show them: they would be missing or wrong here. Use torch's own FSDP, fully_shard "
                "or DistributedDataParallel."
            ),
        ),
    ],
)
def test_a_refusal_says_what_came_and_what_to_type(make, text: str) -> None:
    with pytest.raises(ModelRefused) as refused:
        describe(make())
    assert str(refused.value) == text


@pytest.mark.parametrize("name", ["the model", "module '0'"])
def test_an_engine_of_deepspeed_is_refused_with_what_to_type(name: str) -> None:
    """Known by its name: whoever derives from it, and wherever it is."""
    engine_ = type("DeepSpeedEngine", (nn.Linear,), {})
    derived = type("Ours", (engine_,), {})(2, 2)
    with pytest.raises(ModelRefused) as refused:
        describe(derived if name == "the model" else nn.Sequential(derived))
    assert str(refused.value) == (
        f"{name} is an engine of DeepSpeed, which takes the "
        "gradients away before anybody sees them reduced. With ZeRO of stage 1 or 2, write from "
        "ddpprobe.integrations.deepspeed import install, and install(engine) with what "
        "deepspeed.initialize() returned."
    )


def test_parameters_that_an_engine_takes_are_refused_unless_it_is_asked() -> None:
    model = net()
    parameters = list(model.named_parameters())
    refuse_taken(parameters, None)
    model[2].bias._hp_mapping = None
    with pytest.raises(ModelRefused) as refused:
        refuse_taken(parameters, None)
    assert str(refused.value).startswith("parameter '2.bias' is trained by an engine of DeepSpeed.")
    refuse_taken(parameters, SimpleNamespace(wrapper="zero2"))  # type: ignore[arg-type]


@pytest.mark.parametrize("package", ["apex", "colossalai", "fairscale", "horovod", "megatron"])
def test_a_module_of_an_engine_may_be_left_out_and_is_known_by_its_package(package: str) -> None:
    def of(module: str) -> nn.Module:
        kind = type("Layer", (nn.Linear,), {"__module__": module})
        return nn.Sequential(nn.Linear(2, 2), kind(2, 2))

    with pytest.raises(ModelRefused, match=rf"^module '1' is a Layer of {package}, .*exclude='1"):
        describe(of(f"{package}.deep.inside"))
    describe(of(f"{package}.deep.inside"), lambda fqn: fqn != "1")
    describe(of(f"mine.{package}"))
    describe(of(f"{package}_like.layers"))


def test_a_dtensor_is_refused_by_the_device_of_its_mesh() -> None:
    with on_rank(0):
        model = WRAPPED["tp"]()
        weight = model[0].weight
        refuse_parameter("0", "weight", weight)
        for mesh_of, refused in (("cuda", False), ("hpu", True)):
            other = SimpleNamespace(device_type=mesh_of)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(weight), "device_mesh", property(lambda _, m=other: m))
                if refused:
                    with pytest.raises(ModelRefused, match="'0.weight' is on 'hpu'"):
                        refuse_parameter("0", "weight", weight)
                else:
                    refuse_parameter("0", "weight", weight)


def test_tensor_parallelism_within_ddp_is_refused_by_the_name_of_its_module() -> None:
    inner = nn.Linear(2, 2)
    inner.weight._st_info = "as DDP leaves it in the place of a DTensor"
    with on_rank(0):
        ddp = nn.parallel.DistributedDataParallel(nn.Sequential(inner))
        with pytest.raises(ModelRefused) as refused:
            refuse([("", ddp), ("0", inner)], lambda _: False, ddp)
    assert str(refused.value) == (
        "module '0' is tensor-parallel within DistributedDataParallel(device_mesh=...): torch "
        "takes its parameters out of it in the first forward, so their gradients would be missing "
        "here and activations counted twice. Use torch.distributed.fsdp.fully_shard over the same "
        "mesh."
    )


def test_tensor_parallelism_within_fsdp2_is_refused_where_torch_does_not_say_over_which_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sharding, "_SPECS", ("of_another_torch",))
    with on_rank(0):
        for wrapper in ("tp", "fsdp2"):
            describe(WRAPPED[wrapper]())
        with pytest.raises(ModelRefused, match="fully_shard over tensor-parallel parts"):
            describe(WRAPPED["fsdp2+tp"]())


def test_a_flat_parameter_over_tensor_parallel_parts_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with on_rank(0):
        model = WRAPPED["fsdp1"]()
        (unit,) = describe(model).flat
        unit.flat._param_extensions = [object()]
        with pytest.raises(ModelRefused) as refused:
            describe(model)
    assert str(refused.value) == (
        "parameter 'weight' is sharded by FullyShardedDataParallel (FSDP1) over tensor-parallel "
        "parts. Use torch.distributed.fsdp.fully_shard with tensor parallelism."
    )


def test_buffers_are_this_ranks_own_and_of_one_process_the_whole() -> None:
    for wrapper, kind in (("ddp", "local"), (None, "replicated")):
        with on_rank(1):
            model = WRAPPED[wrapper or "none"]()
            topology = describe(model)
            if wrapper is None:
                topology.world_size = 1
            found = {part.fqn: part for part in parts.buffers(topology)}
            held = topology.root[3].running_mean
            assert found["3.running_mean"].tensor is held
            assert found["3.running_mean"].spec == {"kind": kind}


def test_of_a_shard_that_ddp_reduces_the_first_replica_counts() -> None:
    with on_rank(0), torch.no_grad():
        model = WRAPPED["tp"]()
        put_gradients(model)
        topology = describe(model)
        for managed in (True, False):
            topology.managed_by_ddp = lambda _, managed=managed: managed
            layouts = {fqn: layout for fqn, _, layout in topology.reduced_gradients()}
            assert layouts["0.weight"] == ("sharded", managed)
            assert topology.replica_shard(model[0].weight) == "0/4"
            held = {part.fqn: part.first for part in parts.parameters(topology, 0)}
            assert held["0.weight"] is managed


def test_a_mesh_of_other_ranks_is_not_the_tensor_parallel_one() -> None:
    with on_rank(0):
        topology = describe(WRAPPED["tp of pairs"]())
        over = DeviceMesh("cpu", [0, 2], mesh_dim_names=("outer",))
        assert topology.spans_tensor_meshes(topology.root[0].weight)
        other = sharded(WRAPPED["none"](), over)
        assert not topology.spans_tensor_meshes(other[0].weight)
        assert not topology.spans_tensor_meshes(torch.zeros(2))
        # Each rank of the pair holds what FSDP splits over the others.
        assert topology.replica_shard(other[0].weight) == "0/2"
