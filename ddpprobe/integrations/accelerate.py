"""A loop of your own over Hugging Face Accelerate.

model, optimizer, data = accelerator.prepare(model, optimizer, data)
probe = install(accelerator, model, every=10)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from torch import nn

from ddpprobe.integrations.loggers import Sink, install_linked, sink_of
from ddpprobe.integrations.run_directory import run_directory
from ddpprobe.probe import Probe


def install(
    accelerator: Accelerator,
    model: nn.Module,
    *,
    first_step: int = 0,
    **options: Any,  # noqa: ANN401  (install's)
) -> Probe:
    """Observe `model`, before or after `accelerator.prepare`; call it on every rank.

    The loss is the model's own: `accelerator.backward` divides it later. Trackers that are there
    (`init_trackers`) are told of the run, and of its verdict by `close()`: see
    `loggers.LoggerLink`.

    Args:
        accelerator: its `project_dir` is where a new run lies, below `project_dir/ddpprobe`; a
            resumed one goes on in the newest there. Without one it is `ddpprobe-runs` here.
        model: as trained.
        first_step: optimizer steps taken before, by an earlier job that is resumed.
        options: other keywords of `ddpprobe.install`.

    Raises:
        InstallError: see `ddpprobe.install`.
        TypeError: `accelerator` is none.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"install() takes an Accelerator, got {type(accelerator).__name__}")
    if accelerator.project_dir is not None:
        options = {"run_dir": run_directory(accelerator.project_dir, first_step), **options}
    # Rank 0 has the trackers, and all ranks know what they were to be.
    sinks = (lambda: map(_sink, accelerator.trackers)) if accelerator.log_with else None
    return install_linked(model, sinks, first_step=first_step, **options)


@final
class _TrackerSink:
    """A tracker whose client is not known, through Accelerate's own interface."""

    def __init__(self, tracker: GeneralTracker) -> None:
        self._tracker = tracker

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        self._tracker.log(dict(values), step=step)

    def facts(self, values: Mapping[str, str]) -> None:
        self._tracker.store_init_configuration(dict(values))


def _sink(tracker: GeneralTracker) -> Sink:
    return sink_of(tracker.tracker) or _TrackerSink(tracker)
