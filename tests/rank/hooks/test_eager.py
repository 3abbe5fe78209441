"""Hooks see what a reference sees, and the user's model does not notice them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import ddpprobe
from ddpprobe.rank.hooks.copy_safe_hook import CopySafeObserver
from ddpprobe.rank.hooks.outputs import leaves
from ddpprobe.testing import state_hash


class Pair(NamedTuple):
    a: torch.Tensor
    b: str


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: object = None


class Shapes(nn.Module):
    """Returns its input in one of many containers."""

    def __init__(self, wrap) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> object:
        return self.wrap(self.lin(x))


WRAPS = {
    "tensor": (lambda t: t, lambda o: o, [""]),
    "tuple with None": (lambda t: (None, t * 1, 3), lambda o: o[1], ["1"]),
    "namedtuple": (lambda t: Pair(t * 1, "x"), lambda o: o.a, ["0"]),
    "list": (lambda t: [t * 1], lambda o: o[0], ["0"]),
    "dict": (lambda t: {"y": t * 1, "n": None}, lambda o: o["y"], ["y"]),
    "nested": (lambda t: {"y": (t * 1, {"z": t * 2})}, lambda o: o["y"][1]["z"], ["y.0", "y.1.z"]),
    "dataclass": (lambda t: Output(t * 1, [t * 3]), lambda o: o.extra[0], ["logits", "extra.0"]),
    "return_types": (lambda t: t.max(dim=1), lambda o: o.values, ["0"]),
    "identity": (lambda t: t, lambda o: o, [""]),
    "view": (lambda t: t.view(-1), lambda o: o, [""]),
}


def train(model: nn.Module, loss, steps: int = 2) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    o = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        loss(model(torch.randn(3, 4))).backward()
        o.step()
        o.zero_grad()
    return o


@pytest.mark.parametrize("name", WRAPS)
def test_any_container_is_walked_and_what_did_not_fire_is_unobserved(
    name: str, tmp_path: Path, records_of
) -> None:
    wrap, pick, paths = WRAPS[name]
    torch.manual_seed(1)
    model = Shapes(wrap)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        train(model, lambda out: pick(out).sum())
    record = records_of(tmp_path / "r")[-1]
    rows = {s.key: record.counts[i] for i, s in enumerate(record.sites)}
    outputs = [s.leaf for s in record.sites if s.fqn == "" and s.kind == "output"]
    assert outputs == paths
    used = paths[-1]
    assert rows["", "grad_output", used][6] == 1
    for unused in paths[:-1]:
        tapped, observed = rows["", "grad_output", unused][5:]
        assert (tapped, observed) == (1, 0)


class InPlace(nn.Module):
    """BatchNorm into ReLU(inplace), a view changed in place, a residual added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.bn, self.act = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True)
        self.fc2, self.drop, self.head = nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.bn(self.fc1(x)))
        g = self.fc2(h)
        g += h
        return self.head(self.drop(g).view(-1, 8).mul_(2.0))


@pytest.mark.parametrize("backward", ["output", "full"])
def test_training_an_in_place_model_is_bit_identical_with_the_probe(
    backward: str, tmp_path: Path
) -> None:
    def run(*, probed: bool) -> str:
        torch.manual_seed(3)
        model = InPlace()
        probe = (
            ddpprobe.install(model, run_dir=tmp_path / "r", every=2, backward=backward,
                             daemon="none")
            if probed else contextlib.nullcontext()
        )  # fmt: skip
        with probe:
            return state_hash(model, train(model, lambda y: y.pow(2).sum(), steps=50))

    assert run(probed=True) == run(probed=False)


def test_gradients_equal_those_of_a_full_backward_hook(tmp_path: Path, records_of) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 1))
    twin = copy.deepcopy(model)
    seen: dict[str, torch.Tensor] = {}
    for name, module in twin.named_modules():
        module.register_full_backward_hook(
            lambda _, gi, go, name=name: seen.update({name: go[0].double()})
        )
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        train(model, lambda y: y.pow(2).sum(), steps=1)
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    x.requires_grad_()
    twin(x).pow(2).sum().backward()
    record = records_of(tmp_path / "r")[0]
    for i, site in enumerate(record.sites):
        if site.kind == "grad_output":
            want = seen[site.fqn]
            low, high, total, square = record.values[i]
            assert (low, high) == (want.min(), want.max())
            assert (total, square) == pytest.approx((want.sum().item(), want.square().sum().item()))


def test_full_hooks_are_used_only_where_a_probe_forward_proved_them_safe(
    tmp_path: Path, records_of
) -> None:
    torch.manual_seed(0)
    model = InPlace()
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, backward="full", daemon="none"):
        train(model, lambda y: y.pow(2).sum(), steps=3)
    first, *later = records_of(tmp_path / "r")
    assert not any(s.kind == "grad_input" for s in first.sites)
    for record in later:
        fired = {
            s.fqn for i, s in enumerate(record.sites)
            if s.kind == "grad_input" and record.counts[i][6]
        }  # fmt: skip
        assert fired == {"head"}  # all others are changed in place, or have no input gradient


