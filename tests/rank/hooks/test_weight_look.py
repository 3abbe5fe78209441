"""A sampled step has rows of the weights and of what it changed of them, and harms neither."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ddpprobe
from ddpprobe.rank.hooks import weight_look
from ddpprobe.rank.hooks.constants import LOOKS, Constants
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.hooks.weight_look import BLOCKS, TURN, TURNS, WeightLook, deal, sample
from ddpprobe.rank.topology.describe import describe
from ddpprobe.records.step import BUFFER, IN_TURN, OBSERVED, StepRecord, derive

from ..topology.wrapped_models import WRAPPED, on_rank

STEPS = 6
Weights = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)
        self.tied = nn.Linear(4, 8)
        self.tied.weight = self.a.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x) + self.tied(x))).square().mean()


TRAINED = ("a.weight", "a.bias", "b.weight", "b.bias", "tied.bias", "unused")


def halves(kind):
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        parameters = [p for p in model.parameters() if p.requires_grad]
        return [kind(parameters[:2]), kind(parameters[2:])]

    return make


def one(kind, **options: object):
    return lambda model: [kind(model.parameters(), **options)]


LOOPS = {
    "sgd": one(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": one(torch.optim.AdamW, lr=1e-2),
    "foreach": one(torch.optim.AdamW, lr=1e-2, foreach=True),
    "fused": one(torch.optim.AdamW, lr=1e-2, fused=True),
    "two optimizers": halves(lambda p: torch.optim.SGD(p, lr=0.1)),
    "lbfgs": one(torch.optim.LBFGS, lr=0.1, max_iter=3),
    "by hand": lambda _: [],
}


def train(path: Path | None, loop: str = "sgd", *, every: int = 1, micros: int = 1, between=None):
    """Train; the weights before and after each step, and the model's state at the end."""
    torch.manual_seed(0)
    model = Net()
    optimizers = LOOPS[loop](model)
    probe = path and ddpprobe.install(model, run_dir=path, every=every, daemon="none")
    seen: list[tuple[Weights, Weights]] = []
    for step in range(STEPS):
        data = [torch.randn(3, 4) for _ in range(micros)]
        before = {name: p.detach().clone() for name, p in model.named_parameters()}

        def forward() -> Tensor:
            for x in data:  # noqa: B023  (called within the step)
                loss = model(x)
                loss.backward()
            return loss

        if loop == "lbfgs":

            def closure(forward=forward) -> Tensor:
                optimizers[0].zero_grad()
                return forward()

            optimizers[0].step(closure)
        else:
            forward()
            if between is not None:
                between(step, model, optimizers)
            for optimizer in optimizers:
                optimizer.step()
            if loop == "by hand":
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.grad is not None:
                            parameter.sub_(parameter.grad, alpha=0.1)
                if probe:
                    probe.step()
            model.zero_grad()
        seen.append((before, {name: p.detach().clone() for name, p in model.named_parameters()}))
    if probe:
        probe.close()
    return seen, model.state_dict()


def row(record: StepRecord, fqn: str, kind: str) -> dict[str, float] | None:
    """The row of a site; None where it was not looked at."""
    for i, site in enumerate(record.sites):
        if site.key == (fqn, kind, "") and record.counts[i, OBSERVED]:
            stats = ("numel", "zeros", "norm", "abs_max", "mean")
            return {s: float(derive(s, record.counts[i], record.values[i])) for s in stats}
    return None


