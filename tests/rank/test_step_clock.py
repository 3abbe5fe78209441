"""Steps, micro-batches, evaluations and skipped steps are told apart in every kind of loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddpprobe
from ddpprobe.rundir import heartbeat
from ddpprobe.rundir.paths import RunDir

X = torch.randn(3, 4)
Loop = Callable[[nn.Module, "ddpprobe.Probe"], None]


def adam(m: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(m.parameters(), lr=0.01)


def accumulation_with_evaluation(m, probe) -> None:
    o = adam(m)
    for _ in range(3):
        for _ in range(3):
            m(X).sum().backward()
        o.step()
        o.zero_grad()
        m.eval()
        with torch.no_grad():
            m(X)
        m.train()


def evaluation_between_micro_batches(m, probe) -> None:
    o = adam(m)
    for _ in range(2):
        m(X).sum().backward()
        with torch.no_grad():
            m(X)
        m(X).sum().backward()
        o.step()
        o.zero_grad()


def forwards_with_grad_but_without_backward(m, probe) -> None:
    o = adam(m)
    for _ in range(2):
        m(X).sum().backward()
        m(X)
        o.step()
        o.zero_grad()


def two_optimizers(m, probe) -> None:
    a, b = torch.optim.SGD([m[0].weight], lr=0.1), torch.optim.Adam([m[0].bias, *m[1].parameters()])
    for _ in range(3):
        m(X).sum().backward()
        a.step()
        b.step()
        a.zero_grad()
        b.zero_grad()


def an_optimizer_of_some_of_the_parameters(m, probe) -> None:
    o = torch.optim.SGD([m[0].weight], lr=0.1)
    for _ in range(3):
        m(X).sum().backward()
        o.step()
        m.zero_grad()


def lbfgs(m, probe) -> None:
    o = torch.optim.LBFGS(m.parameters(), max_iter=3, tolerance_grad=0, tolerance_change=0)

    def closure() -> torch.Tensor:
        o.zero_grad()
        loss = m(X).pow(2).sum()
        loss.backward()
        return loss

    for _ in range(2):
        o.step(closure)


def another_models_optimizer_in_between(m, probe) -> None:
    other = nn.Linear(4, 4)
    mine, others = adam(m), adam(other)
    for _ in range(2):
        other(m(X).detach()).sum().backward()
        others.step()
        m(X).sum().backward()
        mine.step()
        mine.zero_grad()


def siamese(m, probe) -> None:
    o = adam(m)
    for _ in range(2):
        (m(X).sum() + m(X).sum()).backward()
        o.step()
        o.zero_grad()


def no_torch_optimizer(m, probe) -> None:
    for _ in range(3):
        m(X).sum().backward()
        with torch.no_grad():
            for p in m.parameters():
                p.sub_(0.1 * p.grad)
                p.grad = None
        probe.step()


def a_step_that_raises(m, probe) -> None:
    o = adam(m)
    m(X).sum().backward()

    def closure() -> float:
        raise RuntimeError("user")

    with pytest.raises(RuntimeError, match="user"):
        o.step(closure)
    o.step()
    o.zero_grad()
    m(X).sum().backward()
    o.step()


@pytest.mark.parametrize(
    ("loop", "micro_batches"),
    [
        (accumulation_with_evaluation, [3, 3, 3]),
        (evaluation_between_micro_batches, [2, 2]),
        (two_optimizers, [1, 1, 1]),
        (an_optimizer_of_some_of_the_parameters, [1, 1, 1]),
        (lbfgs, [3, 3]),
        (siamese, [2, 2]),
        (no_torch_optimizer, [1, 1, 1]),
        (a_step_that_raises, [1, 1]),
    ],
    ids=lambda v: v.__name__ if callable(v) else "",
)
def test_steps_and_micro_batches_are_those_of_the_loop(
    loop: Loop, micro_batches: list[int], tmp_path: Path, records_of
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none") as probe:
        loop(model, probe)
    records = records_of(tmp_path / "r")
    assert [r.step for r in records] == list(range(len(micro_batches)))
    assert [r.scalars[0]["micro_batches"] for r in records] == micro_batches
    for record, micros in zip(records, micro_batches, strict=True):
        rows = {s.key: record.counts[i] for i, s in enumerate(record.sites)}
        assert rows["0", "output", ""][0] == micros * 12  # elements of exactly these forwards
        assert rows["0", "grad_output", ""][0] == micros * 12


def test_a_forward_that_gets_no_gradient_does_not_count_in_the_statistics(
    tmp_path: Path, records_of
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none") as probe:
        forwards_with_grad_but_without_backward(model, probe)
    for record in records_of(tmp_path / "r"):
        rows = {s.key: record.counts[i] for i, s in enumerate(record.sites)}
        assert rows["0", "output", ""][0] == 12


def test_the_other_models_steps_are_not_ours(tmp_path: Path, records_of) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none") as probe:
        another_models_optimizer_in_between(model, probe)
    assert [r.step for r in records_of(tmp_path / "r")] == [0, 1]


@pytest.mark.parametrize("zero_grad_first", [True, False])
def test_a_step_given_up_by_grad_scaler_is_a_skipped_step(
    tmp_path: Path, records_of, zero_grad_first: bool
) -> None:
    model = nn.Linear(4, 4)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        o = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            if zero_grad_first:
                o.zero_grad()
            loss = model(X).sum()
            scaler.scale(loss * torch.inf if step == 1 else loss).backward()
            scaler.step(o)
            scaler.update()
            if not zero_grad_first:
                o.zero_grad()
    records = [r for r in records_of(tmp_path / "r") if r.sites]
    assert [(r.step, r.skipped) for r in records] == [
        (0, False), (1, True), (2, False), (3, False),
    ]  # fmt: skip
    assert records[1].first_bad is not None


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_under_checkpointing_is_not_counted_twice(
    tmp_path: Path, records_of, reentrant: bool
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(4, 4)
            self.block = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, self.stem(x), use_reentrant=reentrant)

    model = Model()
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        o = adam(model)
        for _ in range(2):
            model(X).sum().backward()
            o.step()
            o.zero_grad()
    for record in records_of(tmp_path / "r"):
        for i, site in enumerate(record.sites):
            observed = record.counts[i][6]
            assert observed == 1, f"{site} observed {observed} times"


def test_an_optimizer_inside_the_backward_makes_one_step(tmp_path: Path, records_of) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates what it imports here
        from torch.distributed.optim import _apply_optimizer_in_backward

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _apply_optimizer_in_backward(torch.optim.SGD, list(model.parameters()), {"lr": 0.1})
        for _ in range(3):
            model(X).sum().backward()
    assert [r.step for r in records_of(tmp_path / "r")] == [0, 1, 2]


def test_steps_in_a_pause_leave_nothing_behind(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = adam(model)
    with ddpprobe.install(model, run_dir=tmp_path, daemon="none") as probe:
        held = []
        for _ in range(2):
            model(X).sum().backward()
            optimizer.step()
            with probe.pause("training of another kind"):
                for _ in range(20):
                    optimizer.step()
            clock = probe._recorder._clock
            held.append((len(clock.owners._stepped), len(clock.owners._complete), clock.steps))
    assert held == [(1, 1, 1), (1, 1, 2)]


def test_steps_in_a_pause_before_the_first_forward_are_no_sign_of_blindness(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model(X).sum().backward()
    optimizer = adam(model)
    with ddpprobe.install(model, run_dir=tmp_path, daemon="none") as probe:
        with probe.pause("a warm-up"):
            for _ in range(10):
                optimizer.step()
                assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert "no forward of Sequential" not in caplog.text
        for _ in range(10):
            optimizer.step()
        assert "no forward of Sequential" in caplog.text


def test_resumed_numbers_go_on(tmp_path: Path, records_of) -> None:
    model = nn.Linear(4, 4)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=10, first_step=95, daemon="none"):
        o = adam(model)
        for _ in range(20):
            model(X).sum().backward()
            o.step()
            o.zero_grad()
    assert [r.step for r in records_of(tmp_path / "r")] == [100, 110]


def test_a_step_cut_off_by_an_exception_is_kept_as_partial(tmp_path: Path, records_of) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with (
        pytest.raises(FloatingPointError),
        ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"),
    ):
        nn.init.constant_(model[1].weight, torch.nan)
        if not torch.isfinite(model(X).sum()):
            raise FloatingPointError
    last = records_of(tmp_path / "r")[-1]
    assert last.partial
    assert (last.first_bad.fqn, last.first_bad.kind) == ("1.weight", "param")


@pytest.mark.parametrize(
    ("whole", "fails_in", "known", "silent"),
    [
        (0, "forward", False, []),  # nobody knows what would have been called
        (0, "backward", True, ["spare"]),
        (2, "forward", True, ["spare"]),  # of the step before
    ],
)
def test_what_a_forward_that_fails_has_not_called_yet_is_not_said_to_be_never_called(
    whole: int, fails_in: str, known: bool, silent: list[str], tmp_path: Path
) -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 2), "spare": nn.Linear(4, 2)})
    model.forward = lambda x: model["b"](model["a"](x))
    optimizer = adam(model)
    with (
        pytest.raises(RuntimeError),
        ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"),
    ):
        for step in range(3):
            x = X[:, :3] if step == whole and fails_in == "forward" else X
            loss = model(x).sum()
            if step == whole:
                raise RuntimeError
            loss.backward()
            optimizer.step()
    (rank,) = ddpprobe.open(tmp_path / "r").info()["attempts"][0]["ranks"]
    assert (rank["sites_observed"] is not None, rank["silent"]) == (known, silent)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_backward_behind_a_later_forward_belongs_to_its_own_micro_batch(
    bad: int, tmp_path: Path, records_of
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        o = adam(model)
        outputs = [model(X) for _ in range(2)]
        for micro, output in enumerate(outputs):
            output.sum().backward(torch.tensor(torch.nan if micro == bad else 1.0))
        o.step()
    record = records_of(tmp_path / "r")[-1]
    assert record.scalars[0]["micro_batches"] == 2
    first = record.first_bad
    assert (first.micro, first.phase, first.fqn, first.kind) == (
        bad,
        "backward",
        "1",
        "grad_output",
    )


def beat_of(run_dir: Path) -> heartbeat.Heartbeat:
    found = heartbeat.read(RunDir(run_dir).heartbeat(0, "node_0000", 0))
    assert found is not None
    return found


def test_no_time_has_passed_in_any_phase_before_the_first_step(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with ddpprobe.install(model, run_dir=tmp_path / "r", daemon="none") as probe:
        assert probe._recorder._clock.phases.seconds == [0.0] * 4
        o = adam(model)
        for _ in range(2):
            model(X).sum().backward()
            o.step()
    assert all(seconds > 0 for seconds in beat_of(tmp_path / "r").phase_seconds)


def test_a_heartbeat_says_that_the_rank_pauses_for_as_long_as_it_does(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with ddpprobe.install(model, run_dir=tmp_path / "r", daemon="none") as probe:
        o = adam(model)
        model(X).sum().backward()
        o.step()
        with probe.pause("evaluation"):
            assert beat_of(tmp_path / "r").state == "paused"
        assert beat_of(tmp_path / "r").state == "data"


@pytest.mark.parametrize("by_keyword", [False, True])
def test_of_a_step_with_a_closure_the_gradients_are_ready_when_the_closure_is_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_keyword: bool
) -> None:
    """As in Lightning: the last micro-batch of a step, and the clipping, are in the closure."""
    net = nn.Linear(4, 1)
    optimizer = adam(net)
    left, ready = [], []

    def norm() -> float:
        return nn.utils.get_total_norm([p.grad for p in net.parameters()]).item()

    def closure() -> torch.Tensor:
        loss = net(X).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        left.append(norm())
        return loss

    with ddpprobe.install(net, run_dir=tmp_path / "r", every=1, daemon="none") as probe:
        heard = probe._recorder.gradients_ready
        monkeypatch.setattr(
            probe._recorder, "gradients_ready", lambda o: (ready.append(norm()), heard(o))
        )
        for _ in range(2):
            optimizer.zero_grad()
            net(X).pow(2).mean().backward()
            loss = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
            assert isinstance(loss, torch.Tensor)
    assert ready == left
    assert len(ready) == 2
