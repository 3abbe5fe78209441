"""The gradient norm after clipping is torch's own, under DDP and FSDP2, whoever steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.records.derived import DerivedNumbers
from ddpprobe.records.step import USED_NORM

SCRIPT = """
import json, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import ddpprobe

dist.init_process_group("gloo")
rank, told = dist.get_rank(), {}
for kind in ("ddp", "fsdp2"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.LayerNorm(5))
    if kind == "fsdp2":
        fully_shard(model[2])
        model = fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    told[kind] = []
    with ddpprobe.install(model, run_dir=Path(kind), every=1, daemon="none"):
        for step in range(3):
            loss = 30 * (model(torch.randn(4, 6)) - 1).square().sum()
            loss.backward()
            clip = torch.nn.utils.clip_grad_norm_
            before = clip(model.parameters(), (1.0, 0.25, 1e9)[step])
            used = clip(model.parameters(), 1e9)  # takes nothing away: measures
            whole = [n.full_tensor() if kind == "fsdp2" else n for n in (before, used)]
            told[kind].append([float(n) for n in whole])
            optimizer.step()
            optimizer.zero_grad()
if rank == 0:
    Path("told.json").write_text(json.dumps(told))
dist.destroy_process_group()
time.sleep(0.5)
"""


def test_the_norms_of_all_ranks_before_and_behind_clipping_are_torch_s(
    tmp_path: Path, torchrun
) -> None:
    done = torchrun(SCRIPT, nproc=2)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    for kind, steps in told.items():
        run = ddpprobe.open(tmp_path / kind)
        merged = list(run.records())
        numbers = DerivedNumbers()
        for record, (before, used) in zip(merged, steps, strict=True):
            got = numbers.update(record)["global_grad_norm_used"]
            assert got == pytest.approx(used, rel=1e-5), kind
            mine = [s["grad_norm"] for s in record.scalars.values()]
            if kind == "ddp":
                assert mine == pytest.approx([before] * 2, rel=1e-5)
            else:  # each rank has a shard
                assert sum(n * n for n in mine) ** 0.5 == pytest.approx(before, rel=1e-5)
        assert steps[0][1] == pytest.approx(1.0, rel=1e-4)
        assert steps[1][1] == pytest.approx(0.25, rel=1e-4)
        assert steps[2][1] == pytest.approx(steps[2][0])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).tanh())


def norms(path: Path) -> list[float | None]:
    """What rank 0 said of each step."""
    return [r.scalars[0].get(USED_NORM) for r in ddpprobe.open(path).records()]


def whole(parameters) -> float:
    return float(torch.cat([p.grad.flatten() for p in parameters]).norm())


def test_of_two_optimizers_each_is_asked_before_it_steps(tmp_path: Path) -> None:
    model, used = Net(), []
    first = torch.optim.SGD(model.one.parameters(), lr=0.1)
    second = torch.optim.SGD(model.two.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        for _ in range(3):
            model(torch.randn(8, 4)).square().sum().backward()
            mine = whole(model.one.parameters())
            first.step()
            first.zero_grad()  # none of these is left when the second one steps
            nn.utils.clip_grad_norm_(model.two.parameters(), 0.01)
            used.append((mine**2 + whole(model.two.parameters()) ** 2) ** 0.5)
            second.step()
            second.zero_grad()
    assert norms(tmp_path / "r") == pytest.approx(used, rel=1e-5)


def test_a_closure_s_gradients_are_those_behind_it(tmp_path: Path) -> None:
    model, used = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        used.append(whole(model.parameters()))
        return loss

    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        for _ in range(3):
            optimizer.step(closure)
    assert norms(tmp_path / "r") == pytest.approx(used, rel=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_under_a_grad_scaler_the_norm_is_the_unscaled_one(tmp_path: Path, fused: bool) -> None:
    torch.manual_seed(0)
    model, used = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        for _ in range(3):
            scaler.scale(model(torch.randn(8, 4)).square().sum()).backward()
            used.append(whole(model.parameters()) / 1024)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert norms(tmp_path / "r") == pytest.approx(used, rel=1e-5)


def test_a_sparse_gradient_and_a_name_that_the_user_took_are_let_be(tmp_path: Path) -> None:
    model = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path / "sparse", every=1, daemon="none"):
        model(torch.tensor([[1, 2]])).sum().backward()
        optimizer.step()
    assert norms(tmp_path / "sparse") == [None]
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path / "own", every=1, daemon="none") as probe:
        model(torch.randn(2, 4)).sum().backward()
        probe.log(grad_norm_used=7.0)
        optimizer.step()
    assert norms(tmp_path / "own") == [7.0]