def assert_row(found: dict[str, float] | None, want: Tensor) -> None:
    assert found is not None
    assert (found["numel"], found["zeros"]) == (want.numel(), int((want == 0).sum()))
    assert found["norm"] == pytest.approx(float(want.double().norm()), rel=1e-6)
    assert found["abs_max"] == float(want.abs().max())
    assert found["mean"] == pytest.approx(float(want.double().mean()), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize("loop", LOOPS)
def test_rows_are_of_the_weights_behind_the_step_and_of_their_change_to_the_bit(
    loop: str, micros: int, tmp_path: Path, records_of
) -> None:
    seen, state = train(tmp_path / "r", loop, micros=micros)
    records = records_of(tmp_path / "r")
    assert [r.step for r in records] == list(range(STEPS))
    for record, (before, after) in zip(records, seen, strict=True):
        for fqn in TRAINED:
            assert_row(row(record, fqn, "param"), after[fqn])
            assert_row(row(record, fqn, "update"), after[fqn] - before[fqn])
        weights = [site.fqn for site in record.sites if site.kind in IN_TURN]
        assert {*weights} == {*TRAINED}
        assert record.scalars[0]["sites_expected"] == len(record.sites) - len(weights)
    _, bare = train(None, loop, micros=micros)
    assert all(torch.equal(bare[name], state[name]) for name in bare)


def test_the_change_of_a_weight_of_more_than_four_mebibytes_is_that_of_stretches_of_it(
    tmp_path: Path, records_of
) -> None:
    model = nn.Linear(1024, 1100, bias=False)
    before = model.weight.detach().clone()
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        model(torch.randn(2, 1024)).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    (record,) = records_of(tmp_path / "r")
    change = (model.weight.detach() - before).view(256, -1)[:, :4096]
    assert_row(row(record, "weight", "param"), model.weight.detach())
    assert_row(row(record, "weight", "update"), change)


@pytest.mark.parametrize("made", ["from the start", "as they thaw"])
def test_weights_that_thaw_have_their_own_optimizer_s_change(
    made: str, tmp_path: Path, records_of
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    optimizers = [torch.optim.SGD(model[1].parameters(), lr=0.1)]
    if made == "from the start":
        optimizers.append(torch.optim.SGD(model[0].parameters(), lr=0.1))
    changes = []
    with ddpprobe.install(model, run_dir=tmp_path, every=1, daemon="none"):
        for step in range(4):
            if step == 2:
                model[0].requires_grad_(True)
                if len(optimizers) == 1:
                    optimizers.append(torch.optim.SGD(model[0].parameters(), lr=0.1))
            model(torch.randn(3, 4)).square().mean().backward()
            before = model[0].weight.detach().clone()
            for optimizer in optimizers:
                optimizer.step()
            changes.append((model[0].weight.detach() - before).double().sum().item())
            model.zero_grad()
    told = [
        {site.key: values[2] for site, values in zip(r.sites, r.values, strict=True)}
        for r in records_of(tmp_path)
    ]
    assert all(changes[2:])
    assert [t["0.weight", "update", ""] for t in told[2:]] == pytest.approx(changes[2:])


def test_a_weight_that_did_not_move_has_a_change_of_zeros_only(tmp_path: Path, records_of) -> None:
    def between(step: int, _model: nn.Module, optimizers) -> None:
        optimizers[0].param_groups[0]["lr"] = 0.0 if step == 3 else 0.1

    train(tmp_path / "r", between=between)
    moved = [row(r, "a.weight", "update")["zeros"] for r in records_of(tmp_path / "r")]
    assert [zeros == 32 for zeros in moved] == [s == 3 for s in range(STEPS)]


def test_only_sampled_steps_have_rows_and_a_step_given_up_has_none(
    tmp_path: Path, records_of
) -> None:
    torch.manual_seed(0)
    model, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=2.0, backoff_factor=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=2, daemon="none"):
        for step in range(STEPS):
            scaler.scale(model(torch.randn(3, 4))).backward()
            if step == 2:
                model.a.weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    records = {r.step: r for r in records_of(tmp_path / "r") if not r.partial}
    assert records[2].skipped
    there = {step: row(r, "a.weight", "update") is not None for step, r in records.items()}
    assert {s for s, seen in there.items() if seen} == {0, 4}


def test_an_optimizer_that_steps_inside_the_backward_is_seen_as_a_whole(
    tmp_path: Path, records_of
) -> None:
    torch.manual_seed(0)
    model = Net()
    model.unused.requires_grad_(requires_grad=False)
    of = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters() if p.requires_grad}

    def step_now(parameter: Tensor) -> None:
        of[parameter].step()
        parameter.grad = None

    for parameter in of:
        parameter.register_post_accumulate_grad_hook(step_now)
    seen = []
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        for _ in range(STEPS):
            before = model.a.weight.detach().clone()
            model(torch.randn(3, 4)).backward()
            seen.append(model.a.weight.detach() - before)
    for record, change in zip(records_of(tmp_path / "r"), seen, strict=True):
        assert_row(row(record, "a.weight", "update"), change)


