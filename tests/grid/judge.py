"""Holds a cell's records against the reference: counts exactly, values within a tolerance."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from ddpprobe.records.merge import disagreements, merge_all
from ddpprobe.records.reduction_law import reduction_law, same_factor
from ddpprobe.records.step import OBSERVED, PHASES, StepRecord
from tests.grid.axes import DDP, Cell
from tests.grid.cell import Outcome, Run, is_far, journal_of
from tests.grid.loops import BACKWARD_STEP, FORWARD_STEP, STEPS, planned
from tests.grid.models import build
from tests.grid.reference import Reference
from tests.site_values import Expected, Key, Measured, differ

# Of the largest magnitude of the tensor (sums: of the sum of magnitudes).
TOLERANCE = {"fp32": 1e-5, "autocast": 2.0**-6, "mixed": 2.0**-6, "scaler": 2.0**-9}
# Of the largest gradient: below this, whether it is 0 depends on the order of a sum.
NOISE = {**TOLERANCE, "fp32": 1e-6}

LOST = "autograd drops the gradient hook of a view that is changed in place"
UNKNOWN = "plain tensors inside a tensor-parallel region are labelled, not merged"
PARTIAL = "partial sums are labelled, not merged"
SEVERAL = (
    "gradients of a compiled module's own outputs are reported as unobserved if it has several"
)
ORDER = (
    "graphs that torch breaks get their gradients ready in another order, hence DDP other buckets "
    "and three ranks or more another rounding"
)
SILENT = "modules compiled and called before install() are reported as silent"
# Which buffers are masks, and have no row, is known when the first look at them has arrived.
FAR = "on a device buffers have rows from the second sampled step on"
LIMITS = {"unknown": UNKNOWN, "partial": PARTIAL}


def judge(cell: Cell, runs: list[tuple[Run, Run]], run_dir: Path) -> Outcome:
    """Return what is to be said about the cell."""
    outcome = Outcome(cell.name)
    refused = {probed.refused for _, probed in runs}
    if refused != {""}:
        outcome.result = f"refused: {max(refused)}"
        if len(refused) != 1:
            outcome.problems.append(f"the ranks do not agree: {sorted(refused)}")
        return outcome
    outcome.same = all(bare.state == probed.state for bare, probed in runs)
    limits: Counter[str] = Counter()
    if not outcome.same and _reordered(cell):
        limits[ORDER] += 1
    elif not outcome.same:
        ranks = [rank for rank, (bare, probed) in enumerate(runs) if bare.state != probed.state]
        outcome.problems.append(f"training differs with the probe on ranks {ranks}")
    outcome.graphs = [max(r[i].graphs for r in runs) for i in (0, 1)]
    outcome.breaks = [max(len(r[i].breaks) for r in runs) for i in (0, 1)]
    for new in sorted({reason for bare, probed in runs for reason in probed.breaks - bare.breaks}):
        outcome.problems.append(f"a graph break of the probe's: {new}")
    silent, late = set[str](), set[Key]()
    steps = _merged(cell, run_dir, outcome, silent)
    reference = Reference(cell)
    expected = reference.run()
    _same_training(cell, runs, reference, outcome)
    for number in range(0, STEPS, cell.every):
        if number not in steps:
            outcome.problems.append(f"step {number}: no record")
            continue
        _compare(cell, number, steps[number], expected[number], outcome, limits, silent, late)
    _reduced(steps, outcome)
    _faults(cell, steps, outcome)
    outcome.limited = limits.total()
    outcome.result = (
        "limited: " + "; ".join(sorted(limits)) if limits else "exact"
    )  # fmt: skip
    return outcome


def _reduced(steps: dict[int, StepRecord], outcome: Outcome) -> None:
    """Every wrapper here averages over all ranks, so whatever is told of that says 1."""
    for number, step in steps.items():
        law = reduction_law(step)
        if law is not None and not same_factor(law.factor, 1.0):
            outcome.problems.append(f"step {number}: reduced by {law.factor}, not to the mean")


def _reordered(cell: Cell) -> bool:
    """Whether DDP sums in an order that is learnt from when gradients get ready.

    With find_unused_parameters it never rebuilds its buckets, and the same cells are identical.
    """
    rebuilt = cell.wrapper in ("ddp", "ddp-bucket-view") and cell.ranks > 2
    return rebuilt and cell.engine != "eager" and cell.memory == "offload-wrapper"


def _is_of_several(cell: Cell, key: Key) -> bool:
    """Whether this is the gradient of one of several outputs of a module that is compiled."""
    fqn, kind, leaf = key
    return cell.engine == "whole" and not fqn and kind == "grad_output" and bool(leaf)


def _same_training(
    cell: Cell, runs: list[tuple[Run, Run]], reference: Reference, outcome: Outcome
) -> None:
    """Without a probe the wrapped model must have learnt what the reference has."""
    trained = {name: value for bare, _ in runs for name, value in bare.trained.items()}
    for name, want in reference.parameters().items():
        got = trained.get(name)
        if got is None:
            outcome.problems.append(f"without a probe: no parameter {name}")
            continue
        error = float((got - want).abs().max() / want.abs().max().clamp(min=1e-3))
        if not error <= TOLERANCE[cell.precision]:
            outcome.problems.append(f"without a probe: {name} is trained differently ({error:.1e})")


def _merged(cell: Cell, run_dir: Path, outcome: Outcome, silent: set[str]) -> dict[int, StepRecord]:
    """The ranks' last word on each step (an alarm comes before the step's own record), merged."""
    steps: dict[int, list[StepRecord]] = {}
    for rank in range(cell.ranks):
        last: dict[int, StepRecord] = {}
        records, unseen = journal_of(run_dir, rank)
        silent |= unseen
        for record in records:
            last[record.step] = record
        for step, record in last.items():
            steps.setdefault(step, []).append(record)
    for step in range(0, STEPS, cell.every):
        if len(steps.get(step, ())) not in (0, cell.ranks):
            outcome.problems.append(f"step {step}: records of {len(steps[step])} ranks only")
    return {step: merge_all(records) for step, records in steps.items()}


def _compare(
    cell: Cell, number: int, merged: StepRecord, expected: Expected, outcome: Outcome,
    limits: Counter[str], silent: set[str], late: set[Key],
) -> None:  # fmt: skip
    _alike(cell, number, merged, expected, outcome)
    if merged.skipped != expected.skipped:
        outcome.problems.append(f"step {number}: skipped {merged.skipped}, not {expected.skipped}")
    rows = {site.key: row for row, site in enumerate(merged.sites)}
    for key in expected.tapped.keys() | expected.values.keys():
        if key[1] == "buffer" and cell.recomputes:
            continue  # what is computed again moves running statistics again
        row = rows.get(key)
        where = f"step {number} {_text(key)}"
        if row is None:
            if cell.install == "late" and key[0] in silent:
                limits[SILENT] += 1
            elif key in expected.values:
                outcome.problems.append(f"{where}: no such site")
            continue
        site, observed = merged.sites[row], int(merged.counts[row, OBSERVED])
        if site.placement in LIMITS:
            limits[LIMITS[site.placement]] += 1
            continue
        if key not in expected.values:
            limits[LOST] += 1
            if observed:
                outcome.problems.append(f"{where}: observed {observed}, where torch gives nothing")
            continue
        if not observed and _is_of_several(cell, key):
            limits[SEVERAL] += 1
            continue
        if not observed and key[1] == "buffer" and is_far() and key not in late:
            late.add(key)
            limits[FAR] += 1
            continue
        if not observed:
            outcome.problems.append(f"{where}: unobserved, expected {len(expected.values[key])}")
            continue
        outcome.sites += 1
        counts, values = merged.counts[row], merged.values[row]
        noise = NOISE[cell.precision] if key[1].startswith("grad") else 0.0
        tolerance = TOLERANCE[cell.precision]
        if key[1] == "update":  # of two numbers that are close to each other
            noise = _rounding(expected, key)
            tolerance += noise
        whole = expected.of(key)
        doubtful = _doubtful(whole, noise)
        problem, worst = differ(counts, values, Measured.of(whole), tolerance, doubtful)
        if key[1] != "update":  # the page has one limit for all others
            outcome.worst = max(outcome.worst, worst)
        if problem:
            outcome.problems.append(f"{where} ({site.placement}): {problem}")
        calls = len(expected.values[key])
        if site.placement == "local" and observed != calls:
            outcome.problems.append(f"{where}: observed {observed} times, expected {calls}")
    for key, row in rows.items():
        if key not in expected.values and merged.counts[row, OBSERVED]:
            outcome.problems.append(
                f"step {number} {_text(key)}: observed {int(merged.counts[row, OBSERVED])}, "
                "the reference has no such site"
            )


def _rounding(expected: Expected, update: Key) -> float:
    """What rounding in a weight is of the largest change of one."""
    largest = expected.of(update).abs().max().clamp(min=1e-30)
    weight = expected.of((update[0], "param", "")).abs().max()
    return float(2 * torch.finfo(torch.float32).eps * weight / largest)


def _alike(
    cell: Cell, number: int, merged: StepRecord, expected: Expected, outcome: Outcome
) -> None:
    """What ranks hold alike has equal checksums, and a GradScaler's scale is told."""
    replicated = cell.wrapper in (*DDP, "hsdp", "hsdp1") and cell.ranks > 1
    if replicated and not merged.digests:
        outcome.problems.append(f"step {number}: no checksums of what the ranks hold alike")
    if disagreements(merged.digests):
        named = sorted(fqn for fqn, _ in disagreements(merged.digests))
        outcome.problems.append(f"step {number}: false alarm, ranks are said to differ in {named}")
    if cell.precision == "scaler":
        told = merged.scalars[0].get("loss_scale")
        if told != expected.scale:
            outcome.problems.append(f"step {number}: loss scale {told}, expected {expected.scale}")


