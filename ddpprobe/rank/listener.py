"""Who else in the training process is told of a run: a logger of the training framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from ddpprobe.errors import InstallError
from ddpprobe.records.site_stats import global_grad_norm
from ddpprobe.records.step import StepRecord
from ddpprobe.rundir.heartbeat import HeartbeatWriter


class Listener(Protocol):
    """Hears of one rank's run; what it raises is contained, and it is not asked again."""

    def sampled(self, step: int, numbers: Mapping[str, float]) -> object:
        """Take numbers of a sampled step once they have reached the host, a step or more later.

        Args:
            step: the optimizer step that they are of; ascending.
            numbers: by name, what is known of `grad_norm` (L2 of all reduced gradients of the
                model) and `overhead_ratio` (what ddpprobe adds to a step, by the step's own time).
        """

    def closed(self) -> object:
        """Hear that `Probe.close()` was called and this rank's files are complete.

        Nobody is told where the process ends without it, or where an exception is under way, but
        `AnomalyStop`: the other ranks may wait for this one, and the verdict is to come.
        """


def must_listen(listener: object) -> None:
    """Raise InstallError for what is no `Listener`."""
    if not all(callable(getattr(listener, name, None)) for name in ("sampled", "closed")):
        raise InstallError(
            "listen() takes an object with the methods sampled(step, numbers) and closed(), got "
            f"{type(listener).__name__}"
        )


def tell(
    sampled: Callable[[int, Mapping[str, float]], object], world_size: int,
    heartbeat: HeartbeatWriter, record: StepRecord,
) -> None:  # fmt: skip
    """Tell a `Listener` of one rank's record."""
    sampled(record.step, known_numbers(record, world_size, heartbeat.overhead_ratio))


def known_numbers(record: StepRecord, world_size: int, overhead_ratio: float) -> dict[str, float]:
    """Return what one rank alone knows of a sampled step, see `Listener.sampled`.

    Args:
        record: of one rank; gradients that other ranks hold a part of have no norm here.
        world_size: number of ranks of the job.
        overhead_ratio: NaN where it was not measured yet.
    """
    others = tuple(rank for rank in range(world_size) if rank not in record.ranks)
    norm = global_grad_norm(replace(record, missing=others))
    numbers = {} if norm is None else {"grad_norm": norm}  # NaN is news
    return numbers if math.isnan(overhead_ratio) else {**numbers, "overhead_ratio": overhead_ratio}