def test_a_weight_that_is_not_finite_is_told_as_what_the_step_left_behind(
    tmp_path: Path, records_of
) -> None:
    def between(step: int, _model: nn.Module, optimizers) -> None:
        optimizers[0].param_groups[0]["lr"] = torch.inf if step == 2 else 0.1

    train(tmp_path / "r", between=between)
    records = {r.step: r for r in records_of(tmp_path / "r") if not r.partial}
    bad = records[2].first_bad
    assert (bad.step, bad.phase, bad.kind) == (2, "step", "param")
    assert records[0].first_bad is None


def test_what_a_module_is_left_out_by_leaves_out_its_weights(tmp_path: Path, records_of) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"run_dir": tmp_path / "r", "every": 1, "daemon": "none", "exclude": ["b*"]}
    with ddpprobe.install(model, **options):
        model(torch.randn(3, 4)).backward()
        optimizer.step()
    (record,) = records_of(tmp_path / "r")
    assert row(record, "b.weight", "param") is None
    assert row(record, "a.weight", "param") is not None


@given(st.lists(st.integers(0, 1 << 28), max_size=60))
def test_each_tensor_has_its_turn_and_no_turn_copies_more_than_eight_mebibytes(
    sizes: list[int],
) -> None:
    most, turns = deal(sizes)
    assert len(turns) == len(sizes)
    assert turns == sorted(turns)
    assert max(turns, default=0) <= TURNS
    for turn in set(turns):
        copied = sum(min(s, most) for s, t in zip(sizes, turns, strict=True) if t == turn)
        assert copied <= 2 * TURN
    if sum(sizes) <= TURNS * TURN and max(sizes, default=0) <= TURN:
        assert most == TURN  # everything is copied whole