def _doubtful(want: Tensor, noise: float) -> int:
    """How many values may be 0 on one side only.

    Gradients that cancel exactly in theory (the key bias of attention) are rounding noise around 0:
    whether such an element is 0 depends on the order of a sum.
    """
    sizes = want[torch.isfinite(want)].abs()
    small = noise * float(sizes.max()) if len(sizes) else 0.0
    return int(((sizes > 0) & (sizes <= small)).sum())


def _faults(cell: Cell, steps: dict[int, StepRecord], outcome: Outcome) -> None:
    """The first bad tensor of the two faulty steps names rank, phase, micro-batch and module."""
    plan, model = planned(cell), build(cell.model)
    said = []
    for number, phase, modules in (
        (FORWARD_STEP, "forward", (model.spot,)),
        (BACKWARD_STEP, "backward", _tuple(model.before_spot)),
    ):
        bad = steps[number].first_bad if number in steps else None
        if bad is None:
            outcome.problems.append(f"{phase} fault at step {number}: not found")
            said.append("not found")
            continue
        assert bad.phase in PHASES
        sampled = number % cell.every == 0
        wrong = (bad.rank, bad.phase, bad.micro) != (plan.rank, phase, plan.micro)
        if wrong or (sampled and bad.fqn not in modules):
            outcome.problems.append(
                f"{phase} fault of rank {plan.rank} micro {plan.micro} in {modules}: named rank "
                f"{bad.rank} {bad.phase} micro {bad.micro} {bad.fqn}:{bad.kind}"
            )
            said.append("wrong")
        else:
            said.append("named" if sampled else "named (rank, phase)")
    outcome.faults = ", ".join(dict.fromkeys(said))


def _tuple(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def _text(key: Key) -> str:
    fqn, kind, leaf = key
    return f"{fqn or '(root)'}{f'[{leaf}]' if leaf else ''}:{kind}"
