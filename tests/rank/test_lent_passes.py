"""A pass for another model's step is no step of this one, and nothing of it is in its statistics.

A generator learns through the discriminator, so the discriminator runs in the generator's step and
is left gradients that nobody wants. Every way to throw them away comes to the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ddpprobe
from ddpprobe.records.step import LENT, NUMEL, OBSERVED, StepRecord

from .test_step_events import Loop, Make, made, net, sgd

__all__ = ["made"]  # the fixture
Optimizer = torch.optim.Optimizer
CRITICS = 3
BATCH = 3


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4))


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def noise(at: int) -> Tensor:
    return torch.randn(BATCH, 2, generator=torch.Generator().manual_seed(at))


def real(at: int) -> Tensor:
    return torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(1000 + at))


class Gan:
    """One turn: `CRITICS` steps of the critic, one of the generator.

    Args:
        clean: when the critic's gradients are thrown away: "before" its forward, "between" its
            forward and its backward, "behind" its step, or "frozen": the generator's pass leaves
            none, as the critic's `requires_grad` is False in it.
        detached: the generator's forward for the critic is one with gradients, cut off after it.
    """

    def __init__(self, clean: str = "before", *, detached: bool = False) -> None:
        torch.manual_seed(0)
        self.g, self.d = generator(), critic()
        self.og = torch.optim.Adam(self.g.parameters(), lr=1e-3)
        self.od = torch.optim.Adam(self.d.parameters(), lr=1e-3)
        self.clean, self.detached = clean, detached
        self.at = 0
        self.losses: list[float] = []

    def turn(self) -> None:
        for _ in range(CRITICS):
            self.critic_step()
        self.generator_step()

    def critic_step(self) -> None:
        self.at += 1
        if self.clean == "before":
            self.od.zero_grad()
        with torch.set_grad_enabled(self.detached):
            fake = self.g(noise(self.at))
        loss = self.d(fake.detach()).mean() - self.d(real(self.at)).mean()
        if self.clean in ("between", "frozen"):
            self.od.zero_grad()
        loss.backward()
        self.od.step()
        if self.clean == "behind":
            self.od.zero_grad()
        self.losses.append(loss.item())

    def generator_step(self) -> None:
        self.at += 1
        self.og.zero_grad()
        self.d.requires_grad_(self.clean != "frozen")
        loss = -self.d(self.g(noise(self.at))).mean()
        loss.backward()
        self.og.step()
        self.d.requires_grad_(True)
        if self.clean == "behind":
            self.od.zero_grad()
        self.losses.append(loss.item())


def rows(record: StepRecord) -> dict[tuple[str, str], np.ndarray]:
    return {(s.fqn, s.kind): record.counts[i] for i, s in enumerate(record.sites)}


def whole(records: list[StepRecord]) -> list[StepRecord]:
    return [r for r in records if not r.partial]


@pytest.mark.parametrize("clean", ["before", "between", "behind", "frozen"])
@pytest.mark.parametrize(("detached", "every"), [(False, 1), (True, 2)])
def test_each_model_has_the_steps_of_its_own_optimizer_and_only_its_own_passes(
    clean: str, detached: bool, every: int, tmp_path: Path, records_of
) -> None:
    gan = Gan(clean, detached=detached)
    how = {"every": every, "daemon": "none"}
    with (
        ddpprobe.install(gan.g, run_dir=tmp_path / "g", **how) as of_g,
        ddpprobe.install(gan.d, run_dir=tmp_path / "d", **how) as of_d,
    ):
        for _ in range(4):
            gan.turn()
        steps = of_g._recorder._clock.steps, of_d._recorder._clock.steps
    assert steps == (4, 4 * CRITICS)
    for name, count, passes in (("g", 4, 1), ("d", 4 * CRITICS, 2)):
        records = whole(records_of(tmp_path / name))
        assert [r.step for r in records] == list(range(0, count, every))
        for record in records:
            assert not record.skipped
            for (fqn, kind), counts in rows(record).items():
                if kind in ("output", "grad_output"):
                    assert counts[OBSERVED] == passes, (record.step, fqn, kind)
                elif kind == "grad_local":
                    assert counts[OBSERVED] == 1
    of_critic = whole(records_of(tmp_path / "d"))
    assert {r.scalars[0]["micro_batches"] for r in of_critic} == {2.0}
    assert all(r.scalars[0]["trainable_parameters"] == 4 for r in of_critic)


@pytest.mark.parametrize("clean", ["before", "between", "behind", "frozen"])
def test_the_statistics_of_a_critics_step_are_those_of_its_own_tensors(
    clean: str, tmp_path: Path, records_of
) -> None:
    """Read off the same loop without a probe: the gradient that the optimizer is given."""
    truth, norms = Gan(clean), []
    truth.od.register_step_pre_hook(
        lambda *_: norms.append(
            nn.utils.get_total_norm([p.grad for p in truth.d.parameters()]).item()
        )
    )
    for _ in range(3):
        truth.turn()
    gan = Gan(clean)
    with ddpprobe.install(gan.d, run_dir=tmp_path / "d", every=1, daemon="none"):
        for _ in range(3):
            gan.turn()
    records = whole(records_of(tmp_path / "d"))
    assert [r.scalars[0]["grad_norm"] for r in records] == pytest.approx(norms, rel=1e-5)
    assert [r.scalars[0]["grad_norm_local"] for r in records] == pytest.approx(norms, rel=1e-5)
    assert {rows(r)["0", "output"][NUMEL] for r in records} == {2 * BATCH * 4}


@pytest.mark.parametrize("every", [1, 2])
def test_from_the_first_step_on_the_rows_of_sharpness_aware_training_are_those_that_are_taken(
    every: int, tmp_path: Path, records_of
) -> None:
    torch.manual_seed(0)
    model, norms = critic(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ddpprobe.install(model, run_dir=tmp_path, every=every, daemon="none"):
        for at in range(5):
            optimizer.zero_grad()
            model(real(at)).square().mean().backward()
            moves = [0.1 * p.grad for p in model.parameters()]
            torch._foreach_add_([p.data for p in model.parameters()], moves)
            optimizer.zero_grad()
            model(real(at)).square().mean().backward()
            torch._foreach_sub_([p.data for p in model.parameters()], moves)
            norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
            optimizer.step()
    records = records_of(tmp_path)
    assert [r.step for r in records] == list(range(0, 5, every))
    assert [r.scalars[0]["grad_norm"] for r in records] == pytest.approx(norms[::every], rel=1e-5)
    assert {r.scalars[0]["micro_batches"] for r in records} == {1.0}


@pytest.mark.parametrize("clean", ["before", "between", "frozen"])
@pytest.mark.parametrize("every", [1, 5])
def test_a_pass_for_anothers_last_step_begins_no_step(
    clean: str, every: int, tmp_path: Path, records_of
) -> None:
    gan = Gan(clean)
    with ddpprobe.install(gan.d, run_dir=tmp_path / "d", every=every, daemon="none"):
        for _ in range(5):
            gan.turn()
    records = records_of(tmp_path / "d")
    assert [(r.step, r.partial) for r in records] == [(s, False) for s in range(0, 15, every)]
    info = ddpprobe.open(tmp_path / "d").info()
    (rank,) = info["attempts"][-1]["ranks"]
    assert (info["reached"], rank["sampled"], rank["expected"]) == (14, 15 // every, 15 // every)


def raises(gan: Gan) -> None:
    gan.generator_step()
    raise ArithmeticError


def is_bad(gan: Gan) -> None:
    with torch.no_grad():
        gan.g[0].weight.fill_(torch.nan)
    gan.generator_step()


@pytest.mark.parametrize("what", [raises, is_bad])
def test_what_is_to_be_told_of_a_pass_for_anothers_last_step_is_kept(
    what: Callable[[Gan], None], tmp_path: Path, records_of
) -> None:
    gan = Gan()
    with (
        contextlib.suppress(ArithmeticError),
        ddpprobe.install(gan.d, run_dir=tmp_path / "d", every=1, daemon="none"),
    ):
        for _ in range(4):
            gan.critic_step()
        what(gan)
    last = records_of(tmp_path / "d")[-1]
    assert (last.step, last.partial, last.first_bad is not None) == (4, True, what is is_bad)


@pytest.mark.parametrize("clean", ["between", "frozen"])
def test_training_of_both_models_is_the_same_to_the_bit(clean: str, tmp_path: Path) -> None:
    without, gan = Gan(clean), Gan(clean)
    for _ in range(5):
        without.turn()
    with (
        ddpprobe.install(gan.g, run_dir=tmp_path / "g", every=2, daemon="none"),
        ddpprobe.install(gan.d, run_dir=tmp_path / "d", every=3, daemon="none"),
    ):
        for _ in range(5):
            gan.turn()
    assert gan.losses == without.losses
    pairs = zip(
        (*gan.g.parameters(), *gan.d.parameters()),
        (*without.g.parameters(), *without.d.parameters()),
        strict=True,
    )
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("every", [1, 100])
def test_what_goes_bad_in_a_lent_pass_is_not_forgotten_with_it(
    every: int, tmp_path: Path, records_of
) -> None:
    gan = Gan()
    with ddpprobe.install(gan.d, run_dir=tmp_path / "d", every=every, daemon="none"):
        gan.turn()
        for _ in range(CRITICS):
            gan.critic_step()
        hook = gan.d[1].register_forward_hook(lambda _m, _a, out: out * torch.nan)
        gan.d(gan.g(noise(0))).mean().backward()
        hook.remove()
        gan.og.zero_grad()  # a loop that leaves this batch out
        gan.og.step()
        gan.critic_step()
    bad = [r for r in records_of(tmp_path / "d") if r.first_bad is not None]
    assert {r.step for r in bad} == {2 * CRITICS}  # the critic's step that was under way
    assert {(r.first_bad.micro, r.first_bad.phase) for r in bad} == {(0, "forward")}
    if every == 1:
        assert bad[-1].first_bad.fqn == "1"
        last = rows(whole(records_of(tmp_path / "d"))[-1])
        assert last["1", "output"][OBSERVED] == 2  # its own passes, which are finite
        assert not last["1", "output"][1:4].any()


def test_a_critic_that_closes_behind_the_generators_pass_stands_behind_its_own_last_step(
    tmp_path: Path,
) -> None:
    """What ends a script after that is no death in the middle of a step."""
    gan = Gan()
    models = {"g": gan.g, "d": gan.d}
    with ddpprobe.install(models, run_dir=tmp_path / "r", every=1, daemon="none"):
        gan.turn()
    for run in ddpprobe.open_models(tmp_path / "r").values():
        (rank,) = run.info()["attempts"][0]["ranks"]
        assert rank["status"] == "closed"  # and not "after the forward of step ..."


class Scored(nn.Module):
    """A critic that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = critic()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


