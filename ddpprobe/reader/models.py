"""The runs of several models of one process, side by side: which of them was bad first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from ddpprobe.detectors.nonfinite import NonFinite, was_lent
from ddpprobe.errors import RunNotFound
from ddpprobe.reader.run import Run, open_run
from ddpprobe.reader.run_directories import holds_records
from ddpprobe.records.every_loss import losses_of
from ddpprobe.records.step import PASS, PASS_OF_BAD, Anomaly, FirstBad, StepRecord
from ddpprobe.rundir import store_url
from ddpprobe.rundir.not_a_run import as_directory
from ddpprobe.rundir.paths import RUN_JSON

_GIVE = "give the run_dir that install({...}) was given"
_NEXT = 0.5  # of a number: after its pass, before the next one and what leads to that


@dataclass(frozen=True, slots=True)
class FirstOfModels:
    """A first cause of one model's run, and when it was in the process that trained it.

    Attributes:
        model: name of the model.
        anomaly: the first cause of its run.
        began: the process's forwards and backwards that were behind it then, at least.
        ended: at most; infinite if that is not known.
    """

    model: str
    anomaly: Anomaly
    began: float
    ended: float


@final
class Models(Mapping[str, Run]):
    """The runs of several models that one process trained, by name.

    Args:
        path: the directory that holds them.
        runs: by name of the model.
    """

    def __init__(self, path: Path, runs: Mapping[str, Run]) -> None:
        self.path = path
        self._runs = dict(runs)

    def __repr__(self) -> str:
        return f"Models({str(self.path)!r}: {', '.join(self._runs)})"

    def __getitem__(self, model: str) -> Run:
        return self._runs[model]

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def first_causes(
        self, judged: Mapping[str, Sequence[Anomaly]] | None = None
    ) -> list[FirstOfModels]:
        """Return what was wrong first in any of them; several where it is not known which of these.

        The newest attempts are compared, by the order of forwards and backwards in the process. Of
        a lone model it is the first cause of its run. Empty: no run has one.

        Args:
            judged: by model, what `Run.anomalies()` has said; None: it is asked.
        """
        found: list[FirstOfModels] = []
        for model, run in self._runs.items():
            found += _causes(model, run, run.anomalies() if judged is None else judged[model])
        return [one for one in found if not any(other.ended < one.began for other in found)]


def open_models(directory: str | Path) -> Models:
    """Open the runs of the models that one process trained, see `ddpprobe.install`.

    Args:
        directory: the one that holds them.

    Raises:
        RunNotFound: it holds no runs, or not of one process only; the text says what to give.
        RunError: one of them is of a version that is not read, or damaged.
    """
    found = models_in(as_directory(directory, _GIVE))
    if found is None:
        raise RunNotFound(
            f"{directory}: holds no runs of models that one process trained; "
            f"{_GIVE}, or open a run by itself"
        )
    return found


def models_in(directory: str | Path) -> Models | None:
    """Return the models whose runs a directory holds; None if it holds anything else."""
    path = Path(directory)
    if store_url.is_url(str(directory)) or not path.is_dir() or _is_run(path):
        return None
    names = sorted(each.name for each in path.iterdir() if each.is_dir() and _is_run(each))
    runs = {name: open_run(path / name) for name in names}
    processes = {run.process for run in runs.values()}
    return Models(path, runs) if len(processes) == 1 and "" not in processes else None


def _is_run(path: Path) -> bool:
    """Return whether a directory is a run; one that has lost its run.json may be the first."""
    return (path / RUN_JSON).exists() or holds_records(path)


def _causes(model: str, run: Run, anomalies: Sequence[Anomaly]) -> Iterator[FirstOfModels]:
    newest = run.attempts()[-1:]
    causes = [a for a in anomalies if a.first_cause and a.attempt in newest]
    if not causes:
        return
    bad_losses: set[int] = set()  # steps that are told by the sampled step after them
    at: dict[int, StepRecord] = {}
    before: dict[int, float] = {}  # by step: the last pass of the record before it
    steps, last = {cause.step for cause in causes}, 0.0
    for record in run.records(attempt=newest[0]):
        if record.step in steps:
            at[record.step], before[record.step] = record, last + _NEXT
        last = _number(record, PASS, record.ranks) or last
        bad_losses.update(step for step, losses in losses_of(record) if not _finite(losses))
    for cause in causes:
        loss_is_bad = cause.step in bad_losses
        began, ended = _when(cause, at.get(cause.step), before.get(cause.step, 0.0), loss_is_bad)
        yield FirstOfModels(model, cause, began, ended)


def _when(
    cause: Anomaly, record: StepRecord | None, before: float, loss_is_bad: bool,  # noqa: FBT001
) -> tuple[float, float]:  # fmt: skip
    """Return between which passes of the process a first cause was."""
    if record is None:
        return before, math.inf
    end = _number(record, PASS, record.ranks)
    if end is None:  # lost, or ranks that do not run the same loop: their numbers mean nothing
        return 0.0, math.inf
    if cause.detector != NonFinite.name or record.first_bad is None:
        return before, end
    bad = record.first_bad
    whose = record.ranks if cause.rank is None else (cause.rank,)
    numbers = [record.scalars.get(rank, {}).get(PASS_OF_BAD) for rank in whose]
    known = [number for number in numbers if number is not None]
    if bad.phase == "backward" and loss_is_bad and known and not was_lent(record, bad):
        # The loss: after all forwards that it was made of, and before the backward.
        return math.floor(min(known)) - _NEXT, math.floor(max(known)) - _NEXT
    if _is(cause, bad):
        return (min(known), max(known)) if known else (before, end)
    return before, end


def _finite(losses: Mapping[int, float]) -> bool:
    return all(map(math.isfinite, losses.values()))


def _is(cause: Anomaly, bad: FirstBad) -> bool:
    told = (cause.micro, cause.phase, cause.module, cause.kind)
    return told == (bad.micro, bad.phase, bad.fqn, bad.kind)


def _number(record: StepRecord, name: str, ranks: tuple[int, ...]) -> float | None:
    """Return a scalar that these ranks have in common; None: they do not."""
    found = {record.scalars.get(rank, {}).get(name) for rank in ranks}
    return found.pop() if len(found) == 1 else None