def test_between_sampled_steps_nothing_but_the_roots_two_hooks_hangs_on_the_model(
    tmp_path: Path,
) -> None:
    model = InPlace()
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=100, daemon="none"):
        train(model, lambda y: y.sum(), steps=3)
        hooks = {
            name: len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
            for name, m in model.named_modules()
        }
        assert hooks.pop("") == 2
        assert not any(hooks.values())
        assert all(not p._backward_hooks for p in model.parameters())


def test_copies_and_files_of_the_model_know_nothing_of_us(tmp_path: Path, records_of) -> None:
    model = InPlace()
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        keys = list(model.state_dict())
        o = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(3, 4)).sum().backward()  # in a sampled step: every hook is attached
        twin = copy.deepcopy(model)
        average = torch.optim.swa_utils.AveragedModel(model)
        file = io.BytesIO()
        torch.save(model, file)
        o.step()
        assert list(model.state_dict()) == keys
        assert b"ddpprobe" not in file.getvalue()
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for stranger in (twin, average, loaded):
            stranger(torch.randn(3, 4)).sum().backward()
            assert all(not p._post_accumulate_grad_hooks for p in stranger.parameters())
    (record,) = records_of(tmp_path / "r")
    rows = {s.key: record.counts[i] for i, s in enumerate(record.sites)}
    assert rows["fc1", "output", ""][0] == 24  # one forward, none of the copies'


def test_a_guest_answers_nothing_and_forgets_itself_when_copied() -> None:
    calls: list[object] = []
    guest = CopySafeObserver(lambda *args: calls.append(args) or "an answer")
    assert guest(1, 2) is None
    copied = copy.deepcopy(guest)
    assert copied(1, 2, 3) is None
    assert calls == [(1, 2)]


def test_a_structure_that_contains_itself_ends() -> None:
    loop: list[object] = [torch.ones(1)]
    loop.append(loop)
    assert len(list(leaves(loop))) < 10


def test_shared_modules_merge_their_calls_and_frozen_parts_have_no_gradient(
    tmp_path: Path, records_of
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.shared = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.frozen(x)
            for _ in range(3):
                x = self.shared(x)
            return x

    model = Model()
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        train(model, lambda y: y.sum(), steps=1)
    (record,) = records_of(tmp_path / "r")
    rows = {s.key: record.counts[i] for i, s in enumerate(record.sites)}
    assert rows["shared", "output", ""][6] == 3
    assert rows["shared", "grad_output", ""][6] == 3
    assert rows["shared.weight", "grad_local", ""][6] == 1
    assert ("frozen", "grad_output", "") not in rows
    assert ("frozen.weight", "grad_local", "") not in rows


def test_include_and_exclude_choose_modules_and_their_parameters(tmp_path, records_of) -> None:
    model = InPlace()
    with ddpprobe.install(
        model, run_dir=tmp_path / "r", every=1, include="fc*", exclude=["fc2"], daemon="none"
    ):
        train(model, lambda y: y.sum(), steps=1)
    (record,) = records_of(tmp_path / "r")
    assert {s.fqn for s in record.sites} == {"fc1", "fc1.weight", "fc1.bias"}


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_on_unsampled_steps_the_watch_keeps_step_and_phase(tmp_path, records_of, phase) -> None:
    model = InPlace()
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=10, daemon="none"):
        o = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(9):
            y = model(torch.randn(3, 4))
            loss = y.pow(2).sum()
            if step == 6 and phase == "forward":
                nn.init.constant_(model.bn.weight, torch.nan)
                loss = model(torch.randn(3, 4)).pow(2).sum()
            elif step == 6:
                loss = loss + torch.sqrt(model.fc1.weight.sum() * 0)  # finite, but not its gradient
            loss.backward()
            o.step()
            o.zero_grad()
    bad = [r.first_bad for r in records_of(tmp_path / "r") if r.first_bad]
    assert {(b.step, b.phase) for b in bad} == {(6, phase)}


def test_a_huge_but_finite_gradient_is_not_called_nonfinite(tmp_path, records_of) -> None:
    model = nn.Linear(64, 64, bias=False)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=10, daemon="none"):
        o = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(3):
            (model(torch.ones(1, 64)) * 3e38).sum().backward()  # the sum of these overflows
            o.step()
            o.zero_grad()
    assert [r.first_bad for r in records_of(tmp_path / "r")] == [None]


class Selective(nn.Module):
    """A block under selective checkpointing, which counts the operations of its forward."""

    def __init__(self, policy) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.context = partial(create_selective_checkpoint_contexts, policy)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inside, x, use_reentrant=False, context_fn=self.context).sum()

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)).clone()).square()


def _save_some(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    some = (torch.ops.aten.clone.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in some else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("policy", [_save_some, lambda *_, **__: CheckpointPolicy.MUST_SAVE])
def test_the_tape_of_selective_checkpointing_is_not_shifted(policy, tmp_path: Path) -> None:
    states = []
    for probed in (False, True):
        torch.manual_seed(1)
        model = Selective(policy)
        installed = ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none")
        if not probed:
            installed.close()
        with installed:
            states.append(state_hash(model, train(model, lambda loss: loss, steps=3)))
    assert states[0] == states[1]