def test_the_loss_of_a_lent_pass_is_no_loss_of_the_critics(tmp_path: Path, records_of) -> None:
    torch.manual_seed(0)
    g, d = generator(), Scored()
    og, od = sgd(g), sgd(d)
    told: list[float] = []
    with ddpprobe.install(d, run_dir=tmp_path / "d", every=4, daemon="none"):
        for at in range(9):
            od.zero_grad()
            loss = d(real(at))
            told.append(loss.item())
            loss.backward()
            od.step()
            og.zero_grad()
            d(g(noise(at))).backward()
            og.step()
    kept = {
        record.step - back: scalars[name]
        for record in whole(records_of(tmp_path / "d"))
        for scalars in record.scalars.values()
        for back, name in enumerate(["loss", "loss@-1", "loss@-2", "loss@-3"])
        if name in scalars
    }
    assert [kept[step] for step in range(9)] == pytest.approx(told, rel=1e-6)


def test_a_scaler_that_gives_up_the_generators_first_step_gives_up_none_of_the_critics(
    tmp_path: Path, records_of
) -> None:
    """An overflow of the first step is usual in fp16; nobody has seen that optimizer step."""
    torch.manual_seed(0)
    g, d = generator(), critic()
    og, od = (torch.optim.SGD(m.parameters(), lr=1e-3) for m in (g, d))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def update(optimizer: Optimizer, loss: Tensor) -> None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    with ddpprobe.install(d, run_dir=tmp_path / "d", every=1, daemon="none"):
        for at in range(3):
            od.zero_grad()
            update(od, d(real(at)).mean())
            og.zero_grad()
            loss = d(g(noise(at))).mean()
            hook = g[0].weight.register_hook(lambda grad: grad * torch.inf) if not at else None
            update(og, loss)
            if hook is not None:
                hook.remove()
    assert [(r.step, r.skipped) for r in whole(records_of(tmp_path / "d"))] == [
        (0, False), (1, False), (2, False),
    ]  # fmt: skip


