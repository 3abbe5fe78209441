"""`ddpprobe.capture` in one process: what it keeps, what it measures, and that it does no harm."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import weakref
from functools import partial
from typing import NamedTuple

import matplotlib as mpl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import ddpprobe
from ddpprobe import CaptureError
from ddpprobe.inspect.capture.assemble import RankPart, pieces, region, whole
from ddpprobe.inspect.capture.plots import matrix
from ddpprobe.inspect.capture.series import CallSeries, TensorMeter
from ddpprobe.rank.stats import histogram
from ddpprobe.records.shard_spec import MeshAxis, ShardSpec
from ddpprobe.testing import state_hash
from tests import forked_script

mpl.use("Agg")


class Net(nn.Module):
    """In-place ReLU, a module used twice, tied names, an idle branch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 6), nn.ReLU(inplace=True)
        self.twice = nn.Linear(6, 6)
        self.drop, self.head, self.idle = nn.Dropout(0.3), nn.Linear(6, 2), nn.Linear(2, 2)
        self.same = self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.fc(x))
        return self.head(self.drop(self.twice(self.twice(h))))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def hooks_on(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(m, kind)) for m in model.modules() for kind in kinds)


X = torch.linspace(-2, 2, 20).reshape(5, 4)


def test_outputs_and_gradients_are_those_of_a_full_backward_hook():
    model, seen_by_torch = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2)), {}
    for name, module in model.named_modules():
        module.register_full_backward_hook(
            lambda _, gi, go, name=name: seen_by_torch.update({name: go[0].clone()})
        )
    with ddpprobe.capture(model, grad=True, input=True) as seen:
        model(X.clone().requires_grad_()).square().sum().backward()
    assert list(seen) == ["", "0", "1", "2"]
    for name in seen:
        assert torch.equal(seen[name].grad.local(), seen_by_torch[name])
        assert not seen[name].output.local().requires_grad
    assert torch.equal(seen["1"].input[0].local(), seen["0"].output.full())
    assert torch.equal(seen[""].output.by_rank()[0], seen["2"].output.local())
    assert hooks_on(model) == 4  # torch's own


def test_a_tensor_changed_in_place_later_is_kept_as_it_was():
    model = net()
    with ddpprobe.capture(model, "fc", "act") as seen:
        model(X)
    before = nn.functional.linear(X, model.fc.weight, model.fc.bias)
    assert torch.equal(seen["fc"].output.local(), before)
    assert torch.equal(seen["act"].output.local(), before.relu())


def test_without_a_copy_a_change_in_place_is_an_error_not_another_value():
    model = net()
    with ddpprobe.capture(model, "fc", "twice", copy=False) as seen:
        model(X)
    with pytest.raises(CaptureError, match=r"fc\.output was changed in place.*copy=True"):
        seen["fc"].output.local()
    assert seen["twice"].output.local().shape == (5, 6)


@pytest.mark.parametrize(("keep", "kept"), [("last", [3]), ("all", [0, 1, 2, 3]), (3, [1, 2, 3])])
def test_the_calls_asked_for_are_kept_each_with_its_gradient(keep, kept):
    model = net()
    with ddpprobe.capture(model, "twice", keep=keep, grad=True) as seen:
        for scale in (1.0, 3.0):
            model(X * scale).sum().backward()
    site = seen["twice"]
    assert (site.count, [call.index for call in site.calls]) == (4, kept)
    assert torch.equal(site.output.local(), site.calls[-1].output.local())
    for call in site.calls:
        weight = model.twice.weight if call.index % 2 == 0 else model.head.weight
        upstream = None if call.index % 2 else call.grad.local()
        assert call.grad.local().shape == (5, 6)
        if upstream is not None and call.index + 1 in kept:
            after = next(c for c in site.calls if c.index == call.index + 1).grad.local()
            torch.testing.assert_close(upstream, after @ weight)


