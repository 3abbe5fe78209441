"""A script that says nothing of ddpprobe, started by `ddpprobe run`.

The environment tells each process of the job (`RUN_OPTIONS_VARIABLE`), and Python imports
`unmodified_path/sitecustomize.py` as it starts. From the first optimizer on this waits for the
first training forward of what optimizers train, and installs in it. So the model is there as it is
trained, wrapped, and on several ranks the process group is.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ddpprobe.probe import Probe, install_within
from ddpprobe.rank import process_group
from ddpprobe.rank.announcements import when_installed
from ddpprobe.rundir.fuse import Fuse, logger
from ddpprobe.rundir.paths import RUN_OPTIONS_VARIABLE


def take(optimizer: Optimizer, done: Callable[[], object]) -> None:
    """Take an optimizer that was just made.

    Args:
        optimizer: of the script's.
        done: to be called when no further optimizer is of interest.
    """
    Fuse("ddpprobe run").guard(_waiting.take)(optimizer, done)


@final
class _Waiting:
    """From the first optimizer of this process to its first training forward."""

    def __init__(self) -> None:
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._done: Callable[[], object] = bool
        self._handle: RemovableHandle | None = None
        self._others: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # that nobody trains
        self._over = False
        self._probe: Probe | None = None

    def take(self, optimizer: Optimizer, done: Callable[[], object]) -> None:
        if self._over or RUN_OPTIONS_VARIABLE not in os.environ:
            done()
            return
        self._done = done
        self._optimizers.append(weakref.ref(optimizer))
        self._others.clear()
        if self._handle is None:
            self._handle = register_module_forward_pre_hook(self._forward)
            when_installed(self._yield)
            atexit.register(self._say_nothing_came)

    def _forward(self, module: nn.Module, _: object) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not module.training:
            return
        if module in self._others:
            return
        if _is_engine(module):
            self._end()
            self._probe = Fuse("ddpprobe run").guard(_observe_engine)(module)
            return
        trained = self._trained()
        if trained.isdisjoint(map(id, module.parameters())):
            self._others.add(module)
            return
        self._end()
        self._probe = Fuse("ddpprobe run").guard(_observe)(module, trained)

    def _trained(self) -> set[int]:
        """Return the identities of the parameters that the optimizers train."""
        living = filter(None, (known() for known in self._optimizers))
        groups = (group for optimizer in living for group in optimizer.param_groups)
        return {id(p) for group in groups for p in group["params"] if p.requires_grad}

    def _yield(self) -> None:
        """Leave it to the script, which calls `install()` itself."""
        self._end()
        if self._probe is not None:
            logger.warning(
                "ddpprobe run: the script calls ddpprobe.install() in the midst of its training; "
                "the run %s ends here",
                self._probe.run_dir,
            )
            self._probe.close()

    def _end(self) -> None:
        self._over = True
        if self._handle is not None:
            self._handle.remove()
        self._done()

    def _say_nothing_came(self) -> None:
        if not self._over:
            logger.warning(
                "ddpprobe run: nothing was recorded: an optimizer was made, and no module that it "
                "trains was called in training mode"
            )


def _observe(called: nn.Module, trained: set[int]) -> Probe:
    model = _whole(called, trained)
    rest = trained.difference(map(id, model.parameters()))
    probe = install_within(called, model, **_options())
    if _told(probe, model) and rest:
        logger.warning(
            "ddpprobe run: %d of %d parameters that optimizers train belong to other models, "
            "which are not observed: call ddpprobe.install(model) for the one that you want",
            len(rest), len(trained),
        )  # fmt: skip
    return probe


def _is_engine(module: nn.Module) -> bool:
    """Whether it is DeepSpeed's, whose optimizer owns no parameter of the model."""
    kind = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)
    return kind is not None and isinstance(module, kind)


def _observe_engine(engine: nn.Module) -> Probe:
    """Observe what an engine is about to call for the first time."""
    from ddpprobe.integrations import deepspeed  # noqa: PLC0415  (only where it is installed)

    probe = deepspeed.observe(engine, **_options())
    _told(probe, engine.module)
    return probe


def _options() -> dict[str, Any]:
    told: dict[str, Any] = json.loads(os.environ[RUN_OPTIONS_VARIABLE])
    return told


def _told(probe: Probe, model: nn.Module | Tensor) -> bool:
    """Say once for the job where its run is."""
    is_told = probe.run_dir is not None and process_group.leads()
    if is_told:
        sys.stderr.write(f"ddpprobe: {type(model).__name__} is observed in {probe.run_dir}\n")
    return is_told


def _whole(called: nn.Module, trained: set[int]) -> nn.Module:
    """Return the module to observe: what is called, or what holds all that is trained.

    A loop may call the parts of a model and never the model. Lightning's module is one, also where
    all that is trained is in one part: by its names the user knows the model.
    """
    around = [
        module
        for module in gc.get_objects()
        if issubclass(type(module), nn.Module)
        and "_modules" in vars(module)  # else its constructor has not run
        and any(m is called for m in module.modules())
        and trained.issubset(map(id, module.parameters()))
    ]
    asked = [module for module in around if callable(getattr(module, "training_step", None))]
    if called in around and not asked:
        return called
    return min(asked or around, key=lambda m: sum(1 for _ in m.modules()), default=called)


_waiting = _Waiting()

__all__ = ["take"]
