"""The summary tells shapes and counts a reference would, and the model does not notice it."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import json
import random
import resource
import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.flop_counter import FlopCounterMode

import ddpprobe
from ddpprobe.errors import SummaryError
from ddpprobe.inspect.summary.table import shorten
from ddpprobe.rank.topology.describe import describe


class Net(nn.Module):
    """Tied weights, a shared module, one that is never called, a frozen bias, BN, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 6)) for _ in range(2)
        )
        self.shared, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.alias = self.shared
        self.blocks[0][0].bias.requires_grad_(False)
        self.scale = torch.full((6,), 2.0)
        self.last, self.seen = None, []

    def forward(self, x: torch.Tensor, *, again: int = 3) -> dict[str, torch.Tensor]:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        for _ in range(again):
            h = self.shared(h)
        random.random(), np.random.rand()
        h = self.drop(self.norm(h)) * self.scale.clone()
        self.scale.mul_(1.5)  # a plain tensor of the module's, changed in place
        self.last = h
        self.seen.append(h)
        return {"logits": self.head(h), "hidden": h}


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def tokens(n: int = 4) -> torch.Tensor:
    return torch.arange(n) % 11


def test_shapes_and_calls_are_those_of_a_real_forward() -> None:
    model, twin = net(), net()
    shapes: dict[str, list[tuple[torch.Size, ...]]] = collections.defaultdict(list)
    for name, module in twin.named_modules():
        module.register_forward_hook(
            lambda _, args, out, name=name: shapes[name].append(
                tuple(tuple(t.shape) for t in (args[0], *(out.values() if name == "" else (out,))))
            )
        )
    twin(tokens())
    summary = ddpprobe.summary(model, tokens())
    assert [row.fqn for row in summary] == [name for name, _ in model.named_modules()]
    for row in summary:
        found = shapes[row.fqn]
        assert row.calls == len(found)
        assert (*row.input_shapes, *row.output_shapes) == (found[0] if found else ())
    assert summary["shared"].calls == 3
    assert summary["unused"].calls == 0
    assert ddpprobe.summary(model, tokens(), again=5)["shared"].calls == 5
    assert ddpprobe.summary(model, x=tokens(7))["head"].output_shapes == ((7, 11),)


def test_counts_are_each_parameters_own_and_tied_ones_count_once() -> None:
    summary = ddpprobe.summary(model := net())
    total = sum(p.numel() for p in model.parameters())
    assert summary.totals.params == summary.totals.params_local == total
    assert summary.totals.params == sum(row.params_global for row in summary)
    assert summary.totals.trainable == total - 8
    assert summary.totals.param_bytes == 4 * total
    assert (summary.totals.buffers, summary.totals.buffer_bytes) == (13, 56)
    assert summary["blocks.0.0"].trainable == 48  # weight, but not bias: not the first one's flag
    assert [p.trainable for p in summary["blocks.0.0"].parameters] == [True, False]
    assert summary["head"].params_global == 0
    assert [p.tied_to for p in summary["head"].parameters] == ["embed.weight"]
    assert not summary["drop"].parameters
    assert not summary.with_shapes


def snapshot(model: nn.Module) -> tuple[object, ...]:
    tensors = [*model.parameters(), *model.buffers()]
    return (
        [t.tolist() for t in tensors],
        [(id(t), t._version, t.requires_grad, t.grad, t.data_ptr()) for t in tensors],
        [(id(m), m.training, type(m), len(m._forward_hooks)) for m in model.modules()],
        torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(),
    )  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_the_model_changes(training: bool) -> None:
    model = net().train(training)
    model.norm.eval()  # a mixture, which a blanket train() afterwards would lose
    calls: list[object] = []
    model.head.register_forward_hook(lambda *_: calls.append(1))
    model.head.weight.grad = torch.ones(11, 6)
    x = tokens()
    before, version = snapshot(model), x._version
    attributes = {name: id(value) for name, value in model.__dict__.items()}
    scale = model.scale.clone()
    ddpprobe.summary(model, x)
    assert snapshot(model) == before
    assert {name: id(value) for name, value in model.__dict__.items()} == attributes
    assert (model.last, model.seen, calls, x._version) == (None, [], [], version)
    assert torch.equal(model.scale, scale)
    assert model.scale._version == 0
    model(x)["logits"].sum().backward()