def test_what_was_stored_is_there_by_position_and_in_order():
    model = net()
    with ddpprobe.capture(model, "fc", "twice", "idle") as seen:
        model(X)
    names = list(seen)
    assert names == ["fc", "twice", "idle"]
    assert [seen[i].name for i in (0, 1, -2, -3)] == ["fc", "twice", "twice", "fc"]
    with pytest.raises(CaptureError, match="idle has no data"):  # as seen["idle"] does
        seen[2]
    assert seen[0].stored.equal(seen["fc"].output.local())
    first, second, idle = seen.stored
    assert first.equal(seen[0].stored)
    assert second.equal(seen[1].calls[-1].output.local())
    assert idle is None
    with pytest.raises(IndexError, match="module 3 of 3 captured ones"):
        seen[3]
    with ddpprobe.capture(model, "fc", keep="stats") as seen:
        model(X)
    with pytest.raises(CaptureError, match="keeps no tensors"):
        _ = seen.stored


class Pair(NamedTuple):
    a: torch.Tensor
    b: str


@dataclasses.dataclass
class Out:
    logits: torch.Tensor
    past: list[dict[str, torch.Tensor]]


class Gives(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.make(*args, **kwargs)


def test_structures_are_taken_leaf_by_leaf():
    model = Gives(lambda x, mask: Out(x + 1, [{"k": x * 2, "n": None}, {"k": mask * 3}]))
    with ddpprobe.capture(model, input=True) as seen:
        model(X, mask=X)
    out = seen[""].output
    assert out.leaves == ("logits", "past.0.k", "past.1.k")
    assert torch.equal(out["logits"].full(), X + 1)
    assert torch.equal(out["past"][0].full(), X * 2)
    assert torch.equal(out["past.1.k"].full(), X * 3)
    assert seen[""].input.leaves == ("0", "mask")
    assert list(seen[0].stored) == ["logits", "past.0.k", "past.1.k"]
    assert torch.equal(seen[0].stored["past.0.k"], X * 2)
    with pytest.raises(CaptureError, match=r'holds several tensors: choose one of \["logits"\]'):
        out.full()
    with pytest.raises(CaptureError, match=r'\[past\.2\] does not exist; there are: \["logits"\]'):
        out["past"][2].local()
    model = Gives(lambda x: Pair(x, "b"))
    with ddpprobe.capture(model) as seen:
        model(X)
    assert torch.equal(seen[""].output.full(), X)  # the only tensor needs no path


def test_modules_are_chosen_by_glob_object_or_class():
    model = net()

    def names(*what, **how) -> list[str]:
        with ddpprobe.capture(model, *what, **how) as seen:
            return list(seen)

    assert names("tw*", model.act) == ["act", "twice"]
    assert names(nn.Linear) == ["fc", "twice", "head", "idle"]
    assert names(nn.Linear, exclude=["i*", model.fc]) == ["twice", "head"]
    assert names(paramless=False) == ["fc", "twice", "head", "idle"]
    assert names("same") == ["head"]
    with ddpprobe.capture(model, "same") as seen:
        model(X)
    assert torch.equal(seen["same"].output.local(), seen["head"].output.local())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"modules": ["encoder.*"]}, r"'encoder.\*' matches no module. There are, for example: "),
        ({"exclude": ["twise"]}, r"'twise' matches no module.*'twice'"),
        ({"exclude": ["*"]}, "no module is left to capture"),
        ({"keep": 0}, 'keep must be "last", "all", "stats" or a number of calls, got 0'),
        ({"every": 0}, "every must be an integer of at least 1, got 0"),
        ({"bins": 40}, "bins must be 0 or a power of two from 4 up, got 40"),
        ({"range": (1, 1)}, "range must be .* with low < high"),
        ({"compiled": "no"}, 'compiled must be "refuse" or "eager"'),
        ({"timeout": 0}, "timeout must be a number of seconds above 0"),
        ({"apply": 3}, "apply must be a function of a tensor"),
    ],
)
def test_wrong_arguments_teach(given, says):
    options = dict(given)
    with pytest.raises(CaptureError, match=says):
        ddpprobe.capture(net(), *options.pop("modules", []), **options).open()
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module first, got str"):
        ddpprobe.capture("layers.*")


