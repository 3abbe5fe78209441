"""A loop of your own over Hugging Face Accelerate.

model, optimizer, data = accelerator.prepare(model, optimizer, data)
probe = install(accelerator, model, every=10)
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch import nn

from ddpprobe.integrations.run_directory import run_directory
from ddpprobe.probe import Probe
from ddpprobe.probe import install as install_probe


def install(
    accelerator: Accelerator,
    model: nn.Module,
    *,
    first_step: int = 0,
    **options: Any,  # noqa: ANN401  (install's)
) -> Probe:
    """Observe `model`, before or after `accelerator.prepare`; call it on every rank.

    The loss is the model's own: `accelerator.backward` divides it later. Trackers that are there
    (`init_trackers`) are told where the run is, as `ddpprobe_run`.

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
    probe = install_probe(model, first_step=first_step, **options)
    for tracker in accelerator.trackers if probe.run_dir is not None else ():
        tracker.store_init_configuration({"ddpprobe_run": probe.run_dir})
    return probe
