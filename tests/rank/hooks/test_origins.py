"""Where a NaN began is told, or said not to be known: on every step, however the loop goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import ddpprobe
from ddpprobe.records.step import Anomaly
from ddpprobe.rundir.paths import RunDir, node_name
from ddpprobe.rundir.spool import waiting_at

NAN = float("nan")


class Scratched(nn.Module):
    """Returns its child's very tensor, with one element written past autograd's version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.bad = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        if self.bad:
            out.data[0, 0] = NAN
        return out


def train(
    run: Path, model: nn.Module, step: Callable[[int], Tensor | None], steps: int, every: int = 1
) -> list[Anomaly]:
    """Train with `step(i) -> loss`; None: the loop goes on to its next batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ddpprobe.install(model, run_dir=run, every=every, daemon="none"):
        for i in range(steps):
            loss = step(i)
            if loss is None:
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return ddpprobe.open(run).anomalies()


def pages(found: list[Anomaly]) -> list[tuple[int, str, str | None]]:
    return [(a.step, a.phase, a.module) for a in found if a.level == "page"]


def test_damage_between_a_childs_return_and_its_parents_is_the_parents(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Scratched(), nn.Linear(4, 1))

    def step(i: int) -> Tensor:
        model[1].bad = i == 2
        return model(torch.ones(2, 4)).sum()

    found = train(tmp_path / "r", model, step, 3)
    assert pages(found) == [(2, "forward", "1")]


class Poison(torch.autograd.Function):
    """Passes a tensor on, and makes its gradient NaN."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * NAN


class Layers(nn.Module):
    """Linear layers in a chosen order, poisoned after one of them; a head that may be tied."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 4, bias=False)
        if tied:
            self.head.weight = self.layers[0].weight
        self.order, self.poisoned = [0, 1, 2, 3], ""

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = self._behind(f"layers.{i}", self.layers[i](x))
        x = self._behind("norm", self.norm(x))
        return self._behind("head", self.head(x)).square().mean()

    def _behind(self, name: str, x: Tensor) -> Tensor:
        return Poison.apply(x) if name == self.poisoned else x


def named_backward(
    tmp_path: Path, model: Layers, poisoned: str, order: list[int], wrapped: nn.Module | None = None
) -> str | None:
    """Return which parameter is named for a fault of an unsampled backward, after a clean one."""

    def step(i: int) -> Tensor:
        model.poisoned, model.order = (poisoned, order) if i == 3 else ("", [0, 1, 2, 3])
        return (wrapped or model)(torch.ones(2, 4))

    found = train(tmp_path / "r", wrapped or model, step, 4, every=10)
    (page,) = [a for a in found if a.level == "page"]
    assert (page.step, page.phase, page.sampled) == (3, "backward", False)
    return page.module


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 3, 1, 0]], ids=["as ever", "another"])
@pytest.mark.parametrize("at", [0, 2])
def test_of_an_unsampled_backward_the_parameter_nearest_to_the_origin_is_named(
    at: int, order: list[int], tmp_path: Path
) -> None:
    named = named_backward(tmp_path, Layers(), f"layers.{order[at]}", order)
    assert named in {f"layers.{order[at]}.{name}" for name in ("weight", "bias")}


@pytest.mark.parametrize(
    ("poisoned", "named"),
    [("head", None), ("norm", None), ("layers.3", "layers.3.bias"), ("layers.1", "layers.1.bias")],
)
def test_nobody_is_named_if_another_use_of_a_shared_parameter_may_be_nearer(
    poisoned: str, named: str | None, tmp_path: Path
) -> None:
    assert named_backward(tmp_path, Layers(tied=True), poisoned, [0, 1, 2, 3]) == named


class Mask(nn.Module):
    """Adds infinities of its own, of which a softmax makes zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.value = -torch.inf

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(torch.eye(4, dtype=torch.bool)[: len(x)], self.value, x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores, self.mask, self.head = nn.Linear(4, 4), Mask(), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mask(self.scores(x)).softmax(-1))


def poisoned_at(module: nn.Module, i: int, at: int) -> None:
    """Make a module's output NaN in one step, by a hook of the user's."""
    if i == at:
        handle = module.register_forward_hook(lambda *call: call[-1] * NAN)
        module.poisoning = handle
    elif i == at + 1:
        module.poisoning.remove()


BATCH = torch.arange(8.0).reshape(2, 4) / 8


@pytest.mark.parametrize("every", [1, 10])
def test_a_mask_that_is_infinite_from_the_first_step_on_hides_no_nan(
    every: int, tmp_path: Path
) -> None:
    model = Attention()

    def step(i: int) -> Tensor | None:
        poisoned_at(model.head, i, 5)
        loss = model(BATCH).sum()
        return loss if loss.isfinite() else None

    found = train(tmp_path / "r", model, step, 12, every)
    assert pages(found) == [(5, "forward", "head" if every == 1 else None)]
    (rank,) = ddpprobe.open(tmp_path / "r").info()["attempts"][0]["ranks"]
    assert rank["steady"] == [{"site": "mask:output", "values": ["-Inf"], "step": 0}]