def test_a_list_of_modules_is_no_module_that_runs():
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 4)] * 2), "odd[0]": nn.ReLU()})
    with ddpprobe.capture(model) as seen:
        model["odd[0]"](model["blocks"][0](X))
    assert list(seen) == ["blocks.0", "odd[0]"]
    assert dict(seen.items()).keys() == {"blocks.0", "odd[0]"}
    with ddpprobe.capture(model, "odd[0]") as seen:  # its name, and no glob
        model["odd[0]"](X)
    assert list(seen) == ["odd[0]"]


@pytest.mark.parametrize("switch", ["input", "grad", "paramless", "copy", "detach"])
def test_a_switch_is_true_or_false(switch: str):
    with pytest.raises(CaptureError, match=f"{switch} must be True or False, got 'yes'"):
        ddpprobe.capture(net(), **{switch: "yes"}).open()


def test_what_is_not_there_teaches():
    model = net()
    closed = ddpprobe.capture(model)
    with pytest.raises(CaptureError, match="never opened. Write `with ddpprobe.capture"):
        closed["fc"]
    with ddpprobe.capture(model, "fc", "idle", "head") as seen:
        with torch.no_grad():
            model(X)
    with pytest.raises(KeyError, match="'haed' is not captured.*'head'"):
        seen["haed"]
    with pytest.raises(CaptureError, match="idle has no data: it never ran inside the capture"):
        seen["idle"]
    with pytest.raises(CaptureError, match="not asked for it: pass grad=True"):
        seen["fc"].grad.full()
    with ddpprobe.capture(model, "fc", grad=True) as seen:
        loss = model(X).sum()
    loss.backward()
    with pytest.raises(CaptureError, match="must run while the capture is open"):
        seen["fc"].grad.local()
    with pytest.raises(CaptureError, match="was opened before"):
        seen.open()


class Remat(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_is_no_call_and_its_gradient_goes_to_the_call_it_repeats(reentrant):
    def run(model: nn.Module) -> ddpprobe.inspect.capture.result.Capture:
        torch.manual_seed(1)
        with ddpprobe.capture(model, "block.*", grad=True, keep="all") as seen:
            model(X.clone().requires_grad_()).square().sum().backward()
        return seen

    torch.manual_seed(0)
    model = Remat(reentrant)
    plain = copy.deepcopy(model)
    plain.forward = lambda x: plain.block(plain.block(plain.block(x)))
    seen, truth = run(model), run(plain)
    for name in ("block.0", "block.2"):
        assert seen[name].count == truth[name].count == 3
        for mine, true in zip(seen[name].calls, truth[name].calls, strict=True):
            assert torch.equal(mine.output.local(), true.output.local())
            torch.testing.assert_close(mine.grad.local(), true.grad.local())


@pytest.mark.parametrize("keep", ["last", "stats"])
def test_training_is_bit_identical_while_captures_are_open(keep):
    def train(*, captured: bool) -> str:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(5)
        outer = ddpprobe.capture(model, every=2, input=True, grad=True, keep=keep)
        if captured:
            outer.open()
        for _ in range(10):
            if captured:
                with ddpprobe.capture(model, grad=True, input=True, keep=keep):
                    model(X).square().sum().backward()
            else:
                model(X).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        outer.close()
        assert hooks_on(model) == 0
        return state_hash(model, optimizer)

    assert train(captured=True) == train(captured=False)


def test_the_tape_of_selective_checkpointing_is_not_shifted():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.relu(self.a(x)).clone())

    def gradients(policy, keep) -> list[torch.Tensor]:
        torch.manual_seed(0)
        block, x = Block(), X.clone().requires_grad_()
        context = partial(create_selective_checkpoint_contexts, policy)
        with ddpprobe.capture(block, grad=True, input=True, keep=keep or "last") as seen:
            if keep is None:
                seen.close()
            y = checkpoint(block, x, use_reentrant=False, context_fn=context)
            y.square().sum().backward()
        return [x.grad, *(p.grad for p in block.parameters())]

    def save_some(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        some = (torch.ops.aten.clone.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if op in some else CheckpointPolicy.PREFER_RECOMPUTE

    for policy in (save_some, lambda *_, **__: CheckpointPolicy.MUST_SAVE):
        for keep in ("last", "stats"):
            pairs = zip(gradients(policy, keep), gradients(policy, None), strict=True)
            assert all(torch.equal(mine, bare) for mine, bare in pairs)


def test_a_default_device_and_inference_mode_do_no_harm():
    model = net()
    with torch.device("meta"), torch.inference_mode():
        with ddpprobe.capture(model, "fc", copy=False) as seen:
            model(X)
        assert seen["fc"].output.full().shape == (5, 6)
        assert seen["fc"].output.stats().numel == 30


def test_every_nth_forward_is_taken_and_the_others_run_without_hooks_on_the_modules():
    model, counts = net(), []
    with ddpprobe.capture(model, every=3, keep="all", grad=True, input=True) as seen:
        for i in range(7):
            model(X * i).sum().backward()
            counts.append(hooks_on(model))
    assert [n > 1 for n in counts] == [True, False, False] * 2 + [True]
    assert [n for n in counts if n == 1] == [1] * 4  # the one that counts forwards
    assert [seen[name].count for name in ("", "fc", "twice")] == [3, 3, 6]
    inputs = [call.input[0].local() for call in seen[""].calls]
    assert all(torch.equal(x, X * i) for x, i in zip(inputs, (0, 3, 6), strict=True))
    assert len({call.grad.local().sum() for call in seen["fc"].calls}) > 0


def test_hooks_go_whatever_happens():
    model = net()
    with pytest.raises(ZeroDivisionError), ddpprobe.capture(model):
        model(X)
        raise ZeroDivisionError
    assert hooks_on(model) == 0
    seen = ddpprobe.capture(model, "fc").open()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 3))
    assert not any(seen._opening._watcher._under_way._running.values())  # no call is held
    model(X)
    seen.close()
    seen.close()
    assert (seen["fc"].count, hooks_on(model)) == (1, 0)

    class Stubborn(nn.Linear):
        def register_forward_hook(self, *args: object, **kwargs: object) -> object:
            raise PermissionError

    model.head = Stubborn(6, 2)
    with pytest.raises(PermissionError):
        ddpprobe.capture(model).open()
    assert hooks_on(model) == 0