def test_a_model_larger_than_the_memory_is_told_from_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(400_000, 400_000), nn.GELU(), nn.Linear(400_000, 3))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for device in ("cpu", "meta"):
        summary = ddpprobe.summary(model, torch.empty(2, 400_000, device=device))
        assert summary["2"].output_shapes == ((2, 3),)
    assert summary.totals.param_bytes == 4 * (400_001 * 400_000 + 400_001 * 3)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_wrappers_are_seen_through_and_names_are_the_topologys() -> None:
    model = net()
    want = ddpprobe.summary(net(), tokens())
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1].compile(backend="eager")
    names = [fqn for fqn, _ in describe(model).named_modules()]
    for wrapped in (model, torch.compile(model, backend="eager"), nn.DataParallel(model)):
        summary = ddpprobe.summary(wrapped, tokens())
        assert [row.fqn for row in summary] == names
        assert summary == want


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    n: int = 2


class Odd(nn.Module):
    """Inputs in containers, outputs in a dataclass, a module built on the way, a bound forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 6)
        self.b.forward = types.MethodType(lambda this, x: nn.Linear.forward(this, x) * 2, self.b)
        self.a.forward = functools.partial(nn.Linear.forward, self.a)
        self.order = [self.a, self.b]  # a plain list beside the registry

    def forward(self, batch: Batch, more: dict[str, torch.Tensor]) -> Batch:
        h = batch.x + more["bias"]
        for module in self.order:
            h = nn.Softmax(dim=-1)(module(h))
        return Batch(h)


def test_containers_bound_forwards_and_plain_lists_of_modules_are_followed() -> None:
    summary = ddpprobe.summary(Odd(), Batch(torch.ones(2, 4)), {"bias": torch.ones(4)})
    assert summary[""].output_shapes == summary["b"].output_shapes == ((2, 6),)
    assert (summary["a"].calls, summary["b"].calls) == (1, 1)


def test_dtypes_layouts_and_old_style_weight_norm_are_told() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LSTM(6, 5, batch_first=True)).bfloat16()
    model[0] = nn.utils.parametrizations.weight_norm(model[0].to(memory_format=torch.channels_last))
    model.forward = lambda x: model[1](model[0](x).flatten(0, 1))  # a lambda: not ours to rebind
    with pytest.raises(SummaryError, match="through an object that is not a module"):
        ddpprobe.summary(model, torch.ones(2, 3, 8, 8, dtype=torch.bfloat16))
    del model.forward
    summary = ddpprobe.summary(model[0], torch.ones(2, 3, 8, 8, dtype=torch.bfloat16))
    assert (summary[""].output_shapes, summary[""].output_dtypes) == (
        ((2, 4, 6, 6),),
        ("bfloat16",),
    )
    lstm = ddpprobe.summary(model[1], torch.ones(2, 7, 6, dtype=torch.bfloat16))
    assert lstm[""].output_shapes == ((2, 7, 5), (1, 2, 5), (1, 2, 5))
    assert lstm[""].dtype == "bfloat16"


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.gate(x)[:, 0] > 0]


OUTSIDE = torch.ones(4)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        OUTSIDE.add_(1)
        return self.lin(x)


def scripted() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        return torch.jit.script(nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4), Router()), torch.ones(2, 4),
         r"failed in '1' \(Router\) with DynamicOutputShape.*\n.*without inputs for parameters"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4)), torch.ones(2, 4),
         r"failed in '1' \(Linear\) with .*\n.*fails on real inputs, too, got the wrong ones"),
        (nn.BatchNorm1d(4), torch.ones(1, 4), r"in the root \(BatchNorm1d\) with ValueError"),
        (Writes(), torch.ones(2, 4), r"failed in the root \(Writes\) .* the model does not own"),
        (nn.Sequential(nn.LazyLinear(4)), torch.ones(2, 4), "lazy module has no parameters yet"),
        (scripted(), torch.ones(2, 4), "is a ScriptModule"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_what_cannot_be_followed_is_refused_with_its_name(model, x, message: str, capfd) -> None:
    kept, state = OUTSIDE.clone(), torch.get_rng_state()
    with pytest.raises(SummaryError, match=message):
        ddpprobe.summary(model, x)
    assert capfd.readouterr().err == ""
    assert torch.equal(OUTSIDE, kept)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert ddpprobe.summary(model).totals.params == sum(
        p.numel() for p in model.parameters() if not nn.parameter.is_lazy(p)
    )
    assert torch.ones(1).add(1).item() == 2  # no mode is left behind


def test_something_that_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module, got dict. Write ddpprobe.summ"):
        ddpprobe.summary({})


@functools.lru_cache
def table(n: int) -> torch.Tensor:
    return torch.arange(n).float()


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) + table(4)


def test_a_fake_tensor_left_in_a_global_cache_is_reported() -> None:
    table.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"made in the root \(Cached\) .*cache_clear"):
        ddpprobe.summary(Cached(), torch.ones(2, 4))
    table.cache_clear()
    table(4)
    with warnings.catch_warnings(action="error"):  # a real one, made before, is no reason
        assert ddpprobe.summary(Cached(), torch.ones(2, 4))[""].output_shapes == ((2, 4),)
    table.cache_clear()


def test_a_probed_model_is_summarised_without_the_probe_noticing(tmp_path, records_of) -> None:
    model = net()
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out = model(tokens())["logits"].sum()
        ddpprobe.summary(model, tokens())  # every hook of a sampled step is attached
        out.backward()
        optimizer.step()
    (record,) = records_of(tmp_path / "r")
    counts = {s.key: record.counts[i][0] for i, s in enumerate(record.sites)}
    assert counts["head", "output", ""] == 44
    assert record.scalars[0]["micro_batches"] == 1


def test_under_autocast_and_with_constants_from_outside_nothing_is_kept() -> None:
    class Reads(Writes):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x).add_(OUTSIDE)

    with warnings.catch_warnings(action="error"), torch.autocast("cpu", torch.bfloat16):
        summary = ddpprobe.summary(model := Reads(), torch.ones(2, 4))
        assert torch.is_autocast_cache_enabled()
        assert model(torch.ones(2, 4)).dtype == torch.bfloat16
    assert summary[""].output_dtypes == ("bfloat16",)


def test_synchronised_batch_norm_is_followed_without_a_collective() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)))
    assert ddpprobe.summary(model, torch.ones(2, 3, 4, 4))["0"].output_shapes == ((2, 3, 4, 4),)


def test_the_dictionary_is_json_and_the_table_is_aligned() -> None:
    summary = ddpprobe.summary(net(), tokens())
    again = json.loads(json.dumps(summary.to_dict()))
    assert again["rows"][0]["output_shapes"] == [[4, 11], [4, 6]]
    head, rule, *lines = str(summary).splitlines()
    assert head.split() == ["module", "type", "input", "output", "params", "dtype", "trainable",
                            "calls", "FLOPs"]  # fmt: skip
    assert set(rule) == {"-"}
    at = head.index("type")
    assert all(line[at - 1] == " " and line[at] != " " for line in lines[: len(summary.rows)])
    text = str(summary)
    assert "blocks.0.0" in text
    assert "in part" in text
    assert "tied" in text
    assert "params: 352 (344 trainable, 8 frozen)" in text
    with pytest.raises(KeyError, match=r"no module 'nope'; there are: '', 'embed"):
        summary["nope"]


def test_a_long_name_keeps_both_ends() -> None:
    assert shorten("a" * 30 + "b" * 30, 11) == "aaaa...bbbb"
    assert shorten("short", 11) == "short"


def test_a_deep_copy_of_the_model_is_not_needed(monkeypatch) -> None:
    monkeypatch.setattr(copy, "deepcopy", lambda *_: pytest.fail("a copy of every weight"))
    assert ddpprobe.summary(net(), tokens()).with_shapes


def test_sizes_stand_for_inputs() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)).bfloat16()
    summary = ddpprobe.summary(model, input_sizes=(2, 3, 8, 8))
    assert summary.rows == ddpprobe.summary(model, torch.ones(2, 3, 8, 8).bfloat16()).rows
    assert summary["2"].output_dtypes == ("bfloat16",)
    assert summary.num_features_model == 5
    two = ddpprobe.summary(Two(), input_sizes=[(4,), (4, 6)], input_dtypes=[torch.long, torch.half])
    assert two[""].output_shapes == ((4, 6),)
    one = ddpprobe.summary(net(), input_sizes=(4,), input_dtypes=torch.long)
    assert one.num_features_model == 11


class Two(nn.Module):
    def forward(self, index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        assert (index.dtype, table.dtype) == (torch.long, torch.half)
        return table[index]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_sizes": "8"}, r"input_sizes must be a size such as \(8, 3, 32, 32\).* got '8'"),
        ({"input_sizes": [(2, -1)]}, r"a list of sizes, got \[\(2, -1\)\]"),
        ({"input_sizes": [(2,), (3,)], "input_dtypes": [torch.long]}, "each of the 2 sizes"),
        ({"input_dtypes": torch.long}, "input_dtypes goes with input_sizes"),
    ],
)
def test_wrong_sizes_are_refused(given, message: str) -> None:
    with pytest.raises(SummaryError, match=message):
        ddpprobe.summary(nn.Linear(4, 4), **given)
    with pytest.raises(SummaryError, match="inputs or input_sizes, not both"):
        ddpprobe.summary(nn.Linear(4, 4), torch.ones(2, 4), input_sizes=(2, 4))
    with pytest.raises(SummaryError, match="num_features_model needs an output"):
        ddpprobe.summary(nn.Linear(4, 4)).num_features_model  # noqa: B018  (it raises)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_operations_are_counted_where_they_are_done_and_as_by_hand() -> None:
    conv = ddpprobe.summary(nn.Conv2d(6, 4, 3, groups=2), input_sizes=(2, 6, 8, 8))
    assert conv.totals.flops == 2 * (2 * 4 * 6 * 6) * (3 * 3 * 3)
    back = ddpprobe.summary(nn.ConvTranspose2d(6, 4, 3), input_sizes=(2, 6, 8, 8))
    assert back.totals.flops == 2 * (2 * 6 * 8 * 8) * (4 * 3 * 3)
    attends = ddpprobe.summary(Attends(), input_sizes=(3, 16, 8))
    assert attends["qkv"].flops == 2 * 3 * 16 * 8 * 24
    assert attends[""].flops == 2 * 2 * 3 * 2 * 16 * 16 * 4  # also on the CPU, where torch's has 0
    lstm = ddpprobe.summary(nn.LSTM(6, 5, num_layers=2, bidirectional=True), input_sizes=(7, 2, 6))
    each = [2 * 7 * 2 * 20 * (width + 5) for width in (6, 6, 10, 10)]
    assert lstm.totals.flops == sum(each)
    shared = ddpprobe.summary(net(), tokens())
    assert shared["shared"].flops == 3 * 2 * 4 * 6 * 6  # three calls
    assert shared.totals.flops == sum(row.flops for row in shared)
    assert ddpprobe.summary(net()).totals.flops == 0


def test_torch_counts_the_same_operations() -> None:
    encoder, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.ones(2, 5, 8)
    with FlopCounterMode(display=False) as counter:
        encoder(x)
    assert ddpprobe.summary(encoder, x).totals.flops == counter.get_total_flops()


@torch.library.custom_op("ddpprobe_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_custom_operator_is_named_and_not_counted_as_nothing() -> None:
    class Custom(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return double(x)

    summary = ddpprobe.summary(Custom(), torch.ones(2))
    assert summary.uncounted == ("ddpprobe_tests.double.default",)
    assert "not counted in FLOPs: ddpprobe_tests.double.default" in str(summary)


def test_optimizer_and_loss_are_told_and_what_no_optimizer_trains() -> None:
    model, other = net(), nn.Linear(2, 2)
    trained = [p for n, p in model.named_parameters() if not n.startswith("unused.")]
    adam = torch.optim.AdamW([{"params": trained}, {"params": other.parameters(), "lr": 0.5}])
    before = ddpprobe.summary(model, optimizer=adam)
    (row,) = before.optimizers
    assert (row.type, row.lr, row.foreign, row.state_bytes_local) == ("AdamW", (1e-3, 0.5), 2, 0)
    assert before.left_out == ("unused.weight", "unused.bias")
    model(tokens())["logits"].sum().backward()
    adam.step()
    after = ddpprobe.summary(model, optimizer=[adam], loss_func=nn.functional.mse_loss)
    stepped = [p for p in trained if p.grad is not None]
    assert after.optimizers[0].state_bytes_local == sum(8 * p.numel() + 4 for p in stepped)
    text = str(after)
    assert "optimizer: AdamW, lr 0.001, 0.5, " in text
    assert "2 of them not the model's; state 2," in text
    assert "trainable, and in no optimizer: unused.weight, unused.bias" in text
    assert text.endswith("loss: mse_loss")
    assert ddpprobe.summary(model, loss_func=nn.CrossEntropyLoss()).loss == "CrossEntropyLoss"
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer .* got float"):
        ddpprobe.summary(model, optimizer=[0.1])


def test_sizes_are_told_for_people() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.ReLU())
    summary = ddpprobe.summary(model, input_sizes=(2, 4096))
    assert "params in bytes: 67,108,864 (64.00 MiB)" in str(summary)
    assert "forward: 67,108,864 FLOPs (67.11 MFLOPs)" in str(summary)
    assert [row.has_params for row in summary] == [True, True, False]
