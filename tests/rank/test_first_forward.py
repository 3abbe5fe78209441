"""`install()` before there is a process group, and roots that the training loop never calls."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.rank.first_forward import FirstForward
from ddpprobe.rank.topology.describe import describe

BEFORE_THE_GROUP = """
import json, os, sys
import torch, ddpprobe
from torch import distributed as dist, nn

how, out = sys.argv[1], sys.argv[2]
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
variables = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE")}
if how == "launched later" and rank == 0:  # as Lightning does: the others are started by fit()
    for name in variables:
        del os.environ[name]
probe = ddpprobe.install(model, run_dir=f"{out}/run", every=1)
probe.note(config={"lr": 0.1})
known = probe.run_dir is not None
os.environ.update(variables)
dist.init_process_group("gloo")
wrapped = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.no_grad():
    wrapped(torch.ones(1, 4))
for step in range(3):
    def closure():
        optimizer.zero_grad()
        loss = wrapped(torch.full((2, 4), float(rank + step))).mean()
        loss.backward()
        return loss
    if how == "launched later":
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
json.dump([known, probe.run_dir], open(f"{out}/{rank}.json", "w"))
probe.close()
dist.destroy_process_group()
import time; time.sleep(0.5)
"""


@pytest.mark.parametrize("how", ["torchrun", "launched later"])
def test_install_before_the_process_group_joins_it_in_the_first_training_forward(
    how: str, torchrun, tmp_path: Path, records_of
) -> None:
    script = tmp_path / "job.py"
    script.write_text(BEFORE_THE_GROUP)
    done = torchrun([script, how, tmp_path])
    assert done.returncode == 0, done.stderr
    assert "contained" not in done.stderr
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    run = tmp_path / "run"
    assert ddpprobe.open(run).info()["attempts"][-1]["config"] == {"lr": "0.1"}
    # A rank that looks like a job of its own has its run at once, and goes on in it.
    assert told == [[how == "launched later", str(run)], [False, str(run)]]
    attempt = int(how == "launched later")
    for rank in range(2):
        found = records_of(run, rank, attempt)
        assert [r.step for r in found] == [0, 1, 2]
        sites = {(s.fqn, s.kind) for s in found[0].sites}
        assert {("0", "output"), ("2", "grad_output"), ("0.weight", "grad")} <= sites
    info = ddpprobe.open(run).info()
    assert (info["world_size"], info["wrapper"], info["backend"]) == (2, "ddp", "gloo")


class Lit(nn.Module):
    """A model as Lightning trains it on one device: its `training_step` is called, never it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.metric = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)]), nn.MSELoss()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body:
            x = layer(x).relu()
        return x

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body:
            x = layer(x)
        self.metric(x, x)
        return x.pow(2).mean()