@pytest.mark.parametrize("value", [torch.inf, NAN])
def test_only_the_infinity_that_was_learned_is_no_fault(value: float, tmp_path: Path) -> None:
    model = Attention()

    def step(i: int) -> Tensor | None:
        model.mask.value = value if i == 3 else -torch.inf
        loss = model(BATCH).sum()
        return loss if loss.isfinite() else None

    assert pages(train(tmp_path / "r", model, step, 6)) == [(3, "forward", "mask")]


def test_an_infinity_where_all_was_finite_is_a_fault_and_hides_no_later_one(tmp_path: Path) -> None:
    model = Attention()

    def step(i: int) -> Tensor | None:
        model.mask.value = 0.0 if i < 2 else -torch.inf
        poisoned_at(model.head, i, 4)
        loss = model(BATCH).sum()
        return loss if loss.isfinite() else None

    found = train(tmp_path / "r", model, step, 8)
    assert pages(found) == [(2, "forward", "mask"), (4, "forward", "head")]


def test_an_explosion_in_the_first_step_is_a_fault(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    nn.init.constant_(model[0].weight, 3e38)
    found = train(tmp_path / "r", model, lambda _: model(BATCH + 1).sum(), 2)
    assert pages(found) == [(0, "forward", "0")]


@pytest.mark.parametrize("first", [0, 1], ids=["sampled first", "unsampled first"])
def test_logits_that_are_masked_in_what_the_model_returns_are_no_fault(
    first: int, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Mask())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = tmp_path / "r"
    with ddpprobe.install(model, run_dir=run, every=4, first_step=first, daemon="none"):
        for i in range(first, 10):
            poisoned_at(model[0], i, 7)
            model(BATCH).softmax(-1).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert pages(ddpprobe.open(run).anomalies())[0] == (7, "forward", None)


def test_a_loop_that_leaves_out_bad_batches_is_told_the_module(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))

    def step(i: int) -> Tensor | None:
        poisoned_at(model[1], i, 2)
        loss = model(BATCH).sum()
        return loss if loss.isfinite() else None

    found = train(tmp_path / "r", model, step, 6)
    assert pages(found) == [(2, "forward", "1")]
    assert "not sampled" not in "".join(a.message for a in found)


class Root(nn.Module):
    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self.first, self.last, self.look = nn.Linear(4, 4), nn.Linear(4, 1), look
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.look()  # a process may die here
        return self.last(x).sum() * self.factor


@pytest.mark.parametrize("born", ["first", ""])
def test_what_a_process_knows_is_written_before_it_can_die(
    born: str, tmp_path: Path, records_of, poll
) -> None:
    written: list[list[str | None]] = []
    run = RunDir(tmp_path / "r")

    def look() -> None:
        # What has left the process and is not on the disk yet waits for the disk thread.
        poll(lambda: waiting_at(run, 0, node_name(0), 0) is None, 60)
        records = records_of(run.path)
        written.append([r.first_bad.fqn for r in records if r.first_bad is not None])

    model = Root(look)

    def step(i: int) -> Tensor:
        if i == 1 and born:
            poisoned_at(model.first, 1, 1)
        elif i == 1:
            model.factor = NAN
        loss = model(BATCH)
        look()
        return loss

    train(tmp_path / "r", model, step, 2)
    inside, behind = written[2:]
    assert inside == (["first"] if born else [])
    assert behind[-1] == born


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fails = nn.Linear(4, 4), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        if self.fails:
            raise ValueError("the user's own")
        return Categorical(logits=x, validate_args=True).logits.sum()


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_forward_that_a_nan_ends_by_an_exception_is_told(
    every: int, goes_on: bool, tmp_path: Path
) -> None:
    model = Policy()

    def step(i: int) -> Tensor | None:
        poisoned_at(model.body, i, 3)
        if not goes_on or i != 3:
            return model(BATCH)
        with pytest.raises(ValueError, match="invalid values"):
            model(BATCH)
        return None

    if goes_on:
        found = train(tmp_path / "r", model, step, 6, every)
    else:
        with pytest.raises(ValueError, match="invalid values"):
            train(tmp_path / "r", model, step, 6, every)
        found = ddpprobe.open(tmp_path / "r").anomalies()
    assert pages(found) == [(3, "forward", "body" if every == 1 else None)]


def test_a_forward_that_raises_with_finite_numbers_at_hand_is_no_nan(tmp_path: Path) -> None:
    model = Policy()

    def step(i: int) -> Tensor:
        model.fails = i == 3
        return model(BATCH)

    with pytest.raises(ValueError, match="the user's own"):
        train(tmp_path / "r", model, step, 6, every=10)
    assert pages(ddpprobe.open(tmp_path / "r").anomalies()) == []


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize(("logs", "bad_loss"), [(True, True), (False, True), (True, False)])
def test_a_nan_of_the_loss_is_told_from_one_of_its_backward_where_the_loss_was_logged(
    every: int, logs: bool, bad_loss: bool, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=every, daemon="none") as probe:
        for i in range(8):
            out = model(BATCH)
            loss = out.square().mean() * (NAN if i == 5 and bad_loss else 1.0)
            if i == 5 and not bad_loss:
                out.register_hook(lambda gradient: gradient * NAN)
            if logs:
                probe.log(loss=loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    page = next(a for a in ddpprobe.open(tmp_path / "r").anomalies() if a.level == "page")
    assert (page.step, page.phase) == (5, "forward" if logs and bad_loss else "backward")
    assert ("no finite loss of this step is known" in page.message) == (not logs)