def test_copies_and_pickles_of_the_model_report_nothing():
    model = net()
    with ddpprobe.capture(model, keep="all") as seen:
        model(X)
        copy.deepcopy(model)(X)
        torch.save(model, io.BytesIO())
    assert seen["fc"].count == 1


def test_nothing_keeps_the_tensors_alive_behind_the_capture():
    model = net()
    with ddpprobe.capture(model, grad=True, detach=False) as seen:
        loss = model(X).sum()
        loss.backward()
    kept = [weakref.ref(seen[name].output.local()) for name in ("fc", "head")]
    del seen, loss
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def test_detach_false_keeps_the_graph():
    model = net()
    x = X.clone().requires_grad_()
    with ddpprobe.capture(model, "fc", detach=False) as seen:
        model(x)
    (gradient,) = torch.autograd.grad(seen["fc"].output.local().sum(), x)
    assert torch.equal(gradient, model.fc.weight.sum(0).expand(5, 4))


def test_apply_keeps_what_a_function_makes():
    model = net()
    with ddpprobe.capture(model, "fc", apply=lambda t: t.abs().mean(0)) as seen:
        model(X)
    assert seen["fc"].output.local().shape == (6,)
    assert seen["fc"].output.full().shape == (6,)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch 2.14's compiler looks at it
@pytest.mark.filterwarnings("ignore:Guards may run slower")  # torch, of Python 3.13.0
def test_a_compiled_module_is_refused_or_run_eagerly():
    model = net()
    whole = torch.compile(model, backend="eager")
    whole(X)
    with pytest.raises(CaptureError, match=r'inside torch.compile.*compiled="eager"'):
        ddpprobe.capture(whole, "fc").open()
    with ddpprobe.capture(whole, "fc", compiled="eager") as seen:
        whole(X)
    assert seen["fc"].output.local().shape == (5, 6)
    block = net()
    block.twice.compile(backend="eager")
    with pytest.raises(CaptureError, match="'twice' runs inside"):
        ddpprobe.capture(block).open()
    with ddpprobe.capture(block, "fc") as seen:
        block(X)
    assert seen["fc"].count == 1


