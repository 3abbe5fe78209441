"""Under every wrapper, the merged statistics equal those of one process with the unwrapped model.

So do the captured tensors, put together by their layouts: bit for bit (`whole_tensors`).

Each world size is one launch, in which the wrappers follow one another.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpprobe.records.merge import disagreements, merge_all
from ddpprobe.records.step import STALE, UNWRAPPED, StepRecord
from tests.distributed import whole_tensors
from tests.distributed import wrappers_job as job
from tests.distributed.reference import Reference

JOB = Path(job.__file__)
LABELLED = ("partial", "unknown")


def differences(merged: StepRecord, reference: Reference, slack: float) -> list[str]:
    """One line per statistic of a merged site that is not the reference's."""
    wrong = []
    for i, site in enumerate(merged.sites):
        if site.placement in LABELLED or merged.counts[i][6] == 0:
            continue
        want = reference.of(site.key)
        counts, (low, high, total, square) = merged.counts[i], merged.values[i]
        near = slack * (float(want.abs().max()) + 1e-30) + reference.rounding.get(site.key, 0.0)
        if counts[0] != want.numel() or counts[1:4].any():
            wrong.append(f"{site} {site.placement}: counts {counts} of {want.numel()}")
        elif (
            abs(low - want.min()) > near
            or abs(high - want.max()) > near
            or abs(total - want.sum()) > near * want.numel()
            or abs(square - want.square().sum()) > 2 * near * float(want.abs().sum()) + near**2
        ):
            mine = f"{low:.7g} {high:.7g} {total:.7g} {square:.7g}"
            theirs = f"{want.min():.7g} {want.max():.7g} {want.sum():.7g} {want.square().sum():.7g}"
            wrong.append(f"{site} {site.placement}: {mine}, not {theirs}")
    return wrong


# Per world size: what runs in one launch, with the data-parallel ranks that its reference plays.
ALL_OF_TWO = {
    **dict.fromkeys(
        ("ddp", "fsdp1", "fsdp1-own", "fsdp1-grad-op", "fsdp1-grad-op-own", "fsdp1-no-shard",
         "fsdp1-no-shard-own", "fsdp1-bf16", "fsdp1-checkpoint", "fsdp2", "fsdp2-bf16",
         "fsdp2-kept", "mixed", "mixed-composed", "handmade"), range(2)),
    **dict.fromkeys(("tp", "tp-dtensor", "tp-sequence"), range(1)),
    "pipeline": range(1, 2),
}  # fmt: skip
ALL_OF_THREE = {
    **dict.fromkeys(("fsdp1", "fsdp1-own", "fsdp2"), range(3)),
    **dict.fromkeys(("tp", "tp-sequence"), range(1)),
}
ALL_OF_FOUR = {
    **dict.fromkeys(("hsdp", "fsdp1-hybrid", "fsdp1-hybrid-own"), range(4)),
    **dict.fromkeys(("fsdp2-tp", "fsdp2-tp-sequence"), range(2)),
}
# The local gradients of a SequenceParallel norm are partial sums over the group, and so are the
# reduced ones where FSDP2 does not sum them. All else is exact, but for stages that nobody can
# tell apart from replicas, where all is labelled.
NORMS = {
    f"{name}.{part}"
    for name in ("norm", "blocks.0.norm", "blocks.1.norm")
    for part in ("weight", "bias")
}
# Of FSDP2, however wrapped: their first forward computes with what they were built with.
WITH_UNITS = (
    "fsdp2",
    "fsdp2-bf16",
    "hsdp",
    "fsdp2-tp",
    "fsdp2-tp-sequence",
    "mixed",
    "mixed-composed",
)
WRAPPERS = {
    "mixed-composed": "mixed", "hsdp": "hsdp", "fsdp2-bf16": "fsdp2", "fsdp2-kept": "fsdp2",
    "tp-sequence": "tp",
    "tp-dtensor": "tp", "fsdp2-tp": "fsdp2+tp", "fsdp2-tp-sequence": "fsdp2+tp",
    "pipeline": "pipeline", "handmade": "none",
}  # fmt: skip


@pytest.mark.parametrize(
    ("nproc", "cases"),
    [(2, ALL_OF_TWO), (3, ALL_OF_THREE), (4, ALL_OF_FOUR)],
    ids=["two ranks", "three ranks", "four ranks"],
)
def test_statistics_are_exact_or_labelled_tensors_whole_and_training_bit_identical(
    nproc: int, cases: dict[str, range], torchrun, tmp_path: Path, records_of
) -> None:
    whole = [f"whole:{case}" for case in whole_tensors.CASES.get(nproc, ())]
    done = torchrun([JOB, tmp_path, *cases, *whole], nproc=nproc, timeout=240)
    assert done.returncode == 0, done.stderr
    same = [json.loads((tmp_path / f"same.{rank}").read_text()) for rank in range(nproc)]
    assert all(all(result) for each in same for result in each.values()), same
    wrong = []
    for run in sorted(path for path in tmp_path.iterdir() if (path / "run.json").exists()):
        case = run.name.removesuffix("-before")
        records = [records_of(run, rank) for rank in range(nproc)]
        assert all([r.step for r in rank] == [0, 1] for rank in records), case
        merged, reference = (
            merge_all([rank[0] for rank in records]),
            Reference(job.build, job.batch, cases[case], job.MICROS).step(job.RATE),
        )
        slack = 0.05 if case.endswith("bf16") else 1e-5
        wrong += [f"{case}: {d}" for d in differences(merged, reference, slack)]
        assert seen(merged) == expected(case, reference), case
        assert labelled(merged) == labels(case, reference), case
        apart = {shard for _, shard in disagreements(merged.digests)}
        assert apart == ({UNWRAPPED} if case == "handmade" else set()), case
        units = 3.0 if case == "fsdp2-kept" else 0.0 if case in WITH_UNITS else None
        stale = [{r.scalars[rank].get(STALE) for r in records[rank]} for rank in range(nproc)]
        assert stale == [{0.0, units} if units is not None else {None}] * nproc, case
        identity = json.loads((run / "run.json").read_text())
        if run.name == case:  # installed before wrapping it cannot know yet
            assert identity["wrapper"] == WRAPPERS.get(case, case.split("-")[0]), case
    if whole:
        wrong += whole_tensors.differences(tmp_path / "whole", nproc)
    assert not wrong, "\n".join(wrong)


def seen(merged: StepRecord) -> set[tuple[str, str, str]]:
    return {site.key for i, site in enumerate(merged.sites) if merged.counts[i][6]}


def expected(case: str, reference: Reference) -> set[tuple[str, str, str]]:
    return {key for key in reference.keys if key[0] or case != "pipeline"}  # the root is excluded


def labelled(merged: StepRecord) -> dict[tuple[str, str, str], str]:
    return {s.key: s.placement for s in merged.sites if s.placement in LABELLED}


def labels(case: str, reference: Reference) -> dict[tuple[str, str, str], str]:
    if case == "handmade":
        return dict.fromkeys(reference.keys, "unknown")
    kinds = {"tp-sequence": ("grad_local", "grad"), "fsdp2-tp-sequence": ("grad_local",)}
    return {(n, kind, ""): "partial" for kind in kinds.get(case, ()) for n in NORMS}