class Unusual(nn.Module):
    """Has a forward that nobody calls, and nothing that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu()).mean()


def train(net: nn.Module, call, steps: int = 3, micros: int = 1) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in range(steps):
        with torch.no_grad():
            call(torch.ones(1, 4))
        for micro in range(micros):
            call(torch.full((2, 4), 1.0 + step + micro)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("micros", [1, 2])
def test_of_a_root_that_is_never_called_the_parts_are_observed_from_the_first_step_on(
    tmp_path: Path, records_of, micros: int
) -> None:
    torch.manual_seed(0)
    net = Lit()
    alone = copy.deepcopy(net)
    with ddpprobe.install(net, run_dir=tmp_path / "r", every=2, daemon="none"):
        bits = train(net, net.training_step, micros=micros)
    expected = train(alone, alone.training_step, micros=micros)
    assert all(torch.equal(a, b) for a, b in zip(bits, expected, strict=True))
    records = records_of(tmp_path / "r")
    assert [r.step for r in records] == [0, 2]
    for record in records:
        sites = {(s.fqn, s.kind): n for s, n in zip(record.sites, record.counts[:, 0], strict=True)}
        assert sites["body.0", "output"] == 8 * micros
        assert {("body.1", "grad_output"), ("body.0.weight", "grad")} <= set(sites)
        assert record.scalars[0]["micro_batches"] == micros
        assert "loss" not in record.scalars[0]  # a metric is a part, too


def test_from_the_second_step_on_only_the_heads_carry_hooks(tmp_path: Path) -> None:
    class Nested(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

        def training_step(self, x):
            return self.body(x).pow(2).mean()

    net = Nested()

    def hooked() -> set[str]:
        return {n for n, m in net.named_modules() if m._forward_hooks or m._forward_pre_hooks}

    with ddpprobe.install(net, run_dir=tmp_path / "r", every=100, daemon="none") as probe:
        assert hooked() == {"", "body", "body.0", "body.1", "metric"}
        train(net, net.training_step)
        assert hooked() == {"", "body"}
        with probe.pause():
            assert hooked() == set()
        assert hooked() == {"", "body"}
    assert hooked() == set()


def test_a_root_that_is_called_after_all_carries_the_only_hooks(tmp_path: Path, records_of) -> None:
    net = Lit()
    with ddpprobe.install(net, run_dir=tmp_path / "r", every=1, daemon="none"):
        train(net, lambda x: net(x).mean())
        assert {n for n, m in net.named_modules() if m._forward_hooks} == {""}
    assert [r.step for r in records_of(tmp_path / "r")] == [0, 1, 2]


def test_a_root_that_turns_out_never_to_be_called_is_observed_from_the_second_step_on(
    tmp_path: Path, records_of
) -> None:
    net = Unusual()
    with ddpprobe.install(net, run_dir=tmp_path / "r", every=1, daemon="none"):
        train(net, net.loss)
    found = records_of(tmp_path / "r")
    assert [r.step for r in found] == [1, 2]  # of step 0 only its end was seen
    assert ("a", "output") in {(s.fqn, s.kind) for s in found[0].sites}


def test_a_nan_in_a_part_is_named(tmp_path: Path) -> None:
    net = Lit()
    with ddpprobe.install(net, run_dir=tmp_path / "r", every=1, daemon="none"):
        train(net, net.training_step, steps=2)
        net.body[1].register_forward_hook(lambda m, a, out: out * float("nan"))
        train(net, net.training_step, steps=1)
    (page, *_) = [a for a in ddpprobe.open(tmp_path / "r").anomalies() if a.level == "page"]
    assert (page.detector, page.step, page.rank, page.module) == ("nonfinite", 2, 0, "body.1")


def test_a_run_in_which_no_forward_was_seen_is_never_green(tmp_path: Path, call) -> None:
    net = nn.Linear(4, 1)
    with ddpprobe.install(net, run_dir=tmp_path / "r", every=1, daemon="none"):
        # Graphs that other code of this process has compiled are made anew first, once.
        train(net, lambda x: nn.functional.linear(x, net.weight, net.bias).mean(), steps=8)
    code, out, err = call("anomalies", tmp_path / "r")
    assert code == 4
    assert "no anomalies" not in out
    assert "no training forward of the model was seen" in err


class Bare:
    """Trainings that `install` sees nothing of, or not soon enough."""

    @staticmethod
    def of_a_copy(net: nn.Linear) -> None:
        other = copy.deepcopy(net)
        train(other, lambda x: other(x).mean(), steps=6)

    @staticmethod
    def without_a_forward(net: nn.Linear) -> None:
        train(net, lambda x: nn.functional.linear(x, net.weight, net.bias).mean(), steps=2)

    @staticmethod
    def of_nothing(net: nn.Linear) -> None:
        with torch.no_grad():
            net(torch.ones(1, 4))


@pytest.mark.parametrize("way", [Bare.of_a_copy, Bare.without_a_forward, Bare.of_nothing])
def test_a_run_without_a_sampled_step_is_never_green(tmp_path: Path, call, way) -> None:
    net = nn.Linear(4, 1)
    with ddpprobe.install(net, run_dir=tmp_path / "r", every=1, daemon="none"):
        way(net)
    code, out, err = call("anomalies", tmp_path / "r")
    assert (code, out) == (4, "nothing to judge: no step was sampled\n")
    assert "the run took no sampled step" in err
    assert not ddpprobe.open(tmp_path / "r").info()["complete"]
    line = ddpprobe.runs(tmp_path)[0]
    assert line.verdict == "nothing to judge: no step was sampled"
    assert (line.whole, line.to_json()["judged"]["complete"]) == (False, False)


def test_a_run_that_began_no_step_has_reached_none(tmp_path: Path) -> None:
    ddpprobe.install(nn.Linear(4, 1), run_dir=tmp_path / "r", first_step=99, daemon="none").close()
    assert ddpprobe.open(tmp_path / "r").info()["reached"] is None


def test_a_run_that_ends_before_the_next_step_that_is_sampled_says_so(tmp_path: Path, call) -> None:
    net = nn.Linear(4, 1)
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    with ddpprobe.install(net, run_dir=tmp_path / "r", every=10, first_step=43, daemon="none"):
        for _ in range(2):
            net(torch.ones(1, 4)).sum().backward()
            sgd.step()
    _, _, err = call("anomalies", tmp_path / "r")
    assert "or before the next that `every` samples" in err
    _, out, _ = call("info", tmp_path / "r")
    assert "43 to 44, none recorded" in out


def test_steps_that_the_loop_declares_without_a_forward_are_no_green_run(
    tmp_path: Path, call
) -> None:
    net = nn.Linear(4, 1)
    with ddpprobe.install(net, run_dir=tmp_path / "r", every=1, daemon="none") as probe:
        for _ in range(6):
            nn.functional.linear(torch.ones(2, 4), net.weight, net.bias).mean().backward()
            net.zero_grad()
            probe.step()
    code, _, err = call("anomalies", tmp_path / "r")
    assert code == 4
    assert "the run took no sampled step" in err


def test_without_a_group_in_the_first_forward_training_goes_on_and_a_line_says_why(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    net = nn.Linear(4, 1)
    with caplog.at_level(logging.WARNING, "ddpprobe"):
        probe = ddpprobe.install(net, run_dir=tmp_path / "r", daemon="none")
        assert probe.run_dir is None
        train(net, lambda x: net(x).mean())
        probe.close()
    (line,) = caplog.messages
    assert "WORLD_SIZE is 2" in line
    assert "init_process_group() before training" in line
    assert not net._forward_pre_hooks
    assert not (tmp_path / "r").exists()


def test_a_probe_that_never_met_its_group_says_so_at_the_end(monkeypatch, caplog) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    net = nn.Linear(4, 1)
    ddpprobe.install(net, daemon="none").close()
    assert "nothing was recorded" in caplog.text
    assert not net._forward_pre_hooks


def test_without_a_group_a_wrong_argument_is_still_refused_at_once(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ddpprobe.InstallError, match="every must be"):
        ddpprobe.install(nn.Linear(4, 1), every=-1, daemon="none")


def test_it_comes_before_the_hooks_that_users_have_hung_on_the_model() -> None:
    model, told = nn.Linear(2, 2), list[str]()
    model.register_forward_pre_hook(lambda *_: told.append("theirs"))
    waits = FirstForward(describe(model), lambda _: told.append("ours"))
    assert waits.cancel()
    waits.hang()
    model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert told == ["ours", "theirs", "theirs"]
