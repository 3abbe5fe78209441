"""On real ranks every statistic equals the unsharded single-process reference, and training is
bit-identical with and without the probe."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ddpprobe.records.histogram import EDGES
from ddpprobe.records.merge import merge_all
from ddpprobe.records.step import IN_TURN, StepRecord, derive

from .reference import Reference

JOB = Path(__file__).parent / "job.py"
spec = importlib.util.spec_from_file_location("job", JOB)
job = importlib.util.module_from_spec(spec)
spec.loader.exec_module(job)

MICROS = 2


@pytest.mark.parametrize(
    ("wraps", "nproc"), [(["none"], 1), (["ddp", "fsdp2"], 2), (["ddp", "fsdp2"], 3)]
)
def test_merged_statistics_equal_the_unsharded_reference(
    wraps: list[str], nproc: int, torchrun, tmp_path: Path, records_of
) -> None:
    more = ["--steps", 1, "--dropout", 0, "--histograms", "blocks.*"]
    words = [["--wrap", w, "--out", tmp_path / w, *more] for w in wraps]
    done = torchrun([JOB, *in_a_row(words)], nproc=nproc)
    assert done.returncode == 0, done.stderr
    reference = Reference(
        lambda: job.build(dropout=0.0), lambda micro, rank: job.batch(0, micro, rank),
        range(nproc), MICROS,
    )  # fmt: skip
    for wrap in wraps:
        records = [records_of(tmp_path / wrap, rank)[0] for rank in range(nproc)]
        merged = merge_all(records)
        assert_equal(merged, reference)
        assert_histograms_equal(merged, reference)


def assert_histograms_equal(merged: StepRecord, reference: Reference) -> None:
    """Look at the histograms of the sites that are exact: rounding moves others over borders."""
    exact = set()
    for row, bins in zip(merged.binned.tolist(), merged.bins, strict=True):
        site = merged.sites[row]
        assert site.fqn.startswith("blocks."), site
        if site.kind in IN_TURN or merged.counts[row][6] == 0:
            continue
        want = reference.of(site.key).double().numpy().ravel()
        wanted = np.histogram(want[want != 0], EDGES)[0]
        assert bins.sum() + merged.counts[row][4] == want.size
        moved = np.abs(np.cumsum(bins - wanted)).sum()  # by how many bins in all
        assert moved <= 0.02 * want.size + 1, site
        exact.add(site.kind)
    assert exact == {"output", "grad_output", "grad_local", "grad"}


def in_a_row(runs: list[list[object]]) -> list[object]:
    """Join the options of several runs of the job, for one launch."""
    return [word for words in runs for word in ("--then", *words)][1:]


def assert_equal(merged: StepRecord, reference: Reference) -> None:
    kinds, unobserved = set(), set()
    for i, site in enumerate(merged.sites):
        if site.kind in IN_TURN:  # of them, see test_wrappers: AdamW makes much of rounding
            kinds.add(site.kind)
            continue
        if merged.counts[i][6] == 0:
            unobserved.add(str(site))
            continue
        want = reference.of(site.key)
        counts, (low, high, total, square) = merged.counts[i], merged.values[i]
        assert counts[0] == want.numel(), site
        assert counts[1:4].sum() == 0
        scale = float(want.abs().max()) + 1e-30
        # a reduced gradient is summed in another order than the reference: rounding, 1e-5 of scale
        slack = {"grad": 1e-5, "grad_output": 1e-6, "grad_local": 1e-5}.get(site.kind, 1e-6) * scale
        assert abs(low - want.min()) <= slack, site
        assert abs(high - want.max()) <= slack, site
        assert abs(total - want.sum()) <= slack * want.numel(), site
        assert square == pytest.approx(float(want.square().sum()), rel=1e-4, abs=slack**2), site
        kinds.add(site.kind)
    in_turn = set(IN_TURN) - {"buffer"}  # it has none
    assert kinds == {"output", "grad_output", "grad_local", "grad", *in_turn}
    # Up to torch 2.14 a Linear's 3-d output is a view; changed in place by ReLU its tensor hook is
    # lost inside autograd, in the reference too.
    lost = {(f"blocks.{i}.up", "grad_output", "") for i in range(3)} - reference.keys
    assert unobserved == {f"{fqn}:{kind}" for fqn, kind, _ in lost}
    named = {s.fqn for s in merged.sites if s.kind == "grad"}
    assert named == {n for n, _ in job.build().named_parameters()}
    norm = np.sqrt(
        np.nansum(
            [derive("sum_sq", merged.counts[i], merged.values[i])
             for i, s in enumerate(merged.sites) if s.kind == "grad"]
        )
    )  # fmt: skip
    truth = torch.cat([g.reshape(-1) for g in reference.reduced.values()]).norm().item()
    assert norm == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_twenty_steps_are_bit_identical_with_and_without_the_probe(
    wrap: str, torchrun, tmp_path: Path
) -> None:
    nproc = 2
    variants = {
        "bare": [],
        "every step": ["--out", tmp_path / "a", "--every", "1"],
        "installed before, full hooks": ["--out", tmp_path / "b", "--every", "3", "--before",
                                         "--backward", "full"],
    }  # fmt: skip
    runs = [
        ["--wrap", wrap, "--steps", 20, "--hash", tmp_path / f"{name}.hash", *arguments]
        for name, arguments in variants.items()
    ]
    done = torchrun([JOB, *in_a_row(runs)], nproc=nproc, timeout=300)
    assert done.returncode == 0, done.stderr
    hashes = {
        name: [json.loads((tmp_path / f"{name}.hash.{r}").read_text()) for r in range(nproc)]
        for name in variants
    }
    assert hashes["every step"] == hashes["bare"]
    assert hashes["installed before, full hooks"] == hashes["bare"]


def test_a_wrong_argument_on_one_rank_is_an_error_on_every_rank(torchrun, tmp_path: Path) -> None:
    script = f"""
import os, sys, torch, torch.distributed as dist, ddpprobe
dist.init_process_group("gloo")
rank = dist.get_rank()
try:
    ddpprobe.install(torch.nn.Linear(2, 2), run_dir={str(tmp_path / "r")!r}, daemon="none",
                     every=-1 if rank == 1 else 5)
except ValueError as error:
    print(f"<{{rank}}: {{error}}>", flush=True)
probe = ddpprobe.install(torch.nn.Linear(2, 2), run_dir={str(tmp_path / "r")!r}, daemon="none")
probe.close()
dist.destroy_process_group()
"""
    done = torchrun(script, nproc=2)
    assert done.returncode == 0, done.stderr
    message = "rank 1: every must be an integer of at least 1 (sample each N-th step), got -1"
    for rank in range(2):
        assert f"<{rank}: {message}>" in done.stdout