@pytest.mark.parametrize("shape", [(7,), (100, 30), (3000,), (64, 3, 5), (1, 4096)])
@pytest.mark.parametrize("most", [4, 400, 4000, 1 << 20])
def test_a_sample_is_a_view_within_its_limit_spread_over_the_whole_tensor(
    shape: tuple[int, ...], most: int
) -> None:
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    part = sample(tensor, most)
    assert part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert 0 < part.numel() * 4 <= max(most, 4)
    if tensor.numel() * 4 <= most:
        assert torch.equal(part, tensor)
    else:  # what is left out at the end is less than a stretch and a number for each of them
        flat, blocks = part.reshape(-1), min(BLOCKS, most // 4)
        assert float(flat[0]) == 0
        assert float(flat[-1]) >= tensor.numel() - tensor.numel() // blocks - blocks
    turned = tensor.t() if tensor.dim() == 2 else tensor
    assert sample(turned, most).numel() > 0
    if tensor.dim() == 2 and tensor.numel() * 4 > most and 1 not in shape:  # whole rows of it
        rows = max(1, len(turned) * (most // 4) // tensor.numel())
        assert torch.equal(sample(turned, most), turned[:rows])


def test_a_large_model_takes_turns_and_nothing_is_kept_between_them(monkeypatch) -> None:
    monkeypatch.setattr(weight_look, "TURN", 64)
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))  # of 80 bytes each
    topology = describe(model)
    rows = StepRows(topology.device, 0)
    look = WeightLook(topology, lambda _: True, rows)
    seen: list[set[str]] = []
    for turn in range(9):
        rows.begin()
        look.begin(turn)
        look.remember()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        look.remember()  # a second micro-batch, or optimizer, changes nothing
        look.tell(0, skipped=False)
        assert not look._copies
        result = rows.fetch().result(turn, partial=False)
        changed = set()
        for i, site in enumerate(result.sites):
            if site.kind == "update" and result.counts[i, OBSERVED]:
                assert derive("mean", result.counts[i], result.values[i]) == pytest.approx(1, 1e-6)
                changed.add(site.fqn)
        seen.append(changed)
    assert set.union(*seen) == {name for name, _ in model.named_parameters()}
    assert not any(a & b for a, b in pairwise(seen))
    assert seen[7:] == seen[:2]  # 400 bytes are seven turns of 64


def test_buffers_of_any_size_take_no_turns_from_weights_and_have_each_their_own(
    monkeypatch,
) -> None:
    """A cache has grown on one rank alone, and one has no mask: all look at the same weights."""
    monkeypatch.setattr(weight_look, "TURN", 32)
    looks: list[list[set[tuple[str, str]]]] = []
    for rank in (0, 1):
        with on_rank(rank), torch.no_grad():
            model = WRAPPED["fsdp2"]()
            model[0].register_buffer("cache", torch.ones(1000 if rank else 1))
            if rank:
                model[0].register_buffer("mask", torch.full((100, 100), -torch.inf).triu(1))
            topology = describe(model)
            rows = StepRows(topology.device, 0)
            look = WeightLook(topology, lambda _: True, rows, is_mask=lambda fqn: "mask" in fqn)
            seen: list[set[tuple[str, str]]] = []
            for turn in range(12):
                rows.begin()
                look.begin(turn)
                look.remember()
                look.tell(0, skipped=False)
                found = rows.fetch().result(turn, partial=False)
                there = [s for i, s in enumerate(found.sites) if found.counts[i, OBSERVED]]
                seen.append({(s.fqn, s.kind) for s in there if s.kind in ("param", "buffer")})
            looks.append(seen)
    assert looks[0] == looks[1]
    turns = next(n for n in range(1, 12) if looks[0][n] == looks[0][0])
    assert turns == 3
    once = [each for seen in looks[0][:turns] for each in seen]
    names = {("0.cache", "buffer"), ("3.running_mean", "buffer"), ("3.running_var", "buffer")}
    assert len(once) == len(set(once))
    assert {each for each in once if each[1] == "buffer"} == names


def test_a_buffer_that_has_changed_once_is_no_constant_any_more() -> None:
    constants = Constants()
    assert [constants.take("a", word) for word in (7, 7, 7, 8, 7, 7, 7)] == [
        False, False, True, False, False, False, False,
    ]  # fmt: skip
    assert [constants.take("b", 7) for _ in range(LOOKS)] == [False] * (LOOKS - 1) + [True]


@pytest.mark.parametrize(("wrapped", "compared"), [("fsdp2", True), ("tp", False)])
def test_buffers_that_no_step_changes_are_compared_and_no_others(wrapped, compared) -> None:
    found: list[dict[str, set[int]]] = []
    for rank in (0, 1):
        with on_rank(rank), torch.no_grad():
            model = WRAPPED[wrapped]()
            model[0].register_buffer("table", torch.full((1 << 15,), 1.0 - rank))
            model[0].register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))
            model[0].register_buffer("late", torch.zeros(3))
            topology = describe(model)
            rows = StepRows(topology.device, rank)
            look = WeightLook(topology, lambda _: True, rows, is_mask=lambda fqn: "mask" in fqn)
            told: dict[str, set[int]] = {}
            for turn in range(12):
                rows.begin()
                look.begin(turn)
                look.remember()
                if turn == 1:
                    model[0].late += 1.0
                look.tell(0, skipped=False)
                for (fqn, shard), held in rows.fetch().result(turn, partial=False).digests.items():
                    assert (shard, turn >= LOOKS - 1) == (BUFFER, True)
                    told.setdefault(fqn.rpartition(".")[2], set()).update(held)
            found.append(told)
    first, second = found
    assert first.keys() == second.keys()
    assert {"table", "mask"} <= first.keys() or not compared
    assert "late" not in first
    if compared:
        assert first["mask"] == second["mask"]
        assert len(first["table"] | second["table"]) == 2
    else:  # each rank of a tensor-parallel group may have a part of it
        assert first == {}


