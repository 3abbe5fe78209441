"""A training function of Ray Train.

model = ray.train.torch.prepare_model(model)
with install(model, every=10) as probe:
    ...  # the loop
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray import train
from torch import nn

from ddpprobe.integrations.run_directory import run_directory
from ddpprobe.probe import Probe
from ddpprobe.probe import install as install_probe

LETTERS = 8  # of a random name of 32


def install(model: nn.Module, *, first_step: int = 0, **options: Any) -> Probe:  # noqa: ANN401  (install's)
    """Observe `model`, before or after `prepare_model`; call it in the function of each worker.

    Use it in a `with`, or call `close()` at the end of the function: Ray ends its workers without
    Python's own exit, so nothing else tells an orderly end from a kill.

    Args:
        model: as trained.
        first_step: optimizer steps taken before, by an earlier job that is resumed.
        options: other keywords of `ddpprobe.install`. Without `run_dir` a new run lies in the
            experiment's directory (`storage_path` and `name` of `RunConfig`), below `ddpprobe`, and
            a resumed one goes on in the newest there. Workers that Ray starts again
            (`FailureConfig`) go on in their own, whatever step they begin at. A live run needs a
            file system: if the storage is another, it is `~/ray_results/NAME` on the worker's node.

    Raises:
        InstallError: see `ddpprobe.install`.
        RuntimeError: a worker of Ray Train has not called it.
    """
    options = {"run_dir": run_directory(_experiment(), first_step, _job()), **options}
    return install_probe(model, first_step=first_step, **options)


def _experiment() -> Path:
    """Return the experiment's directory: the working directory is in Ray's temporary one."""
    try:
        context = train.get_context()
        name = str(context.get_experiment_name())
    except RuntimeError as error:
        raise RuntimeError(
            "install() of ddpprobe.integrations.ray was called outside of a worker of Ray Train. "
            "Call it in the function that TorchTrainer is given, or use ddpprobe.install(model)."
        ) from error
    try:
        storage = context.get_storage()
    except NotImplementedError:  # of local mode, which has workers but no storage
        storage = None
    if storage is not None and storage.storage_filesystem.type_name == "local":
        return Path(storage.experiment_fs_path)
    return Path.home() / "ray_results" / name


def _job() -> str:
    """Return the beginning of what one `fit()` is known by; "" of a Ray that does not tell.

    Ray Train has no public name for it: that of the experiment is the same for each `fit()`.
    """
    try:
        from ray.train.v2._internal.execution import context  # noqa: PLC0415  (not in each version)

        return str(context.get_train_context().train_run_context.run_id)[:LETTERS]
    except (ImportError, AttributeError, RuntimeError):
        return ""
