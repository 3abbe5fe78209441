"""What `install()` says of many probes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.func import functional_call

import ddpprobe
from ddpprobe.rank import announcements


def test_many_open_probes_are_told_once_and_closed_ones_do_not_count(
    tmp_path: Path, caplog
) -> None:
    announcements.tell_many.cache_clear()
    for number in range(20):
        model = nn.Linear(2, 2)
        with ddpprobe.install(model, run_dir=tmp_path / f"closed-{number}", daemon="none"):
            pass
    assert caplog.messages == []
    probes = []
    for number in range(17):
        path = tmp_path / f"open-{number}"
        probes.append(ddpprobe.install(nn.Linear(2, 2), run_dir=path, daemon="none"))
    for probe in probes:
        probe.close()
    assert sum("16 probes are open" in text for text in caplog.messages) == 1


def test_forward_mode_gradients_are_named_where_no_forward_with_gradients_was_seen(
    tmp_path: Path, caplog
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path / "r", daemon="none"):
        for _ in range(8):  # if torch.compile has graphs, these are made anew first
            tangents = {name: torch.randn_like(p) for name, p in model.named_parameters()}
            with torch.no_grad():
                state = {name: p.detach() for name, p in model.named_parameters()}
                functional_call(model, state, (torch.randn(3, 2),))
            for name, parameter in model.named_parameters():
                parameter.grad = tangents[name]
            optimizer.step()
    (said,) = [text for text in caplog.messages if "no forward of Linear" in text]
    assert "torch.no_grad()" in said