def test_a_hook_that_fails_is_contained_and_told(monkeypatch, caplog):
    monkeypatch.delenv("DDPPROBE_STRICT")
    model = net()
    with ddpprobe.capture(model, "fc", apply=lambda t: t.no_such_thing) as seen:
        model(X)
    with pytest.raises(CaptureError, match="the capture failed on this rank.*no_such_thing"):
        seen["fc"].output.local()
    assert "contained" in caplog.text


# ---- statistics


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_statistics_are_the_truth(dtype):
    x = (torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    model = nn.Identity()
    with ddpprobe.capture(model) as seen:
        model(x)
    stats, wide = seen[""].output.stats(), x.double()
    assert stats.numel == 1000
    assert stats.mean == pytest.approx(wide.mean().item())
    assert stats.std == pytest.approx(wide.std(correction=0).item())
    assert stats.near_zero == (wide.abs() <= 0.05).sum().item() / 1000  # negatives count by size
    counts, edges = torch.histogram(wide, torch.from_numpy(stats.histogram.edges))
    assert counts.tolist() == stats.histogram.counts.tolist()
    assert (edges[0], edges[-1]) == (-16, 16)


def test_near_zero_of_a_normal_distribution_is_four_percent():
    model = nn.Identity()
    with ddpprobe.capture(model, keep="stats") as seen:
        model(torch.randn(100_000, generator=torch.Generator().manual_seed(0)))
    assert seen[""].output.stats().near_zero == pytest.approx(0.0399, abs=0.002)


def test_nonfinite_values_are_counted_apart_and_a_fixed_range_says_what_it_misses():
    model = nn.Identity()
    with ddpprobe.capture(model, keep="stats", bins=5, range=(0, 10)) as seen:
        model(torch.tensor([-1.0, 0.0, 1.9, 2.0, 10.0, 11.0, torch.inf, -torch.inf, torch.nan]))
    stats = seen[""].output.stats()
    assert (stats.nan, stats.pos_inf, stats.neg_inf, stats.numel) == (1, 1, 1, 9)
    bars = stats.histogram
    assert (bars.counts.tolist(), bars.below, bars.above) == ([2, 1, 0, 0, 1], 1, 1)
    assert (stats.min, stats.max, stats.mean) == (-1, 11, pytest.approx(23.9 / 6))


numbers = st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 1e-38, torch.inf, -torch.inf, torch.nan]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(numbers, max_size=6), min_size=1, max_size=9), st.booleans())
def test_merging_histograms_gives_the_histogram_of_all(parts, fixed):
    limits = (-2.0, 3.0) if fixed else None
    meter = TensorMeter(8, limits, 0.05)
    measured = torch.stack([meter.measure(torch.tensor(p)) for p in parts])
    at_once = meter.measure(torch.tensor([v for p in parts for v in p]))
    merged = meter.total(measured)
    assert torch.equal(merged[:7], at_once[:7])
    assert torch.equal(merged[histogram.NEAR_ZERO :], at_once[histogram.NEAR_ZERO :])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 70), st.sampled_from([4, 5, 16]))
