"""A copy of a run that goes on: what is in memory, and the processes, are not the copy's."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import nn

import ddpprobe
from ddpprobe.reader.last_beats import last_beats
from ddpprobe.rundir import paths, tmpfs


def test_a_copy_of_a_run_that_trains_on_stays_as_it_was_copied(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(steps: int) -> None:
        for _ in range(steps):
            model(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    run, copy = tmp_path / "run", tmp_path / "copy"
    with ddpprobe.install(model, run_dir=run, every=1, daemon="none"):
        train(3)
        shutil.copytree(run, copy)
        train(40)
        _, beat = last_beats(paths.RunDir(copy), 0)[0]
        own = paths.RunDir(copy).heartbeat(0, paths.node_name(0), 0).parent
        assert tmpfs.beside(own) is None
        assert tmpfs.is_copied(own)
        assert beat.step < 3
        copied = ddpprobe.open(copy)
        assert [e.end.state for e in copied.endings()] == ["unknown"]
        assert [a.level for a in copied.anomalies() if a.detector == "rank_lost"] == []
        assert [e.end.state for e in ddpprobe.open(run).endings()] == ["running"]


def test_a_run_that_was_moved_or_is_seen_by_another_path_has_its_memory(tmp_path: Path) -> None:
    own = tmp_path / "run/heartbeat/000/node_0000"
    place = tmpfs.make(own, tmpfs.token())
    try:
        (tmp_path / "link").symlink_to(tmp_path / "run")
        linked = tmp_path / "link/heartbeat/000/node_0000"
        assert tmpfs.beside(own) == tmpfs.beside(linked) == place
        (tmp_path / "run").rename(tmp_path / "moved")
        moved = tmp_path / "moved/heartbeat/000/node_0000"
        assert tmpfs.beside(moved) == place
        assert not tmpfs.is_copied(moved)
    finally:
        shutil.rmtree(place)