def separate() -> tuple[nn.Module, nn.Module]:
    return nn.Linear(4, 2), nn.Linear(4, 1)


def with_a_trunk() -> tuple[nn.Module, nn.Module]:
    trunk = nn.Linear(4, 4)
    return nn.Sequential(trunk, nn.Linear(4, 2)), nn.Sequential(trunk, nn.Linear(4, 1))


def one_after_the_other(actor, critic_, oa, oc, x: Tensor) -> None:
    advantage = critic_(x).detach()
    oa.zero_grad()
    (actor(x).mean(1, keepdim=True) * advantage).mean().backward()
    oa.step()
    oc.zero_grad()
    critic_(x).square().mean().backward()
    oc.step()


def both_at_once(actor, critic_, oa, oc, x: Tensor) -> None:
    oa.zero_grad()
    oc.zero_grad()
    (actor(x).mean() + critic_(x).square().mean()).backward()
    oa.step()
    oc.step()


def through_the_critic(actor, critic_, oa, oc, x: Tensor) -> None:
    """As in DDPG: the actor learns through the critic, which is stepped first."""
    oc.zero_grad()
    critic_(x).square().mean().backward()
    oc.step()
    oa.zero_grad()
    (-critic_(actor(x).repeat(1, 2))).mean().backward()
    oa.step()


