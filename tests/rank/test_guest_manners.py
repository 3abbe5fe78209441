"""Whatever a script does with its model and its loop, a probe on it changes nothing.

Bit-identical ends are compared by the hash of parameters, buffers, optimizer and random states.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import tracemalloc
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ddpprobe
from ddpprobe.testing import state_hash

from ..older_torch import exports_hooked_strictly

STEPS = 6
SAVED: list[int] = []  # how many tensors autograd saved in each run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.act = nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(inplace=True)
        self.drop, self.fc2 = nn.Dropout(0.2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(self.act(self.norm(self.fc1(x)))))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def turn(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(batch(step)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def hooks_left(*models: nn.Module) -> list[str]:
    """Every hook of ours on the models, their parameters, all modules and all optimizers."""
    from torch.optim import optimizer

    owners: list[object] = [nn.modules.module, optimizer]
    owners += [m for model in models for m in model.modules()]
    owners += [p for model in models for p in model.parameters()]
    found = []
    for owner in owners:
        tables = {k: v for k, v in vars(owner).items() if "hook" in k and isinstance(v, dict)}
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            tables[name] = getattr(owner, name, None) or {}
        for name, table in tables.items():
            for hook in table.values():
                inner = getattr(hook, "func", hook)  # of a partial
                if str(getattr(inner, "__module__", "")).startswith("ddpprobe"):
                    found.append(f"{type(owner).__name__}.{name}: {inner}")
    return found


# ---- what people do in a loop; each returns the optimizer whose state is compared


def plain(model: Net) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    for step in range(STEPS):
        turn(model, optimizer, step)
    return optimizer


def gradient_penalty(model: Net) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    for step in range(STEPS):
        x = batch(step).requires_grad_()
        y = model(x).square().sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        (y + gradient.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def two_backwards(model: Net) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    for step in range(STEPS):
        y = model(batch(step))
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return optimizer


def gradients_by_hand(model: Net) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    parameters = list(model.parameters())
    for step in range(STEPS):
        for p, g in zip(
            parameters, torch.autograd.grad(model(batch(step)).square().sum(), parameters),
            strict=True,
        ):  # fmt: skip
            p.grad = g * 0.5
        optimizer.step()
    return optimizer


def sharpness_aware(model: Net) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    for step in range(STEPS):
        model(batch(step)).square().sum().backward()
        pushes = [p.grad * 0.1 for p in model.parameters()]
        with torch.no_grad():
            for p, push in zip(model.parameters(), pushes, strict=True):
                p.add_(push)
        model.zero_grad()
        model(batch(step)).square().sum().backward()
        with torch.no_grad():
            for p, push in zip(model.parameters(), pushes, strict=True):
                p.sub_(push)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def per_sample_gradients(model: Net) -> torch.optim.Optimizer:
    optimizer = sgd(model)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x[None],)).square().sum()

    for step in range(STEPS):
        parameters = {k: v.detach() for k, v in model.named_parameters()}
        each = vmap(grad(loss), in_dims=(None, 0), randomness="different")(parameters, batch(step))
        for name, p in model.named_parameters():
            p.grad = each[name].mean(0)
        optimizer.step()
    return optimizer


def called_functionally(model: Net) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    for step in range(STEPS):
        scaled = {name: p * 1.5 for name, p in model.named_parameters()}
        functional_call(model, scaled, (batch(step),)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def hooks_of_ones_own(model: Net) -> torch.optim.Optimizer:
    model.fc1.register_forward_hook(lambda _, args, out: out * 2)
    model.norm.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    model.fc2.register_full_backward_hook(lambda _, gi, go: (gi[0] * 0.5,))
    model.fc1.weight.register_hook(lambda g: g.clamp(-0.1, 0.1))

    def halve(p: Tensor) -> None:
        p.grad.mul_(0.5)

    model.fc2.weight.register_post_accumulate_grad_hook(halve)
    return plain(model)


def step_inside_the_backward(model: Net) -> torch.optim.Optimizer:
    each = {p: torch.optim.SGD([p], lr=0.01, momentum=0.9) for p in model.parameters()}

    def step(p: nn.Parameter) -> None:
        each[p].step()
        each[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for step_ in range(STEPS):
        model(batch(step_)).square().sum().backward()
    return next(iter(each.values()))


def with_a_closure(model: Net) -> torch.optim.Optimizer:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = model(batch(step)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    return optimizer


def moving_average(model: Net) -> torch.optim.Optimizer:
    optimizer, average = sgd(model), None
    for step in range(STEPS):
        y = model(batch(step))
        if average is None:  # made while the hooks of a sampled step are attached
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        y.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        average(batch(step)).sum().backward()  # with gradients: the average is no micro-batch
    with torch.no_grad():
        for mine, other in zip(model.parameters(), average.module.parameters(), strict=True):
            mine.add_(other)  # the average itself enters the hash
    return optimizer


def evaluation_in_between(model: Net) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    for step in range(STEPS):
        model(batch(step)).square().sum().backward()
        with torch.inference_mode():  # before the step, with gradients pending
            model.eval()(batch(99))
        model.train()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def parts_frozen_and_thawed(model: Net) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    for step in range(STEPS):
        model.fc1.requires_grad_(step % 3 != 1)
        model.fc2.bias.requires_grad_(step % 3 != 2)
        turn(model, optimizer, step)
    return optimizer


def other_numbers_loaded(model: Net) -> torch.optim.Optimizer:
    optimizer, saved = sgd(model), {k: v.clone() for k, v in model.state_dict().items()}
    for step in range(STEPS):
        if step == 3:
            model.load_state_dict(saved)
        turn(model, optimizer, step)
    return optimizer


def other_parameters_loaded(model: Net) -> torch.optim.Optimizer:
    optimizer, saved = sgd(model), {k: v.clone() for k, v in model.state_dict().items()}
    for step in range(STEPS):
        if step == 3:
            model.load_state_dict(saved, assign=True)  # new Parameter objects
            optimizer = sgd(model)
        turn(model, optimizer, step)
    return optimizer


def another_dtype(model: Net) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    for step in range(STEPS):
        dtype = torch.float64 if step >= 3 else torch.float32
        if step == 3:
            model.to(dtype)
            optimizer = sgd(model)
        model(batch(step).to(dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def modules_replaced(model: Net) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    for step in range(STEPS):
        if step == 3:
            model.fc1 = LowRank(model.fc1)
            optimizer = sgd(model)
        turn(model, optimizer, step)
    return optimizer


def weights_parametrized(model: Net) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    for step in range(STEPS):
        if step == 3:
            parametrizations.weight_norm(model.fc1)
            parametrizations.spectral_norm(model.fc2)
            optimizer = sgd(model)
        turn(model, optimizer, step)
    return optimizer


def several_optimizers(model: Net) -> torch.optim.Optimizer:
    first, second = sgd(model.fc1), torch.optim.SGD(model.fc2.parameters(), lr=0.1)
    norm = torch.optim.SGD(model.norm.parameters(), lr=0.1)
    for step in range(STEPS):
        model(batch(step)).square().sum().backward()
        first.step()
        if step % 2:
            second.step()
        norm.step()
        model.zero_grad()
    return first


def other_defaults(model: Net) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    first, *batches = [batch(step) for step in range(STEPS)]
    model(first).square().sum().backward()
    optimizer.step()  # it makes its state, in torch 2.6 on the default device
    optimizer.zero_grad()
    torch.set_default_device("meta")  # as others do with "cuda", for what they make themselves
    torch.set_default_dtype(torch.float64)
    try:
        for x in batches:
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    return optimizer


def under_modes(model: Net) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    torch.use_deterministic_algorithms(mode=True)
    try:
        with (
            FlopCounterMode(display=False) as flops,
            torch.autograd.set_detect_anomaly(mode=True),
            torch.set_grad_enabled(mode=False),
            torch.autocast("cpu", torch.bfloat16),
        ):
            for step in range(STEPS):
                with torch.enable_grad():
                    loss = model(batch(step)).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert flops.get_total_flops() == STEPS * 3 * 2 * (2 * 32 + 3 * 16)  # none of ours
    return optimizer


def activations_offloaded(model: Net) -> torch.optim.Optimizer:
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        optimizer = plain(model)
    SAVED.append(len(packed))
    assert SAVED[-1] == SAVED[0]  # the probe saves none
    return optimizer


WAYS = [
    plain, gradient_penalty, two_backwards, gradients_by_hand, sharpness_aware,
    per_sample_gradients, called_functionally, hooks_of_ones_own, step_inside_the_backward,
    with_a_closure, moving_average, evaluation_in_between, parts_frozen_and_thawed,
    other_numbers_loaded, other_parameters_loaded, another_dtype, modules_replaced,
    weights_parametrized, several_optimizers, other_defaults, under_modes, activations_offloaded,
]  # fmt: skip
# What is counted, where it is not one step and one micro-batch for each turn of the loop.
COUNTS = {
    sharpness_aware: None,  # gradients thrown away before a step look like a step given up
    step_inside_the_backward: None,
    per_sample_gradients: None,
    with_a_closure: (STEPS, None),
    several_optimizers: (STEPS, 1),
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(("every", "backward"), [(2, "output"), (1, "full")])
def test_training_ends_with_the_same_bits(
    way, every: int, backward: str, tmp_path, records_of
) -> None:
    options = {"run_dir": tmp_path / "r", "every": every, "backward": backward, "daemon": "none"}

    def run(*, probed: bool) -> str:
        model = net()
        torch.manual_seed(7)
        if not probed:
            return state_hash(model, way(model))
        with ddpprobe.install(model, **options):
            optimizer = way(model)
        assert hooks_left(model) == []
        return state_hash(model, optimizer)

    bare = run(probed=False)
    assert run(probed=True) == bare
    counted = COUNTS.get(way, (STEPS, 1))
    if counted is not None:
        steps, micros = counted
        records = [r for r in records_of(tmp_path / "r") if r.sampled]
        assert [r.step for r in records] == list(range(0, steps, every))
        if micros is not None:
            assert {r.scalars[0]["micro_batches"] for r in records} == {float(micros)}


class Operators(TorchDispatchMode):
    """A mode of the user's that writes down what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("several", [False, True])
