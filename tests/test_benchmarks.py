"""The benchmarks run and compose into one document; what they measure is no claim of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch import distributed as dist
from torch import nn

from benchmarks import __main__ as bench
from benchmarks import blocks, overhead, tables
from benchmarks.variants import VARIANTS, missing
from benchmarks.workloads import WORKLOADS, Training


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _hooks(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    of_modules = sum(len(getattr(m, kind)) for m in model.modules() for kind in kinds)
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return of_modules + sum(len(getattr(p, k) or ()) for p in model.parameters() for k in kinds)


def test_blocks_without_a_variant_are_bare(one_rank: None, tmp_path: Path) -> None:
    training = Training(replace(WORKLOADS["small-mlp"], steps=1), 0)
    ours = [n for n, (*_, package) in VARIANTS.items() if package == "torch"]
    assert {"none", "sampled", "unsampled", "no-op", "item"} < set(ours)
    for name in ours:
        variant = VARIANTS[name][1](training, tmp_path / name)
        variant.on()
        assert (_hooks(training.model) > 0) == (name not in {"none", "anomaly"}), name
        variant.off()
        assert _hooks(training.model) == 0, name
        times = blocks.times_of(training, variant, 1, pairs=1)
        assert [len(times[kind][0]) for kind in ("off", "on")] == [2, 2]


def test_overhead_tells_paired_ratios_and_why_a_row_has_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(workload: str, variant: str, pairs: int, ranks: int) -> dict[str, list[float]]:
        if variant == "unsampled":
            raise RuntimeError("rank 1 is ill")
        return {
            "wall": [1.01, 1.03, 1.02], "cpu": [1.01, 1.01, 1.01], "seconds": [1.0, 1.5, 1.2],
            "fastest": [1.02], "own": [0.015, 0.016, 0.014],
        }  # fmt: skip

    monkeypatch.setattr(overhead, "measure", measured)
    monkeypatch.setattr(overhead, "missing", lambda name: "wandb" if name == "wandb" else None)
    chosen = ["sampled", "unsampled", "wandb"]
    text = overhead.main(["--workloads", "gpt-ddp", "--variants", *chosen])
    one = "1.010 / **1.020** / 1.030"
    row = f"1.2e+03, 1.2e+03 | {one}; {one} | 1.020, 1.020 | 0.0150, 0.0150 | 1.010, 1.010"
    assert f"| {row} | <= 1.02 | yes |" in text
    assert "failed: rank 1 is ill" in text
    assert "wandb is not installed" in text
    assert missing("none") is None


def test_cheap_sections_print_tables_and_their_goals_are_gathered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "SECTIONS", ("gpu", "unmodified", "scale"))
    assert bench.main(["--quick"]) == 0
    told = capsys.readouterr().out
    for name in bench.SECTIONS:
        assert f"`python -m benchmarks.{name}`" in told
    assert "| --- |" in told


def test_goals_are_gathered_with_their_figures() -> None:
    rows = [("a step", "1.01 / **1.02** / 1.03", "<= 1.02", "yes"), ("another", "9", "", "")]
    table = tables.table(("what", "ratio", "goal", "holds"), rows)
    text = tables.section("Overhead", "overhead", "How.", "### GPT", table)
    assert list(bench.goals(text)) == [["GPT: a step", "1.01 / **1.02** / 1.03", "<= 1.02", "yes"]]


def test_a_section_that_fails_is_named_and_the_others_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(argv: list[str]) -> str:
        raise RuntimeError("no such machine")

    monkeypatch.setattr(bench, "SECTIONS", ("overhead", "scale"))
    monkeypatch.setattr("benchmarks.overhead.main", lambda argv: tables.section("A", "a", "Text."))
    monkeypatch.setattr("benchmarks.scale.main", fails)
    out = tmp_path / "benchmarks.md"
    assert bench.main(["--out", str(out)]) == 1
    assert "## A\n\n`python -m benchmarks.a`" in out.read_text()
    told = capsys.readouterr().err
    assert "no such machine" in told
    assert "failed: scale" in told
