"""Compares what was recorded of a model with the reference, and the verdicts with the faults."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import ddpprobe
from ddpprobe.records.step import IN_TURN, OBSERVED, Anomaly, StepRecord
from ddpprobe.testing import Fault
from tests.models import probed, reference
from tests.models.processes import Died, on_ranks
from tests.models.reference import Reference, Seen
from tests.models.training import STEPS, Architecture
from tests.site_values import Key, Measured, differ

FAULT_STEP = 1
TOLERANCE = 1e-6  # of the largest magnitude, of the sum of magnitudes, of the sum of squares
ALIKE = ("grad", "param", "update", "optim_state")  # the same on all ranks
_KIND = {"forward": "output", "backward": "grad_output"}  # where a fault of a phase is born


@dataclass
class Outcome:
    """All that is known of one model; `problems` non-empty: it failed."""

    title: str
    world: int
    same: bool = False
    sites: int = 0
    rows: int = 0
    worst: float = 0.0
    named: list[str] = field(default_factory=list)  # the phases of the faults that were
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


def prove(architecture: Architecture, seed: int = 0) -> Outcome:
    """Train a model in all the ways that are compared, and compare them."""
    begun = time.monotonic()
    outcome = Outcome(architecture.title, architecture.world)
    with tempfile.TemporaryDirectory(prefix="ddpprobe-models-") as scratch:
        try:
            _prove(architecture, seed, Path(scratch), outcome)
        except Died as died:
            outcome.problems.append(str(died))
    outcome.seconds = time.monotonic() - begun
    return outcome


def _prove(architecture: Architecture, seed: int, directory: Path, outcome: Outcome) -> None:
    seen = on_ranks(reference.observe, architecture)
    faults = plan(architecture, seen, seed)
    trained = on_ranks(probed.train, architecture, directory, faults)
    _same_training(seen, trained, outcome)
    found = ddpprobe.open(directory / probed.HEALTHY).anomalies()
    outcome.problems += (f"a false page: {a.message}" for a in found if a.level == "page")
    records = records_of(directory / probed.HEALTHY)
    for number in range(STEPS):
        if number not in records:
            outcome.problems.append(f"step {number}: no record")
            continue
        expected = merged([one.steps[number] for one in seen])
        compare(number, records[number], expected, outcome)
    for phase, fault in faults.items():
        if not trained[fault.rank].fired[phase]:
            outcome.problems.append(f"{fault}: it did not happen")
            continue
        _named(directory / phase, fault, outcome)


def plan(architecture: Architecture, seen: list[Reference], seed: int) -> dict[str, Fault]:
    """Choose an inner module for each phase, at random, but for one seed always the same."""
    draw = random.Random(f"{architecture.title} {seed}")
    rank = architecture.world - 1
    faults = {}
    for phase, kind in _KIND.items():
        measured = seen[rank].steps[FAULT_STEP].measured
        first: dict[str, Key] = {}  # the injection hits a module's first floating-point output
        for key in measured:
            if key[1] == "output" and key[0]:
                first.setdefault(key[0], key)
        modules = sorted(
            fqn for fqn, (_, _, leaf) in first.items()
            if (fqn, kind, leaf) in measured and measured[fqn, kind, leaf].counts[0]
        )  # fmt: skip
        faults[phase] = Fault("nan", FAULT_STEP, draw.choice(modules), rank, phase)
    return faults


def _same_training(seen: list[Reference], trained: list[probed.Probed], outcome: Outcome) -> None:
    outcome.same = True
    for rank, (theirs, ours) in enumerate(zip(seen, trained, strict=True)):
        if theirs.watched != theirs.alone:
            outcome.problems.append(f"rank {rank}: the reference is not deterministic")
        if ours.trained != theirs.alone:
            outcome.same = False
            losses = ours.trained.losses == theirs.alone.losses
            what = "state" if losses else "losses and state"
            outcome.problems.append(f"rank {rank}: the probe changes {what}")


def records_of(run_dir: Path) -> dict[int, StepRecord]:
    """Return the records of a run, merged over ranks, by step."""
    return {record.step: record for record in ddpprobe.open(run_dir).records()}


def causes_of(run_dir: Path) -> list[Anomaly]:
    """Return the first causes that the verdict on a run names."""
    return [a for a in ddpprobe.open(run_dir).anomalies() if a.first_cause]


def merged(ranks: Iterable[Seen]) -> Seen:
    """Return what all ranks saw together; what they hold alike is the first one's."""
    first, *others = ranks
    measured, calls = dict(first.measured), dict(first.calls)
    for other in others:
        for key, one in other.measured.items():
            if key[1] in ALIKE:
                assert one == measured[key], key
                continue
            calls[key] = calls.get(key, 0) + other.calls[key]
            measured[key] = measured[key].merged(one) if key in measured else one
    return Seen(measured, calls)


def compare(number: int, record: StepRecord, expected: Seen, outcome: Outcome) -> None:
    """Hold each row of a step against what passed its site, and look for rows without one."""
    rows = {site.key: row for row, site in enumerate(record.sites)}
    problems = outcome.problems
    outcome.sites = max(outcome.sites, len(expected.measured))
    for key, want in expected.measured.items():
        row = rows.get(key)
        where = f"step {number} {_text(key)}"
        observed = 0 if row is None else int(record.counts[row, OBSERVED])
        if row is None or not observed:
            if key[1] not in IN_TURN:
                problems.append(f"{where}: unobserved, expected {expected.calls[key]}")
            continue
        outcome.rows += 1
        tolerance = TOLERANCE
        if key[1] == "update":  # of two numbers that are close to each other
            tolerance += _rounding(expected.measured, key)
        problem, worst = differ(record.counts[row], record.values[row], want, tolerance)
        outcome.worst = max(outcome.worst, worst)
        if problem:
            problems.append(f"{where}: {problem}")
        if key[1] not in ALIKE and observed != expected.calls[key]:
            problems.append(f"{where}: observed {observed}, expected {expected.calls[key]}")
    for key, row in rows.items():
        if key not in expected.measured and record.counts[row, OBSERVED]:
            problems.append(f"step {number} {_text(key)}: the reference has no such site")


def _rounding(measured: Mapping[Key, Measured], update: Key) -> float:
    """What rounding in a weight is of the largest change of one."""
    weight = measured[update[0], "param", ""].peak
    return float(2 * np.finfo(np.float32).eps * weight / max(measured[update].peak, 1e-30))


def _named(run_dir: Path, fault: Fault, outcome: Outcome) -> None:
    """The first cause must be the fault: its detector, step, rank, module and phase."""
    causes = causes_of(run_dir)
    said = [
        (a.detector, a.step, a.rank, a.module, a.phase, a.kind) for a in causes
    ]  # fmt: skip
    want = ("nonfinite", fault.step, fault.rank, fault.module, fault.phase, _KIND[fault.phase])
    if said == [want]:
        outcome.named.append(fault.phase)
    else:
        outcome.problems.append(f"{fault}: said {said or 'nothing'}")


def _text(key: Key) -> str:
    fqn, kind, leaf = key
    return f"{fqn or '(root)'}{f'[{leaf}]' if leaf else ''}:{kind}"