def test_a_series_is_bounded_and_loses_no_call(calls, most):
    meter = TensorMeter(4, None, 0.05)
    series = CallSeries(meter, most)
    for i in range(calls):
        series.add(meter.measure(torch.full((3,), float(i))))
    rows = series.rows()
    assert len(rows) <= most + 1
    assert len(rows) == -(-calls // series.stride)
    assert rows[:, 0].tolist() == [
        3.0 * min(series.stride, calls - i * series.stride) for i in range(len(rows))
    ]
    assert meter.total(rows)[7] == 3 * sum(range(calls))


def test_the_table_prints_one_line_a_tensor():
    model = net()
    with ddpprobe.capture(model, "fc", "act", grad=True) as seen:
        model(X).sum().backward()
    lines = str(seen.stats()).split("\n")
    assert lines[0].split()[:3] == ["tensor", "numel", "nan"]
    assert [line.split()[0] for line in lines[1:]] == ["fc.output", "fc.grad", "act.output",
                                                      "act.grad"]  # fmt: skip


# ---- plots


def test_the_plots_show_every_call(tmp_path):
    model = net()
    with ddpprobe.capture(model, keep="stats") as seen:
        for i in range(1, 6):
            model(X * i)
    edges, counts = matrix(seen["fc"].output.history())
    assert counts.sum(1).tolist() == [30] * 5
    assert edges[-1] == -edges[0]
    (image,) = seen["fc"].output.plot_hist().collections
    assert image.get_array().shape == (64, 5)
    axes = seen["fc"].output.plot_stats()
    assert [len(ax.lines[0].get_xdata()) for ax in axes] == [5, 5, 5]
    with ddpprobe.capture(model, "fc", "act", bins=0) as flat:
        model(X)
    with pytest.raises(CaptureError, match="no histogram: capture with bins=64"):
        flat["fc"].output.plot_hist()
    with ddpprobe.capture(model, "fc", "act") as both:
        model(X)
    for figure in (both.plot_hist(), both.plot_stats()):
        figure.savefig(tmp_path / "figure.png")
    mpl.pyplot.close("all")
    for draw in (both.plot_hist, both.plot_stats):
        with pytest.raises(CaptureError, match="one of input, output, grad, got 'outp'"):
            draw("outp")


def test_without_matplotlib_the_plots_say_what_to_install(tmp_path):
    code = """
import sys; sys.modules["matplotlib"] = None
import torch, ddpprobe
model = torch.nn.Linear(2, 2)
with ddpprobe.capture(model) as seen: model(torch.ones(1, 2))
try: seen.plot_hist()
except ddpprobe.CaptureError as error: print(error)
"""
    done = forked_script.run(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert "pip install 'ddpprobe[plot]'" in done.stdout


# ---- assembling, without ranks


def spread(whole_: torch.Tensor, laid: ShardSpec) -> dict[int, torch.Tensor]:
    return {
        rank: whole_[torch.meshgrid(*region(laid, laid.coordinate(rank)), indexing="ij")]
        for rank in laid.ranks
    }


axes = st.one_of(
    st.just(MeshAxis("replicate")),
    st.builds(MeshAxis, st.just("shard"), st.integers(0, 1)),
    st.builds(MeshAxis, st.just("shard"), st.integers(0, 1), st.integers(2, 3)),
)


@settings(max_examples=80, deadline=None)
@given(st.tuples(st.integers(0, 7), st.integers(1, 5)), st.lists(axes, min_size=1, max_size=2))
def test_any_layout_assembles_to_what_was_spread(shape, laid_axes):
    mesh = (2, 3)[: len(laid_axes)]
    ranks = tuple(range(10, 10 + (6 if len(mesh) == 2 else 2)))
    laid = ShardSpec(ranks, mesh, shape, tuple(laid_axes))
    truth = torch.arange(float(shape[0] * shape[1])).reshape(shape)
    tensors = spread(truth, laid)
    parts = {r: RankPart(tuple(t.shape), "float32", laid) for r, t in tensors.items()}
    found = pieces(parts, None, "x")
    primary = {r: t for r, t in tensors.items() if laid.primary(r)}
    assert torch.equal(whole(found, primary, 0, "x"), truth)


def test_a_shard_that_is_missing_or_of_another_shape_is_told():
    laid = ShardSpec((0, 1), (2,), (4, 2), (MeshAxis("shard"),))
    parts = {0: RankPart((2, 2), "float32", laid)}
    with pytest.raises(CaptureError, match="rank 1 has no part of it"):
        whole(pieces(parts, None, "x"), {0: torch.ones(2, 2)}, 0, "x")
    parts[1] = RankPart((1, 2), "float32", laid)
    with pytest.raises(CaptureError, match=r"rank 1 holds the shape \(1, 2\)"):
        whole(pieces(parts, None, "x"), {0: torch.ones(2, 2), 1: torch.ones(1, 2)}, 0, "x")
    masked = ShardSpec((0, 1), (2,), (4, 2), (MeshAxis("unknown"),))
    with pytest.raises(CaptureError, match="torch does not tell"):
        pieces({0: RankPart((4, 2), "float32", masked)}, None, "x")
