"""One training under a framework's trainer: what the callbacks of all frameworks do alike."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Any, final

from torch import nn

from ddpprobe.errors import InstallError
from ddpprobe.integrations.loggers import Sink, install_linked
from ddpprobe.integrations.run_directory import run_directory
from ddpprobe.probe import Probe
from ddpprobe.records.step import Anomaly
from ddpprobe.rundir.fuse import logger


@final
class Fit:
    """Installs a probe when training begins, pauses it around what is no training, closes it.

    Args:
        options: keywords of `ddpprobe.install`, but for the first step. With `on_anomaly="stop"`
            the framework is asked to end its training, and nothing is raised.

    Attributes:
        probe: of the training under way; None before it and after it.
        stopped_for: the anomaly that training is to stop for.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        if "first_step" in options:
            raise InstallError(
                "first_step comes from the framework, which knows where it resumes: leave it out"
            )
        self.probe: Probe | None = None
        self.stopped_for: Anomaly | None = None
        self._options = options
        self._paused = contextlib.ExitStack()

    def begin(
        self, model: nn.Module, base: str | os.PathLike[str], step: int,
        sinks: Callable[[], Iterable[Sink]] | None = None,
    ) -> Probe:  # fmt: skip
        """Observe `model` from the optimizer step `step` on.

        Args:
            model: as the framework trains it.
            base: directory of the framework's output, below which the run lies by default.
            step: optimizer steps taken before, by an earlier job that is resumed.
            sinks: see `LoggerLink`.

        Raises:
            InstallError: see `ddpprobe.install`.
        """
        self.end()
        self.stopped_for = None
        options = {"run_dir": run_directory(base, step), **self._options}
        if options.get("on_anomaly") == "stop":
            options["on_anomaly"] = self._stop
        self.probe = install_linked(model, sinks, **options, first_step=step)
        if self.probe.run_dir is not None and os.environ.get("RANK", "0") == "0":
            logger.info("ddpprobe: the run is in %s", self.probe.run_dir)
        return self.probe

    def pause(self, reason: str) -> None:
        """What follows is no training, until `go_on`."""
        if self.probe is not None:
            self.go_on()
            self._paused.enter_context(self.probe.pause(reason))

    def go_on(self) -> None:
        """Training goes on."""
        self._paused.close()

    def end(self) -> None:
        """Training is over."""
        self.go_on()
        if self.probe is not None:
            self.probe.close()
        self.probe = None

    def _stop(self, anomaly: Anomaly) -> None:
        if self.stopped_for is None and self.probe is not None:
            self.stopped_for = anomaly
            logger.warning(
                "ddpprobe: training is asked to stop for %s at step %s: %s (ddpprobe anomalies %s)",
                anomaly.detector, anomaly.step, anomaly.message, self.probe.run_dir,
            )  # fmt: skip
