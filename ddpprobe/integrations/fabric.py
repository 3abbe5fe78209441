"""A loop of your own over Lightning Fabric.

model, optimizer = fabric.setup(model, optimizer)
probe = install(fabric, model, every=10)
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from lightning.fabric import Fabric
from torch import nn

from ddpprobe.integrations.lightning_loggers import sinks_of
from ddpprobe.integrations.loggers import install_linked
from ddpprobe.integrations.run_directory import run_directory
from ddpprobe.probe import Probe


def install(
    fabric: Fabric,
    model: nn.Module,
    *,
    root_dir: str | os.PathLike[str] = ".",
    first_step: int = 0,
    **options: Any,  # noqa: ANN401  (install's)
) -> Probe:
    """Observe what `fabric.setup` or `fabric.setup_module` returned; call it on every rank.

    Modules have the names that they have in your own model: Fabric's wrapper is left out. Fabric's
    loggers are told of the run, and of its verdict by `close()` (see `loggers.LoggerLink`).

    Args:
        fabric: launched, so that the process group is there.
        model: as Fabric returned it.
        root_dir: a new run lies below `root_dir/ddpprobe`; a resumed one goes on in the newest.
        first_step: optimizer steps taken before, by an earlier job that is resumed.
        options: other keywords of `ddpprobe.install`.

    Raises:
        InstallError: see `ddpprobe.install`.
        TypeError: `fabric` is none, or the model is not set up yet.
    """
    if not isinstance(fabric, Fabric):
        raise TypeError(f"install() takes a Fabric, got {type(fabric).__name__}")
    inner = getattr(model, "module", None)
    if not isinstance(inner, nn.Module):
        raise TypeError(
            f"this {type(model).__name__} was not set up. Write model, optimizer = "
            "fabric.setup(model, optimizer) first, and pass that model."
        )
    options = {"run_dir": run_directory(root_dir, first_step), **options}
    sinks = partial(sinks_of, fabric.loggers) if fabric.loggers else None
    return install_linked(inner, sinks, first_step=first_step, **options)
