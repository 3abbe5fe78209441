"""What a detector is: a class with a name, a title, settings, and a fold over records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from ddpprobe.records.identity_cache import IdentityCache
from ddpprobe.records.step import (
    FIRST_DECAY,
    LEARNING_RATE,
    MOMENT_DECAY,
    NOTED,
    OPTION,
    Anomaly,
    StepRecord,
)

Optimizer = frozenset[str]  # the names of its options
AFTERMATH_STEPS = 100  # also the quiet time of the detectors that have one


class Detector(ABC):
    """A pure fold over the merged stream: the same records give the same anomalies.

    The settings are the keyword arguments of the constructor, all of them numbers with a default.
    The docstring is what a user reads: its first paragraph in `ddpprobe replay --list`, its `Args`
    beside each setting in the reference.

    Attributes:
        name: in `Anomaly.detector`, on the command line, and as a label of the metrics.
        title: what a report calls a first cause of this kind.
        follows_within: steps after a first cause in which what this detector finds follows from it.
        raised_after: detectors whose warning just before one of this detector makes that a page. It
            says in `values["since"]` at which step it began.
        across_attempts: it is told of what earlier attempts said, ahead of the first record: their
            sampled steps, with scalars alone. What it finds in these is known.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    follows_within: ClassVar[int] = AFTERMATH_STEPS
    raised_after: ClassVar[frozenset[str]] = frozenset()
    across_attempts: ClassVar[bool] = False

    @abstractmethod
    def update(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record, in ascending order of steps; return what it shows."""

    def finish(self) -> list[Anomaly]:
        """Return what only the end of the stream shows; nothing, unless something is held back."""
        return []

    @classmethod
    def anomaly(
        cls, record: StepRecord, level: str, message: str, values: Mapping[str, float], *,
        phase: str = "step", step: int | None = None, micro: int = 0, rank: int | None = None,
        module: str | None = None, kind: str | None = None,
    ) -> Anomaly:  # fmt: skip
        """Return a verdict on a record.

        Args:
            record: that shows it.
            level: page, warn or info.
            message: one line, what was seen and what to make of it.
            values: the numbers behind it.
            phase: one of `PHASES`, where in the step it is.
            step: an earlier one, if it began there.
            micro: micro-batch of the step.
            rank: the one to blame; None: several, or nobody knows.
            module: FQN; None where it is not known.
            kind: one of `KINDS`; None where no tensor is named.
        """
        at = record.step if step is None else step
        return Anomaly(
            detector=cls.name,
            level=level,
            step=at,
            micro=micro,
            rank=rank,
            module=module,
            kind=kind,
            phase=phase,
            first_cause=level == "page",  # the suite knows whether another page came before
            message=message,
            values=values,
            sampled=record.sampled and at == record.step,
            attempt=record.attempt,
            wall_time_ns=record.wall_time_ns,
        )


class SampledDetector(Detector):
    """A detector of whole sampled steps that begins anew with each attempt, and after each note.

    What `probe.note` announces (an unfreezing, another sequence length) is meant to change the
    numbers: what was usual before says nothing of them. So is an optimizer of another kind, of
    which the attempt has had none: no fault makes one. A constructor ends with `_reset`.
    """

    _attempt: int | None = None
    _optimizers: frozenset[Optimizer] = frozenset()  # kinds that the attempt has had

    def update(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; looks at those that it is about."""
        optimizer = _optimizer_of(record)
        if record.attempt != self._attempt:
            self._attempt, self._optimizers = record.attempt, frozenset()
            self._begin()
            self._reset()
        elif is_noted(record) or (self._optimizers and optimizer - self._optimizers):
            self._reset()
        self._optimizers |= optimizer
        return self._look(record) if self._is_about(record) else []

    def _is_about(self, record: StepRecord) -> bool:
        """Whether it looks at this record: at whole sampled steps."""
        return record.sampled and not record.partial

    def _begin(self) -> None:
        """Begin an attempt: forget what a note leaves alone, such as what is of its start."""

    @abstractmethod
    def _reset(self) -> None:
        """Forget all records, as before the first one of an attempt or after a note."""

    @abstractmethod
    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record that it is about; return what it shows."""


def _has_note(record: StepRecord) -> bool:
    return any(NOTED in said for said in record.scalars.values())


def _kind_of(record: StepRecord) -> frozenset[Optimizer]:
    """Return the kind of the optimizers that stepped, by the options that they have; or nothing."""
    said = record.scalars.get(min(record.scalars, default=0), {})
    if not record.sampled or record.partial or LEARNING_RATE not in said:
        return frozenset()
    decays = {FIRST_DECAY, MOMENT_DECAY} & said.keys()
    return frozenset({frozenset(decays | {name for name in said if name.startswith(OPTION)})})


# Three dozen detectors ask for the same record.
is_noted = IdentityCache(_has_note, 1)
_optimizer_of = IdentityCache(_kind_of, 1)
