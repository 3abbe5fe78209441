"""A number belongs to the step whose loop pass logs it, also after `optimizer.step()`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.rank.held_record import HeldRecord
from ddpprobe.records.events import UnkeptEvent
from ddpprobe.records.step import StepRecord
from ddpprobe.rundir import framing
from ddpprobe.rundir.journal import JournalWriter
from ddpprobe.rundir.journal_tail import JournalTail
from ddpprobe.rundir.paths import RunDir

from .. import far

PLACES = ("forward", "backward", "step", "zero_grad")
Told = dict[str, float | torch.Tensor]


def train(
    probe: ddpprobe.Probe, model: nn.Module, place: str, steps: int,
    more: Callable[[int], None] = lambda _: None,
) -> dict[int, float]:  # fmt: skip
    """Log after `place` of each step; returns the true losses. `more` runs at the very end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: dict[int, float] = {}
    for step in range(steps):
        loss = model(torch.randn(3, 4)).square().mean()
        losses[step] = loss.item()
        told: Told = {"loss": loss, "tokens": 10.0 * step}
        for now, work in (
            ("forward", lambda: None),
            ("backward", loss.backward),
            ("step", optimizer.step),
            ("zero_grad", optimizer.zero_grad),
        ):
            work()
            if now == place:
                probe.log(**told)
        more(step)
    return losses


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