@pytest.mark.parametrize(
    ("loop", "shared"),
    [(one_after_the_other, 2), (both_at_once, 1), (through_the_critic, 2)],
)
@pytest.mark.parametrize("models", [separate, with_a_trunk])
def test_actor_and_critic_have_a_step_for_each_of_their_optimizers_steps(
    loop: Callable[..., None], shared: int,
    models: Callable[[], tuple[nn.Module, nn.Module]], tmp_path: Path, records_of,
) -> None:  # fmt: skip
    """A trunk of both is the actor optimizer's: its steps change the critic, and are its steps too.

    `shared`: steps of the critic per turn then; of optimizers that step together there is one.
    """
    torch.manual_seed(0)
    actor, critic_ = models()
    oa = torch.optim.SGD(actor.parameters(), lr=0.01)
    known = {id(p) for p in actor.parameters()}
    oc = torch.optim.SGD([p for p in critic_.parameters() if id(p) not in known], lr=0.01)
    with (
        ddpprobe.install(actor, run_dir=tmp_path / "a", every=1, daemon="none"),
        ddpprobe.install(critic_, run_dir=tmp_path / "c", every=1, daemon="none"),
    ):
        for at in range(5):
            loop(actor, critic_, oa, oc, real(at))
    per_turn = shared if models is with_a_trunk else 1
    for name, count in (("a", 5), ("c", 5 * per_turn)):
        assert [r.step for r in whole(records_of(tmp_path / name))] == list(range(count)), name


# -- the clock alone ------------------------------------------------------------------------------


def through(other: nn.Module, loop: Loop, theirs: Optimizer) -> None:
    loop.model(other(X)).sum().backward()
    theirs.step()
    loop.model.zero_grad()
    theirs.zero_grad()


def test_before_ours_was_ever_stepped_a_pass_for_another_observed_model_is_lent(
    made: Make,
) -> None:
    loop, theirs = made(net()), made(nn.Linear(4, 4))
    for each in (loop, theirs):
        each.clock.start()
    optimizer = sgd(theirs.model)
    for _ in range(2):
        through(theirs.model, loop, optimizer)
    loop.model(X)
    assert (loop.ends(), theirs.ends()) == ([], [False, False])
    assert (loop.clock.step, loop.clock.micro, loop.clock.lent) == (0, 2, 2)
    assert loop.clock.passes.told(0, None)[LENT] == 2.0