def test_a_model_that_holds_its_probe_is_copied_and_pickled(several: bool, tmp_path) -> None:
    model = net()
    optimizer = sgd(model)
    models = {"net": model, "other": nn.Linear(2, 2)} if several else model
    model.probe = ddpprobe.install(models, run_dir=tmp_path / "run", every=1, daemon="none")
    turn(model, optimizer, 0)
    for copied in (
        copy.deepcopy(model), pickle.loads(pickle.dumps(model)), AveragedModel(model).module,
    ):  # fmt: skip
        held = copied.probe
        if several:
            held.note("nothing")
            held = held["net"]
        held.log(loss=1.0)
        held.step()
        with held.pause():
            turn(copied, sgd(copied), 1)
        held.close()
        assert held.run_dir is None
    turn(model, optimizer, 1)
    assert hooks_left(model)
    model.probe.close()
    assert hooks_left(model) == []


@pytest.mark.parametrize("every", [1, 3])
def test_a_dispatch_mode_of_the_users_sees_what_it_sees_without_us(every: int, tmp_path) -> None:
    def seen(probe: ddpprobe.Probe | None) -> list[list[str]]:
        labels, steps = torch.arange(16) % 2, []
        for step in range(STEPS):
            with Operators() as mode:
                logits = model(batch(step).repeat(6, 1)[:16])
                loss = nn.functional.cross_entropy(logits, labels)
                if probe is not None:
                    probe.log(loss=loss)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            steps.append(mode.seen)
        return steps

    model = net()
    optimizer = sgd(model)
    want = seen(None)
    model = net()
    optimizer = sgd(model)
    with ddpprobe.install(
        model, run_dir=tmp_path / "run", every=every, daemon="none", histograms="fc1"
    ) as probe:
        assert seen(probe) == want