@pytest.mark.parametrize("device", ["near", "far"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("every", [1, 10])
def test_wherever_it_is_logged_a_number_is_in_the_record_of_its_step(
    every: int, place: str, device: str, tmp_path: Path, records_of, monkeypatch
) -> None:
    if device == "far":
        far.pretend(monkeypatch)
    model = net()
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=every, daemon="none") as probe:
        losses = train(probe, model, place, 21)
    records = records_of(tmp_path / "r")
    assert [r.step for r in records] == list(range(0, 21, every))
    told = {r.step: (r.scalars[0]["loss"], r.scalars[0]["tokens"]) for r in records}
    assert told == {step: (losses[step], 10.0 * step) for step in range(0, 21, every)}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps whose records are in the journal by now."""
    steps: list[int] = []
    original = JournalWriter.append_record

    def append(self: JournalWriter, record: StepRecord) -> bool:
        steps.append(record.step)
        return original(self, record)

    monkeypatch.setattr(JournalWriter, "append_record", append)
    return steps


@pytest.mark.parametrize("place", ["backward", "zero_grad"])
def test_a_record_but_the_first_is_written_when_the_usual_numbers_are_there(
    place: str, tmp_path: Path, written: list[int]
) -> None:
    seen: list[int] = []
    model = net()
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none") as probe:
        train(probe, model, place, 4, lambda _: seen.append(len(written)))
    assert seen == [0, 2, 3, 4]


def test_a_loss_that_is_logged_replaces_the_one_that_the_model_returns(
    tmp_path: Path, records_of
) -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).square().mean()

    model = Returns()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none") as probe:
        for step in range(3):
            model(torch.randn(3, 4)).backward()
            optimizer.step()
            if step != 1:
                probe.log(loss=7.0 + step)
    first, own, second = (r.scalars[0]["loss"] for r in records_of(tmp_path / "r"))
    assert (first, second) == (7.0, 9.0)
    assert own < 7


def unkept(run: Path) -> list[tuple[int, tuple[str, ...]]]:
    """What a rank says that no record holds."""
    tail = JournalTail(RunDir(run).rank_journal(0, "node_0000", 0))
    events = [f.event() for f in tail.poll() if f.type == framing.LIFE]
    tail.close()
    return [(e.step, e.names) for e in events if isinstance(e, UnkeptEvent)]


def test_what_comes_too_late_for_its_record_is_told_once_and_waited_for_from_then_on(
    tmp_path: Path, records_of, caplog
) -> None:
    model = net()
    run = tmp_path / "r"

    def validate(step: int) -> None:
        if step in (1, 3):  # not yet in the first step, whose record waits for anything
            probe.log(score=100.0 + step)

    with ddpprobe.install(model, run_dir=run, every=1, daemon="none") as probe:
        probe.log(early=1.0)
        train(probe, model, "step", 4, validate)
        model.eval()
        with torch.no_grad():
            model(torch.randn(3, 4))  # may take long: nothing is held any more
        probe.log(score=5.0, other=6.0)
    assert [r.scalars[0].get("score") for r in records_of(run)] == [None, None, None, 103.0]
    assert unkept(run) == [(-1, ("early",)), (1, ("score",)), (3, ("other",))]
    assert len([r for r in caplog.records if "is not kept" in r.getMessage()]) == 3


@pytest.mark.parametrize("rest", ["evaluation", "pause", "close"])
def test_what_may_take_long_does_not_find_a_record_waiting(
    rest: str, tmp_path: Path, written: list[int]
) -> None:
    model = net()
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none") as probe:
        train(probe, model, "none", 1)
        assert written == []
        if rest == "evaluation":
            with torch.no_grad():
                model(torch.randn(3, 4))
        elif rest == "pause":
            with probe.pause("checkpoint"):
                assert written == [0]
        else:
            probe.close()
        assert written == [0]


def test_the_scale_of_the_next_step_is_not_taken_for_that_of_this_one(
    tmp_path: Path, records_of
) -> None:
    model, run = net(), tmp_path / "r"
    with ddpprobe.install(model, run_dir=run, every=1, daemon="none") as probe:
        train(probe, model, "none", 2, lambda _: probe.log(loss_scale=65536.0))
    assert all("loss_scale" not in r.scalars[0] for r in records_of(run))
    assert all(r.scalars[0]["grad_norm"] > 1e-3 for r in records_of(run))
    assert unkept(run) == [(0, ("loss_scale",))]


def test_a_measured_norm_stands_and_the_logged_one_is_told_as_not_kept(
    tmp_path: Path, records_of
) -> None:
    model, run = net(), tmp_path / "r"
    with ddpprobe.install(model, run_dir=run, every=1, daemon="none") as probe:
        train(probe, model, "none", 2, lambda _: probe.log(grad_norm=1e9, my_norm=2.0))
    assert all(r.scalars[0]["grad_norm"] < 1e3 for r in records_of(run))
    assert [r.scalars[0]["my_norm"] for r in records_of(run)] == [2.0, 2.0]
    assert unkept(run) == [(0, ("grad_norm",))]


def test_a_record_waits_for_as_many_numbers_of_a_name_as_came_before() -> None:
    sent: list[str] = []
    held = HeldRecord()
    held.hold(lambda: sent.append("first"))
    held.take(["loss"])
    held.take(["loss"])
    assert sent == []
    held.forward_begins()
    held.hold(lambda: sent.append("second"))
    held.take(["loss", "other"])
    assert (sent, held.waits) == (["first"], True)
    held.take(["loss"])
    assert (sent, held.waits, held.is_behind) == (["first", "second"], False, True)
    held.forward_begins()
    assert (sent, held.is_behind) == (["first", "second"], False)


RANKS = """
import json, sys, time, torch, torch.distributed as dist, ddpprobe
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
sys.path.insert(0, sys.argv[2])
from tests.rank.test_held_record import net, train
dist.init_process_group("gloo")
rank, out = dist.get_rank(), sys.argv[1]
torch.manual_seed(rank)
for every in (1, 10):
    for place in ("backward", "step", "zero_grad"):
        model = DDP(net())
        name = f"{out}/{place}-{every}"
        with ddpprobe.install(model, run_dir=name, every=every) as probe:
            losses = train(probe, model, place, 21)
        with open(f"{name}.{rank}.json", "w") as file:
            json.dump(losses, file)
dist.destroy_process_group()
time.sleep(0.5)
"""


def test_two_ranks_have_the_true_losses_as_the_daemon_merges_and_stores_them(
    torchrun, tmp_path: Path, poll
) -> None:
    script = tmp_path / "job.py"
    script.write_text(RANKS)
    done = torchrun([script, tmp_path, Path(__file__).parents[2]])
    assert done.returncode == 0, done.stderr
    for every in (1, 10):
        for place in ("backward", "step", "zero_grad"):
            path = tmp_path / f"{place}-{every}"
            poll(lambda p=path: ddpprobe.open(p).info()["attempts"][0]["sealed"], 30)
            run = ddpprobe.open(path)
            assert [(r.step, r.missing) for r in run.records()] == [
                (step, ()) for step in range(0, 21, every)
            ]
            for rank in (0, 1):
                true = json.loads((tmp_path / f"{place}-{every}.{rank}.json").read_text())
                for records in (run.records(), run.records(rank)):
                    told = {str(r.step): r.scalars[rank]["loss"] for r in records}
                    assert told == {s: x for s, x in true.items() if int(s) % every == 0}