def test_gradients_that_an_optimizer_of_master_weights_takes_end_a_step_each(made: Make) -> None:
    """It owns nothing of the model, and neither does anybody else know what it owns."""
    loop, bystander = made(net()), made(nn.Linear(4, 4))
    for each in (loop, bystander):
        each.clock.start()
    masters = [p.detach().clone().requires_grad_() for p in loop.model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    for _ in range(3):
        loop.model(X).sum().backward()
        for master, parameter in zip(masters, loop.model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad, None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, loop.model.parameters(), strict=True):
                parameter.copy_(master)
    loop.model(X)
    assert loop.ends() == [False, False, False]


def test_an_accumulation_that_goes_on_behind_anothers_step_is_all_ours(made: Make) -> None:
    loop = made(net())
    other = nn.Linear(4, 4)
    ours, theirs = sgd(loop.model), sgd(other)
    loop.clock.start()
    for _ in range(2):
        for _ in range(3):
            loop.model(other(X)).sum().backward()
            theirs.step()
        ours.step()
        ours.zero_grad()
    assert (loop.ends(), loop.clock.micro, loop.clock.lent) == ([False, False], 2, 0)


def test_a_lent_pass_before_a_closure_is_no_pass_of_the_closure(made: Make) -> None:
    loop = made(net())
    other = nn.Linear(4, 4)
    ours, theirs = sgd(loop.model), sgd(other)
    loop.clock.start()

    def closure() -> Tensor:
        ours.zero_grad()
        loss = loop.model(X).sum()
        loss.backward()
        return loss

    for turn in range(3):
        ours.step(closure)
        assert (loop.clock.micro, loop.clock.lent) == ((1, 1) if turn else (0, 0))
        loop.model(other(X)).sum().backward()
        theirs.step()
    assert loop.ends() == [False, False, False]


X = torch.ones(BATCH, 4)


class PenalizedGan(Gan):
    """The critic's loss has a gradient penalty: a gradient through the critic, in its forward.

    Its gradients are thrown away after the penalty ("late"), or before the forwards ("before").
    """

    def critic_step(self) -> None:
        self.at += 1
        if self.clean == "before":
            self.od.zero_grad()
        with torch.no_grad():
            fake = self.g(noise(self.at))
        loss = self.d(fake).mean() - self.d(real(self.at)).mean()
        between = ((fake + real(self.at)) / 2).requires_grad_()
        (slope,) = torch.autograd.grad(self.d(between).sum(), between, create_graph=True)
        loss = loss + (slope.norm(dim=1) - 1).square().mean()
        if self.clean == "late":
            self.od.zero_grad()
        loss.backward()
        self.od.step()
        self.losses.append(loss.item())


@pytest.mark.parametrize("clean", ["late", "before"])
@pytest.mark.parametrize("every", [1, 2])
def test_the_passes_before_a_gradient_penalty_are_those_of_the_step(
    clean: str, every: int, tmp_path: Path, records_of
) -> None:
    without, gan = PenalizedGan(clean), PenalizedGan(clean)
    how = {"every": every, "daemon": "none"}
    with (
        ddpprobe.install(gan.g, run_dir=tmp_path / "g", **how),
        ddpprobe.install(gan.d, run_dir=tmp_path / "d", **how),
    ):
        for _ in range(4):
            gan.turn()
            without.turn()
    assert gan.losses == without.losses
    for name, count, passes in (("g", 4, 1), ("d", 4 * CRITICS, 3)):
        records = whole(records_of(tmp_path / name))
        assert [r.step for r in records] == list(range(0, count, every))
        assert {r.scalars[0]["micro_batches"] for r in records} == {passes}
        assert {rows(r)["0", "output"][OBSERVED] for r in records} == {passes}
        assert {rows(r)["0.weight", "grad_local"][OBSERVED] for r in records} == {1}


def test_a_skipped_step_behind_a_gradient_penalty_is_still_told(tmp_path: Path, records_of) -> None:
    gan, scaler = PenalizedGan("late"), torch.amp.GradScaler("cpu", init_scale=4.0)
    with ddpprobe.install(gan.d, run_dir=tmp_path / "d", every=1, daemon="none"):
        for at in range(4):
            between = real(at).requires_grad_()
            score = gan.d(between).mean()
            (slope,) = torch.autograd.grad(score, between, create_graph=True)
            gan.od.zero_grad()
            loss = score + slope.norm() * (torch.inf if at == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(gan.od)
            scaler.update()
    records = whole(records_of(tmp_path / "d"))
    assert [(r.step, r.skipped) for r in records] == [(s, s == 2) for s in range(4)]


def test_one_forward_with_a_backward_for_each_task_is_no_pass_for_anothers_step(
    tmp_path: Path, records_of
) -> None:
    """PCGrad, MGDA: the gradients of each task are taken away, and their sum is put in place."""
    torch.manual_seed(0)
    model = critic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ddpprobe.install(model, run_dir=tmp_path, every=1, daemon="none"):
        for at in range(4):
            out, parts = model(real(at)), []
            for power in (1, 2, 3):
                optimizer.zero_grad()
                (out**power).mean().backward(retain_graph=True)
                parts.append([p.grad.clone() for p in model.parameters()])
            for parameter, *each in zip(model.parameters(), *parts, strict=True):
                parameter.grad = sum(each)
            optimizer.step()
    records = whole(records_of(tmp_path))
    assert [r.step for r in records] == [0, 1, 2, 3]
    for record in records:
        assert LENT not in record.scalars[0]
        assert record.scalars[0]["micro_batches"] == 1.0
        assert rows(record)["0", "output"][OBSERVED] == 1
        assert record.scalars[0]["grad_norm"] > 0
