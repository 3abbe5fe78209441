"""The loggers of Lightning's `Trainer` and of `Fabric`, of whichever of the two packages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

from ddpprobe.integrations.loggers import Sink, sink_of


@final
class LoggerSink:
    """A logger whose client is not known, through Lightning's own interface: CSV, Comet, ..."""

    def __init__(self, logger: Any) -> None:  # noqa: ANN401  (one of two packages')
        self._logger = logger

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        """Log metrics."""
        self._logger.log_metrics(dict(values), step)

    def facts(self, values: Mapping[str, str]) -> None:
        """Keep them as hyper-parameters, the only texts that every logger takes."""
        self._logger.log_hyperparams(dict(values))


def sinks_of(loggers: Iterable[Any]) -> list[Sink]:
    """Return how to speak to these loggers; asked on rank 0, as a client may be started by it."""
    return [
        sink_of(
            getattr(logger, "experiment", None),
            run_id=getattr(logger, "run_id", None), commit=True,
        ) or LoggerSink(logger)
        for logger in loggers
    ]  # fmt: skip