def test_the_search_for_hooks_finds_ours(tmp_path) -> None:
    model = net()
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        assert len(hooks_left(model)) >= 4  # two on the root, two of all optimizers
        model(batch(0)).sum().backward()
        assert len(hooks_left(model)) > 10
    assert hooks_left(model) == []


# ---- copies, files, traces


@pytest.fixture
def probed(tmp_path) -> Iterator[tuple[nn.Sequential, ddpprobe.Probe]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none") as probe:
        yield model, probe


READER = """
import sys
sys.modules["ddpprobe"] = None  # importing it is an error
import torch
for path in sys.argv[1:]:
    model = torch.load(path, weights_only=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
print(sorted(m for m in sys.modules if m.startswith("ddpprobe.")))
"""


def test_a_saved_model_loads_and_trains_where_ddpprobe_is_not_installed(probed, tmp_path) -> None:
    model, _ = probed
    torch.save(model, tmp_path / "between.pt")
    y = model(batch(0))
    torch.save(model, tmp_path / "forward.pt")
    y.sum().backward()
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(model))
    torch.save(model, tmp_path / "backward.pt")
    assert pickle.loads((tmp_path / "pickle.pt").read_bytes())(batch(1)).shape == (3, 2)
    files = [tmp_path / f"{name}.pt" for name in ("between", "forward", "backward")]
    done = subprocess.run(
        [sys.executable, "-c", READER, *files], capture_output=True, text=True, check=False,
        cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize("when", ["between", "forward", "backward"])
def test_a_deep_copy_is_silent_and_carries_no_hook(when: str, probed, tmp_path, records_of) -> None:
    model, probe = probed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twin = copy.deepcopy(model)
    y = model(batch(0))
    if when == "forward":
        twin = copy.deepcopy(model)
    y.sum().backward()
    if when == "backward":
        twin = copy.deepcopy(model)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        twin(batch(step)).sum().backward()
        other.step()
        other.zero_grad()
    optimizer.step()
    probe.close()
    assert hooks_left(twin, model) == []
    (record,) = records_of(tmp_path / "r")
    assert record.scalars[0]["micro_batches"] == 1
    assert all(record.counts[i][0] <= 24 for i, s in enumerate(record.sites) if s.kind == "output")


def test_in_a_pause_the_model_is_scripted_traced_exported_and_copied_bare(probed) -> None:
    model, probe = probed
    makes = [
        torch.jit.script,
        lambda m: torch.jit.trace(m, batch(0)),
        lambda m: torch.export.export(m, (batch(0),)).module(),
    ]
    with probe.pause("export"), warnings.catch_warnings(action="ignore"):
        for one in (model, copy.deepcopy(model)):
            for make in makes:
                assert torch.equal(make(one)(batch(3)), one(batch(3)))
    model(batch(0)).sum().backward()


@pytest.mark.parametrize("sampled", [True, False])
def test_without_a_pause_it_is_traced_and_exported_and_no_micro_batch_is_counted(
    sampled: bool, tmp_path, records_of
) -> None:
    model = net().eval()
    every = 1 if sampled else 2
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=every, daemon="none"):
        plain(model)
        with warnings.catch_warnings(action="ignore"):
            traced = torch.jit.trace(model, batch(0))
            how = {} if exports_hooked_strictly() else {"strict": False}
            exported = torch.export.export(model, (batch(0),), **how).module()
        with torch.no_grad():
            assert torch.equal(traced(batch(3)), model(batch(3)))
            assert torch.equal(exported(batch(3)), model(batch(3)))
        plain(model)
    records = [r for r in records_of(tmp_path / "r") if r.sampled]
    assert [r.step for r in records] == list(range(0, 2 * STEPS, every))
    assert {r.scalars[0]["micro_batches"] for r in records} == {1.0}