def test_buffers_of_a_model_of_which_nothing_is_trained_have_rows_each_time() -> None:
    topology = describe(nn.BatchNorm1d(3).requires_grad_(requires_grad=False))
    rows = StepRows(topology.device, 0)
    look = WeightLook(topology, lambda _: True, rows)
    for turn in range(3):
        rows.begin()
        look.begin(turn)
        look.remember()
        look.tell(0, skipped=False)
        found = rows.fetch().result(turn, partial=False)
        there = [s.fqn for i, s in enumerate(found.sites) if found.counts[i, OBSERVED]]
        assert there == ["running_mean", "running_var"]


def test_a_parameter_that_was_exchanged_in_between_has_no_change(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    topology = describe(model)
    rows = StepRows(topology.device, 0)
    look = WeightLook(topology, lambda _: True, rows)
    look.begin(0)
    look.remember()
    model.weight = nn.Parameter(torch.ones(2, 4))
    look.tell(0, skipped=False)
    result = rows.fetch().result(0, partial=False)
    kinds = {(s.fqn, s.kind) for i, s in enumerate(result.sites) if result.counts[i, OBSERVED]}
    assert kinds == {("weight", "param"), ("bias", "param"), ("bias", "update")}


@pytest.mark.parametrize(
    ("kind", "leaf"), [(torch.optim.AdamW, "exp_avg_sq"), (torch.optim.RMSprop, "square_avg")]
)
def test_second_moments_have_rows_of_all_their_elements_where_an_optimizer_keeps_them(
    kind: type[torch.optim.Optimizer], leaf: str, tmp_path: Path, records_of
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    optimizers = [kind(model[0].parameters(), lr=0.1), torch.optim.SGD(model[1].parameters(), 0.1)]
    want: list[dict[str, Tensor]] = []
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        for _ in range(3):
            model(torch.randn(2, 4)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            state = optimizers[0].state
            want.append({n: state[p][leaf].clone() for n, p in model[0].named_parameters()})
    for record, moments in zip(records_of(tmp_path / "r"), want, strict=True):
        sites = {s.key: i for i, s in enumerate(record.sites) if s.kind == "optim_state"}
        assert sites.keys() == {(f"0.{name}", "optim_state", leaf) for name in moments}
        for name, moment in moments.items():
            i = sites[f"0.{name}", "optim_state", leaf]
            assert record.values[i, 2] == pytest.approx(float(moment.double().sum()), rel=1e-6)
            assert record.counts[i, 0] == moment.numel()


def test_floating_buffers_have_rows_but_for_masks_and_numbers(tmp_path: Path, records_of) -> None:
    torch.manual_seed(0)

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = nn.BatchNorm1d(4), nn.Linear(4, 1)
            self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
            self.register_buffer("adjacent", torch.eye(4).to_sparse())
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 2:  # made when it is needed
                self.register_buffer("late", torch.full((4, 4), -torch.inf).triu(1))
            return self.fc(self.norm(torch.sparse.mm(self.adjacent, x.mT).mT)).square().sum()

    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    want = []
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        for _ in range(3):
            model(torch.randn(8, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
            want.append(model.norm.running_var.clone())
    for record, variance in zip(records_of(tmp_path / "r"), want, strict=True):
        named = {site.fqn for site in record.sites if site.kind == "buffer"}
        assert named == {"norm.running_mean", "norm.running_var"}
        assert_row(row(record, "norm.running_var", "buffer"), variance)
        assert record.counts[:, 1:4].sum() == 0