def test_a_pause_in_the_middle_of_a_step_changes_nothing(tmp_path, records_of) -> None:
    def run(*, probed: bool) -> str:
        model = net()
        torch.manual_seed(7)
        with contextlib.ExitStack() as stack:
            pause = contextlib.nullcontext
            if probed:
                probe = ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none")
                pause = stack.enter_context(probe).pause
            optimizer = sgd(model)
            for step in range(STEPS):
                loss = model(batch(step)).square().sum()
                with pause():
                    model(batch(50 + step))  # with gradients, and the dropout's random numbers
                loss.backward()
                with pause():
                    copy.deepcopy(model)(batch(60 + step)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return state_hash(model, optimizer)

    assert run(probed=True) == run(probed=False)
    records = [r for r in records_of(tmp_path / "r") if r.sampled]
    assert [r.step for r in records] == list(range(STEPS))
    assert {r.scalars[0]["micro_batches"] for r in records} == {1.0}


# ---- errors of the user's


class Mine(Exception):
    pass


@pytest.mark.parametrize("error", [Mine, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["forward", "backward", "optimizer", "hook"])
def test_an_error_of_the_users_is_the_users_and_training_goes_on(
    where: str, error: type[BaseException], tmp_path, records_of
) -> None:
    """In a sampled step, and the same bits as without a probe afterwards."""

    def run(*, probed: bool) -> str:
        model = net()
        torch.manual_seed(7)
        probe = (
            ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none")
            if probed else contextlib.nullcontext()
        )  # fmt: skip
        with probe:
            optimizer = sgd(model)
            for step in range(STEPS):
                thrown = error("theirs")
                try:
                    fail_once(model, optimizer, where, thrown if step == 2 else None, step)
                except error as caught:
                    assert caught is thrown  # noqa: PT017
                optimizer.zero_grad()
        assert hooks_left(model) == []
        return state_hash(model, optimizer)

    assert run(probed=True) == run(probed=False)
    steps = [r.step for r in records_of(tmp_path / "r") if r.sampled and not r.skipped]
    assert steps[-1] >= STEPS - 2
    assert len(steps) >= STEPS - 1


def fail_once(model, optimizer, where: str, error: BaseException | None, step: int) -> None:
    def throw(*_: object) -> None:
        raise error

    with contextlib.ExitStack() as stack:
        if error is not None and where == "forward":
            stack.callback(model.act.register_forward_pre_hook(throw).remove)
        if error is not None and where == "hook":
            stack.callback(model.fc2.register_forward_hook(throw).remove)
        loss = model(batch(step)).square().sum()
        if error is not None and where == "backward":
            stack.callback(model.fc1.weight.register_hook(throw).remove)
        loss.backward()
        if error is not None and where == "optimizer":
            stack.callback(optimizer.register_step_pre_hook(throw).remove)
        optimizer.step()


# ---- again and again


def test_many_cycles_leave_no_hook_thread_file_or_memory(tmp_path) -> None:
    model, children = net(), offspring()

    def cycle(i: int) -> None:
        with ddpprobe.install(model, run_dir=tmp_path / str(i), every=1, daemon="none") as probe:
            if i % 5 == 0 or i < 20:  # at first each one, until bounded caches are full
                optimizer = sgd(model)
                loss = model(batch(i)).square().sum()
                probe.log(loss=loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            with probe.pause("eval"):
                model(batch(9))

    def held() -> tuple[int, int, int]:
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd")), len(gc.get_objects())

    for i in range(20):
        cycle(i)
    *before, objects = held()
    tracemalloc.start(_FRAMES)
    try:
        for i in range(20, 30):
            cycle(i)
        first = settled()
        for i in range(30, 70):
            cycle(i)
        grown = settled().compare_to(first, "lineno")
    finally:
        tracemalloc.stop()
    for i in range(70, 110):  # a third of the time without it
        cycle(i)
    *after, more = held()
    assert after == before
    assert hooks_left(model) == []
    # What is remembered of the last few tables comes and goes: some 20 KB.
    # One block more in 40 cycles is a table that Python has made larger (of interned names, say).
    growth = sum(line.size_diff for line in grown if line.count_diff != 1)
    assert growth < 40 * 1024, "\n".join(map(str, grown[:10]))
    assert more - objects < 200
    assert offspring() == children


_FRAMES = 25  # of a call stack, of which one is ddpprobe's if it has asked for the memory


def offspring() -> set[psutil.Process]:
    """The test worker's own children; other tests may have left it a server that forks ranks."""
    return set(psutil.Process().children(recursive=True))


def settled() -> tracemalloc.Snapshot:
    """What is held of all that was allocated below a frame of ddpprobe, in whatever thread."""
    gc.collect()
    ours = tracemalloc.Filter(True, f"{Path(ddpprobe.__file__).parent}/*", all_frames=True)
    return tracemalloc.take_snapshot().filter_traces([ours])


def test_with_a_daemon_nothing_is_left_either(tmp_path, monkeypatch, poll) -> None:
    monkeypatch.setenv("DDPPROBE_LINGER", "0")
    monkeypatch.setenv("DDPPROBE_LISTEN", "127.0.0.1:0")
    model, children = net(), offspring()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for i in range(3):
        with ddpprobe.install(model, run_dir=tmp_path / str(i), every=1):
            plain(model)
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)
    assert hooks_left(model) == []
    assert offspring() == children  # neither a child nor a zombie
    poll(lambda: not daemons(str(tmp_path)), timeout=30)
    assert [r.step for r in ddpprobe.open(tmp_path / "2").records()] == list(range(STEPS))


def daemons(path: str) -> list[psutil.Process]:
    every = psutil.process_iter(["cmdline"])
    return [p for p in every if path in " ".join(p.info["cmdline"] or ())]


def test_neither_a_step_nor_a_closed_probe_keeps_tensors_or_the_model_alive(tmp_path) -> None:
    model = net()
    hidden: list[weakref.ref[Tensor]] = []
    for module in model.modules():
        module.register_forward_hook(lambda _, __, out: hidden.append(weakref.ref(out)))
    probe = ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none")
    gc.collect()
    gc.disable()  # at once, not when the collector comes
    try:
        optimizer = plain(model)
        assert [ref() for ref in hidden if ref() is not None] == []
    finally:
        gc.enable()
    assert len(hidden) == 6 * STEPS
    probe.close()
    ends = [weakref.ref(model), weakref.ref(model.fc1.weight), weakref.ref(optimizer)]
    del model, module, optimizer
    gc.collect()
    assert [ref() for ref in ends] == [None, None, None]
    assert probe.run_id


# ---- other processes of the script's


class Items(torch.utils.data.Dataset):
    """Its workers hold the probed model, train on it and log: all of it in a fork."""

    def __init__(self, model: nn.Module, probe: ddpprobe.Probe) -> None:
        self.model, self.probe = model, probe

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        self.model(batch(index)).sum().backward()
        self.probe.log(loss=1e9)
        self.probe.step()
        self.probe.close()
        return batch(index)


def test_forked_loader_workers_do_not_touch_the_parents_run(tmp_path, records_of) -> None:
    model = net()
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none") as probe:
        loader = torch.utils.data.DataLoader(
            Items(model, probe), batch_size=2, num_workers=2, multiprocessing_context="fork"
        )
        optimizer = sgd(model)
        for _ in range(2):  # workers anew, in the middle of a run
            for x in loader:
                loss = model(x).square().sum()
                probe.log(loss=loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            with pytest.raises(ValueError, match="is held by a live run"):
                ddpprobe.install(net(), run_dir=tmp_path / "r", daemon="none")
    journal = b"".join(path.read_bytes() for path in (tmp_path / "r").rglob("rank_00000/*.wal"))
    assert journal.count(b'"event":"closed"') == 1
    records = records_of(tmp_path / "r")
    assert [r.step for r in records] == list(range(8))
    assert all(r.scalars[0]["loss"] < 1e6 for r in records)
    assert {r.scalars[0]["micro_batches"] for r in records} == {1.0}


def test_a_generator_that_owns_the_loop_may_be_dropped_in_the_middle(tmp_path, records_of) -> None:
    def training(model: nn.Module) -> Iterator[float]:
        optimizer = sgd(model)
        with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
            for step in range(100):
                loss = model(batch(step)).square().sum()
                yield loss.item()  # in the middle of a sampled step
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    model = net()
    steps = training(model)
    for _ in range(3):
        next(steps)
    steps.close()
    assert hooks_left(model) == []
    assert [r.step for r in records_of(tmp_path / "r")][:2] == [0, 1]
